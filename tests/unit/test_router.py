"""Who computes a request, and what of its output is true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from engine import errors
from engine.request import Abort, Finished, Output, Progress, SamplingParams, Submit, ToWorker
from engine.router import MAX_SOLO_DEATHS, ActiveRequest, Event, Router


def make(request_id: str = "a", *, is_warmup: bool = False, **fields: Any) -> ActiveRequest:
    defaults: dict[str, Any] = {
        "attempt": 0,
        "prompt_ids": [1, 2, 3],
        "output_ids": [],
        "sampling": SamplingParams(temperature=0.5, top_k=3),
        "resolved_seed": 99,
        "max_tokens": 10,
        "stop_token_ids": [7],
        "min_tokens": 2,
        "bypass_cache": True,
        "urgency": 1,
        "priority": -4,
    }
    return ActiveRequest(Submit(request_id, **(defaults | fields)), is_warmup=is_warmup)


class Worker:
    """What a worker was sent, and what it says back."""

    def __init__(self, router: Router, role: str = "unified") -> None:
        self.router = router
        self.inbox: list[ToWorker] = []
        self.routed = router.worker_ready(role, self.inbox.append)

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.inbox if isinstance(message, Submit)]

    @property
    def ids(self) -> list[str]:
        """Of the requests it was given, in order."""
        return [submit.request_id for submit in self.submits]

    def aborted(self, request: ActiveRequest | Submit) -> bool:
        return Abort(request.attempt) in self.inbox

    def begin(self, *requests: ActiveRequest, num_computed: int = 0) -> None:
        for request in requests:
            assert self.router.on_message(progress(request, num_computed))

    def die(self) -> None:
        self.router.worker_lost(self.routed)


def progress(of: ActiveRequest | Submit, num_computed: int) -> Progress:
    submit = of if isinstance(of, Submit) else of.submit
    return Progress(submit.request_id, of.attempt, submit.sample_index, num_computed)


def output(of: ActiveRequest | Submit, index: int, *ids: int) -> Output:
    submit = of if isinstance(of, Submit) else of.submit
    return Output(submit.request_id, of.attempt, submit.sample_index, index, list(ids))


def finished(of: ActiveRequest | Submit, reason: str = "length", **fields: Any) -> Finished:
    submit = of if isinstance(of, Submit) else of.submit
    return Finished(submit.request_id, of.attempt, submit.sample_index, reason, **fields)


def events_of(request: ActiveRequest) -> list[Event]:
    found: list[Event] = []
    while not request.events.empty():
        found.append(request.events.get_nowait())
    return found


def submit_all(router: Router, *names: str) -> list[ActiveRequest]:
    """Requests of those names, each submitted on its own."""
    requests = [make(name) for name in names]
    for request in requests:
        router.submit([request])
    return requests


def reasons(request: ActiveRequest) -> list[str]:
    return [event.reason for event in events_of(request) if isinstance(event, Finished)]


# -- the stream ---------------------------------------------------------------------------------


def test_what_a_worker_says_reaches_the_stream_in_order() -> None:
    """Progress, output and the end are events; with the end the request is not active any more."""
    router = Router(4)
    worker = Worker(router)
    (request,) = submit_all(router, "a")
    assert (router.num_waiting, router.num_running) == (1, 0)
    messages = [progress(request, 3), output(request, 0, 5), finished(request)]
    for message in messages:
        assert router.on_message(message)
    assert events_of(request) == messages
    assert request.output_ids == [5]
    assert (router.num_active, worker.routed.requests) == (0, set())


def test_requests_and_warm_ups_are_counted_apart() -> None:
    """Warm-ups are active, but neither waiting nor running in what users see."""
    router = Router(4)
    worker, user = Worker(router), make("user")
    router.submit([user])
    router.submit([make("warm", is_warmup=True)])
    worker.begin(user)
    assert (router.num_waiting, router.num_running, router.num_active) == (0, 1, 2)


def test_the_least_loaded_worker_takes_a_request() -> None:
    """Every active request counts, begun or not; what has ended does not."""
    router = Router(8)
    left, right = Worker(router), Worker(router)
    requests = submit_all(router, *"abcd")
    assert sorted(left.ids + right.ids) == [*"abcd"]
    assert len(left.ids) == len(right.ids) == 2
    for request in requests:
        if request.worker is right.routed:
            router.on_message(finished(request))
    submit_all(router, "e", "f")
    assert right.ids[2:] == ["e", "f"]


def test_a_request_that_no_worker_is_there_for_waits_for_one() -> None:
    """Accepted between two workers, it goes to the next."""
    router = Router(4)
    (request,) = submit_all(router, "a")
    assert (request.worker, router.num_waiting) == (None, 1)
    assert Worker(router).ids == ["a"]


# -- attempts -----------------------------------------------------------------------------------


def test_a_new_worker_continues_with_the_output_so_far() -> None:
    """The next Submit is the same request with what was sent, under another attempt."""
    router = Router(4)
    first = Worker(router)
    (request,) = submit_all(router, "a")
    (before,) = first.submits
    router.on_message(output(before, 0, 5, 6))
    first.die()
    (after,) = Worker(router).submits
    assert (after.output_ids, request.num_failovers, router.num_failovers) == ([5, 6], 1, 1)
    assert after.attempt > before.attempt
    for name in Submit.__struct_fields__:
        if name not in ("attempt", "output_ids"):
            assert getattr(after, name) == getattr(before, name)
    assert router.on_message(output(after, 2, 7))
    assert request.output_ids == [5, 6, 7]


def test_the_time_without_a_worker_is_counted_to_the_next_token() -> None:
    """Two losses are two gaps; waiting for the first worker is none."""
    now = [100.0]
    router = Router(4, clock=lambda: now[0])
    (request,) = submit_all(router, "a")
    now[0] += 50
    for gap in (3.0, 4.0):
        worker = Worker(router)
        router.on_message(output(request, len(request.output_ids), 5))
        worker.die()
        now[0] += gap / 2
        Worker(router).die()  # before it has begun: the gap goes on
        now[0] += gap / 2
    Worker(router)
    assert request.failover_s == 3.0
    router.on_message(finished(request))
    assert (request.failover_s, request.num_failovers) == (7.0, 2)


def test_stale_attempts_are_dropped() -> None:
    """Messages of a lost worker change nothing and are no offence."""
    router = Router(4)
    worker = Worker(router)
    (request,) = submit_all(router, "a")
    (old,) = worker.submits
    router.on_message(output(old, 0, 5))
    worker.die()
    late = [output(old, 1, 6), output(old, 9, 6), progress(old, 3), finished(old)]
    for message in late:  # nobody has it
        assert router.on_message(message)
    Worker(router)
    for message in late:
        assert router.on_message(message)
    assert (request.output_ids, request.is_started) == ([5], False)
    assert len(events_of(request)) == 1
    assert router.num_active == 1


def test_e9_an_id_that_is_used_again_hears_nothing_of_its_past() -> None:
    """Late messages about a request that was cancelled don't reach its namesake."""
    router = Router(4)
    worker = Worker(router)
    (request,) = submit_all(router, "a")
    old = worker.submits[-1]
    router.on_message(output(old, 0, 5))
    router.forget(request)
    (namesake,) = submit_all(router, "a")
    assert router.on_message(output(old, 1, 6))
    assert router.on_message(finished(old))
    assert events_of(namesake) == []
    assert router.on_message(output(worker.submits[-1], 0, 8))
    assert namesake.output_ids == [8]


