"""Requests whose prompt is to be pinned: they end when the daemon has said whether it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb
from engine.request import Finished, FromWorker

_TIMEOUT_S = 5.0
_NOT_SHARED = "it is not in the shared pool"


@dataclass
class _Asked:
    future: Future[tuple[pb.Envelope, list[int]]]
    last: Finished
    deadline: float = field(default_factory=lambda: time.monotonic() + _TIMEOUT_S)


class Pinning:
    """Those that wait for the daemon's word. All calls from the worker's loop."""

    def __init__(self, send: Callable[[FromWorker], None]) -> None:
        self._send = send
        self._asked: list[_Asked] = []

    @property
    def num_open(self) -> int:
        return len(self._asked)

    def begin(self, future: Future[tuple[pb.Envelope, list[int]]] | None, last: Finished) -> None:
        """`last` is told once the future is done; None = there is nothing to pin."""
        if future is None:
            self._send(msgspec.structs.replace(last, pin_error=_NOT_SHARED))
        else:
            self._asked.append(_Asked(future, last))

    def poll(self) -> None:
        """Tell of those that are decided."""
        for asked in list(self._asked):
            is_late = time.monotonic() > asked.deadline
            if not asked.future.done() and not is_late:
                continue
            self._asked.remove(asked)
            self._send(msgspec.structs.replace(asked.last, pin_error=_error_of(asked.future)))


def _error_of(future: Future[tuple[pb.Envelope, list[int]]]) -> str:
    """Empty: it is pinned."""
    if not future.done():
        return f"no answer within {_TIMEOUT_S:g} s"
    try:
        future.result()
    except CachewarmError as exc:
        return str(exc)
    return ""
