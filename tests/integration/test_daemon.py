"""The real daemon: its socket and start, who may do what, and leases of those who left."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachewarmd import layout, protocol, segment
from cachewarmd.budget import RESERVE_BYTES
from cachewarmd.client import Client
from cachewarmd.errors import (
    CachewarmError,
    InvalidRequestError,
    LimitError,
    NotFoundError,
    NotPermittedError,
    UnreachableError,
)
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import (
    NOBODY,
    PATIENCE_S,
    Daemon,
    StartFailedError,
    become,
    environment,
    fake_cgroup,
    open_fds,
    private_pool,
    wait_readable,
    wait_until,
)
from tests.worker import BLOCK_BYTES, connect_worker, key

needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="needs root to start processes as another user"
)


def ask(client: Client, **body: object) -> pb.Envelope:
    return client.call(pb.Envelope(**body), PATIENCE_S)[0]


def evict_all(daemon: Daemon) -> pb.EvictReply:
    with daemon.client(pb.ROLE_ADMIN) as admin:
        return ask(admin, evict=pb.Evict()).evict_reply


@contextlib.contextmanager
def raw_socket(path: Path) -> Iterator[socket.socket]:
    """A connection on which a test says what it likes."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(str(path))
        yield sock


def read_to_end(sock: socket.socket) -> list[pb.Envelope]:
    """All frames until the daemon closes the connection."""
    decoder = protocol.FrameDecoder()
    frames: list[pb.Envelope] = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            frames += [envelope for envelope, _ in decoder.feed(data, [])]
    return frames


def hello(**fields: object) -> pb.Envelope:
    given = {"protocol_version": protocol.PROTOCOL_VERSION, "role": pb.ROLE_OBSERVER, **fields}
    return pb.Envelope(id=1, hello=pb.Hello(**given))


# -- start and socket -----------------------------------------------------------------------------


def test_g13_second_daemon_exits_75_and_the_first_keeps_serving(daemon: Daemon) -> None:
    """The loser says why, and the winner's clients notice nothing."""
    with daemon.client() as client:
        with pytest.raises(StartFailedError, match="another cachewarmd serves") as failed:
            Daemon(daemon.socket, "64MiB").start()
        assert failed.value.returncode == 75
        assert ask(client, status=pb.Status()).status_reply.pid == daemon.pid
    assert daemon.status().pid == daemon.pid


def test_g13_of_concurrent_starts_exactly_one_wins(short_dir: Path) -> None:
    """Eight at once on one socket: one serves, seven exit 75."""
    with contextlib.ExitStack() as stack:
        daemons = [Daemon(short_dir / "s", "64MiB") for _ in range(8)]
        for daemon in daemons:
            stack.callback(daemon.stop)
            daemon.launch()
        outcomes = []
        for daemon in daemons:
            try:
                outcomes.append(daemon.wait_ready().pid)
            except StartFailedError as failed:
                assert failed.returncode == 75
        assert outcomes == [Daemon.status(daemons[0]).pid]


def test_g13_socket_of_a_killed_daemon_is_replaced_and_the_epoch_grows(short_dir: Path) -> None:
    """After kill -9 the next start needs no cleaning up, and clients can tell the two apart."""
    with Daemon(short_dir / "s", "64MiB") as first:
        epoch = first.status().epoch
        client = first.client()
        first.kill()
        wait_until(lambda: client.is_lost, "the client sees the end")
        with pytest.raises(UnreachableError):
            client.submit(pb.Envelope(status=pb.Status()))
        client.close()
    assert (short_dir / "s").is_socket()
    with Daemon(short_dir / "s", "64MiB") as second:
        assert second.status().epoch == epoch + 1
    assert not (short_dir / "s").exists()


def test_g13_other_file_at_the_socket_path_stops_the_start(short_dir: Path) -> None:
    """Nothing of the user's is deleted; the message says what is in the way."""
    path = short_dir / "s"
    path.write_text("precious")
    with pytest.raises(StartFailedError, match="exists and is not a socket") as failed:
        Daemon(path, "64MiB").start()
    assert failed.value.returncode == 1
    assert path.read_text() == "precious"


def test_g13_socket_path_may_have_107_bytes_and_not_one_more(short_dir: Path) -> None:
    """The kernel's limit is a clear error on both sides."""
    room = 107 - len(os.fsencode(short_dir)) - 1
    with Daemon(short_dir / ("s" * room), "64MiB") as daemon:
        assert daemon.status().socket == str(daemon.socket)
    too_long = short_dir / ("s" * (room + 1))
    with pytest.raises(StartFailedError, match="at most 107 are allowed"):
        Daemon(too_long, "64MiB").start()
    with pytest.raises(UnreachableError, match="too long"):
        Client.connect(too_long, pb.ROLE_OBSERVER, "test")


