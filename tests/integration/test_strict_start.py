"""What the host does not give: a warning with numbers, or a refused start under --strict."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cachewarmd import numa
from cachewarmd.ctl import __main__ as ctl
from cachewarmd.errors import NoSpaceError
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import NOBODY, Daemon, StartFailedError, wait_until
from tests.integration.test_weight_service import attach, plan_of, write_model

MIB = 1 << 20
FEW_LOCKED = "import resource as r; r.setrlimit(r.RLIMIT_MEMLOCK, (65536, 65536))"
NO_HUGE_PAGES = "import cachewarmd.huge_pages as h; h._collapse = lambda address: 'not here'"


def unprivileged(folder: Path) -> int | None:
    """Root may lock what it wants: so somebody else, who then needs the directory."""
    if os.getuid() != 0:
        return None
    os.chown(folder, NOBODY, NOBODY)
    return NOBODY


def refused(daemon: Daemon) -> str:
    with pytest.raises(StartFailedError) as caught:
        daemon.start()
    assert caught.value.returncode == 1
    return caught.value.stderr


def test_g8_too_little_lockable_memory_is_told_with_both_numbers(short_dir: Path) -> None:
    """Lenient: a warning, and the status says so. Strict or required: no start."""
    uid = unprivileged(short_dir)
    numbers = f"{64 * MIB} bytes are to be locked, RLIMIT_MEMLOCK allows 65536"
    with Daemon(short_dir / "a", "64MiB", prelude=FEW_LOCKED, uid=uid) as daemon:
        assert numbers in daemon.log()
        assert not daemon.status().pool.locked
    for flags in (["--lock", "require"], ["--strict"]):
        daemon = Daemon(short_dir / "b", "64MiB", flags, prelude=FEW_LOCKED, uid=uid)
        assert numbers in refused(daemon)
    with Daemon(short_dir / "c", "64MiB", ["--lock=off"], prelude=FEW_LOCKED, uid=uid) as daemon:
        assert numbers not in daemon.log()


def test_a_pool_that_may_be_locked_is_locked(short_dir: Path) -> None:
    """As the kernel counts it, not as we say; off leaves it alone."""
    for lock, is_locked in (("auto", True), ("off", False)):
        with Daemon(short_dir / lock, "128MiB", ["--lock", lock]) as daemon:
            wait_until(lambda d=daemon: d.status().pool.committed_bytes == 128 * MIB, "the pool")
            if is_locked:
                if "pool_not_locked" in daemon.log():
                    pytest.skip("this user may not lock 128 MiB")
                wait_until(lambda d=daemon: d.status().pool.locked, "it is locked")
            lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
            locked = next(int(line.split()[1]) for line in lines if line.startswith("VmLck:"))
            assert locked == (128 * 1024 if is_locked else 0)
            assert daemon.status().pool.locked is is_locked


def test_g7_no_huge_pages_is_a_small_loss_or_no_start(short_dir: Path) -> None:
    """Lenient: the status shows what is huge and why no more. Strict: no start."""
    with Daemon(short_dir / "a", "64MiB", prelude=NO_HUGE_PAGES) as daemon:
        pool = daemon.status().pool
        assert (pool.huge_bytes, pool.page_bytes) == (0, 4096)
        assert pool.small_pages_because == "not here"
        wait_until(lambda: "not here" in daemon.log(), "the log line")
    strict = Daemon(short_dir / "b", "64MiB", ["--strict", "--lock=off"], prelude=NO_HUGE_PAGES)
    assert "the pool gets no huge pages: not here" in refused(strict)


def test_what_can_not_be_kept_is_counted_and_under_strict_no_start(short_dir: Path) -> None:
    """A fd store that is too small would lose warmth at the next restart, silently."""
    small = "import cachewarmd.program as p; p._store_room = lambda environ: {}"
    enabled = "import cachewarmd.notify as n; n.Notifier.store_fd = lambda self, name, fd: True"
    store = "import os; os.environ['NOTIFY_SOCKET'] = '@cachewarm-test-nobody-listens'"
    for room, missing in ((0, True), (64, False)):
        prelude = "\n".join((small.format(room), enabled, store))
        with Daemon(short_dir / "a", "64MiB", prelude=prelude) as daemon:
            assert bool(daemon.status().counters["fds_not_stored"]) is missing
            assert ("fd_store_is_full" in daemon.log()) is missing
    strict = ["--strict", "--lock=off"]
    prelude = "\n".join(
        (small.format(0), enabled, store, NO_HUGE_PAGES.replace("'not here'", "''"))
    )
    assert "the fd store is full" in refused(
        Daemon(short_dir / "b", "64MiB", strict, prelude=prelude)
    )


@pytest.mark.skipif(not numa.topology(), reason="the kernel knows no NUMA nodes")
def test_pool_on_the_wrong_node_is_seen_and_under_strict_no_start(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy that came too late or did nothing must not be believed."""
    node = numa.topology()[0].number
    bound = ["--numa=bind", f"--numa-nodes={node}"]
    with Daemon(short_dir / "a", "64MiB", bound) as daemon:
        assert daemon.status().counters["numa_misplaced_pages"] == 0
        code, told = _numa(daemon, capsys)
        assert (code, told["policy"], told["refusal"]) == (0, "bind", "")
        assert [n["number"] for n in told["nodes"] if n["is_wanted"]] == [node]
        assert [(r["name"], r["num_misplaced"]) for r in told["regions"]] == [("pool", 0)]
        assert told["regions"][0]["node_bytes"] == {str(node): told["regions"][0]["num_bytes"]}
    elsewhere = (
        "import cachewarmd.numa as n; n.Linux.nodes_of = lambda self, pages: [99] * len(pages)"
    )
    with Daemon(short_dir / "b", "64MiB", bound, prelude=elsewhere) as daemon:
        assert daemon.status().counters["numa_misplaced_pages"] > 0
        assert _numa(daemon, capsys)[0] == 3
    prelude = "\n".join((elsewhere, NO_HUGE_PAGES.replace("'not here'", "''")))
    strict = Daemon(short_dir / "c", "64MiB", ["--strict", "--lock=off", *bound], prelude=prelude)
    assert "pages of the pool lie on other nodes" in refused(strict)