@pytest.mark.parametrize("index", [0, 2])
def test_output_that_is_not_contiguous_is_refused(index: int) -> None:
    """A repetition or a gap condemns the worker; the client sees nothing of it."""
    router = Router(4)
    Worker(router)
    (request,) = submit_all(router, "a")
    assert router.on_message(output(request, 0, 5))
    assert not router.on_message(output(request, index, 6))
    assert request.output_ids == [5]
    assert len(events_of(request)) == 1


def test_a_continued_request_begins_behind_its_earlier_output() -> None:
    """`output_ids` of the first Submit count; the first index a worker may say is theirs."""
    router = Router(4)
    worker, request = Worker(router), make(output_ids=[4, 5])
    router.submit([request])
    assert worker.submits[0].output_ids == [4, 5]
    assert not router.on_message(output(request, 0, 6))
    assert router.on_message(output(request, 2, 6))
    assert request.output_ids == [4, 5, 6]


# -- refusals -----------------------------------------------------------------------------------


def test_e9_a_taken_id_and_a_full_queue_are_refused() -> None:
    """Both are typed errors, and what was active stays so; all samples count."""
    router = Router(3)
    submit_all(router, "a")
    with pytest.raises(errors.DuplicateRequestIdError, match="a is active"):
        router.submit([make("a")])
    with pytest.raises(errors.QueueFullError, match="3 requests") as full:
        router.submit([make("b", sample_index=index) for index in range(3)])
    assert full.value.retry_after_s is not None
    assert router.num_active == 1
    router.submit([make("b", sample_index=index) for index in range(2)])
    assert router.num_active == 3


