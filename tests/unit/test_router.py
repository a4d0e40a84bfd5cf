"""Who computes a request, and what of its output is true."""

from __future__ import annotations

import pytest

from engine import errors
from engine.request import Abort, Finished, Output, Progress, SamplingParams, Submit, ToWorker
from engine.router import MAX_ATTEMPTS, ActiveRequest, Event, Router


def make(request_id: str = "a", *, is_warmup: bool = False) -> ActiveRequest:
    submit = Submit(
        request_id=request_id,
        attempt=0,
        prompt_ids=[1, 2, 3],
        output_ids=[],
        sampling=SamplingParams(temperature=0.5, top_k=3),
        resolved_seed=99,
        max_tokens=10,
        stop_token_ids=[7],
        bypass_cache=True,
        urgency=1,
    )
    return ActiveRequest(submit, is_warmup=is_warmup)


class Worker:
    """Keeps what a worker was sent."""

    def __init__(self, router: Router) -> None:
        self.inbox: list[ToWorker] = []
        router.worker_ready(self.inbox.append)

    def last_submit(self) -> Submit:
        return next(m for m in reversed(self.inbox) if isinstance(m, Submit))


def output(of: Submit, index: int, *ids: int) -> Output:
    return Output(of.request_id, of.attempt, 0, index, list(ids))


def finished(of: Submit) -> Finished:
    return Finished(of.request_id, of.attempt, "length", 0, 0.0, 0.0, 0.0, 0.0)


def events_of(request: ActiveRequest) -> list[Event]:
    found: list[Event] = []
    while not request.events.empty():
        found.append(request.events.get_nowait())
    return found


def test_what_a_worker_says_reaches_the_stream_in_order() -> None:
    """Progress, output and the end are events; with the end the request is not active any more."""
    router = Router(4)
    worker, request = Worker(router), make()
    router.submit(request)
    sent = worker.last_submit()
    assert (router.num_waiting, router.num_running) == (1, 0)
    messages = [Progress("a", sent.attempt, 3), output(sent, 0, 5), finished(sent)]
    for message in messages:
        assert router.on_message(message)
    assert events_of(request) == messages
    assert request.output_ids == [5]
    assert router.num_active == 0


def test_requests_and_warm_ups_are_counted_apart() -> None:
    """Warm-ups are active, but neither waiting nor running in what users see."""
    router = Router(4)
    worker = Worker(router)
    router.submit(make("user"))
    sent = worker.last_submit()
    router.submit(make("warm", is_warmup=True))
    router.on_message(Progress("user", sent.attempt, 1))
    assert (router.num_waiting, router.num_running, router.num_active) == (0, 1, 2)


def test_a_new_worker_continues_with_the_output_so_far() -> None:
    """The next Submit is the same request with what was sent, under another attempt."""
    router = Router(4)
    first, request = Worker(router), make()
    router.submit(request)
    before = first.last_submit()
    router.on_message(output(before, 0, 5, 6))
    router.worker_lost()
    second = Worker(router)
    (after,) = second.inbox
    assert isinstance(after, Submit)
    assert after.output_ids == [5, 6]
    assert after.attempt > before.attempt
    assert request.num_failovers == router.num_failovers == 1
    for name in ("request_id", "prompt_ids", "sampling", "resolved_seed", "max_tokens"):
        assert getattr(after, name) == getattr(before, name)
    assert (after.stop_token_ids, after.bypass_cache, after.urgency) == ([7], True, 1)
    assert router.on_message(output(after, 2, 7))
    assert request.output_ids == [5, 6, 7]


def test_stale_attempts_are_dropped() -> None:
    """Messages of a lost worker change nothing and are no offence."""
    router = Router(4)
    worker, request = Worker(router), make()
    router.submit(request)
    old = worker.last_submit()
    router.on_message(output(old, 0, 5))
    router.worker_lost()
    Worker(router)
    for message in (output(old, 1, 6), output(old, 9, 6), finished(old)):
        assert router.on_message(message)
    assert request.output_ids == [5]
    assert len(events_of(request)) == 1
    assert router.num_active == 1


