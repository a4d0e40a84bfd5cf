"""Who computes a request, and what of its output is true.

The front owns what was sent to the client, so it owns the truth: a request that lost its worker is
submitted again, under a new attempt, with the output it has; stale attempts are dropped.

What ran on a worker that died may have killed it. Several such requests are tried again in halves,
the half under test alone on a fresh worker, until one that kills a worker all by itself is found;
only that one is failed.

    died with {a b c d} -> {a b} on the next worker -> a token each: cleared, {c d} join them
                                                    -> it dies too:  {a}, then {b}, then {c d}
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from cachewarmd.log import get_logger
from engine import errors
from engine.request import Abort, Finished, Output, Progress, Submit, ToWorker

_log = get_logger()

# Deaths of a worker that ran nothing but one request, without a new token in between.
MAX_SOLO_DEATHS = 3

Event = Output | Finished | Progress | errors.EngineError


@dataclass(eq=False)
class ActiveRequest:
    """One sample of a request between acceptance and its end; `events` feeds its stream.

    The samples of a request share one queue.
    """

    submit: Submit  # as first made; `output_ids` below is what counts
    is_warmup: bool = False
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    output_ids: list[int] = field(default_factory=list)
    attempt: int = 0
    worker: RoutedWorker | None = None
    is_started: bool = False
    is_aborted: bool = False
    prefilled: Finished | None = None  # what the worker said that only prefilled
    release: Callable[[], None] | None = None  # tells that worker to let go of its lease
    num_failovers: int = 0
    failover_s: float = 0.0
    lost_at: float = 0.0
    num_solo_deaths: int = 0
    num_output_at_death: int = -1

    def __post_init__(self) -> None:
        self.output_ids = list(self.submit.output_ids)

    @property
    def key(self) -> tuple[str, int]:
        return self.submit.request_id, self.submit.sample_index


@dataclass(eq=False)
class RoutedWorker:
    """A worker that takes requests. `under_test` are suspects that must show they don't kill it."""

    role: str
    send: Callable[[ToWorker], None]
    requests: set[ActiveRequest] = field(default_factory=set)
    under_test: set[ActiveRequest] = field(default_factory=set)


