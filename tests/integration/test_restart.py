"""A daemon that is killed under its holder: nothing that was sealed is lost, nothing is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachewarmd import layout
from cachewarmd.client import Client
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import (
    PATIENCE_S,
    Daemon,
    StartFailedError,
    children_of,
    environment,
    wait_readable,
    wait_until,
)
from tests.worker import Worker, connect_worker, key

HOLDER = ["--holder"]
_PROGRAM = "from cachewarmd.__main__ import main; raise SystemExit(main())"


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[Daemon]:
    """A daemon under a holder, with the smallest pool."""
    with Daemon(short_dir / "s", "64MiB", HOLDER) as running:
        yield running


def labels(count: int, prefix: str = "b") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def publish(daemon: Daemon, *chain: str) -> None:
    """Seal a chain that nobody leases afterwards."""
    with connect_worker(daemon.socket) as worker:
        lease = worker.lookup().lease
        assert not worker.publish(lease, *chain).refused
        worker.release(lease)


def test_killed_daemon_comes_back_with_every_sealed_block(daemon: Daemon) -> None:
    """Same blocks, same bytes, next epoch; also after a second kill."""
    chain = labels(8)
    publish(daemon, *chain)
    for epoch in (2, 3, 4):
        before = daemon.kill_under_holder()
        status = daemon.status()
        assert (status.epoch, status.pool.blocks["sealed"]) == (epoch, 8)
        assert status.pid != before
        assert status.counters["recovered"] == 8
        with connect_worker(daemon.socket) as worker:
            found = worker.lookup(*chain)
            assert [worker.read(block) for block in found.blocks] == [key(b) for b in chain]
            worker.release(found.lease)
    assert daemon.status().counters["integrity_failures"] == 0


def test_connections_wait_while_no_daemon_runs(daemon: Daemon) -> None:
    """The socket stays open in the holder: who connects in between is served, not refused."""
    for _ in range(5):
        os.kill(daemon.serving_pid(), signal.SIGKILL)
        assert daemon.status().pid


def test_holder_is_small_and_ends_with_a_clean_stop(daemon: Daemon, short_dir: Path) -> None:
    """It imports neither numpy nor protobuf; SIGTERM ends both, and the path goes."""
    maps = Path(f"/proc/{daemon.pid}/maps").read_text()
    assert "numpy" not in maps
    assert "_upb" not in maps
    served_by = daemon.serving_pid()
    assert children_of(daemon.pid) == [served_by]
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert not Path(f"/proc/{served_by}").exists()
    assert sorted(os.listdir(short_dir)) == ["s.lock"]


def test_shutdown_by_an_operator_ends_the_holder_too(daemon: Daemon) -> None:
    """`cachewarmd-ctl shutdown` means all of it."""
    with daemon.client(pb.ROLE_ADMIN) as client:
        client.call(pb.Envelope(shutdown=pb.Shutdown()), PATIENCE_S)
    assert daemon.wait() == 0


def test_killed_holder_leaves_a_daemon_that_serves(daemon: Daemon) -> None:
    """Only its next death would cost warmth."""
    publish(daemon, *labels(3))
    served_by = daemon.serving_pid()
    daemon.kill()
    try:
        with connect_worker(daemon.socket) as worker:
            assert len(worker.lookup(*labels(3)).blocks) == 3
            lease = worker.lookup().lease
            assert not worker.publish(lease, "other").refused
    finally:
        os.kill(served_by, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{served_by}").exists(), "it stops in order")


def test_who_started_it_may_be_gone(short_dir: Path) -> None:
    """Nobody reads its ready line nor its log any more: the next daemon serves all the same."""
    daemon = Daemon(short_dir / "s", "64MiB", HOLDER)
    read, write = os.pipe()
    command = [sys.executable, "-P", "-c", _PROGRAM, "--holder", "--socket", str(daemon.socket)]
    holder = subprocess.Popen(
        [*command, "--pool-bytes", "64MiB"], env=environment(), stdout=write, stderr=write
    )
    os.close(write)
    try:
        assert wait_readable(read), "no ready line"
        os.close(read)
        for epoch in (2, 3):
            daemon.kill_under_holder()
            assert daemon.status().epoch == epoch
    finally:
        holder.terminate()
        assert holder.wait(PATIENCE_S) == 0


def test_bad_settings_are_not_tried_again(short_dir: Path) -> None:
    """What can't start at all ends the holder with the daemon's own status."""
    with pytest.raises(StartFailedError) as failed:
        Daemon(short_dir / "s", "1KiB", HOLDER).start()
    assert failed.value.returncode == 1


def test_leased_blocks_are_kept_for_a_client_that_lives(daemon: Daemon) -> None:
    """Nobody can evict them until it has told what it holds; the rest of its leases goes."""
    with connect_worker(daemon.socket) as before:
        kept, gone = before.lookup(), before.lookup()
        blocks = before.publish(kept.lease, "kept0", "kept1").blocks
        before.publish(gone.lease, "gone")
        daemon.kill_under_holder()
        assert evict(daemon) == (0, 3)
        with connect_worker(daemon.socket) as after:
            told = before.client.hello
            leases = reattach(after, told, blocks[1]).leases
            assert len(leases) == 1
            assert leases[0]
            assert evict(daemon) == (1, 2)
            assert [after.read(block) for block in blocks] == [key("kept0"), key("kept1")]
            # The chain goes on where it was.
            element = pb.PublishBlock(
                parent_key=key("kept1"), key=key("kept2"), num_tokens=4, private_offset=0
            )
            reply = after.call(pb.Envelope(publish=pb.Publish(lease=leases[0], chain=[element])))
            assert not reply.publish_reply.refused
            after.release(leases[0])
        assert evict(daemon) == (3, 0)


def test_a_handle_of_a_block_that_is_gone_is_not_a_lease(daemon: Daemon) -> None:
    """A generation that differs, a slot that can't be."""
    with connect_worker(daemon.socket) as before:
        (block,) = before.publish(before.lookup().lease, "a").blocks
        daemon.kill_under_holder()
        with connect_worker(daemon.socket) as after:
            for slot, generation in ((block.slot, block.generation + 1), (1 << 31, 0), (77, 0)):
                wrong = pb.Block(slot=slot, generation=generation)
                assert reattach(after, before.client.hello, wrong).leases == [0]
            assert evict(daemon) == (1, 0), "the reattach named nothing: all of it is free"


