"""What the front counts for Prometheus. One thread only: the front's loop counts and exposes.

Values are plain numbers and become prometheus_client's families when somebody collects. Its own
Histogram and Counter lock and search at every token, which costs several times as much, and can't
take cumulative numbers from workers. The library is imported by whoever collects first: it brings
an HTTP server along, and the front's start is waited for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING

from engine.request import Finished

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric

FINISH_REASONS = ("stop", "length", "cancelled", "error")

# Seconds. Prefills take from milliseconds (warm) to minutes (128K tokens, cold).
REQUEST_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 600.0),
)
# Seconds. Finer where one step's duration lies, so that jitter is seen.
TOKEN_BUCKETS_S = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0, 600.0),
)


class Histogram:
    """Counts per bucket; a value on a bound belongs to the bucket below it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> Metric:
        """What is exposed: cumulative counts, and their sum."""
        from prometheus_client.core import HistogramMetricFamily
        from prometheus_client.utils import floatToGoString

        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class WorkerTotals:
    """Sums over all workers ever, from cumulative numbers that begin at 0 with each process.

    Only differences are added, so a total never shrinks, not by a rounding error either (that would
    read as a restart). What a worker did after its last report is lost with it.
    """

    def __init__(self) -> None:
        self.totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._last: dict[int, dict[tuple[str, str], float]] = {}

    def report(self, pid: int, values: dict[tuple[str, str], float]) -> None:
        """The numbers of one worker now. A number that shrank means another process of that pid."""
        last = self._last.get(pid, {})
        if any(values.get(key, 0) < value for key, value in last.items()):
            last = {}
        for key, value in values.items():
            self.totals[key] += value - last.get(key, 0)
        self._last[pid] = values

    def forget(self, pid: int) -> None:
        """The process is gone; a later one of the same pid begins at 0."""
        self._last.pop(pid, None)


