"""The service manager's protocol, spoken with a fake manager on a real datagram socket."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachewarmd import notify
from cachewarmd.notify import Notifier, NotifyError, keep_telling, listen_fds
from tests.daemon import PATIENCE_S, environment, open_fds
from tests.manager import Manager


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, short_dir: Path) -> Iterator[Manager]:
    """A fake service manager on a path, and on an abstract name."""
    address = str(short_dir / "notify")
    if request.param == "abstract":
        address = f"@{address}"
    with Manager(address) as fake:
        yield fake


def test_g16_each_message_is_the_one_that_systemd_knows(manager: Manager) -> None:
    """One datagram each, on a path and on an abstract name."""
    notifier = Notifier(manager.address, watchdog_interval_s=1.0)
    assert notifier.ready()
    assert manager.receive() == "READY=1"
    assert notifier.status("serving")
    assert manager.receive() == "STATUS=serving"
    assert notifier.ping()
    assert manager.receive() == "WATCHDOG=1"
    assert notifier.extend_timeout(2.5)
    assert manager.receive() == "EXTEND_TIMEOUT_USEC=2500000"
    assert notifier.remove_fd("pool")
    assert manager.receive() == "FDSTOREREMOVE=1\nFDNAME=pool"
    assert notifier.num_lost == 0


def test_g16_stopping_is_told_once(manager: Manager) -> None:
    """However many ways lead to the stop."""
    notifier = Notifier(manager.address)
    assert notifier.stopping()
    assert not notifier.stopping()
    assert manager.receive() == "STOPPING=1"
    assert manager.drain() == []


def test_status_is_one_bounded_line(manager: Manager) -> None:
    """A line end would be a second assignment: READY=1 in a model's name must not count."""
    notifier = Notifier(manager.address)
    notifier.status("model a\nREADY=1\r\nb \udcff" + "x" * 10_000)
    told = manager.receive()
    assert told.startswith("STATUS=model a READY=1 b \\udcffxxx")
    assert "\n" not in told
    assert len(told) <= len("STATUS=") + notify.MAX_STATUS_CHARS + len("\\udcff")


def test_stored_descriptor_reaches_the_manager(manager: Manager) -> None:
    """The manager gets the same memory, under the name, with SCM_RIGHTS."""
    notifier = Notifier(manager.address)
    fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    os.write(fd, b"warm")
    assert notifier.store_fd("pool", fd)
    os.close(fd)
    size = array.array("i").itemsize
    data, ancillary, _, _ = manager.sock.recvmsg(4096, socket.CMSG_SPACE(size))
    assert data == b"FDSTORE=1\nFDNAME=pool"
    [(level, kind, raw)] = ancillary
    assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    [stored] = array.array("i", raw)
    assert os.pread(stored, 10, 0) == b"warm"
    os.close(stored)


@pytest.mark.parametrize("name", ["", "a:b", "a\nREADY=1", "ü", "x" * 256])
def test_descriptor_names_that_systemd_refuses_are_errors(manager: Manager, name: str) -> None:
    """Nothing is sent: a line end in the name would be an assignment of its own."""
    notifier = Notifier(manager.address)
    with pytest.raises(NotifyError, match="1 to 255 printable ASCII"):
        notifier.store_fd(name, 0)
    with pytest.raises(NotifyError, match="1 to 255 printable ASCII"):
        notifier.remove_fd(name)
    assert manager.drain() == []


def test_without_a_manager_nothing_happens() -> None:
    """An interactive start: no socket, no error, no pings."""
    environ = {"WATCHDOG_USEC": "1000000"}
    notifier = Notifier.from_environ(environ)
    assert not notifier.is_enabled
    assert notifier.watchdog_interval_s is None
    assert not any([notifier.ready(), notifier.status("x"), notifier.ping(), notifier.stopping()])
    assert notifier.num_lost == 0
    assert environ == {}
    asyncio.run(keep_telling(notifier, lambda: pytest.fail("nobody hears it")))


def test_manager_that_is_gone_is_counted_and_raises_nothing(short_dir: Path) -> None:
    """Serving goes on."""
    before = open_fds()
    notifier = Notifier(str(short_dir / "gone"), watchdog_interval_s=1.0)
    assert not notifier.ready()
    assert not notifier.ping()
    assert not notifier.store_fd("pool", 0)
    assert notifier.num_lost == 3
    assert open_fds() == before


def test_manager_that_does_not_read_holds_up_no_ping(manager: Manager) -> None:
    """A ping that would have to wait is lost, and is sent again when there is room."""
    notifier = Notifier(manager.address, watchdog_interval_s=1.0)
    sent = 0
    while notifier.ping():
        sent += 1
    assert not notifier.status("x")
    assert notifier.num_lost == 2
    for _ in range(sent):
        assert manager.receive() == "WATCHDOG=1"
    assert notifier.ping()


