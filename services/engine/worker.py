"""A worker's loop: inbox -> schedule -> forward -> sample -> outbox, on one thread.

All of a request's state derives from its Submit, so nothing here has to survive: a worker that dies
is replaced.
"""

from __future__ import annotations

import queue
import time
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import structlog

from engine.block_table import BlockTable, OutOfBlocksError, PrivatePool, SharedBlock
from engine.channel import BlockingChannel, BrokenChannelError
from engine.config import WorkerConfig
from engine.errors import EngineError, RequestTooLargeError
from engine.executor.base import Chunk, Executor
from engine.request import (
    Abort,
    Finished,
    Output,
    Progress,
    Stats,
    StatsRequest,
    Submit,
    ToWorker,
)
from engine.sampler import sample
from engine.scheduler import ScheduledChunk, Scheduler, Sequence, Status
from engine.shared_cache import CachedPrefix, SharedCache

_log = structlog.get_logger()

_MIN_LOOKUP_BUDGET_S = 0.020
_LOOKUP_BUDGET_SHARE = 0.02  # of the estimated recompute
_OWED_POLL_S = 0.5
_PENDING_POLL_S = 0.005


# What others put there: the front's messages, the end of its channel, None to wake up.
Inbox: TypeAlias = "queue.SimpleQueue[ToWorker | BrokenChannelError | None]"


@dataclass
class _Clock:
    """When a sequence reached what; seconds of the monotonic clock."""

    submitted: float
    admitted: float = 0.0
    looked_up: float = 0.0
    first_token: float = 0.0


@dataclass
class _Running:
    """What the worker keeps beside the scheduler's view of a sequence."""

    prefix: CachedPrefix | None
    clock: _Clock
    num_cached_tokens: int = 0


