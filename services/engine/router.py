"""Who computes a request, and what of its output is true.

The front owns what was sent to the client, so it owns the truth: a request that lost its worker is
submitted again, attempt + 1, with the output it has; stale attempts are dropped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from engine import errors
from engine.request import Abort, Finished, Output, Progress, Submit, ToWorker

_log = structlog.get_logger()

# A request that took this many workers with it is taken for the cause.
MAX_ATTEMPTS = 3

Event = Output | Finished | Progress | errors.EngineError


@dataclass(eq=False)
class ActiveRequest:
    """A request between acceptance and its last message; `events` feeds its stream."""

    submit: Submit  # as first made; `output_ids` below is what counts
    is_warmup: bool = False
    attempt: int = 0
    output_ids: list[int] = field(default_factory=list)
    num_failovers: int = 0
    is_started: bool = False
    is_aborted: bool = False
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    def current(self) -> Submit:
        """The Submit that continues it from here."""
        first = self.submit
        return Submit(
            request_id=first.request_id,
            attempt=self.attempt,
            prompt_ids=first.prompt_ids,
            output_ids=list(self.output_ids),
            sampling=first.sampling,
            resolved_seed=first.resolved_seed,
            max_tokens=first.max_tokens,
            stop_token_ids=first.stop_token_ids,
            sample_index=first.sample_index,
            bypass_cache=first.bypass_cache,
            urgency=first.urgency,
        )


class Router:
    """All active requests; one unified worker at a time. Runs on the front's loop."""

    def __init__(self, max_active: int) -> None:
        self._max_active = max_active
        self._active: dict[str, ActiveRequest] = {}
        self._send: Callable[[ToWorker], None] | None = None
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

    def submit(self, request: ActiveRequest) -> None:
        """Take it on. Raises DuplicateRequestIdError, QueueFullError."""
        request_id = request.submit.request_id
        if request_id in self._active:
            raise errors.DuplicateRequestIdError(f"request_id {request_id} is active")
        if len(self._active) >= self._max_active:
            raise errors.QueueFullError(f"{self._max_active} requests are queued or running")
        request.attempt = next(self._attempts)
        self._active[request_id] = request
        if self._send is not None:
            self._send(request.current())

    def abort(self, request_id: str) -> bool:
        """Ask the worker to stop it; its stream ends as cancelled. False = nothing to stop."""
        request = self._active.get(request_id)
        if request is None:
            return False
        request.is_aborted = True
        if self._send is not None:
            self._send(Abort(request_id, request.attempt))
        else:
            self._end_as_cancelled(request)
        return True

    @staticmethod
    def _end_as_cancelled(request: ActiveRequest) -> None:
        request.events.put_nowait(
            Finished(request.submit.request_id, request.attempt, "cancelled", 0, 0, 0, 0, 0)
        )

    def forget(self, request: ActiveRequest) -> None:
        """Its stream is over, whoever ended it; what a worker still computes for it is stopped."""
        if self._active.get(request.submit.request_id) is request:
            del self._active[request.submit.request_id]
            if self._send is not None:
                self._send(Abort(request.submit.request_id, request.attempt))

    # -- workers --------------------------------------------------------------------------------

    def worker_ready(self, send: Callable[[ToWorker], None]) -> None:
        """A worker takes requests: it gets all active ones."""
        self._send = send
        for request in self._active.values():
            if not request.is_aborted:
                send(request.current())

    def worker_lost(self) -> None:
        """Its requests wait for the next one, under a new attempt."""
        self._send = None
        for request in list(self._active.values()):
            if request.is_started:
                request.num_failovers += 1
                self.num_failovers += 1
            was_started, request.is_started = request.is_started, False
            request.attempt = next(self._attempts)
            if request.is_aborted:
                self._end_as_cancelled(request)  # the worker died before it read the Abort
            elif was_started and request.num_failovers >= MAX_ATTEMPTS:
                _log.error("request_given_up", request_id=request.submit.request_id)
                request.events.put_nowait(
                    errors.InternalError(f"{request.num_failovers} workers died on this request")
                )

    def no_worker_left(self) -> None:
        """Nobody will come: fail what waits."""
        for request in self._active.values():
            request.events.put_nowait(errors.NoWorkerError("no worker could be started"))

    def on_message(self, message: Output | Finished | Progress) -> bool:
        """What a worker says of a request; stale attempts are dropped.

        False = the worker broke the contract (indices not contiguous): it must not go on.
        """
        request = self._active.get(message.request_id)
        if request is None or message.attempt != request.attempt:
            return True
        request.is_started = True
        if isinstance(message, Output):
            if message.first_output_index != len(request.output_ids):
                _log.error("output_not_contiguous", request_id=message.request_id)
                return False
            request.output_ids.extend(message.token_ids)
        elif isinstance(message, Finished):
            del self._active[message.request_id]
        request.events.put_nowait(message)
        return True
