"""`cachewarmd-ctl serve`: the daemon's numbers over HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cachewarmd.ctl.__main__ import main
from tests.daemon import PATIENCE_S, Daemon, environment
from tests.worker import connect_worker

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@pytest.fixture
def url(daemon: Daemon) -> Iterator[str]:
    """Of an exporter for the daemon; it has to end well."""
    command = [sys.executable, "-P", "-m", "cachewarmd.ctl", "--socket", str(daemon.socket)]
    with subprocess.Popen(
        [*command, "serve", "-o", "json"], env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers=headers)
    with _DIRECT.open(request, timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def test_metrics_are_what_status_tells(daemon: Daemon, url: str) -> None:
    """Bytes, epoch and lookups are the daemon's; when it is gone, that is what is told."""
    pool = daemon.status().pool
    lines = dict(
        line.rsplit(" ", 1) for line in get(f"{url}/metrics").splitlines() if line[0] != "#"
    )
    assert float(lines["cachewarmd_up"]) == 1
    free = lines['cachewarmd_pool_bytes{numa_node="",pool="kv",state="free"}']
    assert float(free) == pool.bytes["free"]
    assert float(lines['cachewarmd_lookups_total{result="hit"}']) == 0
    assert float(lines["cachewarmd_epoch"]) == daemon.status().epoch
    told = json.loads(get(f"{url}/status.json"))
    assert told["pool"]["bytes"] == dict(pool.bytes)
    assert told["pid"] == daemon.pid
    daemon.stop()
    gone = [line for line in get(f"{url}/metrics").splitlines() if line[0] != "#"]
    assert gone == ["cachewarmd_up 0.0"]


def test_latencies_are_histograms(daemon: Daemon, url: str) -> None:
    """Of as many calls as there were; no bucket is below the one before."""
    with connect_worker(daemon.socket) as worker:
        for _ in range(5):
            worker.release(worker.lookup("a").lease)
    families = {f.name: f for f in text_string_to_metric_families(get(f"{url}/metrics"))}
    samples = families["cachewarmd_lookup_seconds"].samples
    buckets = [sample.value for sample in samples if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    (count,) = [sample.value for sample in samples if sample.name.endswith("_count")]
    assert count == buckets[-1] == 5
    assert all(sample.value > 0 for sample in samples if sample.name.endswith("_sum"))


def test_other_host_names_are_refused(url: str) -> None:
    """A page whose name was made to lead here reads nothing."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(f"{url}/metrics", Host="evil.example")
    with caught.value as answer:
        assert answer.code == 400


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost"])
def test_addresses_that_others_reach_need_insecure(host: str) -> None:
    """Exit 2 before anything listens; names are no addresses."""
    assert main(["serve", "--host", host]) == 2
