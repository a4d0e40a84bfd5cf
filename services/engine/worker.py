"""A worker's loop: inbox -> admit -> schedule -> forward -> sample -> outbox, on one thread.

All of a request's state derives from its Submit, so nothing here has to survive: a worker that dies
is replaced.
"""

from __future__ import annotations

import queue
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cachewarmd.log import get_logger
from engine.attempt import AttemptState, Clock, finished
from engine.background import BackgroundShare
from engine.block_table import BlockTable, PrivatePool, SharedBlock
from engine.channel import BrokenChannelError
from engine.config import WorkerConfig
from engine.errors import EngineError, RequestTooLargeError
from engine.executor.base import Chunk, Executor
from engine.hand_off import HandOffs
from engine.pinning import Pinning
from engine.request import (
    Abort,
    FromWorker,
    Output,
    Progress,
    Stats,
    StatsRequest,
    Submit,
    ToWorker,
)
from engine.sampler import sample
from engine.scheduler import ScheduledChunk, Scheduler, Sequence, Status
from engine.scratch import ScratchRuns
from engine.shared_cache import Lookup, SharedCache

_log = get_logger()

_LOOKUP_BUDGET_SHARE = 0.02  # of the estimated recompute
_OWED_POLL_S = 0.5
_BLOCKED_POLL_S = 0.005

# What others put there: the front's messages, the end of its channel, None to wake up.
Inbox: TypeAlias = "queue.SimpleQueue[ToWorker | BrokenChannelError | None]"


