"""Real processes under a fake service manager: notifications, watchdog, socket activation."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import (
    NOBODY,
    PATIENCE_S,
    Daemon,
    StartFailedError,
    environment,
    private_pool,
    wait_readable,
    wait_until,
)
from tests.engine import START_S, Engine
from tests.manager import Manager
from tests.worker import connect_worker, key

WATCHDOG_S = 2.0
GROUP = 54321
STRANGER = 54322

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="needs root to start processes as another user"
)


@pytest.fixture(params=["path", "abstract"])
def manager(
    request: pytest.FixtureRequest, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Manager]:
    """Daemons that are started here find it in their environment, with a watchdog of 2 s."""
    address = str(short_dir / "notify")
    with Manager(address if request.param == "path" else f"@{address}", is_store=True) as fake:
        monkeypatch.setenv("NOTIFY_SOCKET", fake.address)
        monkeypatch.setenv("WATCHDOG_USEC", str(int(WATCHDOG_S * 1e6)))
        yield fake


# -- notifications ----------------------------------------------------------------------------


def test_g16_ready_is_told_when_the_daemon_serves_and_not_before(
    manager: Manager, short_dir: Path
) -> None:
    """A start that takes long is silent; at READY=1 the first question is answered."""
    gate = short_dir / "gate"
    os.mkfifo(gate)
    held = (
        "import cachewarmd.server as s; State = s.State\n"
        f"s.State = lambda *a: (open({str(gate)!r}).read(), State(*a))[1]\n"
    )
    daemon = Daemon(short_dir / "s", "64MiB", prelude=held)
    daemon.launch()
    try:
        # Opening waits until the daemon has opened its end: it is in the middle of its start.
        with gate.open("w"):
            assert manager.drain() == []
        heard = manager.receive_until("READY=1")
        assert heard == ["READY=1"]
        assert daemon.status().epoch == 1
        daemon.wait_ready()
    finally:
        daemon.stop()


def test_g16_start_that_fails_is_never_ready(manager: Manager, short_dir: Path) -> None:
    """Neither a pool that does not fit nor a socket in use."""
    with pytest.raises(StartFailedError, match="are available"):
        Daemon(short_dir / "s", "64TiB").start()
    assert manager.drain() == []


def test_g16_healthy_daemon_pings_in_time(manager: Manager, short_dir: Path) -> None:
    """At most half the watchdog's time apart: idle, filling its pool, and asked all the time.

    The times are of a machine that others use as well: one of five has to be right.
    """
    longest = []
    for _ in range(5):
        heard_at: list[float] = []
        with Daemon(short_dir / "s", "512MiB") as daemon, daemon.client() as client:
            end = time.monotonic() + 2 * WATCHDOG_S
            while time.monotonic() < end:
                if time.monotonic() > end - WATCHDOG_S:
                    client.call(pb.Envelope(status=pb.Status()), PATIENCE_S)
                heard_at += [time.monotonic() for text in manager.drain() if text == "WATCHDOG=1"]
                time.sleep(0.001)
        manager.drain()
        gaps = [after - before for before, after in itertools.pairwise(heard_at)]
        longest.append(max(gaps, default=math.inf))
        if len(gaps) >= 2 * WATCHDOG_S / (WATCHDOG_S / 2) - 1 and longest[-1] <= WATCHDOG_S / 2:
            return
    pytest.fail(f"longest gaps: {longest}")


def test_g16_status_says_what_is_in_use(manager: Manager, short_dir: Path) -> None:
    """Start number, pool, clients; told again when it changes."""
    with Daemon(short_dir / "s", "128MiB") as daemon:
        manager.receive_until("STATUS=epoch 1, pool 128 of 128 MiB, clients 0, engines 0")
        with daemon.client(pb.ROLE_ENGINE), daemon.client(pb.ROLE_OBSERVER):
            manager.receive_until("STATUS=epoch 1, pool 128 of 128 MiB, clients 2, engines 1")


def test_g16_stop_is_told_once(manager: Manager, short_dir: Path) -> None:
    """Two SIGTERM are one stop, and nothing is told after it."""
    with Daemon(short_dir / "s", "64MiB") as daemon:
        manager.receive_until("READY=1")
        daemon.signal(signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):
            daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    heard = manager.drain()
    assert heard.count("STOPPING=1") == 1
    assert heard[-1] == "STOPPING=1"


def test_g16_stopped_process_pings_no_more(manager: Manager, short_dir: Path) -> None:
    """And goes on pinging when it may run again."""
    with Daemon(short_dir / "s", "64MiB") as daemon:
        manager.receive_until("WATCHDOG=1")
        daemon.sigstop()
        manager.drain()
        manager.sock.settimeout(WATCHDOG_S)
        with pytest.raises(TimeoutError):
            manager.receive()
        daemon.sigcont()
        manager.sock.settimeout(PATIENCE_S)
        manager.receive_until("WATCHDOG=1")


def test_g16_daemon_whose_loop_hangs_pings_no_more(manager: Manager, short_dir: Path) -> None:
    """Its process runs and its other threads do, yet it serves nobody."""
    gate = short_dir / "gate"
    os.mkfifo(gate)
    wedged = (
        "import cachewarmd.calls as c\n"
        f"c.HANDLERS['jobs'] = lambda *_: open({str(gate)!r}).read() and None\n"
    )
    with Daemon(short_dir / "s", "64MiB", prelude=wedged) as daemon, daemon.client() as client:
        manager.receive_until("WATCHDOG=1")
        client.submit(pb.Envelope(jobs=pb.Jobs()))
        with gate.open("w"):  # it hangs in our handler now
            manager.drain()
            manager.sock.settimeout(WATCHDOG_S)
            with pytest.raises(TimeoutError):
                manager.receive()
        manager.sock.settimeout(PATIENCE_S)
        manager.receive_until("WATCHDOG=1")


def test_variables_of_the_manager_go_no_further(manager: Manager, short_dir: Path) -> None:
    """A child of the daemon can't speak for it."""
    with Daemon(short_dir / "s", "64MiB", prelude=TELL_ENVIRON) as daemon:
        manager.receive_until("READY=1")
        daemon.stop()
        assert "left: []" in daemon.log()