@pytest.mark.parametrize(
    ("is_stopping", "error"), [(False, errors.NoWorkerError), (True, errors.DrainingError)]
)
def test_without_any_worker_left_everything_fails(
    is_stopping: bool, error: type[errors.EngineError]
) -> None:
    """Nobody waits for what will not come; whether the server was told to stop is another error."""
    router = Router(4)
    Worker(router)
    requests = submit_all(router, "a", "b")
    router.no_worker_left(is_stopping=is_stopping)
    for request in requests:
        (event,) = events_of(request)
        assert isinstance(event, error)
    assert router.num_active == 0


# -- ends that clients make ---------------------------------------------------------------------


def test_a_stream_that_left_stops_its_worker() -> None:
    """Forgetting an active request sends an Abort of its attempt; a finished one needs none."""
    router = Router(4)
    worker = Worker(router)
    left, done = submit_all(router, "left", "done")
    router.on_message(finished(done))
    router.forget(left)
    router.forget(done)
    assert [m for m in worker.inbox if isinstance(m, Abort)] == [Abort(left.attempt)]
    assert (router.num_active, worker.routed.requests) == (0, set())
    router.on_message(finished(left, "cancelled"))
    assert events_of(left) == []


def test_an_abort_goes_to_the_worker_or_ends_what_has_none() -> None:
    """Without a worker the stream ends as cancelled at once; unknown ids are no-ops."""
    router = Router(4)
    (request,) = submit_all(router, "a")
    assert not router.abort("unknown")
    assert router.abort("a")
    assert reasons(request) == ["cancelled"]
    assert not router.abort("a")
    worker = Worker(router)
    (request,) = submit_all(router, "a")
    assert router.abort("a")
    assert router.abort("a")
    assert worker.inbox.count(Abort(request.attempt)) == 1
    assert events_of(request) == [], "the worker's own last word ends it"
    router.on_message(finished(request, "cancelled"))
    assert reasons(request) == ["cancelled"]


def test_an_abort_that_died_with_its_worker_still_ends_the_request() -> None:
    """A worker that dies before it reads the Abort: no other gets the request, it is cancelled."""
    router = Router(4)
    worker = Worker(router)
    (request,) = submit_all(router, "a")
    assert router.abort("a")
    worker.die()
    assert reasons(request) == ["cancelled"]
    assert Worker(router).inbox == []


def test_samples_are_stopped_one_by_one_or_all_at_once() -> None:
    """A stop text ends its own sample; an abort of the id ends those that are left."""
    router = Router(4)
    worker = Worker(router)
    samples = [make("a", sample_index=index) for index in range(3)]
    router.submit(samples)
    assert len({sample.attempt for sample in samples}) == 3
    router.stop_sample(samples[1])
    assert [worker.aborted(sample) for sample in samples] == [False, True, False]
    router.on_message(finished(samples[1], "cancelled"))
    assert router.on_message(output(samples[2], 0, 5)), "the others go on"
    router.abort("a")
    assert all(worker.aborted(sample) for sample in samples)
    assert (samples[0].output_ids, samples[2].output_ids) == ([], [5])


def test_e9_an_id_is_taken_while_any_of_its_samples_runs() -> None:
    """A new request of one sample does not slip in beside the third of an old one."""
    router = Router(8)
    Worker(router)
    samples = [make("a", sample_index=index) for index in range(3)]
    router.submit(samples)
    router.on_message(finished(samples[0]))
    with pytest.raises(errors.DuplicateRequestIdError):
        router.submit([make("a")])


