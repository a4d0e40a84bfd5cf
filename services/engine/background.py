"""How much background work a step takes beside requests that somebody waits for. Pure: no clock.

Prefill tokens that ride along with a decode step cost little until its arithmetic is as long as its
reading of the weights; where that is depends on machine, model and batch. So it is measured: the
share grows while such steps are hardly longer than steps without, and shrinks when they are.
"""

from __future__ import annotations

_TOLERATED = 1.06  # a step with background work, in steps without
_SMOOTH = 0.2
_PROBE_EVERY = 16  # steps, of which one is without: what the others are compared with
_SHRINK = 0.7


class BackgroundShare:
    """Tokens of background prefill for the next step."""

    def __init__(self, most: int) -> None:
        """At most `most`, at least one: what waits must not look as if it were stuck."""
        self._most = most
        self._tokens = 1.0
        self._without_s = 0.0  # of a step, smoothed; 0 = not known for this batch
        self._with_s = 0.0
        self._batch = 0
        self._num_steps = 0

    def tokens(self, batch: int) -> int:
        """Beside `batch` rows of others; 0 for the steps that show how long one is without."""
        if batch != self._batch:
            self._batch, self._without_s, self._with_s = batch, 0.0, 0.0
            self._num_steps = 0
        self._num_steps += 1
        return 0 if self._num_steps % _PROBE_EVERY == 1 else max(1, int(self._tokens))

    def measured(self, num_tokens: int, seconds: float) -> None:
        """A step beside others took so long."""
        if not num_tokens:
            self._without_s = _smoothed(self._without_s, seconds)
            return
        self._with_s = _smoothed(self._with_s, seconds)
        if not self._without_s:
            return
        if self._with_s > _TOLERATED * self._without_s:
            self._tokens = max(1.0, _SHRINK * self._tokens)
            self._with_s = 0.0  # of fewer tokens from here on
        else:
            self._tokens = min(float(self._most), self._tokens + 0.25)


def _smoothed(before: float, now: float) -> float:
    return now if not before else (1 - _SMOOTH) * before + _SMOOTH * now
