"""From logits to a token: numpy, one row at a time, no state.

A draw depends on nothing but (seed, sample index, output index) and the row: batch mates, order of
arrival, a preemption or a restart can't change it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.request import SamplingParams

_MIN_TEMPERATURE = 1e-5  # below it the division overflows; the result is greedy anyway


def uniform(seed: int, sample_index: int, output_index: int) -> float:
    """Counter-based random number in [0, 1): Philox 4x64 keyed by (seed, sample index)."""
    # A list would go by way of float64, where large seeds fall together.
    key = np.array([seed, sample_index], dtype=np.uint64)
    generator = np.random.Philox(key=key, counter=[output_index, 0, 0, 0])
    return float(generator.random_raw() >> 11) * 2.0**-53


def sample(
    logits: npt.NDArray[np.float32],
    params: SamplingParams,
    seed: int,
    sample_index: int,
    output_index: int,
) -> int:
    """The next token of one row of logits [vocab].

    Filters apply in the order top-k, top-p, min-p on the tempered distribution. The draw inverts
    the cumulative distribution in token-id order, so that near-equal logits don't trade places.
    """
    if params.temperature < _MIN_TEMPERATURE:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / params.temperature
    scaled -= scaled.max()
    if 0 < params.top_k < len(scaled):
        kth = np.partition(scaled, -params.top_k)[-params.top_k]
        scaled[scaled < kth] = -np.inf
    weights = np.exp(scaled)
    if params.top_p < 1.0:
        weights[~_nucleus(weights, params.top_p)] = 0.0
    if params.min_p > 0.0:
        weights[weights < params.min_p * weights.max()] = 0.0
    cumulative = np.cumsum(weights)
    target = uniform(seed, sample_index, output_index) * cumulative[-1]
    # The first token whose share of the line covers the target; empty shares cover nothing.
    return int(np.searchsorted(cumulative, target, side="right"))


def _nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.bool_]:
    """The smallest set of most likely tokens whose probability reaches top_p; never empty."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.zeros(len(weights), dtype=bool)
    kept[order[before < top_p * weights.sum()]] = True
    kept[order[0]] = True
    return kept