# -- prefill here, decode there -----------------------------------------------------------------


def prefill_and_decode(router: Router) -> tuple[Worker, Worker]:
    return Worker(router, "prefill"), Worker(router, "decode")


def test_a_request_goes_from_a_prefill_to_a_decode_worker() -> None:
    """The second is asked for the whole request; the first's lease ends with the second's own."""
    router = Router(4, has_roles=True)
    prefill, decode = prefill_and_decode(router)
    (request,) = submit_all(router, "a")
    (first,) = prefill.submits
    assert (first.hand_off, decode.inbox) == (True, [])
    prefill.begin(request, num_computed=3)
    events_of(request)
    router.on_message(finished(request, "prefilled"))
    (second,) = decode.submits
    assert (second.hand_off, second.attempt > first.attempt) == (False, True)
    assert events_of(request) == [], "a hand-off is nothing the client sees"
    assert prefill.routed.requests == set()
    assert not prefill.aborted(first), "it only has a place in the queue"
    decode.begin(request, num_computed=2)
    assert prefill.aborted(first), "a seat comes after the lease"
    router.on_message(output(request, 0, 5))
    router.on_message(finished(request))
    assert prefill.inbox.count(Abort(first.attempt)) == 1
    assert router.num_active == 0


def test_the_end_tells_what_both_workers_did() -> None:
    """Queue, lookup and prefill times add up; the cached tokens are what the first one found."""
    router = Router(4, has_roles=True)
    prefill_and_decode(router)
    (request,) = submit_all(router, "a")
    part = {"queued_s": 1.0, "lookup_s": 2.0, "prefill_s": 3.0, "num_preemptions": 1}
    part |= {"preempted_s": 0.5}
    router.on_message(finished(request, "prefilled", num_cached_tokens=1, decode_s=9.0, **part))
    router.on_message(finished(request, num_cached_tokens=3, decode_s=4.0, **part))
    (end,) = events_of(request)
    assert end == finished(
        request,
        num_cached_tokens=1,
        queued_s=2.0,
        lookup_s=4.0,
        prefill_s=6.0,
        decode_s=4.0,
        preempted_s=1.0,
        num_preemptions=2,
    )


def test_a_prefill_only_request_ends_where_it_is_prefilled() -> None:
    """max_tokens = 0 needs no decode worker."""
    router = Router(4, has_roles=True)
    prefill, decode = prefill_and_decode(router)
    request = make(max_tokens=0)
    router.submit([request])
    assert [submit.hand_off for submit in prefill.submits] == [False]
    router.on_message(finished(request))
    assert (reasons(request), decode.inbox) == (["length"], [])


def test_a_decode_worker_is_replaced_by_one_of_its_role() -> None:
    """What it had is prefilled: it waits for another that decodes."""
    router = Router(4, has_roles=True)
    _, decode = prefill_and_decode(router)
    (request,) = submit_all(router, "a")
    router.on_message(finished(request, "prefilled"))
    decode.begin(request, num_computed=3)
    decode.die()
    other = Worker(router, "prefill")
    assert (other.inbox, request.worker) == ([], None)
    assert Worker(router, "decode").ids == ["a"]


def test_a_suspect_in_prefill_can_be_handed_over() -> None:
    """Lost in prefill it prefills again, alone; once that is done, another worker decodes."""
    router = Router(4, has_roles=True)
    prefill, decode = prefill_and_decode(router)
    (request,) = submit_all(router, "a")
    prefill.begin(request)
    prefill.die()
    assert decode.inbox == []
    again = Worker(router, "prefill")
    assert router.on_message(finished(request, "prefilled"))
    assert decode.ids == ["a"]
    decode.begin(request, num_computed=3)
    assert again.aborted(again.submits[0])