class EngineMetrics:
    """All metrics of one engine, in a registry of their own.

    The callables are read at each collection: a gauge can't be left behind by a request that ended
    in an unusual way. `kv_usage` is a ratio of 0 to 1; `num_failovers` counts since start. `now`
    gives seconds and never steps back. `prompt_tokens` counts tokens of texts looked up
    in tier L1, those found in the front, and those found in the daemon.
    """

    def __init__(
        self,
        *,
        num_running: Callable[[], int],
        num_waiting: Callable[[], int],
        kv_usage: Callable[[], float],
        num_failovers: Callable[[], int],
        prompt_tokens: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = now
        self._gauges = (num_running, num_waiting, kv_usage)
        self._num_failovers = num_failovers
        self._prompt_tokens = prompt_tokens
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self._num_rejected: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.ttft = Histogram(REQUEST_BUCKETS_S)
        self.itl = Histogram(TOKEN_BUCKETS_S)
        self.e2e = Histogram(REQUEST_BUCKETS_S)
        self.queued = Histogram(REQUEST_BUCKETS_S)
        self.prefill = Histogram(REQUEST_BUCKETS_S)
        self.decode = Histogram(REQUEST_BUCKETS_S)
        self._workers = WorkerTotals()
        self._start_seconds: dict[str, float] = {}
        self._backend: dict[str, str] | None = None

    @cached_property
    def registry(self) -> CollectorRegistry:
        """For whoever exposes it."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        return registry

    # -- requests ------------------------------------------------------------------------------

    def request(
        self,
        num_prompt_tokens: int,
        *,
        num_samples: int = 1,
        arrived_at: float | None = None,
        bypasses_cache: bool = False,
        is_internal: bool = False,
    ) -> RequestClock:
        """Count an accepted request; use the result with `with` around its stream.

        `arrived_at` (of `now`) is when it came in, before it was tokenised; default: this moment.
        Nothing is counted for an internal request: warm-up is no user's traffic.
        """
        if not is_internal:
            self.num_prompt_tokens += num_prompt_tokens
        arrived_at = self.now() if arrived_at is None else arrived_at
        return RequestClock(
            self,
            num_looked_up=0 if bypasses_cache else num_prompt_tokens,
            num_samples=num_samples,
            arrived_at=arrived_at,
            is_internal=is_internal,
        )

    def rejected(self, reason: str) -> None:
        """A request was refused before it was accepted; `reason` is its EngineError's."""
        self._num_rejected[reason] += 1

    # -- workers and start -----------------------------------------------------------------------

    def worker_stats(
        self,
        pid: int,
        *,
        num_steps: Mapping[str, int],
        step_seconds: Mapping[str, float],
        num_preemptions: int,
    ) -> None:
        """One worker's cumulative numbers, as its Stats message has them; steps by kind."""
        values: dict[tuple[str, str], float] = {("preemptions", ""): num_preemptions}
        values |= {("steps", kind): count for kind, count in num_steps.items()}
        values |= {("seconds", kind): seconds for kind, seconds in step_seconds.items()}
        self._workers.report(pid, values)

    def worker_gone(self, pid: int) -> None:
        """That worker has ended; what it did stays counted."""
        self._workers.forget(pid)

    def start_seconds(self, phases: Mapping[str, float]) -> None:
        """Durations of phases of the latest start, by phase."""
        self._start_seconds.update(phases)

    def backend(self, name: str, reason: str) -> None:
        """What computes, and why that was chosen."""
        self._backend = {"backend": name, "reason": reason}

    # -- exposition ------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """For the registry: everything as it is now."""
        yield from self._request_families()
        yield from self._token_families()
        yield from self._worker_families()

    def _request_families(self) -> Iterator[Metric]:
        num_running, num_waiting, kv_usage = self._gauges
        yield _gauge("engine_requests_running", "Requests being computed.", num_running())
        yield _gauge("engine_requests_waiting", "Accepted requests not yet begun.", num_waiting())
        yield _gauge("engine_kv_usage_ratio", "Private KV blocks in use, 0 to 1.", kv_usage())
        yield _counter(
            "engine_requests", "Accepted requests that ended.", "finish_reason", self.num_finished
        )
        yield _counter(
            "engine_requests_rejected", "Requests refused at once.", "reason", self._num_rejected
        )
        for name, text, histogram in (
            ("time_to_first_token", "Arrival to first token.", self.ttft),
            ("inter_token_latency", "Between messages with tokens of one sample.", self.itl),
            ("e2e_request_latency", "Arrival to end, however it ended.", self.e2e),
            ("request_queue_time", "Waiting for a seat.", self.queued),
            ("request_prefill_time", "Computing the prompt.", self.prefill),
            ("request_decode_time", "First to last token.", self.decode),
        ):
            yield histogram.family(f"engine_{name}_seconds", text)

    def _token_families(self) -> Iterator[Metric]:
        yield _total(
            "engine_prompt_tokens", "Prompt tokens of accepted requests.", self.num_prompt_tokens
        )
        yield _total(
            "engine_generation_tokens", "Tokens handed to clients.", self.num_generated_tokens
        )
        yield _total(
            "engine_prefix_cache_queries_tokens",
            "Prompt tokens looked up in the prefix cache.",
            self.num_queried_tokens,
        )
        yield _counter(
            "engine_prefix_cache_hits_tokens",
            "Prompt tokens whose KV was there already.",
            "tier",
            {"l2": self.num_hit_tokens},
        )
        yield _total(
            "engine_prompt_cache_queries_tokens",
            "Tokens of texts looked up among the ids that are kept.",
            self._prompt_tokens()[0],
        )
        yield _counter(
            "engine_prompt_cache_hits_tokens",
            "Tokens of texts that were not tokenised again.",
            "source",
            dict(zip(("front", "daemon"), self._prompt_tokens()[1:], strict=True)),
        )

    def _worker_families(self) -> Iterator[Metric]:
        from prometheus_client.core import (
            GaugeMetricFamily,
            InfoMetricFamily,
            SummaryMetricFamily,
        )

        totals = self._workers.totals
        yield _total("engine_preemptions", "Seats taken from requests.", totals["preemptions", ""])
        yield _total("engine_failovers", "Requests given to another worker.", self._num_failovers())
        steps = SummaryMetricFamily("engine_step_seconds", "Duration of steps.", labels=["kind"])
        for kind in sorted(kind for what, kind in totals if what == "steps"):
            steps.add_metric([kind], int(totals["steps", kind]), totals["seconds", kind])
        yield steps
        start = GaugeMetricFamily(
            "engine_start_seconds", "Duration of phases of the latest start.", labels=["phase"]
        )
        for phase, seconds in self._start_seconds.items():
            start.add_metric([phase], seconds)
        yield start
        if self._backend is not None:
            yield InfoMetricFamily("engine_backend", "What computes.", value=self._backend)


def _gauge(name: str, text: str, value: float) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return GaugeMetricFamily(name, text, value=value)


def _total(name: str, text: str, value: float) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(name, text, value=value)


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


class RequestClock:
    """One accepted request from arrival to end; every way out of its `with` ends it exactly once.

    A block left by an exception ends it as `error`, by cancellation or a closed generator (the
    client is gone) as `cancelled`. A block left in order without an end is our bug: `error`.
    """

    __slots__ = (
        "_arrived_at",
        "_is_ended",
        "_last",
        "_metrics",
        "_num_looked_up",
        "_num_samples_left",
    )

    def __init__(
        self,
        metrics: EngineMetrics,
        *,
        num_looked_up: int,
        num_samples: int,
        arrived_at: float,
        is_internal: bool,
    ) -> None:
        self._metrics = metrics
        self._num_looked_up = num_looked_up  # prompt tokens, once the request has a seat
        self._arrived_at = arrived_at
        self._last: dict[int, float] = {}  # by sample: when its last tokens came
        self._num_samples_left = num_samples
        self._is_ended = is_internal  # an internal request has nothing more to count

    def tokens(self, count: int, sample_index: int = 0) -> None:
        """New tokens of one sample go out in one message; 0 = only text that was held back."""
        if self._is_ended or not count:
            return
        metrics, last = self._metrics, self._last
        now = metrics.now()
        metrics.num_generated_tokens += count
        if sample_index in last:
            metrics.itl.observe(now - last[sample_index])
        elif not last:
            metrics.ttft.observe(now - self._arrived_at)
        last[sample_index] = now

    def sample_finished(self, event: Finished) -> None:
        """One sample ended; the last one, or any error, ends the request under its reason.

        Phases are counted of samples that came to their own end. The cache was asked if the lookup
        took time (a request that never had a seat did none); samples of a request share the answer.
        """
        if self._is_ended:
            return
        metrics = self._metrics
        if event.reason in ("stop", "length"):
            metrics.queued.observe(event.queued_s)
            metrics.prefill.observe(event.prefill_s)
            metrics.decode.observe(event.decode_s)
        if event.sample_index == 0 and event.lookup_s > 0:
            metrics.num_queried_tokens += self._num_looked_up
            # After a failover output may be cached too; a hit rate above 1 would help nobody.
            metrics.num_hit_tokens += min(event.num_cached_tokens, self._num_looked_up)
        self._num_samples_left -= 1
        if self._num_samples_left == 0 or event.error is not None:
            self.finished(event.reason)

    def finished(self, reason: str) -> None:
        """The request is over, for one of FINISH_REASONS (KeyError otherwise); only once counts."""
        if self._is_ended:
            return
        metrics = self._metrics
        metrics.num_finished[reason] += 1
        metrics.e2e.observe(metrics.now() - self._arrived_at)
        self._is_ended = True

    def __enter__(self) -> RequestClock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Cancellation and GeneratorExit are no `Exception`s.
        is_cancelled = kind is not None and not issubclass(kind, Exception)
        self.finished("cancelled" if is_cancelled else "error")