@pytest.mark.root
@needs_root
def test_start_without_permission_is_a_clear_error(short_dir: Path) -> None:
    """In a directory of somebody else's: exit 1, one line, no traceback."""
    with pytest.raises(StartFailedError, match="Permission denied") as failed:
        Daemon(short_dir / "s", "64MiB", uid=NOBODY).start()
    assert failed.value.returncode == 1
    assert len(failed.value.stderr.splitlines()) == 1


def test_g3_pool_larger_than_the_host_is_refused(short_dir: Path) -> None:
    """Needed and available bytes are told, and nothing is allocated."""
    with pytest.raises(StartFailedError, match=f"needs {64 << 40} bytes, [0-9]+ are available"):
        Daemon(short_dir / "s", "64TiB").start()


def test_g3_pool_larger_than_the_cgroup_allows_is_refused(short_dir: Path, tmp_path: Path) -> None:
    """The limit is found before the kernel would kill for it."""
    fake_cgroup(tmp_path, RESERVE_BYTES + (100 << 20))
    flags = ["--cgroup-root", str(tmp_path)]
    expected = f"needs {128 << 20} bytes, {100 << 20} are available"
    with pytest.raises(StartFailedError, match=expected):
        Daemon(short_dir / "s", "128MiB", flags).start()
    with Daemon(short_dir / "s", "64MiB", flags) as daemon:
        assert daemon.status().pool.pool_bytes == 64 << 20


def test_bad_setting_is_named_with_its_value_and_what_is_allowed(short_dir: Path) -> None:
    """Exit 2 for flags."""
    with pytest.raises(StartFailedError, match=r"--pool-bytes: '12 apples' is not allowed") as flag:
        Daemon(short_dir / "s", "12 apples").start()
    assert flag.value.returncode == 2
    with pytest.raises(StartFailedError, match=r"pool-bytes 1048576 is not allowed: at least"):
        Daemon(short_dir / "s", "1MiB").start()


def test_daemon_that_nobody_uses_stops_by_itself(short_dir: Path) -> None:
    """Not while an engine is connected; soon after it left."""
    with Daemon(short_dir / "s", "64MiB", ["--exit-when-unused", "1s"]) as daemon:
        with daemon.client(pb.ROLE_ENGINE):
            pidfd = os.pidfd_open(daemon.pid)
            has_ended = wait_readable(pidfd, 1.5)
            os.close(pidfd)
            assert not has_ended
        assert daemon.wait() == 0


def test_pool_is_filled_in_the_background_up_to_what_was_asked(short_dir: Path) -> None:
    """The daemon serves at once; its status tells how far the pool is."""
    with Daemon(short_dir / "s", "192MiB") as daemon:
        pool = daemon.status().pool
        assert pool.pool_bytes == 192 << 20
        wait_until(lambda: daemon.status().pool.committed_bytes == 192 << 20, "all is allocated")


# -- strangers and roles --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 8) + b"\xff" * 8,
        struct.pack("<I", protocol.MAX_FRAME_BYTES + 1),
        protocol.encode(pb.Envelope(id=1, status=pb.Status())),
        protocol.encode(pb.Envelope(id=1)),
        protocol.encode(hello(role=9)),
        protocol.encode(hello()) * 2,
        protocol.encode(hello()) + protocol.encode(pb.Envelope(status=pb.Status())),
    ],
    ids=["http", "not protobuf", "too large", "no hello", "empty", "role", "two hellos", "id 0"],
)
def test_garbage_ends_that_connection_only(module_daemon: Daemon, garbage: bytes) -> None:
    """The culprit is told and cut off, everybody else goes on."""
    with module_daemon.client() as bystander, raw_socket(module_daemon.socket) as sock:
        sock.sendall(garbage)
        frames = read_to_end(sock)
        assert frames[-1].error.code == pb.ERROR_CODE_PROTOCOL
        assert ask(bystander, status=pb.Status()).HasField("status_reply")


def test_unknown_protocol_version_is_refused_with_a_message(module_daemon: Daemon) -> None:
    """Both versions are named."""
    with raw_socket(module_daemon.socket) as sock:
        sock.sendall(protocol.encode(hello(protocol_version=99)))
        (frame,) = read_to_end(sock)
    assert frame.error.code == pb.ERROR_CODE_VERSION
    assert (
        frame.error.message
        == f"protocol version 99, this daemon speaks {protocol.PROTOCOL_VERSION}"
    )


