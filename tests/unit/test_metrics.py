"""Tests of what the front counts, and of how requests that end in unusual ways are counted."""

from __future__ import annotations

import asyncio
import contextlib
import timeit
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics import (
    REQUEST_BUCKETS_S,
    TOKEN_BUCKETS_S,
    EngineMetrics,
    Histogram,
    RequestClock,
    WorkerTotals,
)
from engine.request import Finished


@dataclass
class Front:
    """An engine's numbers that tests can set, and its metrics."""

    time: float = 100.0
    running: set[object] = field(default_factory=set)
    waiting: set[object] = field(default_factory=set)
    num_failovers: int = 0
    metrics: EngineMetrics = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = EngineMetrics(
            num_running=lambda: len(self.running),
            num_waiting=lambda: len(self.waiting),
            kv_usage=lambda: 0.25 if self.running else 0.0,
            num_failovers=lambda: self.num_failovers,
            now=lambda: self.time,
        )

    def samples(self) -> dict[str, float]:
        """Everything that is exposed, as `name{label=value}`."""
        text = prometheus_client.generate_latest(self.metrics.registry).decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def finished(self) -> dict[str, float]:
        """Ended requests by reason, those that are not zero."""
        prefix = "engine_requests_total{finish_reason="
        return {
            name.removeprefix(prefix).rstrip("}"): value
            for name, value in self.samples().items()
            if name.startswith(prefix) and value
        }


@pytest.fixture
def front() -> Front:
    """Metrics with a clock that stands still unless moved."""
    return Front()


def end(
    reason: str = "stop", *, sample: int = 0, cached: int = 0, lookup_s: float = 0.002
) -> Finished:
    """What a worker says at a sample's end."""
    return Finished(
        request_id="r",
        attempt=1,
        sample_index=sample,
        reason=reason,
        num_cached_tokens=cached,
        queued_s=0.5,
        lookup_s=lookup_s,
        prefill_s=2.0,
        decode_s=7.0,
        error=("InternalError", "") if reason == "error" else None,
    )


# -- names ---------------------------------------------------------------------------------------


def test_every_documented_name_is_exposed(front: Front) -> None:
    """Dashboards find the names, in both formats, before and after there is anything to count."""
    metrics = front.metrics
    metrics.backend("reference", "auto")
    metrics.start_seconds({"serving": 2.5})
    metrics.worker_stats(
        1, num_steps={"decode": 4}, step_seconds={"decode": 0.5}, num_preemptions=2
    )
    metrics.rejected("QUEUE_FULL")
    front.num_failovers = 3
    found = front.samples()
    assert found["engine_backend_info{backend=reference,reason=auto}"] == 1
    assert found["engine_start_seconds{phase=serving}"] == 2.5
    assert found["engine_step_seconds_count{kind=decode}"] == 4
    assert found["engine_step_seconds_sum{kind=decode}"] == 0.5
    assert found["engine_preemptions_total"] == 2
    assert found["engine_failovers_total"] == 3
    assert found["engine_requests_rejected_total{reason=QUEUE_FULL}"] == 1
    assert found["engine_prefix_cache_hits_tokens_total{tier=l2}"] == 0
    assert found["engine_prefix_cache_queries_tokens_total"] == 0
    assert found["engine_prompt_tokens_total"] == found["engine_generation_tokens_total"] == 0
    for reason in ("stop", "length", "cancelled", "error"):
        assert found[f"engine_requests_total{{finish_reason={reason}}}"] == 0
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency"):
        assert found[f"engine_{name}_seconds_count"] == 0
    for name in ("queue", "prefill", "decode"):
        assert found[f"engine_request_{name}_time_seconds_count"] == 0
    assert {"engine_requests_running", "engine_requests_waiting", "engine_kv_usage_ratio"} < set(
        found
    )
    families = list(parse_openmetrics(openmetrics(metrics.registry).decode()))
    assert {family.name for family in families} >= {"engine_requests", "engine_backend"}


def test_two_engines_share_nothing() -> None:
    """Metrics live in their own registry, not in prometheus_client's global one."""
    one, two = Front(), Front()
    one.metrics.request(5).finished("stop")
    assert one.finished() == {"stop": 1}
    assert two.finished() == {}
    assert b"engine_" not in prometheus_client.generate_latest(prometheus_client.REGISTRY)


# -- times ---------------------------------------------------------------------------------------