@pytest.mark.parametrize(
    ("pid", "usec", "interval"),
    [
        (str(os.getpid()), "2000000", 1.0),
        (None, "30000000", 15.0),
        (str(os.getpid() + 1), "2000000", None),
        (None, "0", None),
        (None, None, None),
    ],
)
def test_g16_watchdog_is_for_the_process_it_names(
    pid: str | None, usec: str | None, interval: float | None
) -> None:
    """Half of what the manager waits; none when the variable was meant for our parent."""
    given = {"NOTIFY_SOCKET": "/run/n", "WATCHDOG_PID": pid, "WATCHDOG_USEC": usec}
    environ = {name: value for name, value in given.items() if value is not None}
    notifier = Notifier.from_environ(environ)
    assert notifier.watchdog_interval_s == interval
    assert environ == {}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"NOTIFY_SOCKET": "relative"}, "NOTIFY_SOCKET: 'relative'"),
        ({"NOTIFY_SOCKET": "vsock:2:1"}, "NOTIFY_SOCKET: 'vsock:2:1'"),
        ({"NOTIFY_SOCKET": "@"}, "NOTIFY_SOCKET: '@'"),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "soon"}, "WATCHDOG_USEC: 'soon'"),
        ({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "²"}, "WATCHDOG_USEC: '²'"),
        ({"WATCHDOG_USEC": "1", "WATCHDOG_PID": "-1"}, "WATCHDOG_PID: '-1'"),
    ],
)
def test_malformed_variables_are_named(environ: dict[str, str], named: str) -> None:
    """With their value and what is allowed."""
    with pytest.raises(NotifyError, match=f"{named} is not allowed"):
        Notifier.from_environ(environ)


async def test_g16_pings_and_changed_status_come_from_the_loop(manager: Manager) -> None:
    """Twice as often as advised; the same status is not repeated; a wedged loop is silent."""
    notifier = Notifier(manager.address, watchdog_interval_s=0.1)
    text = "one"
    task = asyncio.create_task(keep_telling(notifier, lambda: text))
    heard = await asyncio.to_thread(lambda: [manager.receive() for _ in range(4)])
    assert heard == ["WATCHDOG=1", "STATUS=one", "WATCHDOG=1", "WATCHDOG=1"]
    text = "two"
    heard = await asyncio.to_thread(lambda: [manager.receive() for _ in range(3)])
    assert "STATUS=two" in heard
    manager.drain()
    manager.sock.settimeout(0.5)
    with pytest.raises(TimeoutError):
        manager.receive()  # on the loop itself: nothing else runs meanwhile
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def passed(code: str, names: str | None, pid_offset: int = 0) -> str:
    """What `code` prints in a process that gets two pipe ends as descriptors 3 and 4."""
    setup = (
        "import os, sys\n"
        "from cachewarmd.notify import NotifyError, listen_fds\n"
        f"environ = {{'LISTEN_PID': str(os.getpid() + {pid_offset}), 'LISTEN_FDS': '2'}}\n"
        f"names = {names!r}\n"
        "if names is not None: environ['LISTEN_FDNAMES'] = names\n"
        "r, w = os.pipe(); os.dup2(r, 63); os.dup2(w, 64); os.dup2(63, 3); os.dup2(64, 4)\n"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", setup + code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return result.stdout.strip()


def test_passed_descriptors_are_named_and_go_no_further() -> None:
    """By name; they close on exec, and children see neither them nor the variables."""
    code = (
        "fds = listen_fds(environ)\n"
        "print(fds, [os.get_inheritable(fd) for fd in fds.values()], environ)\n"
    )
    assert passed(code, "control.sock:pool") == "{'control.sock': 3, 'pool': 4} [False, False] {}"


def test_descriptors_for_another_process_are_left_alone() -> None:
    """LISTEN_PID names our parent: they were closed or are not ours, and no variable is left."""
    code = "print(listen_fds(environ), os.get_inheritable(3), environ)"
    assert passed(code, "a:b", pid_offset=1) == "{} True {}"


@pytest.mark.parametrize("names", [None, "a", "a:b:c", "a:a"])
def test_descriptors_that_cannot_be_told_apart_are_an_error(names: str | None) -> None:
    """Two sockets in one unit have one name: taking either would be a guess."""
    code = "try: listen_fds(environ)\nexcept NotifyError as exc: print(exc)"
    expected = f"LISTEN_FDNAMES: {names!r} is not allowed: 2 different names are needed"
    assert passed(code, names) == expected


def test_descriptor_that_was_promised_and_is_not_there_is_an_error() -> None:
    """Rather than a failing accept later."""
    code = "os.close(4)\ntry: listen_fds(environ)\nexcept NotifyError as exc: print(exc)"
    assert passed(code, "a:b") == "LISTEN_FDS: 'b' is descriptor 4: Bad file descriptor"


def test_nothing_passed_is_nothing() -> None:
    """An interactive start."""
    assert listen_fds({}) == {}
    assert listen_fds({"LISTEN_PID": str(os.getpid())}) == {}
