"""From logits to a token: numpy, one row at a time, no state.

A draw depends on nothing but (seed, sample index, output index) and the row: batch mates, order of
arrival, a preemption or a restart can't change it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.request import SamplingParams

_RUN = 256  # tokens
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
    # In float32, which numpy's vector code takes for a vocabulary in microseconds; sums are double.
    weights = np.exp((logits - logits.max()) * np.float32(1 / params.temperature))
    if 0 < params.top_k < len(logits):
        weights[logits < _kth_largest(logits, params.top_k)] = 0.0
    if params.top_p < 1.0:
        _keep_nucleus(weights, params.top_p)
    if params.min_p > 0.0:
        weights[weights < params.min_p * weights.max()] = 0.0
    return _at_share(weights, uniform(seed, sample_index, output_index))


def _at_share(weights: npt.NDArray[np.float32], share: float) -> int:
    """The first token whose part of the line from 0 to the weights' sum covers that share of it.

    Run by run, since a running sum of a whole vocabulary takes ten times as long as its sum. Empty
    parts cover nothing.
    """
    starts = np.arange(0, len(weights), _RUN)
    ends = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = min(share * ends[-1], np.nextafter(ends[-1], 0.0))  # rounding may reach the end
    run = int(np.searchsorted(ends, target, side="right"))
    begin = run * _RUN
    before = ends[run - 1] if run else 0.0
    inside = before + np.cumsum(weights[begin : begin + _RUN], dtype=np.float64)
    place = int(np.searchsorted(inside, target, side="right"))
    # Rounding may leave the run's end a hair behind its sum: then it is its last token.
    last = int(np.flatnonzero(weights[begin : begin + _RUN])[-1])
    return begin + min(place, last)


def _kth_largest(logits: npt.NDArray[np.float32], k: int) -> np.float32:
    """Of k runs' largest the least is a floor for it; few are above that."""
    largest = np.maximum.reduceat(logits, np.arange(0, len(logits), _RUN))
    if k <= len(largest):
        logits = logits[logits >= np.partition(largest, -k)[-k]]
    return np.partition(logits, -k)[-k]


def _keep_nucleus(weights: npt.NDArray[np.float32], top_p: float) -> None:
    """Only the smallest set of most likely tokens whose probability reaches top_p; never empty.

    Nothing is sorted that can't be in it: all weights below a share of what may be left out add up
    to less than that.
    """
    total = float(weights.sum(dtype=np.float64))
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    before = np.cumsum(weights[order], dtype=np.float64) - weights[order]
    num_kept = max(1, int(np.searchsorted(before, top_p * total)))
    kept = order[:num_kept]
    values = weights[kept]
    weights[:] = 0.0
    weights[kept] = values