TELL_ENVIRON = (
    "import atexit, os, sys\n"
    "ours = ('NOTIFY', 'WATCHDOG', 'LISTEN')\n"
    "def left(): return [name for name in os.environ if name.startswith(ours)]\n"
    "atexit.register(lambda: print('left:', left(), file=sys.stderr))\n"
)

# -- the engine -----------------------------------------------------------------------------------


class Hearing:
    """Hears a manager on a thread of its own, so that the times are right."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._is_over = False
        self.told: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._hear)
        self._thread.start()

    def _hear(self) -> None:
        while not self._is_over:
            if wait_readable(self._manager.sock.fileno(), 0.1):
                self.told.append((time.monotonic(), self._manager.receive()))

    def __enter__(self) -> Hearing:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._thread.join()

    def times(self, text: str) -> list[float]:
        return [when for when, what in self.told if what == text]


@pytest.mark.slow
@pytest.mark.parametrize("manager", ["path"], indirect=True)
def test_g16_engine_is_ready_when_it_serves_and_pings_from_its_loop(
    manager: Manager, short_dir: Path, m_rand_dir: Path
) -> None:
    """In time while workers start and compute; not while stopped; one STOPPING=1.

    The times are of a machine that others use as well: one of five has to be right.
    """
    longest: list[float] = []
    while not longest or (longest[-1] > WATCHDOG_S / 2 and len(longest) < 5):
        manager.drain()
        longest.append(longest_gap_of_an_engine(manager, m_rand_dir))
    assert longest[-1] <= WATCHDOG_S / 2, longest


def longest_gap_of_an_engine(manager: Manager, model_dir: Path) -> float:
    """Seconds between pings while it starts and computes; checks what does not depend on time."""
    with contextlib.ExitStack() as stack:
        hearing = stack.enter_context(Hearing(manager))
        engine = Engine(model_dir, "off", step_s=0.0)
        with engine.held():
            engine.launch()
            stack.enter_context(engine)
            # A start of many seconds is no hang.
            wait_until(lambda: len(hearing.times("WATCHDOG=1")) >= 3, "pings")
            assert not hearing.times("READY=1")
        engine.wait_ready()
        wait_until(lambda: bool(hearing.times("READY=1")), "the engine is ready")
        with grpc.insecure_channel(engine.target) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=START_S
            )
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        engine.generate([5] * 200, max_tokens=50)
        pings = hearing.times("WATCHDOG=1")
        engine.signal(signal.SIGSTOP)
        stopped, num_pings = time.monotonic(), len(hearing.times("WATCHDOG=1"))
        time.sleep(WATCHDOG_S)  # what must not come can't be waited for
        assert len(hearing.times("WATCHDOG=1")) <= num_pings + 1, "more than was under way"
        engine.signal(signal.SIGCONT)
        wait_until(lambda: hearing.times("WATCHDOG=1")[-1] > stopped + WATCHDOG_S, "it pings again")
        engine.terminate()
        assert engine.wait() == 0
        assert [what for _, what in hearing.told].count("READY=1") == 1
        wait_until(lambda: bool(hearing.times("STOPPING=1")), "the stop is told")
        assert len(hearing.times("STOPPING=1")) == 1
        return max(after - before for before, after in itertools.pairwise(pings))


# -- socket activation ------------------------------------------------------------------------


class Activation:
    """A service manager's half of a socket unit: it listens, and starts daemons on that socket."""

    def __init__(self, folder: Path, mode: int = 0o600, gid: int = -1) -> None:
        self.path = folder / "s"
        self._lending = folder / "lend"
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(str(self.path))
        os.chown(self.path, -1, gid)
        self.path.chmod(mode)
        self._sock.listen()
        self._lender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lender.bind(str(self._lending))
        self._lender.listen()

    def __enter__(self) -> Activation:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()
        self._lender.close()

    def daemon(self, prelude: str = "", names: str = "control.sock") -> Daemon:
        """A daemon that gets the socket as descriptor 3; `start` it with `self.start`.

        More `names`, with colons between, are those of stored descriptors that `start` gets.
        """
        program = f"{prelude}\nfrom cachewarmd.__main__ import main; raise SystemExit(main())"
        launcher = (
            "import fcntl, os, socket, sys\n"
            "lender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)\n"
            f"lender.connect({str(self._lending)!r})\n"
            "_, fds, _, _ = socket.recv_fds(lender, 1, 16)\n"
            "lender.close()\n"
            "high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3 + len(fds)) for fd in fds]\n"
            "for place, fd in enumerate(high, 3): os.dup2(fd, place, inheritable=True)\n"
            "pid, count = str(os.getpid()), str(len(fds))\n"
            f"os.environ.update(LISTEN_PID=pid, LISTEN_FDS=count, LISTEN_FDNAMES={names!r})\n"
            f"command = [sys.executable, '-P', '-c', {program!r}, *sys.argv[1:]]\n"
            "os.execve(sys.executable, command, os.environ)\n"
        )
        return Daemon(self.path, "64MiB", prelude=launcher)

    def start(self, daemon: Daemon, stored: Sequence[int] = ()) -> Daemon:
        """Returns when it serves, as Daemon.start does."""
        daemon.launch()
        lent, _ = self._lender.accept()
        with lent:
            socket.send_fds(lent, [b"x"], [self._sock.fileno(), *stored])
        return daemon.wait_ready()