class Router:
    """All active requests and the workers they are on. Runs on the front's loop."""

    def __init__(
        self,
        max_active: int,
        *,
        has_roles: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`has_roles`: some workers prefill, others decode, instead of all doing both."""
        self._max_active = max_active
        self._has_roles = has_roles
        self._clock = clock
        self._active: dict[tuple[str, int], ActiveRequest] = {}
        self._workers: list[RoutedWorker] = []
        self._suspects: list[set[ActiveRequest]] = []  # groups that wait for a worker to themselves
        # Never reused, so that a late message about an id that was taken again is stale too.
        self._attempts = itertools.count(1)
        self.num_failovers = 0

    # -- clients --------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        return sum(1 for r in self._active.values() if not r.is_started and not r.is_warmup)

    @property
    def num_running(self) -> int:
        return sum(1 for r in self._active.values() if r.is_started and not r.is_warmup)

    @property
    def num_active(self) -> int:
        return len(self._active)

    def submit(self, samples: Sequence[ActiveRequest]) -> None:
        """Take a request on. Raises DuplicateRequestIdError, QueueFullError."""
        request_id = samples[0].submit.request_id
        if any(active_id == request_id for active_id, _ in self._active):
            raise errors.DuplicateRequestIdError(f"request_id {request_id} is active")
        if len(self._active) + len(samples) > self._max_active:
            raise errors.QueueFullError(f"{self._max_active} requests are queued or running")
        for sample in samples:
            self._active[sample.key] = sample
            self._place(sample)

    def abort(self, request_id: str) -> bool:
        """Ask workers to stop it; its stream ends as cancelled. False = nothing to stop."""
        found = [r for (active_id, _), r in self._active.items() if active_id == request_id]
        for request in found:
            self.stop_sample(request)
        return bool(found)

    def stop_sample(self, request: ActiveRequest) -> None:
        """One sample needs no more tokens; its Finished comes as of a cancelled one."""
        if request.is_aborted or self._active.get(request.key) is not request:
            return
        request.is_aborted = True
        if request.worker is not None:
            request.worker.send(Abort(request.attempt))
        else:
            self._end_as_cancelled(request)

    def _end_as_cancelled(self, request: ActiveRequest) -> None:
        self._leave(request)
        finished = Finished(*_name(request), request.submit.sample_index, "cancelled")
        request.events.put_nowait(finished)

    def forget(self, request: ActiveRequest) -> None:
        """Its stream is over, whoever ended it; what a worker still computes for it is stopped."""
        if self._active.get(request.key) is request:
            if request.worker is not None:
                request.worker.send(Abort(request.attempt))
            self._leave(request)

    def _leave(self, request: ActiveRequest) -> None:
        """Out of every set it may be in."""
        self._active.pop(request.key, None)
        for group in self._suspects:
            group.discard(request)
        self._suspects = [group for group in self._suspects if group]
        self._release(request)
        self._detach(request)

    def _detach(self, request: ActiveRequest) -> None:
        """Its worker has nothing more to do with it. One that is idle now can test suspects."""
        worker, request.worker = request.worker, None
        if worker is None:
            return
        worker.requests.discard(request)
        self._clear(request, worker)
        if not worker.requests and not worker.under_test:
            self._test_next(worker)

    # -- placing --------------------------------------------------------------------------------

    def _role_of(self, request: ActiveRequest) -> str:
        if not self._has_roles:
            return "unified"
        return "decode" if request.prefilled is not None else "prefill"

    def _place(self, request: ActiveRequest) -> None:
        """On the least loaded worker of its role; none there: it waits for `worker_ready`."""
        if any(request in group for group in self._suspects):
            return
        role = self._role_of(request)
        able = [w for w in self._workers if w.role == role and not w.under_test]
        if able:
            self._assign(request, min(able, key=lambda worker: len(worker.requests)))

    def _assign(self, request: ActiveRequest, worker: RoutedWorker) -> None:
        assert request.worker is None, "a request is on one worker at a time"
        first = request.submit
        request.attempt = next(self._attempts)
        request.worker, request.is_started = worker, False
        worker.requests.add(request)
        worker.send(
            msgspec.structs.replace(
                first,
                attempt=request.attempt,
                output_ids=list(request.output_ids),
                hand_off=worker.role == "prefill" and first.max_tokens > 0,
            )
        )

    def _place_all(self) -> None:
        for request in list(self._active.values()):
            if request.worker is None:
                self._place(request)

    # -- workers --------------------------------------------------------------------------------

    def worker_ready(self, role: str, send: Callable[[ToWorker], None]) -> RoutedWorker:
        """A worker takes requests: suspects first, else all that wait for its role."""
        worker = RoutedWorker(role, send)
        self._workers.append(worker)
        self._test_next(worker)
        self._place_all()
        return worker

    def _test_next(self, worker: RoutedWorker) -> None:
        """Give it the next group of suspects that its role is for, if there is one."""
        for group in self._suspects:
            if all(self._role_of(request) == worker.role for request in group):
                self._suspects.remove(group)
                worker.under_test = group
                for request in sorted(group, key=lambda request: request.attempt):
                    self._assign(request, worker)
                return

    def _clear(self, request: ActiveRequest, worker: RoutedWorker) -> None:
        """It came further than where a worker died: it is no suspect any more."""
        if request in worker.under_test:
            worker.under_test.discard(request)
            if not worker.under_test:
                self._test_next(worker)
                self._place_all()

    def worker_lost(self, worker: RoutedWorker, silent_since: float | None = None) -> None:
        """Its requests go to others, those that may have killed it in groups of their own.

        `silent_since` (of the clock) is when it was last heard: from then on its requests wait.
        """
        self._workers.remove(worker)
        requests = sorted(worker.requests, key=lambda request: request.attempt)
        started = [request for request in requests if request.is_started] or requests
        under_test, worker.under_test = worker.under_test, set()
        suspects = [request for request in started if request in under_test] or started
        untested = [request for request in requests if request in under_test.difference(started)]
        for request in requests:
            self._lose(request, self._clock() if silent_since is None else silent_since)
        if len(started) == 1 and self._is_culprit(started[0]):
            suspects = []
        middle = (len(suspects) + 1) // 2
        groups = (suspects[:middle], suspects[middle:], untested)
        active = ({r for r in group if self._active.get(r.key) is r} for group in groups)
        self._suspects[:0] = [group for group in active if group]
        for other in self._workers:
            if not other.requests:
                self._test_next(other)
        self._place_all()

    def _lose(self, request: ActiveRequest, since: float) -> None:
        request.worker = None
        if request.is_started:
            request.num_failovers += 1
            self.num_failovers += 1
            request.lost_at = request.lost_at or since
        request.is_started = False
        if request.is_aborted:
            self._end_as_cancelled(request)  # the worker died before it read the Abort

    def _is_culprit(self, request: ActiveRequest) -> bool:
        """It was alone on a worker that died: does that happen again and again?"""
        if request.num_output_at_death != len(request.output_ids):
            request.num_output_at_death, request.num_solo_deaths = len(request.output_ids), 0
        request.num_solo_deaths += 1
        if request.num_solo_deaths < MAX_SOLO_DEATHS or request.is_aborted:
            return False
        _log.error("request_given_up", request_id=request.submit.request_id)
        self._leave(request)
        request.events.put_nowait(
            errors.InternalError(f"{request.num_solo_deaths} workers died on this request alone")
        )
        return True

    def no_worker_left(self, *, is_stopping: bool = False) -> None:
        """Nobody will come: fail what waits. `is_stopping`: the server was told to stop."""
        if is_stopping:
            self.fail_all(errors.DrainingError("the server stopped before the request was done"))
        else:
            self.fail_all(errors.NoWorkerError("no worker could be started"))

    def fail_all(self, error: errors.EngineError) -> None:
        """End every request; workers are not told."""
        self._suspects.clear()
        for request in list(self._active.values()):
            self._leave(request)
            request.events.put_nowait(error)

    def on_message(self, message: Output | Finished | Progress) -> bool:
        """What a worker says of a request; stale attempts are dropped.

        False = the worker broke the contract (indices not contiguous): it must not go on.
        """
        request = self._active.get((message.request_id, message.sample_index))
        if request is None or message.attempt != request.attempt or request.worker is None:
            return True
        request.is_started = True
        match message:
            case Output():
                if message.first_output_index != len(request.output_ids):
                    _log.error("output_not_contiguous", request_id=message.request_id)
                    return False
                request.output_ids.extend(message.token_ids)
                self._end_gap(request)
                self._clear(request, request.worker)
            case Progress():
                self._release(request)  # this worker has its own lease, or needs none
            case Finished(reason="prefilled"):
                self._hand_over(request, request.worker, message)
                return True
            case Finished():
                self._end_gap(request)
                self._leave(request)
                message = _with_prefill(message, request.prefilled)
        request.events.put_nowait(message)
        return True

    def _end_gap(self, request: ActiveRequest) -> None:
        if request.lost_at:
            request.failover_s += self._clock() - request.lost_at
            request.lost_at = 0.0

    # -- hand-off -------------------------------------------------------------------------------

    def _hand_over(
        self, request: ActiveRequest, prefiller: RoutedWorker, message: Finished
    ) -> None:
        """Prefilled and published: on to a worker that decodes.

        The first worker keeps its lease until the second one has its own, so nothing is evicted
        between. Should it never be told, it lets go by itself after a while.
        """
        attempt = request.attempt

        def release() -> None:
            if prefiller in self._workers:
                prefiller.send(Abort(attempt))

        request.prefilled, request.release = message, release
        if request.is_aborted:
            self._end_as_cancelled(request)  # the Abort and this message crossed
            return
        self._detach(request)
        if request.worker is None:
            self._place(request)

    @staticmethod
    def _release(request: ActiveRequest) -> None:
        release, request.release = request.release, None
        if release is not None:
            release()


def _with_prefill(finished: Finished, prefilled: Finished | None) -> Finished:
    """The end of a request that two workers computed: what the first did belongs to it."""
    if prefilled is None:
        return finished
    return msgspec.structs.replace(
        finished,
        num_cached_tokens=prefilled.num_cached_tokens,
        queued_s=prefilled.queued_s + finished.queued_s,
        lookup_s=prefilled.lookup_s + finished.lookup_s,
        prefill_s=prefilled.prefill_s + finished.prefill_s,
        num_preemptions=prefilled.num_preemptions + finished.num_preemptions,
        preempted_s=prefilled.preempted_s + finished.preempted_s,
    )


def _name(request: ActiveRequest) -> tuple[str, int]:
    return request.submit.request_id, request.attempt