class Worker:
    """The loop and what it owns: scheduler, private pool, executor, link to the daemon."""

    def __init__(
        self,
        channel: BlockingChannel,
        inbox: Inbox,
        config: WorkerConfig,
        executor: Executor,
        pool: PrivatePool,
        cache: SharedCache | None,
        weights_source: str,
    ) -> None:
        self._channel = channel
        self._inbox = inbox
        self._block_size = config.block_size
        self._executor = executor
        self._pool = pool
        self._cache = cache
        self._weights_source = weights_source
        self._scheduler = Scheduler(config.prefill_chunk)
        self._states: dict[Sequence, _Running] = {}
        self._seconds_per_token = 0.0  # of prefill, measured; the lookup budget follows it
        self._num_computed = 0
        self._num_tail_copies = 0

    def run(self) -> None:
        """Until the front is gone. Raises BrokenChannelError then."""
        while True:
            self._take_messages()
            if self._cache is not None:
                self._cache.poll()
            admitted = self._scheduler.admit_next()
            if admitted is not None:
                self._admit(admitted)
            chunk = self._scheduler.next_chunk()
            if chunk is not None:
                self._step(chunk)

    # -- inbox ----------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        is_idle = not (self._scheduler.num_running or self._scheduler.num_waiting)
        # A publish that is owed must be looked after; otherwise sleep until somebody speaks.
        is_owed = self._cache is not None and self._cache.num_pending > 0
        try:
            message = self._inbox.get(block=is_idle, timeout=_OWED_POLL_S if is_owed else None)
            while True:
                self._handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _handle(self, message: ToWorker | BrokenChannelError | None) -> None:
        match message:
            case None:
                pass  # only to wake up
            case Submit():
                sequence = Sequence(message, BlockTable(self._pool, self._block_size))
                self._states[sequence] = _Running(None, _Clock(time.monotonic()))
                self._scheduler.add(sequence)
            case Abort():
                found = self._scheduler.find(message.request_id)
                if found is not None and found.submit.attempt <= message.attempt:
                    self._finish(found, "cancelled")
            case StatsRequest():
                self._channel.send(self._stats())
            case BrokenChannelError():
                raise message

    def _stats(self) -> Stats:
        running = self._scheduler.running
        return Stats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_private_blocks_free=self._pool.num_free,
            num_shared_blocks_in_use=len(running.table.shared_blocks) if running else 0,
            num_pending_publishes=self._cache.num_pending if self._cache is not None else 0,
            num_computed_tokens=self._num_computed,
            num_tail_copies=self._num_tail_copies,
            daemon_epoch=self._cache.epoch if self._cache is not None else 0,
            weights_source=self._weights_source,
        )

    # -- a request's way ------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        """Take over what is sealed already; the rest is computed from there."""
        state = self._states[sequence]
        state.clock.admitted = time.monotonic()
        if sequence.num_output and (reason := self._reason_to_stop(sequence)):
            self._finish(sequence, reason)  # an earlier attempt died between its last two messages
            return
        if sequence.max_length > self._pool.num_blocks * self._block_size:
            self._fail(sequence, self._too_large(sequence))
            return
        if self._cache is not None and not sequence.submit.bypass_cache:
            estimate = self._seconds_per_token * len(sequence.tokens)
            budget = max(_MIN_LOOKUP_BUDGET_S, _LOOKUP_BUDGET_SHARE * estimate)
            state.prefix, shared = self._cache.lookup(sequence.tokens, budget)
            sequence.table.start_with(shared)
            sequence.num_sealed = state.prefix.num_tokens if state.prefix else 0
            # The last token always runs: its logits are in no cache.
            sequence.num_computed = min(sequence.num_sealed, len(sequence.tokens) - 1)
            state.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        state.clock.looked_up = time.monotonic()

    def _too_large(self, sequence: Sequence) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"{sequence.max_length} positions are needed, the private pool has "
            f"{self._pool.num_blocks * self._block_size}"
        )

    def _step(self, chunk: ScheduledChunk) -> None:
        """One chunk through the model, then what follows from it."""
        sequence = chunk.sequence
        state = self._states[sequence]
        write_from = max(chunk.start, sequence.num_sealed)
        copies = sequence.table.num_tail_copies
        # Before the tail is copied: what was copied from is checked like what is read in place.
        read = sequence.table.shared_blocks
        try:
            sequence.table.make_writable(write_from, chunk.end)
        except OutOfBlocksError:
            self._wait_for_blocks(sequence)
            return
        finally:
            self._num_tail_copies += sequence.table.num_tail_copies - copies
        started = time.monotonic()
        (logits,) = self._executor.forward(
            [
                Chunk(
                    sequence.tokens[chunk.start : chunk.end],
                    chunk.start,
                    write_from,
                    [block.memory for block in sequence.table.blocks],
                    chunk.needs_logits,
                )
            ]
        )
        if not self._is_intact(state, read):
            self._start_over(sequence, state)
            return
        self._measure(chunk, time.monotonic() - started)
        sequence.num_computed = chunk.end
        if self._cache is not None and state.prefix is not None:
            self._cache.publish(sequence, state.prefix, with_tail=chunk.ends_prefill)
        if chunk.is_prefill:
            self._channel.send(
                Progress(sequence.submit.request_id, sequence.submit.attempt, chunk.end)
            )
        if logits is not None:
            self._emit(sequence, state, self._sample(sequence, logits))
        elif chunk.ends_prefill:
            self._finish(sequence, "length")  # max_tokens = 0: prefill only

    def _wait_for_blocks(self, sequence: Sequence) -> None:
        """Blocks on their way to the daemon come back soon, whether it answers or is given up."""
        if self._cache is not None and self._cache.num_pending:
            time.sleep(_PENDING_POLL_S)
        else:
            self._fail(sequence, self._too_large(sequence))

    def _is_intact(self, state: _Running, read: list[SharedBlock]) -> bool:
        if self._cache is None or state.prefix is None:
            return True
        return self._cache.is_intact(state.prefix, read)

    def _start_over(self, sequence: Sequence, state: _Running) -> None:
        """Blocks it read were reused after the lease was lost: drop the step, compute anew."""
        _log.warning("shared_blocks_lost", request_id=sequence.submit.request_id)
        sequence.table.clear()
        sequence.num_computed = sequence.num_sealed = state.num_cached_tokens = 0
        state.prefix = None

    def _measure(self, chunk: ScheduledChunk, seconds: float) -> None:
        num_tokens = chunk.end - chunk.start
        self._num_computed += num_tokens
        if num_tokens > 1:
            each = seconds / num_tokens
            before = self._seconds_per_token or each
            self._seconds_per_token = 0.8 * before + 0.2 * each

    @staticmethod
    def _sample(sequence: Sequence, logits: npt.NDArray[np.float32]) -> int:
        submit = sequence.submit
        return sample(
            logits,
            submit.sampling,
            submit.resolved_seed,
            submit.sample_index,
            sequence.num_output,
        )

    def _emit(self, sequence: Sequence, state: _Running, token: int) -> None:
        submit = sequence.submit
        state.clock.first_token = state.clock.first_token or time.monotonic()
        index = sequence.num_output
        sequence.tokens.append(token)
        self._channel.send(
            Output(submit.request_id, submit.attempt, submit.sample_index, index, [token])
        )
        if reason := self._reason_to_stop(sequence):
            self._finish(sequence, reason)

    @staticmethod
    def _reason_to_stop(sequence: Sequence) -> str:
        """Why the last output token is the last one; "" = it is not."""
        submit = sequence.submit
        if sequence.tokens[-1] in submit.stop_token_ids:
            return "stop"
        return "length" if sequence.num_output >= submit.max_tokens else ""

    def _fail(self, sequence: Sequence, error: EngineError) -> None:
        self._finish(sequence, "error", (type(error).__name__, str(error)))

    def _finish(
        self, sequence: Sequence, reason: str, error: tuple[str, str] | None = None
    ) -> None:
        """Let go: publish the short last block, give lease and blocks back, tell the front."""
        state = self._states.pop(sequence)
        was_running = sequence.status is Status.RUNNING
        self._scheduler.finish(sequence)
        if self._cache is not None and state.prefix is not None:
            if was_running and error is None:
                self._cache.publish(sequence, state.prefix, with_tail=True)
            self._cache.release(state.prefix)
        sequence.table.clear()
        clock, now = state.clock, time.monotonic()
        admitted = clock.admitted or now
        looked_up = clock.looked_up or admitted
        first_token = clock.first_token or now
        self._channel.send(
            Finished(
                request_id=sequence.submit.request_id,
                attempt=sequence.submit.attempt,
                reason=reason,
                num_cached_tokens=state.num_cached_tokens,
                queued_s=admitted - clock.submitted,
                lookup_s=looked_up - admitted,
                prefill_s=first_token - looked_up,
                decode_s=now - first_token,
                error=error,
            )
        )