def test_times_of_a_request(front: Front) -> None:
    """TTFT counts from arrival, ITL between messages with tokens, E2E to the end."""
    front.time = 103.0
    with front.metrics.request(20, arrived_at=100.0) as clock:
        front.time = 104.0
        clock.tokens(1)
        front.time = 104.25
        clock.tokens(2)
        front.time = 104.5
        clock.tokens(0)  # held-back text is no token
        front.time = 105.25
        clock.tokens(1)
        clock.sample_finished(end("length"))
    found = front.samples()
    assert found["engine_time_to_first_token_seconds_count"] == 1
    assert found["engine_time_to_first_token_seconds_sum"] == 4.0
    assert found["engine_inter_token_latency_seconds_count"] == 2
    assert found["engine_inter_token_latency_seconds_sum"] == 1.25
    assert found["engine_e2e_request_latency_seconds_count"] == 1
    assert found["engine_e2e_request_latency_seconds_sum"] == 5.25
    assert found["engine_request_queue_time_seconds_sum"] == 0.5
    assert found["engine_request_prefill_time_seconds_sum"] == 2.0
    assert found["engine_request_decode_time_seconds_sum"] == 7.0
    assert found["engine_prompt_tokens_total"] == 20
    assert found["engine_generation_tokens_total"] == 4


def test_samples_of_one_request(front: Front) -> None:
    """Samples have gaps of their own; the request has one first token and ends with the last."""
    with front.metrics.request(20, num_samples=2) as clock:
        front.time = 101.0
        clock.tokens(1, 0)
        front.time = 103.0
        clock.tokens(1, 1)
        front.time = 104.0
        clock.tokens(1, 0)
        clock.sample_finished(end("stop", sample=0, cached=16))
        assert front.finished() == {}
        front.time = 105.0
        clock.tokens(1, 1)
        clock.sample_finished(end("length", sample=1, cached=16))
    found = front.samples()
    assert front.finished() == {"length": 1}
    assert found["engine_time_to_first_token_seconds_sum"] == 1.0
    assert found["engine_inter_token_latency_seconds_count"] == 2
    assert found["engine_inter_token_latency_seconds_sum"] == 3.0 + 2.0
    assert found["engine_e2e_request_latency_seconds_count"] == 1
    assert found["engine_prefix_cache_queries_tokens_total"] == 20
    assert found["engine_prefix_cache_hits_tokens_total{tier=l2}"] == 16


# -- ways out --------------------------------------------------------------------------------------


async def _stream(clock: RequestClock, gate: asyncio.Event) -> AsyncGenerator[int, None]:
    """A handler as the service has it: one token, then it waits."""
    with clock:
        clock.tokens(1)
        yield 1
        await gate.wait()
        clock.sample_finished(end())


async def _cancelled(clock: RequestClock) -> None:
    stream = _stream(clock, asyncio.Event())
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting


async def _closed(clock: RequestClock) -> None:
    stream = _stream(clock, asyncio.Event())
    await anext(stream)
    await stream.aclose()


async def _in_order(clock: RequestClock) -> None:
    gate = asyncio.Event()
    gate.set()
    assert [token async for token in _stream(clock, gate)] == [1]


async def _failed(clock: RequestClock) -> None:
    with contextlib.suppress(RuntimeError), clock:
        clock.tokens(1)
        raise RuntimeError


async def _told_of_an_error(clock: RequestClock) -> None:
    with contextlib.suppress(RuntimeError), clock:
        clock.tokens(1)
        clock.sample_finished(end("error"))
        raise RuntimeError  # as gRPC's abort does


async def _forgotten(clock: RequestClock) -> None:
    with clock:
        clock.tokens(1)


@pytest.mark.parametrize(
    ("way_out", "reason"),
    [
        (_in_order, "stop"),
        (_cancelled, "cancelled"),
        (_closed, "cancelled"),
        (_failed, "error"),
        (_told_of_an_error, "error"),
        (_forgotten, "error"),
    ],
)
async def test_every_way_out_counts_exactly_once(
    front: Front, way_out: Callable[[RequestClock], Awaitable[None]], reason: str
) -> None:
    """A finished, cancelled, closed or failed stream is one ended request with one E2E time."""
    await way_out(front.metrics.request(20))
    found = front.samples()
    assert front.finished() == {reason: 1}
    assert found["engine_e2e_request_latency_seconds_count"] == 1
    assert found["engine_time_to_first_token_seconds_count"] == 1
    assert found["engine_generation_tokens_total"] == 1