def test_activated_daemon_serves_who_connected_before_it_ran(short_dir: Path) -> None:
    """The kernel keeps the connection for it."""
    with Activation(short_dir) as manager:
        daemon = manager.daemon()
        heard: list[int] = []

        def ask() -> None:
            heard.append(daemon.status().epoch)

        early = threading.Thread(target=ask)
        early.start()
        try:
            with manager.start(daemon):
                early.join(PATIENCE_S)
                assert heard == [1]
        finally:
            early.join(PATIENCE_S)


@pytest.mark.parametrize("is_killed", [False, True])
def test_stored_descriptors_are_the_next_daemons_pool(
    manager: Manager, short_dir: Path, is_killed: bool
) -> None:
    """As `systemctl restart` and a crash: blocks are there, believed at once only after a stop."""
    folder = short_dir / "d"
    folder.mkdir(mode=0o700)
    with Activation(folder) as activation:
        with activation.start(activation.daemon()) as daemon:
            with connect_worker(daemon.socket) as worker:
                lease = worker.lookup().lease
                assert not worker.publish(lease, "a", "b").refused
                worker.release(lease)
            if is_killed:
                daemon.kill()
        manager.drain()
        kept = ("records", "pool", "catalog", "prompts")
        assert set(manager.stored) == {f"cachewarm-{name}" for name in kept}
        names = ":".join(["control.sock", *manager.stored])
        stored = list(manager.stored.values())
        with activation.start(activation.daemon(names=names), stored) as daemon:
            assert (daemon.status().epoch, daemon.status().pool.blocks["sealed"]) == (2, 2)
            with connect_worker(daemon.socket) as worker:
                blocks = worker.lookup("a", "b").blocks
                assert [worker.read(block) for block in blocks] == [key("a"), key("b")]
            assert f'"verified": {"false" if is_killed else "true"}' in daemon.log()
            daemon.kill()
        # The token was for one daemon only.
        with activation.start(activation.daemon(names=names), stored) as daemon:
            assert daemon.status().pool.blocks["sealed"] == 2
            assert '"verified": false' in daemon.log()


