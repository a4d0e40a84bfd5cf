"""Runs at a given length whose results nobody reads: they warm up what a first step finds cold, and
tell how long one takes.

An iteration is a prefill of at most 64 tokens that ends one short of the length, and a decode step.
All positions lie in one private block, so that 128K of them need no memory; nothing is looked up
nor published.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.block_table import BlockTable, OutOfBlocksError, PrivatePool
from engine.executor.base import Chunk, Executor
from engine.request import Finished, Progress, Submit

_CHUNK = 64


@dataclass(eq=False)
class _Run:
    submit: Submit
    num_done: int = 0
    first_us: int = 0
    last_us: int = 0


class ScratchRuns:
    """Those of one worker, one after the other."""

    def __init__(
        self,
        executor: Executor,
        pool: PrivatePool,
        block_size: int,
        send: Callable[[Progress | Finished], None],
    ) -> None:
        self._executor = executor
        self._pool = pool
        self._block_size = block_size
        self._send = send
        self._runs: deque[_Run] = deque()

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, submit: Submit) -> None:
        """One with `scratch_length`."""
        self._runs.append(_Run(submit))

    def abort(self, attempt: int) -> None:
        """Nobody wants it any more, if it is here."""
        for run in [run for run in self._runs if run.submit.attempt == attempt]:
            self._runs.remove(run)
            self._send(_finished(run, "cancelled"))

    def step(self) -> None:
        """One iteration of the oldest; none where no block is free for it."""
        run = self._runs[0]
        try:
            run.last_us = self._iterate(run.submit.scratch_length)
        except OutOfBlocksError:
            return
        run.first_us = run.first_us or run.last_us
        run.num_done += 1
        submit = run.submit
        if run.num_done < submit.scratch_iterations:
            self._send(
                Progress(submit.request_id, submit.attempt, submit.sample_index, run.num_done)
            )
        else:
            self._runs.popleft()
            self._send(_finished(run, "length"))

    def _iterate(self, length: int) -> int:
        """Microseconds that it took."""
        table = BlockTable(self._pool, self._block_size)
        table.alias(length)
        last = length - 1
        start = max(0, last - _CHUNK)
        try:
            began = time.monotonic()
            if last > start:
                chunk = Chunk([0] * (last - start), start, start, table, needs_logits=False)
                self._executor.forward([chunk])
            self._executor.forward([Chunk([0], last, last, table, needs_logits=True)])
            return max(1, round(1e6 * (time.monotonic() - began)))
        finally:
            table.clear()


def _finished(run: _Run, reason: str) -> Finished:
    submit = run.submit
    return Finished(
        request_id=submit.request_id,
        attempt=submit.attempt,
        sample_index=submit.sample_index,
        reason=reason,
        scratch_us=(run.first_us, run.last_us),
    )
