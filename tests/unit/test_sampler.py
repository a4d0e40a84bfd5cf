"""From logits to a token."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest

from engine.request import SamplingParams
from engine.sampler import sample, uniform

VOCAB = 12


def row(seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 2, VOCAB).astype(np.float32)


def allowed_by_definition(logits: npt.NDArray[np.float32], params: SamplingParams) -> set[int]:
    """Tokens that the filters leave, each filter spelled out."""
    chance = np.exp(logits.astype(np.float64) / params.temperature)
    chance /= chance.sum()
    left = sorted(range(VOCAB), key=lambda token: (-chance[token], token))
    if params.top_k:
        left = left[: params.top_k]
    total = sum(chance[token] for token in left)
    nucleus, covered = [], 0.0
    for token in left:
        if covered < params.top_p * total or params.top_p == 1.0:
            nucleus.append(token)
        covered += chance[token]
    best = max(chance[token] for token in nucleus)
    return {token for token in nucleus if chance[token] >= params.min_p * best}


def draws(logits: npt.NDArray[np.float32], params: SamplingParams, count: int) -> Counter[int]:
    return Counter(sample(logits, params, 5, 0, index) for index in range(count))


def test_greedy_takes_the_best_and_of_equals_the_lowest_id() -> None:
    """Temperature 0 is argmax; ties don't depend on anything but the ids."""
    logits = np.array([1, 3, 2, 3, 3], dtype=np.float32)
    assert sample(logits, SamplingParams(), 1, 0, 0) == 1
    assert sample(logits[::-1], SamplingParams(), 2, 1, 9) == 0


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-5, 2e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """No overflow, no NaN: the best token, whatever is drawn."""
    for seed in range(20):
        logits = row(seed)
        params = SamplingParams(temperature=temperature)
        assert sample(logits, params, seed, 0, seed) == int(np.argmax(logits))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 100.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, VOCAB, VOCAB + 5])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_filters_leave_what_their_definition_leaves(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Drawn tokens are among those a brute-force filter leaves, and all likely ones occur."""
    params = SamplingParams(temperature, top_p, top_k, min_p)
    for seed in range(3):
        logits = row(seed)
        allowed = allowed_by_definition(logits, params)
        seen = set(draws(logits, params, 80))
        assert seen <= allowed
        chance = np.exp(logits.astype(np.float64) / temperature)
        share = {token: chance[token] / sum(chance[list(allowed)]) for token in allowed}
        assert {token for token, s in share.items() if s > 0.1} <= seen


def test_frequencies_follow_the_distribution() -> None:
    """Chi-square of 5,000 draws against the softmax stays below its 99.9 % point."""
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.05, 0.05], dtype=np.float32))
    count = 5_000
    seen = draws(logits, SamplingParams(temperature=1.0), count)
    expected = np.exp(logits.astype(np.float64)) * count
    chi_square = sum((seen[i] - expected[i]) ** 2 / expected[i] for i in range(5))
    assert chi_square < 18.47  # 4 degrees of freedom


def test_a_draw_depends_on_seed_sample_and_index_alone() -> None:
    """The same three give the same token in any order; each of them changes the draw."""
    logits, params = row(7), SamplingParams(temperature=2.0)
    keys = [(seed, number, index) for seed in (1, 2) for number in (0, 1) for index in range(20)]
    forward = [sample(logits, params, *key) for key in keys]
    backward = [sample(logits, params, *key) for key in reversed(keys)]
    assert forward == backward[::-1]
    numbers = {uniform(*key) for key in keys}
    assert len(numbers) == len(keys)
    assert all(0 <= number < 1 for number in numbers)


def test_large_seeds_are_told_apart() -> None:
    """Seeds are 64 bits; neighbours at both ends of the range give other numbers."""
    seeds = [
        0,
        1,
        (1 << 53) - 1,
        1 << 53,
        (1 << 53) + 1,
        (1 << 63) + 1,
        (1 << 64) - 2,
        (1 << 64) - 1,
    ]
    assert len({uniform(seed, 0, 0) for seed in seeds}) == len(seeds)


def test_logits_are_left_as_they_were() -> None:
    """The row belongs to the caller."""
    logits = row(3)
    kept = logits.copy()
    sample(logits, SamplingParams(0.7, 0.8, 4, 0.1), 1, 0, 0)
    assert np.array_equal(logits, kept)