def test_the_lease_of_a_dead_prefill_worker_is_not_asked_for() -> None:
    """It ended with the process; nothing is sent to what is no worker any more."""
    router = Router(4, has_roles=True)
    prefill, decode = prefill_and_decode(router)
    (request,) = submit_all(router, "a")
    router.on_message(finished(request, "prefilled"))
    prefill.die()
    sent = len(prefill.inbox)
    decode.begin(request, num_computed=3)
    assert len(prefill.inbox) == sent


@pytest.mark.parametrize("how", ["abort", "forget"])
def test_a_request_that_waits_for_a_decode_worker_can_end(how: str) -> None:
    """The prefill worker is told to let go, and no decode worker gets it."""
    router = Router(4, has_roles=True)
    prefill = Worker(router, "prefill")
    (request,) = submit_all(router, "a")
    router.on_message(finished(request, "prefilled"))
    if how == "abort":
        router.abort("a")
    else:
        router.forget(request)
    assert reasons(request) == (["cancelled"] if how == "abort" else [])
    assert prefill.aborted(prefill.submits[0])
    assert (Worker(router, "decode").inbox, router.num_active) == ([], 0)


def test_an_abort_that_crosses_with_the_hand_off_is_kept() -> None:
    """The prefill worker said "prefilled" before it read the Abort: nobody decodes."""
    router = Router(4, has_roles=True)
    prefill, decode = prefill_and_decode(router)
    (request,) = submit_all(router, "a")
    router.abort("a")
    router.on_message(finished(request, "prefilled"))
    assert decode.inbox == []
    assert reasons(request) == ["cancelled"]
    assert prefill.aborted(prefill.submits[0])
    assert router.num_active == 0


# -- who kills workers --------------------------------------------------------------------------


def begun(router: Router, worker: Worker, names: str) -> list[ActiveRequest]:
    requests = submit_all(router, *names)
    worker.begin(*requests)
    return requests


def failed(requests: Sequence[ActiveRequest]) -> list[str]:
    """Names of those that ended with an error."""
    return [
        request.submit.request_id
        for request in requests
        if any(isinstance(event, errors.EngineError) for event in events_of(request))
    ]


def test_what_ran_on_a_dead_worker_is_tried_again_in_halves() -> None:
    """The half under test has the next worker to itself; a token each clears it."""
    router = Router(8)
    first = Worker(router)
    requests = begun(router, first, "abcd")
    first.die()
    second = Worker(router)
    assert {*second.ids} == {"a", "b"}
    (new,) = submit_all(router, "new")
    assert new.worker is None, "it must not be there when the next one dies"
    router.on_message(output(requests[0], 0, 5))
    assert len(second.ids) == 2
    router.on_message(output(requests[1], 0, 5))
    assert {*second.ids[2:]} == {"c", "d"}
    assert new.worker is None
    for request in requests[2:]:
        router.on_message(output(request, 0, 5))
    assert second.ids[4:] == ["new"]
    assert failed(requests) == []


def test_those_that_had_not_begun_are_no_suspects() -> None:
    """They go to any other worker at once."""
    router = Router(8)
    first, other = Worker(router), Worker(router)
    requests = submit_all(router, *"abcd")
    mine = [request for request in requests if request.worker is first.routed]
    first.begin(mine[0])
    first.die()
    assert mine[1].worker is other.routed
    assert (mine[0].worker, mine[1].num_failovers) == (None, 0)
    assert Worker(router).ids == [mine[0].submit.request_id]


def test_only_those_under_test_are_suspects_when_the_worker_dies_again() -> None:
    """Those that showed a token there go on elsewhere; the others are halved further."""
    router = Router(16)
    first = Worker(router)
    requests = begun(router, first, "abcdefgh")
    first.die()
    second = Worker(router)
    assert {*second.ids} == {*"abcd"}
    for request in requests[:4]:
        router.on_message(output(request, 0, 5))
    assert {*second.ids[4:]} == {*"efgh"}
    second.begin(*requests[4:])
    router.on_message(output(requests[7], 0, 5))
    second.die()
    third, fourth, fifth = Worker(router), Worker(router), Worker(router)
    assert [len(worker.ids) for worker in (third, fourth)] == [2, 1]
    assert {*third.ids, *fourth.ids} == {*"efg"}
    assert {*fifth.ids} == {*"abcdh"}, "the innocent, and none of them earlier"


