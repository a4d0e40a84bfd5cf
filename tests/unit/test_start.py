"""Parts of an engine's start that need no engine: clocks, addresses, children."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import head_start
from engine.address import GrpcAddress
from engine.child import Child
from engine.errors import StartError
from tests.daemon import environment, wait_until

PATIENCE_S = 60.0
TICK_S = 0.02


def test_a_processs_age_counts_from_its_exec() -> None:
    """Not from the first line of ours, and within what its parent sees."""
    code = "import time; from engine.phases import process_age; time.sleep(0.2)"
    before = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}; print(process_age())"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert 0.2 - TICK_S <= float(ended.stdout) <= time.monotonic() - before + TICK_S


def test_an_address_that_others_listen_on_is_known_before_it_is_bound(short_dir: Path) -> None:
    """A port, also under a wildcard, and a path; one that nobody listens on is fine."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(StartError, match="in use"):
                GrpcAddress(host, port, "").probe()
    GrpcAddress("127.0.0.1", port, "").probe()
    listen = f"unix:{short_dir}/s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short_dir}/s")
        GrpcAddress("127.0.0.1", 0, listen).probe()
        server.listen()
        with pytest.raises(StartError, match="in use"):
            GrpcAddress("127.0.0.1", 0, listen).probe()


def test_a_daemon_takes_connections_or_one_has_to_be_started(short_dir: Path) -> None:
    """A queue that is full is one too: it is stopped, or busy, and no other must come."""
    path = short_dir / "s"
    assert not head_start._is_served(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert not head_start._is_served(path), "of one that died"
        server.listen(0)
        for _ in range(4):
            assert head_start._is_served(path)
        waiting = []
        try:
            while True:
                client = socket.socket(socket.AF_UNIX)
                waiting.append(client)
                client.setblocking(False)
                client.connect(str(path))
        except BlockingIOError:
            assert head_start._is_served(path)
        finally:
            for client in waiting:
                client.close()


def begin(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stdin=subprocess.PIPE)


def begin_and_end() -> subprocess.Popen[bytes]:
    """Its status is still to be taken."""
    process = begin("")
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].startswith(" Z"), "it has ended")
    return process


async def test_a_child_is_waited_for_by_any_number() -> None:
    """Who gives up disturbs nobody."""
    process = begin("import sys; sys.stdin.read(); sys.exit(7)")
    child = Child(process)
    assert not await child.wait(0.01)
    waiters = [asyncio.create_task(child.wait()) for _ in range(3)]
    waiters[0].cancel()
    assert process.stdin is not None
    process.stdin.close()
    assert await asyncio.wait_for(waiters[1], PATIENCE_S)
    assert await asyncio.wait_for(waiters[2], PATIENCE_S)
    assert (child.returncode, child.pid) == (7, process.pid)
    child.kill()  # nobody is hit


async def test_a_child_that_ended_before_is_noticed() -> None:
    """As happens to one that was started before there was a loop."""
    with begin_and_end() as process:
        child = Child(process)
        assert await child.wait(PATIENCE_S)
        assert child.returncode == 0


async def test_a_child_that_goes_on_is_killed() -> None:
    """SIGKILL, and its status."""
    with begin("import time; time.sleep(600)") as process:
        child = Child(process)
        child.kill()
        assert await child.wait(PATIENCE_S)
        assert child.returncode == -signal.SIGKILL