ENGINE_VERBS = {
    "register": pb.Register(),
    "peek": pb.Peek(),
    "lookup": pb.Lookup(),
    "publish": pb.Publish(),
    "release": pb.Release(),
    "provide": pb.Provide(),
}
ADMIN_VERBS = {
    "cancel_job": pb.CancelJob(),
    "evict": pb.Evict(),
    "shutdown": pb.Shutdown(),
    "verify": pb.Verify(),
}


@pytest.mark.parametrize(
    ("role", "forbidden"),
    [
        (pb.ROLE_OBSERVER, {**ENGINE_VERBS, **ADMIN_VERBS}),
        (pb.ROLE_ENGINE, ADMIN_VERBS),
        (pb.ROLE_ADMIN, ENGINE_VERBS),
    ],
)
def test_roles_are_enforced(
    module_daemon: Daemon, role: pb.Role, forbidden: dict[str, object]
) -> None:
    """Each verb of another role is NOT_PERMITTED, and the connection goes on."""
    with module_daemon.client(role) as client:
        for verb, body in forbidden.items():
            with pytest.raises(NotPermittedError, match=f"^{verb} is not for role"):
                ask(client, **{verb: body})
        assert ask(client, status=pb.Status()).HasField("status_reply")


def test_only_engines_get_the_salt_and_only_workers_the_pool(module_daemon: Daemon) -> None:
    """Who can't need the secret does not learn it; without a private pool nothing is published."""
    for role, has_salt in ((pb.ROLE_OBSERVER, 0), (pb.ROLE_ADMIN, 0), (pb.ROLE_ENGINE, 32)):
        with module_daemon.client(role) as client:
            assert len(client.hello.salt) == has_salt
            assert client.pool is None
    with (
        module_daemon.client(pb.ROLE_ENGINE) as client,
        pytest.raises(NotPermittedError, match="private pool"),
    ):
        ask(client, publish=pb.Publish(lease=1))
    with connect_worker(module_daemon.socket) as worker:
        assert worker.client.pool is not None
        assert not worker.client.pool.memory.flags.writeable
        assert not worker.client.pool.records.flags.writeable