@pytest.mark.skipif(not numa.topology(), reason="the kernel knows no NUMA nodes")
def test_where_nobody_can_look_nothing_is_claimed(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counter is absent, `numa` quotes the kernel, and under strict there is no start."""
    bound = ["--numa=bind", f"--numa-nodes={numa.topology()[0].number}"]
    silent = "import cachewarmd.numa as n\ndef no(*_): raise OSError(1, 'not here')\n"
    silent += "n.Linux.nodes_of = no"
    with Daemon(short_dir / "a", "64MiB", bound, prelude=silent) as daemon:
        assert "numa_misplaced_pages" not in daemon.status().counters
        code, told = _numa(daemon, capsys)
        assert (code, told["refusal"]) == (3, "move_pages: not here")
    prelude = "\n".join((silent, NO_HUGE_PAGES.replace("'not here'", "''")))
    strict = Daemon(short_dir / "b", "64MiB", ["--strict", "--lock=off", *bound], prelude=prelude)
    assert "move_pages: not here" in refused(strict)


@pytest.mark.skipif(not numa.topology(), reason="the kernel knows no NUMA nodes")
def test_weights_on_the_wrong_node_are_refused_under_strict(
    short_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `strict` they are loaded, and `numa` names them; the pool is where it should be."""
    bound = ["--numa=bind", f"--numa-nodes={numa.topology()[0].number}", "--lock=off"]
    # Of a small segment closer pages are sampled than of the pool.
    wrong = """
import cachewarmd.numa as n
ask = n.Linux.nodes_of
n.Linux.nodes_of = lambda self, p: [99] * len(p) if p[1] - p[0] < 65536 else ask(self, p)
"""
    model = write_model(tmp_path / "m", 1.0, 2.0)
    with Daemon(short_dir / "a", "64MiB", bound, prelude=wrong) as daemon:
        with daemon.client(pb.ROLE_ENGINE) as client:
            digest, _, _ = attach(client, model, plan_of(2, 2 * MIB))
        code, told = _numa(daemon, capsys)
        regions = {r["name"]: r["num_misplaced"] for r in told["regions"]}
        assert (code, regions) == (3, {"pool": 0, digest.hex(): 256})
    prelude = "\n".join((wrong, NO_HUGE_PAGES.replace("'not here'", "''")))
    strict = Daemon(short_dir / "b", "64MiB", ["--strict", *bound], prelude=prelude)
    with (
        strict as daemon,
        daemon.client(pb.ROLE_ENGINE) as client,
        pytest.raises(NoSpaceError, match="256 sampled pages of the weights lie on other nodes"),
    ):
        attach(client, model, plan_of(2, 2 * MIB))
    prelude = NO_HUGE_PAGES.replace("'not here'", "''")
    with (
        Daemon(short_dir / "c", "64MiB", ["--strict", *bound], prelude=prelude) as daemon,
        daemon.client(pb.ROLE_ENGINE) as client,
    ):
        assert attach(client, model, plan_of(2, 2 * MIB))[0] == digest


def _numa(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = ctl.main(["--socket", str(daemon.socket), "numa", "-o", "json"])
    return code, json.loads(capsys.readouterr().out)


def test_pool_is_filled_no_faster_than_told(short_dir: Path) -> None:
    """Three extents beyond the first at two a second, while the daemon answers."""
    rate = ["--prefault-bytes-per-second=128MiB"]
    with Daemon(short_dir / "a", "256MiB", rate) as daemon:
        wait_until(lambda: daemon.status().pool.committed_bytes == 256 * MIB, "the pool")
        assert daemon.status().uptime_s >= 1.5
