"""`cachewarmd-ctl doctor` against a real daemon, and its checks on hosts that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachewarmd.ctl import checks
from cachewarmd.ctl.__main__ import main
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import Daemon


def test_a_daemon_alone_is_alive_and_not_durable(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without holder and engine there are warnings, each with what to do, and no failure."""
    assert main(["--socket", str(daemon.socket), "doctor", "-o", "json"]) == 3
    told = json.loads(capsys.readouterr().out)["findings"]
    found = {finding["check"]: finding for finding in told}
    assert found["daemon"]["level"] == "ok"
    assert f"pid {daemon.pid}" in found["daemon"]["text"]
    assert found["version"]["level"] == "ok"
    for check in ("fd_store", "engines"):
        assert found[check]["level"] == "warn"
        assert found[check]["fix"]


def test_a_holder_makes_it_durable(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a holder the descriptors are kept, and doctor says so."""
    with Daemon(short_dir / "s", extra=["--holder"]) as daemon:
        main(["--socket", str(daemon.socket), "doctor", "-o", "json"])
    told = json.loads(capsys.readouterr().out)["findings"]
    assert {f["check"]: f["level"] for f in told}["fd_store"] == "ok"


def test_without_a_daemon_it_fails_and_says_so(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 1; the host is checked all the same."""
    assert main(["--socket", str(short_dir / "none"), "doctor", "-o", "json"]) == 1
    told = json.loads(capsys.readouterr().out)["findings"]
    found = {finding["check"]: finding["level"] for finding in told}
    assert found["daemon"] == found["socket"] == "fail"
    assert "memory" in found


def test_host_settings_that_hurt_are_warnings(tmp_path: Path) -> None:
    """Swap, NUMA balancing on more than one node, no memory left; what can't be read is no one."""
    assert [f.check for f in checks.host(tmp_path, 10, 5)] == ["memory"]
    for name, text in (
        ("proc/swaps", "Filename\n/swapfile file 1 0 -2\n"),
        ("proc/sys/kernel/numa_balancing", "1\n"),
        ("sys/devices/system/node/online", "0-1\n"),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    found = {f.check: f.level for f in checks.host(tmp_path, 1, 5)}
    assert found == {"memory": "warn", "swap": "warn", "numa_balancing": "warn"}


@pytest.mark.parametrize(
    ("model", "level", "text"),
    [
        (pb.ModelStatus(files_present=True), "ok", "unchanged"),
        (pb.ModelStatus(files_present=True, files_changed=True), "warn", "changed since"),
        (pb.ModelStatus(files_present=True, superseded=True), "warn", "superseded"),
        (pb.ModelStatus(), "warn", "missing"),
    ],
)
def test_weights_that_are_not_those_of_the_files(
    model: pb.ModelStatus, level: str, text: str
) -> None:
    """Changed, superseded and missing ones are warnings."""
    (finding,) = checks.models(pb.StatusReply(models=[model]))
    assert finding.level == level
    assert text in finding.text


def test_integrity_failures_fail() -> None:
    """One is enough."""
    assert checks.integrity(pb.StatusReply(counters={"integrity_failures": 1})).level == "fail"
    assert checks.integrity(pb.StatusReply(counters={"integrity_failures": 0})).level == "ok"