def test_a_late_word_changes_nothing(front: Front) -> None:
    """After its end a request counts neither tokens nor another end."""
    clock = front.metrics.request(20)
    clock.finished("cancelled")
    before = front.samples()
    clock.tokens(3)
    clock.sample_finished(end())
    clock.finished("stop")
    assert front.samples() == before


def test_an_unknown_reason_is_refused(front: Front) -> None:
    """A reason outside the label's values is our bug: it raises and counts as error."""
    with pytest.raises(KeyError, match="prefilled"), front.metrics.request(20) as clock:
        clock.finished("prefilled")
    assert front.finished() == {"error": 1}


@dataclass(eq=False)
class _Cancel:
    """A request that is cancelled in a phase, and what its client saw of it."""

    phase: str
    num_prompt_tokens: int
    num_tokens: int = 0

    async def run(self, front: Front, reached: asyncio.Semaphore) -> None:
        """Until cancelled."""
        seats = {"queue": front.waiting, "prefill": front.running, "decode": front.running}
        seat = seats[self.phase]
        seat.add(self)
        try:
            with front.metrics.request(self.num_prompt_tokens) as clock:
                if self.phase == "decode":
                    clock.tokens(2)
                    self.num_tokens += 2
                reached.release()
                await asyncio.Event().wait()
        finally:
            seat.remove(self)


async def test_i1_cancels_leave_no_gauge_behind(front: Front) -> None:
    """Ten cancels in each phase: gauges are 0 without more traffic, and all thirty are counted."""
    cancels = [
        _Cancel(phase, num_prompt_tokens=10 + i)
        for i, phase in enumerate(["queue", "prefill", "decode"] * 10)
    ]
    reached = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(cancel.run(front, reached)) for cancel in cancels]
    async with asyncio.timeout(10):
        for _ in tasks:
            await reached.acquire()
    found = front.samples()
    assert found["engine_requests_running"] == 20
    assert found["engine_requests_waiting"] == 10
    assert found["engine_kv_usage_ratio"] == 0.25
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    found = front.samples()
    assert found["engine_requests_running"] == 0
    assert found["engine_requests_waiting"] == 0
    assert found["engine_kv_usage_ratio"] == 0
    assert front.finished() == {"cancelled": 30}
    assert found["engine_e2e_request_latency_seconds_count"] == 30
    assert found["engine_time_to_first_token_seconds_count"] == 10
    assert found["engine_prompt_tokens_total"] == sum(c.num_prompt_tokens for c in cancels)
    assert found["engine_generation_tokens_total"] == sum(c.num_tokens for c in cancels) == 20


# -- what is not a user's ------------------------------------------------------------------------


def test_i4_warm_up_is_not_in_user_facing_metrics(front: Front) -> None:
    """An internal request changes nothing of what is exposed, whatever becomes of it."""
    before = front.samples()
    with front.metrics.request(20, is_internal=True) as clock:
        front.time += 5
        clock.tokens(1)
        clock.sample_finished(end("length", cached=16))
    with pytest.raises(RuntimeError), front.metrics.request(20, is_internal=True):
        raise RuntimeError
    assert front.samples() == before


def test_only_lookups_count_as_cache_queries(front: Front) -> None:
    """A request that bypasses the cache, or was cancelled before its seat, asked it nothing."""
    front.metrics.request(20, bypasses_cache=True).sample_finished(end())
    front.metrics.request(20).sample_finished(end("cancelled", lookup_s=0.0))
    assert front.samples()["engine_prefix_cache_queries_tokens_total"] == 0
    front.metrics.request(20).sample_finished(end("cancelled", cached=12))
    front.metrics.request(20).sample_finished(end(cached=24))  # output of an earlier attempt too
    found = front.samples()
    assert found["engine_prefix_cache_queries_tokens_total"] == 40
    assert found["engine_prefix_cache_hits_tokens_total{tier=l2}"] == 12 + 20


def test_phases_are_those_of_whole_samples(front: Front) -> None:
    """A cancelled sample's cut phases are in no phase histogram."""
    front.metrics.request(20).sample_finished(end("cancelled"))
    assert front.samples()["engine_request_prefill_time_seconds_count"] == 0
    front.metrics.request(20).sample_finished(end("length"))
    assert front.samples()["engine_request_prefill_time_seconds_count"] == 1


