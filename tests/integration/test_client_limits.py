"""What one client may keep from the others, and what an operator can do about it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachewarmd.client import Client
from cachewarmd.errors import LimitError, NotFoundError, NotPermittedError, UnreachableError
from cachewarmd.keys import peer_salt
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import (
    NOBODY,
    PATIENCE_S,
    SERVICES,
    Daemon,
    environment,
    private_pool,
    wait_readable,
    wait_until,
)
from tests.worker import BLOCK_BYTES, connect_worker

NUM_SLOTS = 128
POOL = f"{NUM_SLOTS * BLOCK_BYTES}"
# Publishes one long chain, tells how much of it was sealed and why no more, and stays.
GREEDY = """
import sys, time
from pathlib import Path
from tests.worker import connect_worker
with connect_worker(Path(sys.argv[1]), 256) as worker:
    reply = worker.publish(worker.lookup().lease, *(f"greedy{n}" for n in range(200)))
    print(len(reply.blocks), reply.refused, flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def full_daemon(short_dir: Path) -> Iterator[Daemon]:
    """One whose whole pool is allocated."""
    with Daemon(short_dir / "s", POOL) as daemon:
        wait_until(
            lambda: daemon.status().pool.committed_bytes == NUM_SLOTS * BLOCK_BYTES, "the pool"
        )
        yield daemon


@contextlib.contextmanager
def greedy_process(daemon: Daemon) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that holds all it may; what it told."""
    process = subprocess.Popen(
        [sys.executable, "-c", GREEDY, str(daemon.socket)],
        env=environment(),
        cwd=SERVICES.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert wait_readable(process.stdout.fileno()), "it never told"
        yield process, process.stdout.readline().split()
    finally:
        process.kill()
        process.communicate()


def status_of(daemon: Daemon, pid: int) -> pb.ClientStatus | None:
    return next((c for c in daemon.status().clients if c.pid == pid), None)


def kick(daemon: Daemon, client_id: int) -> None:
    with daemon.client(pb.ROLE_ADMIN) as admin:
        admin.call(pb.Envelope(kick=pb.Kick(client_id=client_id)), PATIENCE_S)


def names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_a_stopped_client_at_its_cap_leaves_the_rest_to_others(full_daemon: Daemon) -> None:
    """Three quarters of the pool are its own; others publish and hit in what is left.

    A kick ends its connection at once, and its leases once its process is dead.
    """
    daemon, share = full_daemon, NUM_SLOTS * 3 // 4
    rest = NUM_SLOTS - share
    with connect_worker(daemon.socket, 256) as other, greedy_process(daemon) as (process, told):
        assert told == [str(share), "CLIENT_LIMIT"]
        process.send_signal(signal.SIGSTOP)
        for number in range(3):
            chain = names(f"other{number}-", rest)
            lease = other.lookup().lease
            assert other.publish(lease, *chain).refused == ""
            found = other.lookup(*chain)
            assert len(found.blocks) == rest
            for one in (lease, found.lease):
                other.release(one)
        held = status_of(daemon, process.pid)
        assert held is not None
        assert held.held_bytes == held.max_held_bytes == share * BLOCK_BYTES
        kick(daemon, held.client_id)
        with pytest.raises(NotFoundError):
            kick(daemon, held.client_id)
        lease = other.lookup().lease
        assert other.publish(lease, *names("more", rest + 1)).refused == "NO_SPACE"
        other.release(lease)
        process.kill()
        wait_until(lambda: status_of(daemon, process.pid) is None, "its leases are gone")
        assert other.publish(other.lookup().lease, *names("more", rest + 1)).refused == ""
    assert "client_kicked" in daemon.log()


def test_a_client_alone_may_have_all_and_keeps_it(full_daemon: Daemon) -> None:
    """The cap comes with the second client: what is held stays held, a further lease is cut.

    What it holds already costs nothing once more.
    """
    chain = names("a", NUM_SLOTS)
    with connect_worker(full_daemon.socket, 256) as one:
        lease = one.lookup().lease
        assert one.publish(lease, *chain).refused == ""
        with connect_worker(full_daemon.socket, 256) as two:
            again = one.lookup(*chain)
            assert len(again.blocks) == NUM_SLOTS
            assert len(two.lookup(*chain).blocks) == NUM_SLOTS * 3 // 4
            assert two.publish(two.lookup().lease, "b").refused == "CLIENT_LIMIT"
            assert one.publish(again.lease, *chain, "c").refused == "CLIENT_LIMIT"
            one.release(again.lease)
            one.release(lease)
            assert len(one.lookup(*chain).blocks) == NUM_SLOTS * 3 // 4
    assert full_daemon.status().counters["lookup_cut_client_limit"] == 2


def test_the_share_is_a_setting(short_dir: Path) -> None:
    """100 is no limit at all."""
    for share, sealed in (("50%", 32), ("100", 64)):
        with (
            Daemon(short_dir / "s", "64MiB", ["--max-client-slots", share]) as daemon,
            connect_worker(daemon.socket),
            connect_worker(daemon.socket, 128) as worker,
        ):
            reply = worker.publish(worker.lookup().lease, *names("x", 64))
            assert len(reply.blocks) == sealed


def test_only_an_admin_kicks_and_the_kicked_one_is_told(daemon: Daemon) -> None:
    """An engine that is kicked by mistake comes back by itself, so it must not hang."""
    with daemon.client() as observer, pytest.raises(NotPermittedError):
        observer.call(pb.Envelope(kick=pb.Kick(client_id=1)), PATIENCE_S)
    with connect_worker(daemon.socket) as worker:
        kick(daemon, worker.client.hello.client_id)
        with pytest.raises((NotPermittedError, UnreachableError)):
            for _ in range(1000):
                worker.lookup()
        with connect_worker(daemon.socket) as again:
            assert again.lookup().lease


def test_a_publish_of_too_many_blocks_is_refused(short_dir: Path) -> None:
    """The loop copies all of them before it serves anybody else."""
    prelude = (
        "import cachewarmd.engine_calls as c, cachewarmd.state as s; "
        "c.MAX_PUBLISH_BLOCKS = 3; s.MAX_TASKS = 0"
    )
    with (
        Daemon(short_dir / "s", "64MiB", prelude=prelude) as daemon,
        connect_worker(daemon.socket) as worker,
    ):
        lease = worker.lookup().lease
        with pytest.raises(LimitError, match="at most 3 blocks"):
            worker.publish(lease, "a", "b", "c", "d")
        assert len(worker.publish(lease, "a", "b", "c").blocks) == 3
        with pytest.raises(LimitError, match="0 long calls"):
            worker.call(pb.Envelope(watch_job=pb.WatchJob(job_id=1)))


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to connect as another user")
def test_two_users_share_nothing(short_dir: Path) -> None:
    """Each user's engines have a salt of their own, so their keys never meet."""
    os.chown(short_dir, NOBODY, NOBODY)
    with Daemon(short_dir / "s", "64MiB", uid=NOBODY) as daemon, private_pool(BLOCK_BYTES) as fd:

        def connect() -> Client:
            pool = (fd, BLOCK_BYTES)
            return daemon.client(pb.ROLE_ENGINE, private_pool=pool)

        with connect() as mine, connect() as again:
            os.seteuid(NOBODY)
            try:
                other = connect()
            finally:
                os.seteuid(0)
            with other:
                assert mine.hello.salt == again.hello.salt != other.hello.salt
                assert mine.pool is not None
                secret = bytes(mine.pool.header["salt"][0])
                assert mine.hello.salt == peer_salt(secret, 0)
                assert other.hello.salt == peer_salt(secret, NOBODY)


def test_the_cap_is_of_distinct_blocks(full_daemon: Daemon) -> None:
    """Many leases of one chain hold it once."""
    with connect_worker(full_daemon.socket) as one, connect_worker(full_daemon.socket):
        chain = names("a", 8)
        one.publish(one.lookup().lease, *chain)
        leases = [one.lookup(*chain[: 1 + number % 8]) for number in range(100)]
        assert [len(lease.blocks) for lease in leases] == [1 + n % 8 for n in range(100)]
        (told,) = (c for c in full_daemon.status().clients if c.num_leases)
        assert told.held_bytes == 8 * BLOCK_BYTES