def test_an_id_that_is_used_again_hears_nothing_of_its_past() -> None:
    """Late messages about a request that was cancelled don't reach its namesake."""
    router = Router(4)
    worker, request = Worker(router), make()
    router.submit(request)
    old = worker.last_submit()
    router.on_message(output(old, 0, 5))
    router.forget(request)
    namesake = make()
    router.submit(namesake)
    assert router.on_message(output(old, 1, 6))
    assert router.on_message(finished(old))
    assert events_of(namesake) == []
    assert router.on_message(output(worker.last_submit(), 0, 8))
    assert namesake.output_ids == [8]


@pytest.mark.parametrize("index", [0, 2])
def test_output_that_is_not_contiguous_is_refused(index: int) -> None:
    """A repetition or a gap condemns the worker; the client sees nothing of it."""
    router = Router(4)
    worker, request = Worker(router), make()
    router.submit(request)
    sent = worker.last_submit()
    assert router.on_message(output(sent, 0, 5))
    assert not router.on_message(output(sent, index, 6))
    assert request.output_ids == [5]
    assert len(events_of(request)) == 1


def test_a_request_that_took_too_many_workers_with_it_is_given_up() -> None:
    """It ends with INTERNAL; one that only waited meanwhile does not."""
    router = Router(4)
    guilty, bystander = make("guilty"), make("bystander")
    router.submit(guilty)
    router.submit(bystander)
    for number in range(MAX_ATTEMPTS):
        assert not any(isinstance(e, errors.EngineError) for e in events_of(guilty))
        worker = Worker(router)
        sent = next(m for m in worker.inbox if isinstance(m, Submit) and m.request_id == "guilty")
        router.on_message(output(sent, number, 5))
        router.worker_lost()
    last = events_of(guilty)[-1]
    assert isinstance(last, errors.InternalError)
    assert f"{MAX_ATTEMPTS} workers died" in str(last)
    assert (bystander.num_failovers, events_of(bystander)) == (0, [])


def test_a_full_queue_and_a_taken_id_are_refused() -> None:
    """Both are typed errors, and what was active stays so."""
    router = Router(2)
    router.submit(make("a"))
    with pytest.raises(errors.DuplicateRequestIdError, match="a is active"):
        router.submit(make("a"))
    router.submit(make("b"))
    with pytest.raises(errors.QueueFullError, match="2 requests") as full:
        router.submit(make("c"))
    assert full.value.retry_after_s is not None
    assert router.num_active == 2


def test_a_stream_that_left_stops_its_worker() -> None:
    """Forgetting an active request sends an Abort of its attempt; a finished one needs none."""
    router = Router(4)
    worker = Worker(router)
    left, done = make("left"), make("done")
    router.submit(left)
    router.submit(done)
    sent = worker.last_submit()
    router.on_message(finished(sent))
    router.forget(left)
    router.forget(done)
    aborts = [message for message in worker.inbox if isinstance(message, Abort)]
    assert aborts == [Abort("left", left.attempt)]
    assert router.num_active == 0


def test_an_abort_goes_to_the_worker_or_ends_what_has_none() -> None:
    """Without a worker the stream ends as cancelled at once; unknown ids are no-ops."""
    router = Router(4)
    request = make()
    router.submit(request)
    assert not router.abort("unknown")
    assert router.abort("a")
    (event,) = events_of(request)
    assert isinstance(event, Finished)
    assert event.reason == "cancelled"
    worker = Worker(router)
    assert router.abort("a")
    assert worker.inbox[-1] == Abort("a", request.attempt)
    assert events_of(request) == [], "the worker's own last word ends it"


def test_an_abort_that_died_with_its_worker_still_ends_the_request() -> None:
    """A worker that dies before it reads the Abort: no other gets the request, it is cancelled."""
    router = Router(4)
    _, request = Worker(router), make()
    router.submit(request)
    assert router.abort("a")
    router.worker_lost()
    assert [event.reason for event in events_of(request) if isinstance(event, Finished)] == [
        "cancelled"
    ]
    assert Worker(router).inbox == []


def test_without_any_worker_left_everything_fails() -> None:
    """Nobody waits for what will not come."""
    router = Router(4)
    requests = [make("a"), make("b")]
    for request in requests:
        router.submit(request)
    router.no_worker_left()
    for request in requests:
        (event,) = events_of(request)
        assert isinstance(event, errors.NoWorkerError)