def test_half_a_pool_is_no_pool(manager: Manager, short_dir: Path) -> None:
    """The store lost a part of it: a new pool, and nothing of the old one stays stored."""
    folder = short_dir / "d"
    folder.mkdir(mode=0o700)
    with Activation(folder) as activation:
        with activation.start(activation.daemon()):
            pass
        manager.drain()
        before = os.fstat(manager.stored["cachewarm-records"]).st_ino
        names = ["cachewarm-records", "cachewarm-catalog", "cachewarm-weights-unknown"]
        manager.stored["cachewarm-weights-unknown"] = os.memfd_create("x")
        stored = [manager.stored[name] for name in names]
        daemon = activation.daemon(names=":".join(["control.sock", *names]))
        with activation.start(daemon, stored):
            assert "one of its two memfds is missing" in daemon.log()
            manager.drain()
            assert os.fstat(manager.stored["cachewarm-records"]).st_ino != before
            assert "cachewarm-weights-unknown" not in manager.stored


def test_activated_socket_outlives_its_daemons(short_dir: Path) -> None:
    """After a stop and after a kill -9 the path is the same socket, and the next one counts on."""
    with Activation(short_dir) as manager:
        inode = manager.path.stat().st_ino
        with manager.start(manager.daemon()) as daemon:
            assert daemon.status().epoch == 1
        assert manager.path.stat().st_ino == inode
        daemon = manager.start(manager.daemon())
        assert daemon.status().epoch == 2
        daemon.kill()
        assert manager.path.stat().st_ino == inode
        with manager.start(manager.daemon()) as daemon:
            assert daemon.status().epoch == 3


def test_second_daemon_refuses_the_activated_path(short_dir: Path) -> None:
    """While one serves, and while the manager only listens: exit 75, the socket stays."""
    with Activation(short_dir) as manager:
        inode = manager.path.stat().st_ino
        with pytest.raises(StartFailedError, match="another process listens on") as only_listening:
            Daemon(manager.path, "64MiB").start()
        with manager.start(manager.daemon()) as daemon:
            with pytest.raises(StartFailedError, match="another cachewarmd serves") as served:
                Daemon(manager.path, "64MiB").start()
            assert daemon.status().epoch == 1
        assert (only_listening.value.returncode, served.value.returncode) == (75, 75)
        assert manager.path.stat().st_ino == inode