# -- histograms ----------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.floats(0, 1000, allow_nan=False),
            st.sampled_from(sorted({*REQUEST_BUCKETS_S, *TOKEN_BUCKETS_S})),
        ),
        max_size=50,
    ),
    st.sampled_from([REQUEST_BUCKETS_S, TOKEN_BUCKETS_S]),
)
def test_histogram_agrees_with_prometheus_client(
    values: list[float], bounds: tuple[float, ...]
) -> None:
    """Buckets, count and sum are what prometheus_client's own Histogram exposes."""
    theirs = prometheus_client.Histogram("h", "text", registry=None, buckets=bounds)
    ours = Histogram(bounds)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    expected = {
        (sample.name, *sample.labels.items()): sample.value
        for sample in next(iter(theirs.collect())).samples
        if not sample.name.endswith("_created")
    }
    found = {
        (sample.name, *sample.labels.items()): sample.value
        for sample in ours.family("h", "text").samples
    }
    assert found == expected


def test_bounds_reach_from_a_millisecond_to_ten_minutes() -> None:
    """Both sets of bounds grow, from 1 ms to 600 s."""
    for bounds in (REQUEST_BUCKETS_S, TOKEN_BUCKETS_S):
        assert list(bounds) == sorted(set(bounds))
        assert (bounds[0], bounds[-1]) == (0.001, 600.0)


def test_a_token_costs_less_than_prometheus_clients_own_metrics() -> None:
    """The reason for counting in plain numbers: a token is cheaper than one of their observes."""
    metrics = EngineMetrics(
        num_running=int, num_waiting=int, kv_usage=float, num_failovers=int
    )  # with the real clock
    histogram = prometheus_client.Histogram("h", "text", registry=None, buckets=TOKEN_BUCKETS_S)
    clock = metrics.request(1)

    def best(run: Callable[[], None]) -> float:
        return min(timeit.repeat(run, number=2000, repeat=7))

    assert best(lambda: clock.tokens(1)) < best(lambda: histogram.observe(0.02))
    assert metrics.num_generated_tokens == 14_000


# -- workers -------------------------------------------------------------------------------------


def test_worker_counts_survive_its_replacement(front: Front) -> None:
    """A new worker begins at 0; what earlier ones did stays counted, once."""

    def report(pid: int, steps: int, preemptions: int) -> None:
        front.metrics.worker_stats(
            pid,
            num_steps={"prefill": steps, "decode": 10 * steps},
            step_seconds={"prefill": steps / 2, "decode": steps / 4},
            num_preemptions=preemptions,
        )

    report(7, 4, 1)
    report(7, 4, 1)
    report(7, 6, 2)
    report(9, 1, 0)  # a second one at the same time
    front.metrics.worker_gone(7)
    report(8, 2, 1)
    found = front.samples()
    assert found["engine_step_seconds_count{kind=prefill}"] == 6 + 1 + 2
    assert found["engine_step_seconds_count{kind=decode}"] == 60 + 10 + 20
    assert found["engine_step_seconds_sum{kind=prefill}"] == 3 + 0.5 + 1
    assert found["engine_preemptions_total"] == 2 + 0 + 1


def test_a_pid_that_comes_again_is_another_worker() -> None:
    """With or without word of the first one's end, the second one's counts are added whole."""
    key, other = ("steps", "decode"), ("preemptions", "")
    totals = WorkerTotals()
    totals.report(7, {key: 10, other: 5})
    totals.report(7, {key: 12, other: 1})  # one number shrank: all of them are new
    assert totals.totals == {key: 22, other: 6}
    totals.forget(7)
    totals.report(7, {key: 20, other: 2})
    assert totals.totals == {key: 42, other: 8}


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.floats(0, 1e6, allow_nan=False), st.booleans()),
        max_size=40,
    )
)
def test_totals_never_shrink(reports: list[tuple[int, float, bool]]) -> None:
    """No order of reports and deaths makes a counter go back, not even by a rounding error."""
    totals, before = WorkerTotals(), 0.0
    for pid, value, dies in reports:
        if dies:
            totals.forget(pid)
        totals.report(pid, {("seconds", "decode"): value})
        assert totals.totals["seconds", "decode"] >= before
        before = totals.totals["seconds", "decode"]
