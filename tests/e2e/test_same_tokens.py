"""The same request gives the same tokens, wherever its KV comes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.e2e.conftest import Oracle
from tests.engine import Engine, evict_all, make_prompt, num_sealed

BLOCK = 32
NUM_OUTPUT = 10
# Shorter than a block, exactly two, and two and a bit.
PROMPTS = [make_prompt(length, salt) for length, salt in ((20, 11), (64, 12), (70, 13))]
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 42}


def answers(engine: Engine, **options: object) -> list[list[int]]:
    """Greedy and seeded answers to all prompts."""
    return [
        engine.generate(prompt, max_tokens=NUM_OUTPUT, **sampling, **options).ids
        for prompt in PROMPTS
        for sampling in ({}, SEEDED)
    ]


@pytest.fixture(scope="module")
def expected(shared_daemon: Daemon, shared_engine: Engine, oracle: Oracle) -> list[list[int]]:
    """Answers of a cold engine; the greedy ones are the oracle's."""
    evict_all(shared_daemon)
    cold = answers(shared_engine)
    for prompt, greedy, seeded in zip(PROMPTS, cold[::2], cold[1::2], strict=True):
        assert greedy == oracle(prompt, NUM_OUTPUT)
        assert seeded != greedy
    return cold


def test_answers_from_the_cache_equal_cold_ones(
    shared_engine: Engine, expected: list[list[int]]
) -> None:
    """A wholly cached prompt computes one token and gives what the cold run gave."""
    assert answers(shared_engine) == expected
    for prompt in PROMPTS:
        again = shared_engine.generate(prompt, max_tokens=1)
        assert again.done.cached_tokens == len(prompt) - 1


def test_a_seed_decides_the_answer(shared_engine: Engine, expected: list[list[int]]) -> None:
    """One seed gives one answer, another another; one that was drawn can be used again."""
    prompt = PROMPTS[2]
    options = {"max_tokens": NUM_OUTPUT, "temperature": 0.8, "top_p": 0.9}
    assert shared_engine.generate(prompt, seed=43, **options).ids != expected[5]
    drawn = shared_engine.generate(prompt, **options)
    again = shared_engine.generate(prompt, seed=drawn.accepted.resolved_seed, **options)
    assert again.accepted.resolved_seed == drawn.accepted.resolved_seed
    assert again.ids == drawn.ids


def test_bypassing_the_cache_changes_nothing_but_the_work(
    shared_daemon: Daemon, shared_engine: Engine, expected: list[list[int]]
) -> None:
    """With bypass_prefix_cache nothing is read, nothing is published, the answer is the same."""
    assert answers(shared_engine, bypass_prefix_cache=True) == expected
    before = num_sealed(shared_daemon)
    prompt = make_prompt(70, 14)
    bypassing = shared_engine.generate(prompt, max_tokens=4, bypass_prefix_cache=True)
    assert bypassing.done.cached_tokens == 0
    shared_engine.wait_idle()
    assert num_sealed(shared_daemon) == before
    after = shared_engine.generate(prompt, max_tokens=4)
    assert (after.done.cached_tokens, after.ids) == (0, bypassing.ids)


@pytest.mark.parametrize(
    ("num_published", "num_hit"),
    [(1, 0), (31, 0), (32, 32), (33, 32), (63, 32), (64, 64), (69, 69)],
)
def test_a_hit_of_any_length_gives_the_same_tokens(
    shared_daemon: Daemon,
    shared_engine: Engine,
    expected: list[list[int]],
    num_published: int,
    num_hit: int,
) -> None:
    """Full blocks of the common prefix are reused, and a short last one that is a prefix too."""
    prompt = PROMPTS[2]
    shared_engine.wait_idle()
    evict_all(shared_daemon)
    shared_engine.generate(prompt[:num_published], max_tokens=0)
    answer = shared_engine.generate(prompt, max_tokens=NUM_OUTPUT)
    assert answer.done.cached_tokens == num_hit
    assert answer.ids == expected[4]


@pytest.mark.parametrize("delta", [-1, 0, 1])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4])
def test_d1_all_but_the_last_token_of_a_repeated_prompt_is_cached(
    shared_engine: Engine, num_blocks: int, delta: int
) -> None:
    """Around every block border the second answer is equal and computes one token."""
    length = num_blocks * BLOCK + delta
    prompt = make_prompt(length, 100 + length)
    first = shared_engine.generate(prompt, max_tokens=6)
    second = shared_engine.generate(prompt, max_tokens=6)
    assert first.done.cached_tokens == 0
    assert second.done.cached_tokens == length - 1
    assert second.ids == first.ids


@pytest.fixture
def start_engine(m_rand_dir: Path) -> Callable[..., Engine]:
    """A new engine for `with`."""
    return lambda cachewarmd, *flags: Engine(m_rand_dir, cachewarmd, extra=flags)


def test_prefill_chunks_and_who_computed_a_prefix_change_nothing(
    shared_daemon: Daemon,
    shared_engine: Engine,
    expected: list[list[int]],
    start_engine: Callable[..., Engine],
) -> None:
    """An engine with other chunks computes the same, and hits what the first one computed."""
    with start_engine(shared_daemon.socket, "--prefill-chunk", "16") as other:
        theirs = make_prompt(101, 15)
        first = shared_engine.generate(theirs, max_tokens=6)
        hit = other.generate(theirs, max_tokens=6)
        assert hit.done.cached_tokens == 100
        assert hit.ids == first.ids
        other.wait_idle()
        shared_engine.wait_idle()
        evict_all(shared_daemon)
        assert other.generate(PROMPTS[2], max_tokens=NUM_OUTPUT).done.cached_tokens == 0
        assert answers(other) == expected
        assert answers(shared_engine) == expected


def test_without_a_daemon_the_tokens_are_the_same(
    expected: list[list[int]], start_engine: Callable[..., Engine]
) -> None:
    """`--cachewarmd off` serves cold, with its own copy of the weights, and equal answers."""
    with start_engine("off", "--prefill-chunk", "33") as alone:
        assert answers(alone) == expected
        again = alone.generate(PROMPTS[2], max_tokens=NUM_OUTPUT)
        assert (again.done.cached_tokens, again.ids) == (0, expected[4])
        worker = alone.wait_idle()
        assert (worker.weights_source, worker.daemon_connected) == ("private", False)
        assert alone.info().cachewarmd_socket == ""