def test_activation_variables_and_unknown_descriptors_go_no_further(short_dir: Path) -> None:
    """What another version stored is closed and named; what is left would reach children."""
    with Activation(short_dir) as manager:
        daemon = manager.daemon(TELL_ENVIRON, names="pool-of-another-version")
        with pytest.raises(StartFailedError, match="another process listens") as failed:
            manager.start(daemon)
        assert '"name": "pool-of-another-version"' in failed.value.stderr
        assert "left: []" in failed.value.stderr
        with manager.start(manager.daemon(TELL_ENVIRON)) as daemon:
            pass
        assert "left: []" in daemon.log()


# -- separate users -------------------------------------------------------------------------


def connect_as(path: Path, uid: int, gid: int, groups: Sequence[int]) -> list[str]:
    """What each role's connection says to a process of these ids; engines bring a pool."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "import cachewarmd.client as c\n"
        "import cachewarmd.layout, cachewarmd.segment  # while they can be read\n"
        "from cachewarmd.errors import CachewarmError\n"
        "from cachewarmd.v1 import control_pb2 as pb\n"
        f"path = Path({str(path)!r})\n"
        "map_pool = c._map_pool\n"
        "def reopen(hello, fds):\n"
        "    for fd in fds:\n"
        "        try: os.open(f'/proc/self/fd/{fd}', os.O_RDWR)\n"
        "        except PermissionError: print('no writing')\n"
        "    return map_pool(hello, fds)\n"
        "c._map_pool = reopen\n"
        f"os.setgroups({list(groups)}); os.setgid({gid}); os.setuid({uid})\n"
        "fd, _ = c.create_private_pool(1 << 20)\n"
        "for role in (pb.ROLE_OBSERVER, pb.ROLE_ENGINE, pb.ROLE_ADMIN):\n"
        "    pool = (fd, 1 << 20) if role == pb.ROLE_ENGINE else None\n"
        "    try:\n"
        "        with c.Client.connect(path, role, 'x', private_pool=pool, timeout=30):\n"
        "            print('welcome')\n"
        "    except CachewarmError as exc:\n"
        "        print(type(exc).__name__, exc)\n"
    )
    told = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return told.stdout.splitlines()


NO_ADMIN = f"NotPermittedError role ROLE_ADMIN is not for uid {NOBODY}: only for 0 and 0"


@pytest.mark.root
@needs_root
@pytest.mark.parametrize(("gid", "groups"), [(GROUP, []), (STRANGER, [STRANGER, GROUP])])
def test_g15_group_of_the_activated_socket_may_be_engine_and_not_admin(
    short_dir: Path, gid: int, groups: list[int]
) -> None:
    """As first or as further group; the pool it gets can't be reopened for writing."""
    short_dir.chmod(0o755)
    with Activation(short_dir, 0o660, GROUP) as manager, manager.start(manager.daemon()):
        told = connect_as(manager.path, NOBODY, gid, groups)
    assert told == ["welcome", "no writing", "no writing", "welcome", NO_ADMIN]


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("mode", [0o660, 0o600])
def test_g15_other_users_are_refused_by_the_activated_daemon(short_dir: Path, mode: int) -> None:
    """Outside the group, or where the group was not let in: even once the mode is 0666."""
    short_dir.chmod(0o755)
    gid = GROUP if mode == 0o600 else STRANGER
    with Activation(short_dir, mode, GROUP) as manager, manager.start(manager.daemon()):
        manager.path.chmod(0o666)
        told = connect_as(manager.path, NOBODY, gid, [])
    assert told == [f"NotPermittedError uid {NOBODY} may not connect"] * 3


def test_own_user_and_root_keep_all_roles(short_dir: Path) -> None:
    """Whatever the activated socket's group and mode are."""
    with Activation(short_dir) as manager, manager.start(manager.daemon()) as daemon:
        with daemon.client(pb.ROLE_ADMIN) as admin:
            reply, _ = admin.call(pb.Envelope(evict=pb.Evict()), PATIENCE_S)
            assert reply.HasField("evict_reply")
        with private_pool(1 << 20) as fd:
            daemon.client(pb.ROLE_ENGINE, private_pool=(fd, 1 << 20)).close()
