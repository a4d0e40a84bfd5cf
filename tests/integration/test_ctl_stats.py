"""`cachewarmd-ctl stats` against a real daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from cachewarmd.ctl import stats
from cachewarmd.ctl.__main__ import main
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, environment


def test_stats_tells_what_status_tells(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes and blocks by state are the daemon's own; without a lookup there is no ratio."""
    assert main(["--socket", str(daemon.socket), "stats", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    pool = daemon.status().pool
    assert told["bytes"] == dict(pool.bytes)
    assert told["blocks"] == dict(pool.blocks)
    assert told["pool_bytes"] == pool.pool_bytes
    assert told["hit_ratio"] is None


def test_watch_prints_an_object_a_line_until_interrupted(daemon: Daemon) -> None:
    """Ctrl-C is how a watch ends: exit 0, whole lines, nothing on stderr."""
    command = [sys.executable, "-P", "-m", "cachewarmd.ctl", "--socket", str(daemon.socket)]
    with subprocess.Popen(
        [*command, "stats", "--watch", "0.1s", "-o", "json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        samples = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert errors == ""
    assert "rates" not in samples[0]
    assert samples[2]["rates"]["seconds"] >= 0.1
    for line in rest.splitlines():
        json.loads(line)


def test_rates_are_of_one_daemon() -> None:
    """Counters of two daemons are never subtracted; those of one are, by the time between."""
    before = pb.StatusReply(pid=1, epoch=1, counters={"lookup_hit": 2, "published": 10})
    after = pb.StatusReply(
        pid=1,
        epoch=1,
        counters={
            "lookup_hit": 5, "lookup_miss": 1, "published": 30, "evicted_asked": 4,
            "evicted_pressure": 2,
        },
    )  # fmt: skip
    told = stats.rates(before, after, 2.0)
    assert told is not None
    assert (told["lookups_per_s"], told["hits_per_s"], told["hit_ratio"]) == (2.0, 1.5, 0.75)
    assert (told["published_per_s"], told["evicted_per_s"]) == (10.0, 3.0)
    after.epoch = 2
    assert stats.rates(before, after, 2.0) is None


def test_bars_are_in_proportion() -> None:
    """A state with half the pool has half the bar; one without bytes has none."""
    told = pb.StatusReply(pool=pb.PoolStatus(pool_bytes=100, committed_bytes=100))
    told.pool.bytes.update({"sealed": 50, "free": 50, "reserved": 0})
    lines = stats.text(stats.sample(told)).splitlines()
    assert [line.count("█") for line in lines[1:3]] == [20, 20]
    assert "reserved" not in "".join(lines)