class Worker:
    """The loop and what it owns: scheduler, private pool, executor, link to the daemon."""

    def __init__(
        self,
        send: Callable[[FromWorker], None],
        inbox: Inbox,
        config: WorkerConfig,
        executor: Executor,
        pool: PrivatePool,
        cache: SharedCache | None,
        weights_source: str,
    ) -> None:
        """`send` hands a message to the front; it raises BrokenChannelError."""
        self._send = send
        self._inbox = inbox
        self._block_size = config.block_size
        self._lookup_budget_s = config.lookup_budget
        self._executor = executor
        self._pool = pool
        self._cache = cache
        self._weights_source = weights_source
        self._scheduler = Scheduler(
            pool, config.max_num_seqs, config.prefill_chunk, self._on_preempt
        )
        self._background = BackgroundShare(config.prefill_chunk)
        self._states: dict[Sequence, AttemptState] = {}
        self._hand_offs = HandOffs(send, cache)
        self._pinning = Pinning(send)
        self._scratch = ScratchRuns(executor, pool, config.block_size, send)
        self._is_blocked = False  # sequences are there, but none could run
        self._seconds_per_token = 0.0  # of prefill, measured; the lookup budget follows it
        self._num_computed = 0
        self._num_tail_copies = 0
        self._num_steps: Counter[str] = Counter()
        self._step_seconds: defaultdict[str, float] = defaultdict(float)

    def run(self) -> None:
        """Until the front is gone. Raises BrokenChannelError then."""
        while True:
            self._take_messages()
            self._poll()
            self._admit()
            self._step()
            if self._scratch and not self._scheduler.num_urgent:
                self._scratch.step()

    # -- inbox ----------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        try:
            message = self._inbox.get(block=self._may_sleep, timeout=self._sleep_s())
            while True:
                self._handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    @property
    def _has_work(self) -> bool:
        return self._scheduler.num_running + self._scheduler.num_waiting > 0 or bool(self._scratch)

    @property
    def _may_sleep(self) -> bool:
        return self._is_blocked or not self._has_work

    def _sleep_s(self) -> float | None:
        """Until somebody speaks, unless something else has to be looked after."""
        if self._is_blocked:
            return _BLOCKED_POLL_S
        is_owed = self._cache is not None and self._cache.num_pending > 0
        if self._pinning.num_open:
            return _BLOCKED_POLL_S
        return _OWED_POLL_S if is_owed or self._hand_offs.num_open else None

    def _handle(self, message: ToWorker | BrokenChannelError | None) -> None:
        match message:
            case None:
                pass  # only to wake up
            case Submit(scratch_length=length) if length:
                self._scratch.add(message)
            case Submit():
                sequence = Sequence(message, BlockTable(self._pool, self._block_size))
                self._states[sequence] = AttemptState(Clock(time.monotonic()))
                self._scheduler.add(sequence)
            case Abort():
                self._abort(message.attempt)
            case StatsRequest():
                self._send(self._stats())
            case BrokenChannelError():
                raise message

    def _abort(self, attempt: int) -> None:
        found = self._scheduler.find(attempt)
        if found is not None:
            self._finish(found, "cancelled")
        self._hand_offs.end(attempt)
        self._scratch.abort(attempt)

    def _poll(self) -> None:
        """What the daemon answered meanwhile."""
        if self._cache is not None:
            self._cache.poll()
        self._hand_offs.poll()
        self._pinning.poll()

    def _stats(self) -> Stats:
        running = self._scheduler.running
        return Stats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_private_blocks_free=self._pool.num_free,
            num_shared_blocks_in_use=sum(s.table.num_shared for s in running),
            num_computed_tokens=self._num_computed,
            num_tail_copies=self._num_tail_copies,
            num_preemptions=self._scheduler.num_preemptions,
            num_steps=dict(self._num_steps),
            step_seconds=dict(self._step_seconds),
            daemon_epoch=self._cache.epoch if self._cache is not None else 0,
            weights_source=self._weights_source,
        )

    # -- admission ------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Everybody who finds a seat and blocks; who waits for the daemon lets others pass."""
        asking: set[Sequence] = set()
        while (sequence := self._scheduler.candidate(asking)) is not None:
            if self._ends_before_it_runs(sequence):
                continue
            state = self._states[sequence]
            if not state.is_looked_up and not self._look_up(sequence, state):
                asking.add(sequence)
                continue
            if not self._scheduler.admit(sequence):
                return
            self._take_seat(sequence, state)

    def _ends_before_it_runs(self, sequence: Sequence) -> bool:
        if sequence.num_output and (reason := self._reason_to_stop(sequence)):
            self._finish(sequence, reason)  # an earlier attempt died between its last two messages
        elif sequence.max_length > self._pool.num_blocks * self._block_size:
            self._fail(sequence, self._too_large(sequence))
        return sequence.status is Status.FINISHED

    def _too_large(self, sequence: Sequence) -> RequestTooLargeError:
        return RequestTooLargeError(
            f"{sequence.max_length} positions are needed, the private pool has "
            f"{self._pool.num_blocks * self._block_size}"
        )

    def _look_up(self, sequence: Sequence, state: AttemptState) -> bool:
        """Lease what is sealed already, the rest is computed from there; False = no answer yet.

        Nobody who runs waits for it longer than the lookup's budget. Who asked may wait longer, as
        far as that is little beside computing it all.
        """
        clock = state.clock
        clock.admitted = clock.admitted or time.monotonic()
        if self._cache is not None and not sequence.submit.bypass_cache:
            if state.lookup is None:
                state.lookup = self._ask(self._cache, sequence)
            prefix, shared = None, list[SharedBlock]()
            if state.lookup is not None:
                is_alone = not self._scheduler.num_running
                answer = self._cache.answer(state.lookup, is_waiting=is_alone)
                if answer is None:
                    return False
                prefix, shared = answer
            before, state.prefix, state.lookup = state.prefix, prefix, None
            sequence.table.start_with(shared)
            sequence.begin(prefix.num_tokens if prefix is not None else 0)
            if before is not None:
                self._cache.release(before)  # of before a preemption; only now, so nothing got lost
        state.is_looked_up = True
        clock.looked_up = clock.looked_up or time.monotonic()
        return True

    def _ask(self, cache: SharedCache, sequence: Sequence) -> Lookup | None:
        budget = self._lookup_budget_s
        estimate = self._seconds_per_token * len(sequence.tokens)
        limit = max(budget, _LOOKUP_BUDGET_SHARE * estimate)
        # A daemon that keeps one waiting costs the others that budget once, not once for each.
        is_slow = any(state.lookup is not None for state in self._states.values())
        submit = sequence.submit
        return cache.ask(
            sequence.tokens,
            0.0 if is_slow else budget,
            limit,
            submit.domain,
            is_prefill_only=not submit.max_tokens,
        )

    def _take_seat(self, sequence: Sequence, state: AttemptState) -> None:
        """Go on from what another running sequence has of the same tokens, if that is more."""
        other, common = self._scheduler.best_fork(sequence)
        if other is not None:
            covered = sequence.table.fork(other.table, common)
            sequence.begin(max(covered, sequence.num_found))
        clock = state.clock
        if clock.preempted_at:
            clock.preempted_s += time.monotonic() - clock.preempted_at
            clock.preempted_at = 0.0
        if not sequence.num_preemptions:
            state.num_cached_tokens = min(sequence.num_computed, sequence.num_prompt)
        self._tell_progress(sequence, sequence.num_computed)

    def _on_preempt(self, sequence: Sequence) -> None:
        """It keeps its lease until it has a seat again."""
        state = self._states[sequence]
        state.clock.preempted_at = time.monotonic()
        state.is_looked_up = False
        if self._cache is not None and state.prefix is not None:
            self._cache.publish(sequence, state.prefix, with_tail=True)

    # -- a step ---------------------------------------------------------------------------------

    def _step(self) -> None:
        """One chunk of every sequence that takes part, then what follows from it."""
        will_return = self._cache is not None and self._cache.num_pending > 0
        num_urgent = self._scheduler.num_urgent
        share = None
        if 0 < num_urgent < self._scheduler.num_running:
            share = self._background.tokens(num_urgent)
        chunks = self._scheduler.schedule(will_return, share)
        self._is_blocked = not chunks and self._has_work and not self._scratch
        if not chunks:
            return
        self._num_tail_copies += sum(len(chunk.copied) for chunk in chunks)
        started = time.monotonic()
        rows = self._executor.forward([self._for_executor(chunk) for chunk in chunks])
        seconds = time.monotonic() - started
        self._measure(chunks, seconds)
        if share is not None:
            self._measure_background(chunks, seconds)
        for chunk, logits in zip(chunks, rows, strict=True):
            self._take_result(chunk, logits)

    @staticmethod
    def _for_executor(chunk: ScheduledChunk) -> Chunk:
        sequence = chunk.sequence
        return Chunk(
            sequence.tokens[chunk.start : chunk.end],
            chunk.start,
            chunk.write_from,
            sequence.table,
            chunk.needs_logits,
        )

    def _take_result(self, chunk: ScheduledChunk, logits: npt.NDArray[np.float32] | None) -> None:
        sequence = chunk.sequence
        state = self._states[sequence]
        if not self._is_intact(chunk, state):
            self._start_over(sequence, state)
            return
        ends_prefill, is_prefill = chunk.ends_prefill, chunk.is_prefill
        sequence.num_computed = chunk.end
        if self._cache is not None and state.prefix is not None:
            self._cache.publish(sequence, state.prefix, with_tail=ends_prefill)
        if is_prefill:
            self._tell_progress(sequence, chunk.end)
        if logits is not None:
            self._emit(sequence, state, self._sample(sequence, logits))
        elif ends_prefill and sequence.submit.hand_off:
            del self._states[sequence]
            self._scheduler.finish(sequence)
            sequence.table.clear()
            self._hand_offs.begin(sequence, state)
        elif ends_prefill:
            self._finish(sequence, "length")  # max_tokens = 0: prefill only

    def _is_intact(self, chunk: ScheduledChunk, state: AttemptState) -> bool:
        """Were the shared bytes it read, in place or to copy them, still those it leased?"""
        if self._cache is None or state.prefix is None:
            return True
        read = [*chunk.sequence.table.shared_blocks, *chunk.copied]
        return self._cache.is_intact(state.prefix, read)

    def _start_over(self, sequence: Sequence, state: AttemptState) -> None:
        """Blocks it read were reused after the lease was lost: drop the step, compute anew."""
        _log.warning("shared_blocks_lost", request_id=sequence.submit.request_id)
        sequence.table.clear()
        sequence.begin(0)
        state.num_cached_tokens = 0
        state.prefix = None

    def _measure(self, chunks: list[ScheduledChunk], seconds: float) -> None:
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        kind = "prefill" if any(chunk.is_prefill for chunk in chunks) else "decode"
        self._num_computed += num_tokens
        self._num_steps[kind] += 1
        self._step_seconds[kind] += seconds
        if kind == "prefill":
            each = seconds / num_tokens
            before = self._seconds_per_token or each
            self._seconds_per_token = 0.8 * before + 0.2 * each

    def _measure_background(self, chunks: list[ScheduledChunk], seconds: float) -> None:
        """Beside decodes: prompts of others make a step as long as they are."""
        if any(chunk.is_prefill and not chunk.sequence.is_background for chunk in chunks):
            return
        ours = sum(c.end - c.start for c in chunks if c.sequence.is_background)
        self._background.measured(ours, seconds)

    @staticmethod
    def _sample(sequence: Sequence, logits: npt.NDArray[np.float32]) -> int:
        submit = sequence.submit
        if sequence.num_output < submit.min_tokens and submit.stop_token_ids:
            logits = logits.copy()
            logits[submit.stop_token_ids] = -np.inf
        return sample(
            logits,
            submit.sampling,
            submit.resolved_seed,
            submit.sample_index,
            sequence.num_output,
        )

    # -- what the front hears -------------------------------------------------------------------

    def _tell_progress(self, sequence: Sequence, num_computed: int) -> None:
        submit = sequence.submit
        self._send(Progress(submit.request_id, submit.attempt, submit.sample_index, num_computed))

    def _emit(self, sequence: Sequence, state: AttemptState, token: int) -> None:
        submit = sequence.submit
        state.clock.first_token = state.clock.first_token or time.monotonic()
        index = sequence.num_output
        sequence.tokens.append(token)
        self._send(Output(submit.request_id, submit.attempt, submit.sample_index, index, [token]))
        if reason := self._reason_to_stop(sequence):
            self._finish(sequence, reason)

    @staticmethod
    def _reason_to_stop(sequence: Sequence) -> str:
        """Why the last output token is the last one; "" = it is not."""
        submit = sequence.submit
        is_held_back = sequence.num_output <= submit.min_tokens
        if sequence.tokens[-1] in submit.stop_token_ids and not is_held_back:
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
        if self._cache is not None and state.lookup is not None:
            self._cache.forget(state.lookup)
        submit, pin = sequence.submit, None
        if self._cache is not None and state.prefix is not None:
            if was_running and error is None:
                self._cache.publish(sequence, state.prefix, with_tail=True)
                if submit.pin_ttl_ms is not None:
                    pin = self._cache.pin(state.prefix, submit.pin_ttl_ms, submit.request_id)
            self._cache.release(state.prefix)
        sequence.table.clear()
        last = finished(sequence, state, reason, error)
        if submit.pin_ttl_ms is not None and reason != "cancelled" and error is None:
            self._pinning.begin(pin, last)
        else:
            self._send(last)
