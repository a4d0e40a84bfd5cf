"""Prefills that another worker goes on with.

A prefill that is done has given back seat and blocks. Once the daemon has acknowledged all of it
the front is told "prefilled"; the lease stays until the front says (by an Abort) that another
worker has its own, so that nothing is evicted between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.attempt import AttemptState, finished
from engine.request import FromWorker
from engine.scheduler import Sequence
from engine.shared_cache import SharedCache

# A prefill whose lease nobody took over by then is not needed any more.
_TIMEOUT_S = 60.0


@dataclass(eq=False)
class _HandOff:
    sequence: Sequence
    state: AttemptState
    is_told: bool = False
    deadline: float = field(default_factory=lambda: time.monotonic() + _TIMEOUT_S)


class HandOffs:
    """Those that are open. All calls from the worker's loop."""

    def __init__(self, send: Callable[[FromWorker], None], cache: SharedCache | None) -> None:
        self._send = send
        self._cache = cache
        self._open: list[_HandOff] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    def begin(self, sequence: Sequence, state: AttemptState) -> None:
        """Its prefill is done and published as far as can be."""
        self._open.append(_HandOff(sequence, state))

    def poll(self) -> None:
        """Tell of those that are acknowledged; let go of those nobody asks for."""
        for hand_off in list(self._open):
            is_pending = self._cache is not None and self._cache.is_pending(hand_off.sequence)
            if not is_pending and not hand_off.is_told:
                hand_off.is_told = True
                self._send(finished(hand_off.sequence, hand_off.state, "prefilled"))
            if time.monotonic() > hand_off.deadline:
                self._end(hand_off)

    def end(self, attempt: int) -> None:
        """Another worker has what it needs, or nobody needs it; unknown attempts are no-ops."""
        for hand_off in list(self._open):
            if hand_off.sequence.submit.attempt == attempt:
                if not hand_off.is_told:  # the front waits for a last word
                    self._send(finished(hand_off.sequence, hand_off.state, "cancelled"))
                self._end(hand_off)

    def _end(self, hand_off: _HandOff) -> None:
        self._open.remove(hand_off)
        if self._cache is not None and hand_off.state.prefix is not None:
            self._cache.release(hand_off.state.prefix)