def test_pool_descriptors_are_read_only(module_daemon: Daemon) -> None:
    """A worker can't map the shared pool or its records for writing."""
    size = 4096
    with private_pool(size) as fd, raw_socket(module_daemon.socket) as sock:
        envelope = hello(role=pb.ROLE_ENGINE, private_pool_bytes=size)
        envelope.num_fds = 1
        protocol.send_with_fds(sock, protocol.encode(envelope), [fd])
        _, fds = protocol.recv_bytes_and_fds(sock)
    assert len(fds) == 2
    for shared in fds:
        with pytest.raises(PermissionError):
            mmap.mmap(shared, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(shared, b"x", 0)
    protocol.close_all(fds)


@pytest.mark.parametrize("fault", ["no seal", "wrong size", "ordinary file", "directory"])
def test_private_pool_that_could_hurt_is_refused(
    module_daemon: Daemon, tmp_path: Path, fault: str
) -> None:
    """Only a memfd of the told size that can't shrink."""
    size = 1 << 20
    with contextlib.ExitStack() as stack:
        seals = 0 if fault == "no seal" else segment.F_SEAL_SHRINK
        fd = stack.enter_context(private_pool(size, seals))
        told = size + 1 if fault == "wrong size" else size
        if fault in ("ordinary file", "directory"):
            path = tmp_path / "pool"
            path.write_bytes(bytes(size))
            path = tmp_path if fault == "directory" else path
            fd = os.open(path, os.O_RDONLY)
            stack.callback(os.close, fd)
        with pytest.raises(InvalidRequestError, match="private pool"):
            module_daemon.client(pb.ROLE_ENGINE, private_pool=(fd, told))


@pytest.mark.root
@needs_root
def test_other_user_is_refused(module_daemon: Daemon) -> None:
    """Even where the file modes would let them in, their uid does not."""
    module_daemon.socket.parent.chmod(0o755)
    module_daemon.socket.chmod(0o777)
    code = (
        f"{become(NOBODY)}\n"
        "from pathlib import Path\n"
        "from cachewarmd.client import Client\n"
        "from cachewarmd.errors import CachewarmError\n"
        "for _ in range(20):  # whether the refusal or the hello comes first is a race\n"
        "    try:\n"
        f"        Client.connect(Path({str(module_daemon.socket)!r}), 1, 'stranger', timeout=30)\n"
        "    except CachewarmError as exc:\n"
        "        print(type(exc).__name__, exc)\n"
    )
    told = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == f"NotPermittedError uid {NOBODY} may not connect\n" * 20


def test_limits_are_errors_with_a_number(short_dir: Path) -> None:
    """Connections and leases are bounded; at the bound others go on."""
    prelude = (
        "import cachewarmd.server as s, cachewarmd.engine_calls as c; "
        "s.MAX_CONNECTIONS = 2; c.MAX_LEASES_PER_CLIENT = 1"
    )
    with Daemon(short_dir / "s", "64MiB", prelude=prelude) as daemon:
        with connect_worker(daemon.socket) as worker, daemon.client() as observer:
            with pytest.raises(LimitError, match="2 connections are open"):
                daemon.client()
            lease = worker.lookup().lease
            with pytest.raises(LimitError, match="1 leases are held"):
                worker.lookup()
            worker.release(lease)
            worker.release(worker.lookup().lease)
            assert ask(observer, status=pb.Status()).HasField("status_reply")
        wait_until(lambda: can_connect(daemon), "a place is free again")


def can_connect(daemon: Daemon) -> bool:
    try:
        daemon.client().close()
    except CachewarmError:
        return False
    return True


def test_an_idle_daemon_looks_for_broken_invariants(short_dir: Path) -> None:
    """One that finds none says nothing; a planted one is counted and logged, once."""
    check = "import cachewarmd.server as s, cachewarmd.kv as k; s.IDLE_CHECK_S = 0.1"
    broken = f"""{check}
def fail(self): raise AssertionError("planted")
k.BlockStore.check_invariants = fail"""
    with Daemon(short_dir / "a", "64MiB", prelude=check) as daemon:
        with connect_worker(daemon.socket) as worker:
            worker.publish(worker.lookup("b").lease, "b")
        time.sleep(0.5)
        assert "broken_invariants" not in daemon.status().counters
    with Daemon(short_dir / "b", "64MiB", prelude=broken) as daemon:
        daemon.status()
        wait_until(lambda: "planted" in daemon.log(), "the log line")
        assert daemon.status().counters["broken_invariants"] == 1


# -- the data plane -------------------------------------------------------------------------------


def test_published_blocks_are_read_in_place_by_others(module_daemon: Daemon) -> None:
    """What one worker publishes another finds, leases and reads from the shared pool."""
    with connect_worker(module_daemon.socket) as one, connect_worker(module_daemon.socket) as two:
        reply = one.publish(one.lookup("a1", "a2").lease, "a1", "a2")
        assert (len(reply.blocks), reply.refused) == (2, "")
        found = two.lookup("a1", "a2", "a3")
        assert [two.read(block) for block in found.blocks] == [key("a1"), key("a2")]
        assert two.client.pool is not None
        record = two.client.pool.records[found.blocks[1].slot]
        assert bytes(record["key"]) == key("a2")
        assert record["generation"] == found.blocks[1].generation
        assert record["state"] == layout.BlockState.SEALED


def test_leases_belong_to_their_connection(module_daemon: Daemon) -> None:
    """Another client can neither release nor publish under a lease that is not its own."""
    with connect_worker(module_daemon.socket) as one, connect_worker(module_daemon.socket) as two:
        lease = one.lookup("b1").lease
        with pytest.raises(NotFoundError, match="not held by this client"):
            two.release(lease)
        with pytest.raises(NotFoundError, match="not held by this client"):
            two.publish(lease, "b1")
        one.release(lease)
        with pytest.raises(NotFoundError):
            one.release(lease)


def test_stamp_must_be_registered_on_the_connection(module_daemon: Daemon) -> None:
    """A number of somebody else's stamp opens nothing."""
    with (
        module_daemon.client(pb.ROLE_ENGINE) as client,
        pytest.raises(InvalidRequestError, match="stamp_id 0 was not registered"),
    ):
        ask(client, lookup=pb.Lookup(stamp_id=0))


KILLED_WORKER = """
import sys, time
from pathlib import Path
from tests.worker import connect_worker
with connect_worker(Path(sys.argv[1])) as worker:
    worker.publish(worker.lookup().lease, "k1", "k2")
    print("ready", flush=True)
    time.sleep(600)
"""


def test_leases_of_a_killed_process_are_released(daemon: Daemon) -> None:
    """Its blocks stay, and nothing keeps them any longer."""
    env = environment()
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    command = [sys.executable, "-P", "-c", KILLED_WORKER, str(daemon.socket)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        assert daemon.status().counters["leases"] == 1
        assert evict_all(daemon).num_kept == 2
        worker.send_signal(signal.SIGKILL)
    wait_until(lambda: daemon.status().counters["leases"] == 0, "the lease is gone")
    assert daemon.status().pool.blocks["sealed"] == 2
    told = evict_all(daemon)
    assert (told.num_blocks, told.num_bytes, told.num_kept) == (2, 2 * BLOCK_BYTES, 0)


def test_leases_of_a_living_process_outlast_its_connection(daemon: Daemon) -> None:
    """It may still be reading: what it leased can't be evicted although its socket is closed."""
    with connect_worker(daemon.socket) as worker:
        worker.publish(worker.lookup().lease, "q1", "q2")
        client_id = worker.client.hello.client_id
    # By now the daemon has seen the end of the connection: it answers on a later one.
    wait_until(lambda: not evict_all(daemon).num_blocks, "nothing to evict")
    status = daemon.status()
    assert status.counters["leases"] == 1
    assert client_id in [client.client_id for client in status.clients]
    assert evict_all(daemon).num_kept == 2


def test_quarantine_ends(short_dir: Path) -> None:
    """A process that never comes back can't keep blocks for ever."""
    prelude = "import cachewarmd.server as s; s.QUARANTINE_S = 0.3"
    with Daemon(short_dir / "s", "64MiB", prelude=prelude) as daemon:
        with connect_worker(daemon.socket) as worker:
            worker.publish(worker.lookup().lease, "q1")
        assert daemon.status().counters["leases"] == 1
        wait_until(lambda: daemon.status().counters["leases"] == 0, "the quarantine is over")
        assert evict_all(daemon).num_blocks == 1


def test_publish_of_a_closed_connection_is_never_sealed(daemon: Daemon) -> None:
    """A stopped daemon that wakes up to an old publish does not trust the bytes it finds."""
    with connect_worker(daemon.socket) as worker:
        lease = worker.lookup().lease
        daemon.sigstop()
        publish = pb.Publish(
            lease=lease,
            chain=[pb.PublishBlock(parent_key=b"r" * 32, key=key("gone"), num_tokens=4)],
            is_root=True,
        )
        future = worker.client.submit(pb.Envelope(publish=publish))
        worker.client.close()
        # From here on the worker may reuse its private block.
        os.pwrite(worker.pool_fd, b"other bytes", 0)
        daemon.sigcont()
        with pytest.raises(UnreachableError):
            future.result(PATIENCE_S)
    status = daemon.status()
    assert status.counters["refused_peer_gone"] == 1
    assert status.pool.blocks["sealed"] == 0


def test_shared_pool_stays_readable_after_the_daemon_died(short_dir: Path) -> None:
    """A worker goes on reading what it has leased, and can tell that it is intact."""
    with Daemon(short_dir / "s", "64MiB") as daemon, connect_worker(daemon.socket) as worker:
        (block,) = worker.publish(worker.lookup().lease, "d1").blocks
        daemon.kill()
        wait_until(lambda: worker.client.is_lost, "the end is noticed")
        assert worker.read(block) == key("d1")


def test_connections_leave_no_descriptors_behind(daemon: Daemon) -> None:
    """Hundreds of connections, good and bad, and the daemon has as many open as before."""

    def fds_of_daemon() -> int:
        return len(os.listdir(f"/proc/{daemon.pid}/fd"))

    gc.collect()  # what other tests left to the collector is not this one's
    own, before = open_fds(), fds_of_daemon()
    for _ in range(50):
        with connect_worker(daemon.socket, 1):
            pass
        with raw_socket(daemon.socket) as sock:
            fd = os.open("/dev/null", os.O_RDONLY)
            protocol.send_with_fds(sock, protocol.encode(hello()) + b"junk", [fd, fd])
            os.close(fd)
            read_to_end(sock)
    wait_until(lambda: fds_of_daemon() == before, "as many descriptors as before")
    assert open_fds() == own


def test_status_tells_pool_stamps_and_clients(daemon: Daemon) -> None:
    """What is in use, by whom."""
    with connect_worker(daemon.socket) as worker:
        worker.publish(worker.lookup().lease, "s1")
        status = daemon.status()
        assert status.socket == str(daemon.socket)
        assert (status.pool.blocks["sealed"], status.pool.bytes["sealed"]) == (1, BLOCK_BYTES)
        assert sum(status.pool.bytes.values()) == status.pool.pool_bytes
        (stamp,) = status.stamps
        assert (stamp.description, stamp.num_blocks) == ("test stamp", 1)
        (engine,) = [client for client in status.clients if client.role == "engine"]
        assert (engine.name, engine.pid, engine.num_leases) == ("worker", os.getpid(), 1)