def test_a_request_that_kills_alone_again_and_again_is_failed() -> None:
    """INTERNAL with the number of deaths; one that waits meanwhile is untouched."""
    router = Router(4)
    worker = Worker(router)
    guilty, bystander = begun(router, worker, "g")[0], make("bystander")
    router.submit([bystander])
    for number in range(MAX_SOLO_DEATHS):
        assert failed([guilty]) == []
        worker.die()
        worker = Worker(router)
        if number + 1 < MAX_SOLO_DEATHS:
            assert worker.ids == ["g"]
            worker.begin(guilty)
    assert worker.ids == ["bystander"]
    (event,) = [e for e in events_of(guilty) if isinstance(e, errors.EngineError)]
    assert isinstance(event, errors.InternalError)
    assert f"{MAX_SOLO_DEATHS} workers died" in str(event)
    assert (bystander.num_failovers, failed([bystander]), router.num_active) == (0, [], 1)


def test_a_new_token_between_two_deaths_starts_the_count_anew() -> None:
    """A machine that kills workers at random fails nobody who gets on."""
    router = Router(4)
    (request,) = submit_all(router, "a")
    for _ in range(4 * MAX_SOLO_DEATHS):
        worker = Worker(router)
        router.on_message(output(request, len(request.output_ids), 5))
        worker.die()
    assert failed([request]) == []
    for _ in range(MAX_SOLO_DEATHS - 1):
        assert router.num_active == 1
        worker = Worker(router)
        worker.begin(request)
        worker.die()
    assert failed([request]) == ["a"]


def test_deaths_in_company_condemn_nobody() -> None:
    """Two requests that die together, each time after a token of one: both go on."""
    router = Router(4)
    worker = Worker(router)
    requests = begun(router, worker, "ab")
    for _ in range(3 * MAX_SOLO_DEATHS):
        worker.die()
        worker = Worker(router)
        (name,) = worker.ids
        alone = next(r for r in requests if r.submit.request_id == name)
        router.on_message(output(alone, len(alone.output_ids), 5))
        assert len(worker.ids) == 2, "cleared: the other joins"
        worker.begin(*requests)
    assert failed(requests) == []


@pytest.mark.parametrize("how", ["abort", "forget", "finish"])
@pytest.mark.parametrize("phase", ["waits", "under test"])
def test_a_suspect_that_ends_makes_room(how: str, phase: str) -> None:
    """Those behind it take its place; nothing waits for a group that is gone."""
    router = Router(8)
    first = Worker(router)
    requests = begun(router, first, "ab")
    first.die()
    second = Worker(router)
    (new,) = submit_all(router, "new")
    suspect, other = (requests[0], requests[1]) if phase == "under test" else requests[::-1]
    if how == "forget":
        router.forget(suspect)
    elif how == "abort" or phase == "waits":
        router.abort(suspect.submit.request_id)
    if suspect.worker is not None:
        router.on_message(finished(suspect, "length" if how == "finish" else "cancelled"))
    assert router.num_active == 2
    router.on_message(output(other, 0, 5))
    assert new.worker is second.routed
    assert failed([*requests, new]) == []


def test_a_suspect_takes_a_worker_that_has_become_idle() -> None:
    """The lost worker may never be replaced: the one that is left takes it, once it is alone."""
    router = Router(8)
    left, right = Worker(router), Worker(router)
    requests = submit_all(router, "a", "b")
    left.begin(requests[0])
    right.begin(requests[1])
    suspect = next(request for request in requests if request.worker is right.routed)
    other = next(request for request in requests if request is not suspect)
    right.die()
    assert suspect.worker is None
    router.on_message(finished(other))
    assert suspect.worker is left.routed


def test_a_sample_is_suspected_on_its_own() -> None:
    """Samples of one request run, die and end one by one."""
    router = Router(8)
    worker = Worker(router)
    samples = [make("a", sample_index=index) for index in range(2)]
    router.submit(samples)
    worker.begin(*samples)
    worker.die()
    worker = Worker(router)
    assert [submit.sample_index for submit in worker.submits] == [0]
    router.on_message(output(samples[0], 0, 5))
    assert [submit.sample_index for submit in worker.submits] == [0, 1]