def test_another_process_cannot_end_a_quarantine(daemon: Daemon) -> None:
    """Reattach counts only from the process that held the leases."""
    with connect_worker(daemon.socket) as before:
        before.publish(before.lookup().lease, "a")
        told = before.client.hello
        daemon.kill_under_holder()
        pid = os.fork()
        if not pid:
            with connect_worker(daemon.socket) as other:
                reattach(other, told)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert evict(daemon) == (0, 1)


def evict(daemon: Daemon) -> tuple[int, int]:
    """Blocks that nobody holds are dropped: (dropped, kept)."""
    with daemon.client(pb.ROLE_ADMIN) as client:
        reply = client.call(pb.Envelope(evict=pb.Evict()), PATIENCE_S)[0].evict_reply
        return reply.num_blocks, reply.num_kept


def reattach(worker: Worker, told: pb.HelloReply, *blocks: pb.Block) -> pb.ReattachReply:
    claims = [
        pb.Claim(
            stamp_id=worker.stamp_id,
            block=pb.Handle(slot=block.slot, generation=block.generation),
        )
        for block in blocks
    ]
    message = pb.Reattach(epoch=told.epoch, client_id=told.client_id, claims=claims)
    return worker.call(pb.Envelope(reattach=message)).reattach_reply


def test_an_old_reader_keeps_its_bytes_when_the_format_changed(daemon: Daemon) -> None:
    """An upgrade across formats: a new pool, the old one untouched for who maps it."""
    with connect_worker(daemon.socket) as before:
        (block,) = before.publish(before.lookup().lease, "a").blocks
        pid = daemon.serving_pid()
        patch_header(pid, "format_version", layout.FORMAT_VERSION + 1)
        daemon.kill_under_holder()
        status = daemon.status()
        assert (status.epoch, status.pool.blocks["sealed"]) == (2, 0)
        with connect_worker(daemon.socket) as after:
            assert not after.lookup("a").blocks
            assert after.client.hello.pool_id != before.client.hello.pool_id
            assert not after.publish(after.lookup().lease, *labels(8, "new")).refused
        assert before.read(block) == key("a")
        assert "pool_not_adopted" in daemon.log()
        daemon.kill_under_holder()
        assert daemon.status().pool.blocks["sealed"] == 8, "the new pool is kept as well"


def patch_header(pid: int, name: str, value: int) -> None:
    """As another version of the daemon would have written it. The same uid can."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd).startswith("/memfd:cachewarm-records"):
            with open(fd, "r+b", buffering=0) as memory:
                offset = layout.HEADER.fields[name][1]
                size = layout.HEADER.fields[name][0].itemsize
                os.pwrite(memory.fileno(), value.to_bytes(size, "little"), offset)
            return
    raise AssertionError("the daemon has no records")


def test_pool_that_kills_daemons_is_given_up(daemon: Daemon) -> None:
    """After so many deaths before serving the next one starts with an empty pool."""
    publish(daemon, "a")
    patch_header(daemon.serving_pid(), "num_starts", 5)
    daemon.kill_under_holder()
    assert daemon.status().pool.blocks["sealed"] == 0


def test_lookups_are_served_within_a_second_after_a_kill(daemon: Daemon) -> None:
    """Printed, not asserted tightly: the machine may be starved."""
    publish(daemon, *labels(8))
    with connect_worker(daemon.socket) as before:
        assert isinstance(before.client, Client)
        started = time.monotonic()
        daemon.kill_under_holder()
        with connect_worker(daemon.socket) as after:
            assert len(after.lookup(*labels(8)).blocks) == 8
        print(f"lookups again after {time.monotonic() - started:.2f} s")


def test_a_stop_while_old_leases_wait_for_their_client_is_quiet(daemon: Daemon) -> None:
    """The client lives and has not told what it holds: that ends with the daemon, in order."""
    with connect_worker(daemon.socket) as before:
        lease = before.lookup()
        before.publish(lease.lease, "kept")
        daemon.kill_under_holder()
        assert evict(daemon) == (0, 1)
        daemon.stop()
    assert "Traceback" not in daemon.log()
