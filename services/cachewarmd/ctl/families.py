"""What the daemon tells, as Prometheus families."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

from cachewarmd.v1 import control_pb2 as pb

_MAX_EXPONENT = 20  # a second; what took longer is in the last bucket


def families(told: pb.StatusReply, jobs: Sequence[pb.JobProgress]) -> Iterator[Metric]:
    """All of a daemon that answered."""
    yield GaugeMetricFamily("cachewarmd_up", "The daemon answered", 1)
    yield _pool_bytes(told)
    blocks = GaugeMetricFamily("cachewarmd_blocks", "Blocks of the pool", labels=["state"])
    for state, count in sorted(told.pool.blocks.items()):
        blocks.add_metric([state], count)
    yield blocks
    counters = told.counters
    lookups = CounterMetricFamily(
        "cachewarmd_lookups", "Lookups, by whether a block was found", labels=["result"]
    )
    for result in ("hit", "miss"):
        lookups.add_metric([result], counters.get(f"lookup_{result}", 0))
    yield lookups
    evicted = CounterMetricFamily("cachewarmd_evictions", "Blocks dropped", labels=["cause"])
    for name, count in sorted(counters.items()):
        if name.startswith("evicted_"):
            evicted.add_metric([name.removeprefix("evicted_")], count)
    yield evicted
    published = counters.get("published", 0)
    yield CounterMetricFamily("cachewarmd_published_blocks", "Blocks sealed", published)
    broken = CounterMetricFamily(
        "cachewarmd_integrity_failures", "Content or state that was not right", labels=["kind"]
    )
    for kind in ("recovery", "scrub", "verify", "snapshot"):
        broken.add_metric([kind], counters.get(f"integrity_failures_{kind}", 0))
    broken.add_metric(["invariant"], counters.get("broken_invariants", 0))
    yield broken
    yield GaugeMetricFamily("cachewarmd_leases", "Leases", counters.get("leases", 0))
    yield from (_histogram(call, counters) for call in ("lookup", "publish"))
    yield GaugeMetricFamily("cachewarmd_pins", "Pins", told.num_pins)
    if "numa_misplaced_pages" in counters:
        yield GaugeMetricFamily(
            "cachewarmd_numa_misplaced_pages",
            "Of the pages that were looked at, those on other nodes than wanted",
            counters["numa_misplaced_pages"],
        )
    yield GaugeMetricFamily("cachewarmd_clients", "Connections, ours too", len(told.clients))
    by_state = Counter(job.state for job in jobs)
    warmups = GaugeMetricFamily("cachewarmd_warmup_jobs", "Warm-up jobs", labels=["state"])
    for state in ("pending", "running", "done", "failed", "cancelled"):
        warmups.add_metric([state], by_state[state])
    yield warmups
    yield GaugeMetricFamily("cachewarmd_epoch", "Grows with each daemon", told.epoch)
    weights = InfoMetricFamily("cachewarmd_weights", "Weights in memory")
    for model in told.models:
        weights.add_metric(
            [],
            {
                "model": model.model_name,
                "version": model.version,
                "sha256": model.weights_sha256,
            },
        )
    yield weights


def _histogram(call: str, counters: Mapping[str, int]) -> Metric:
    """Of the seconds that the daemon's loop had of such calls."""
    prefix = f"{call}_us_below_"
    found = {int(n.removeprefix(prefix)): c for n, c in counters.items() if n.startswith(prefix)}
    total = 0
    buckets = []
    for exponent in range(_MAX_EXPONENT + 1):
        total += found.pop(1 << exponent, 0)
        buckets.append((str((1 << exponent) / 1e6), total))
    buckets.append(("+Inf", total + sum(found.values())))
    family = HistogramMetricFamily(
        f"cachewarmd_{call}_seconds", f"Seconds of a {call} in the daemon"
    )
    family.add_metric([], buckets, counters.get(f"{call}_us", 0) / 1e6)
    return family


def _pool_bytes(told: pb.StatusReply) -> Metric:
    family = GaugeMetricFamily(
        "cachewarmd_pool_bytes", "Shared memory", labels=["pool", "numa_node", "state"]
    )
    # The daemon does not tell nodes: an empty label is, to Prometheus, no label.
    for state, count in sorted(told.pool.bytes.items()):
        family.add_metric(["kv", "", state], count)
    family.add_metric(
        ["kv", "", "unallocated"], max(0, told.pool.pool_bytes - told.pool.committed_bytes)
    )
    weights = sum(model.segment_bytes for model in told.models)
    family.add_metric(["weights", "", "sealed"], weights)
    return family


def down() -> Iterator[Metric]:
    """Of a daemon that did not answer."""
    yield GaugeMetricFamily("cachewarmd_up", "The daemon answered", 0)
