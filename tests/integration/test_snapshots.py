"""Snapshots, verify and the scrubber of a real daemon; what outlives all of its memory."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachewarmd import protocol
from cachewarmd.client import Client
from cachewarmd.errors import (
    InvalidRequestError,
    NoSpaceError,
    NotPermittedError,
    VersionMismatchError,
)
from cachewarmd.snapshot_format import BLOCK, HEADER_BYTES, STAMP
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, environment, wait_until
from tests.worker import BLOCK_BYTES, Worker, connect_worker, key

HOT = [f"hot{number}" for number in range(4)]
COLD = [f"cold{number}" for number in range(3)]


class Host:
    """A daemon's directories, which outlive it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "snaps" / "one"
        self.file.parent.mkdir(mode=0o700)

    def daemon(self, *extra: str, prelude: str = "") -> Daemon:
        flags = ["--state-dir", str(self.folder / "state"), *extra]
        return Daemon(self.folder / "s", "64MiB", flags, prelude=prelude)


@pytest.fixture
def host(short_dir: Path) -> Host:
    return Host(short_dir)


@pytest.fixture
def daemon(host: Host) -> Iterator[Daemon]:
    """With two chains sealed, HOT after COLD, which does not scrub by itself."""
    with host.daemon("--scrub-bytes-per-second", "0") as running:
        seal(running, COLD)
        seal(running, HOT)
        yield running


def seal(daemon: Daemon, chain: list[str]) -> None:
    with connect_worker(daemon.socket) as worker:
        lease = worker.lookup().lease
        assert not worker.publish(lease, *chain).refused
        worker.release(lease)


def found(daemon: Daemon, chain: list[str]) -> list[str]:
    """What of a chain a worker finds; each block has its own bytes."""
    with connect_worker(daemon.socket) as worker:
        return _read(worker, chain)


def _read(worker: Worker, chain: list[str]) -> list[str]:
    lookup = worker.lookup(*chain)
    labels = chain[: len(lookup.blocks)]
    assert [worker.read(block) for block in lookup.blocks] == list(map(key, labels))
    assert worker.client.pool is not None
    memory = worker.client.pool.memory
    for block in lookup.blocks:
        assert not memory[block.offset + 32 : block.offset + BLOCK_BYTES].any()
    worker.release(lookup.lease)
    return labels


def save(daemon: Daemon, path: Path) -> pb.SnapshotReply:
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with daemon.client(pb.ROLE_ADMIN) as client:
            envelope = pb.Envelope(snapshot_save=pb.SnapshotSave(name=path.name))
            return client.stream(envelope, lambda _: None, PATIENCE_S, [fd])[0].snapshot_reply
    finally:
        os.close(fd)


def load(daemon: Daemon, path: Path) -> pb.SnapshotReply:
    fd = os.open(path, os.O_RDONLY)
    try:
        with daemon.client(pb.ROLE_ADMIN) as client:
            envelope = pb.Envelope(snapshot_load=pb.SnapshotLoad())
            return client.stream(envelope, lambda _: None, PATIENCE_S, [fd])[0].snapshot_reply
    finally:
        os.close(fd)


def ctl(daemon: Daemon, *words: str) -> tuple[int, dict[str, object]]:
    """Exit status and JSON of cachewarmd-ctl."""
    code = "from cachewarmd.ctl.__main__ import main; raise SystemExit(main())"
    command = [sys.executable, "-P", "-c", code, "--socket", str(daemon.socket), "-o", "json"]
    done = subprocess.run(
        [*command, *words], env=environment(), capture_output=True, timeout=2 * PATIENCE_S
    )
    return done.returncode, json.loads(done.stdout)


# -- save and load ----------------------------------------------------------------------------


def test_what_was_saved_hits_after_all_memory_is_gone(host: Host) -> None:
    """Daemon and holder die by SIGKILL: the next daemon has the same salt, and the file."""
    first = host.daemon("--holder").start()
    try:
        seal(first, COLD)
        seal(first, HOT)
        assert ctl(first, "snapshot", "save", str(host.file))[0] == 0
        served_by = first.serving_pid()
        pidfd = os.pidfd_open(served_by)
        first.kill()
        os.kill(served_by, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{served_by}").exists(), "it is gone")
        os.close(pidfd)
    finally:
        first.stop()
    assert oct(host.file.stat().st_mode & 0o777) == "0o600"
    with host.daemon() as second:
        assert second.status().pool.blocks["sealed"] == 0
        status, told = ctl(second, "snapshot", "load", str(host.file))
        assert (status, told["num_blocks"], told["refused"]) == (0, 7, {})
        assert found(second, HOT) == HOT
        assert found(second, COLD) == COLD
        assert second.status().counters["snapshot_restored"] == 7
        # The chain goes on, and a second load finds everything there.
        seal(second, [*HOT, "more"])
        assert load(second, host.file).num_known == 7


def test_by_config_a_clean_stop_and_the_next_boot_keep_the_pool_warm(host: Host) -> None:
    """Off unless asked for: a daemon without the flags writes nothing anywhere."""
    flags = ["--snapshot-on-stop", "--snapshot-at-boot"]
    with host.daemon() as cold:
        seal(cold, HOT)
    assert not (host.folder / "state").exists()
    with host.daemon(*flags) as first:
        seal(first, HOT)
    assert sorted(os.listdir(host.folder / "state")) == ["blocks.snapshot", "salt"]
    # That one had a salt of its own still, which is kept now.
    with host.daemon(*flags) as second:
        wait_until(lambda: second.status().counters["snapshot_restored"] == 4, "it is restored")
        assert found(second, HOT) == HOT
    with host.daemon() as third:
        assert found(third, HOT) == []
    # A pool that has nothing is no reason to lose what was there.
    with host.daemon("--snapshot-on-stop"):
        pass
    with host.daemon("--snapshot-at-boot") as last:
        wait_until(lambda: last.status().counters["snapshot_restored"] == 4, "it is restored")


def test_a_restart_under_the_holder_needs_no_snapshot(host: Host) -> None:
    """The pool is there: nothing of the file is read again."""
    with host.daemon("--holder", "--snapshot-at-boot") as daemon:
        seal(daemon, HOT)
        (host.folder / "state").mkdir(mode=0o700)
        save(daemon, host.folder / "state" / "blocks.snapshot")
        daemon.kill_under_holder()
        wait_until(lambda: "snapshot_restored" in daemon.log(), "it has looked")
        assert daemon.status().counters["snapshot_restored"] == 0
        assert found(daemon, HOT) == HOT


def test_a_flipped_byte_costs_the_rest_of_its_chain(daemon: Daemon, host: Host) -> None:
    """Counted and told; never a wrong byte."""
    save(daemon, host.file)
    raw = bytearray(host.file.read_bytes())
    content = HEADER_BYTES + STAMP.size + 7 * BLOCK.size
    raw[content + 2 * BLOCK_BYTES + 500] ^= 4  # of hot2
    host.file.write_bytes(raw)
    evict(daemon)
    told = load(daemon, host.file)
    assert (told.num_blocks, dict(told.refused)) == (5, {"checksum": 1, "no_parent": 1})
    assert found(daemon, HOT) == HOT[:2]
    assert found(daemon, COLD) == COLD
    assert daemon.status().counters["snapshot_refused_checksum"] == 1
    assert daemon.status().counters["integrity_failures_snapshot"] == 1
    assert "snapshot_restored" in daemon.log()


def evict(daemon: Daemon) -> None:
    with daemon.client(pb.ROLE_ADMIN) as client:
        client.call(pb.Envelope(evict=pb.Evict()), PATIENCE_S)


def test_a_file_that_was_cut_short_has_lost_its_coldest_chain(daemon: Daemon, host: Host) -> None:
    """And a header that is damaged costs all of it, with an error."""
    save(daemon, host.file)
    os.truncate(host.file, host.file.stat().st_size - BLOCK_BYTES - 1)
    evict(daemon)
    told = load(daemon, host.file)
    assert (told.num_blocks, dict(told.refused)) == (5, {"truncated": 2})
    assert (found(daemon, HOT), found(daemon, COLD)) == (HOT, COLD[:1])
    os.truncate(host.file, 100)
    with pytest.raises(InvalidRequestError, match="not a snapshot of ours"):
        load(daemon, host.file)
    assert daemon.status().counters["snapshot_load_failed"] == 1


def test_list_shows_what_is_there_and_what_is_not_whole(daemon: Daemon, host: Host) -> None:
    """Without asking a daemon."""
    save(daemon, host.file)
    (host.file.parent / "notes.txt").write_text("not ours")
    status, told = ctl(daemon, "snapshot", "list", str(host.file.parent))
    (entry,) = told["snapshots"]  # type: ignore[misc]
    assert (status, entry["name"], entry["num_blocks"], entry["error"]) == (0, "one", 7, "")
    os.truncate(host.file, 5000)
    status, told = ctl(daemon, "snapshot", "list", str(host.file.parent))
    assert status == 1
    assert "bytes were written" in told["snapshots"][0]["error"]  # type: ignore[index]


def test_a_full_disk_leaves_the_snapshot_that_was_there(daemon: Daemon, host: Host) -> None:
    """The kernel refuses the new one in its middle: an error, counted, and nothing left behind."""
    save(daemon, host.file)
    before = host.file.read_bytes()
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (3 << 20, limits[1]))
    with pytest.raises(NoSpaceError, match="can't be written"):
        save(daemon, host.file)
    resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, limits)
    assert host.file.read_bytes() == before
    assert os.listdir(host.file.parent) == ["one"]
    assert daemon.status().counters["snapshot_save_failed"] == 1
    assert save(daemon, host.file).num_blocks == 7


def test_a_snapshot_of_another_salt_is_refused(daemon: Daemon, host: Host, tmp_path: Path) -> None:
    """Its keys could not hit: the daemon says so and goes on."""
    save(daemon, host.file)
    other = Daemon(host.folder / "t", "64MiB", ["--state-dir", str(tmp_path / "state")])
    with other, pytest.raises(InvalidRequestError, match="another salt"):
        load(other, host.file)


def test_only_an_admin_may_and_only_where_nobody_else_writes(daemon: Daemon, host: Host) -> None:
    """Engines and observers are refused; so is a directory that others can write."""
    for role in (pb.ROLE_OBSERVER, pb.ROLE_ENGINE):
        with daemon.client(role) as client, pytest.raises(NotPermittedError):
            client.call(pb.Envelope(verify=pb.Verify()), PATIENCE_S)
    host.file.parent.chmod(0o777)
    with pytest.raises(InvalidRequestError, match="lets others write"):
        save(daemon, host.file)
    assert os.listdir(host.file.parent) == []


# -- verify and scrub -------------------------------------------------------------------------


def flip(daemon: Daemon, label: str) -> None:
    """A byte of this block in the pool's memory, past every interface."""
    with connect_worker(daemon.socket) as worker:
        chain = HOT[: HOT.index(label) + 1]
        lookup = worker.lookup(*chain)
        offset = lookup.blocks[-1].offset + 777
        worker.release(lookup.lease)
    for fd in Path(f"/proc/{daemon.serving_pid()}/fd").iterdir():
        if os.readlink(fd).startswith("/memfd:cachewarm-pool"):
            with open(os.open(fd, os.O_RDWR), "r+b", buffering=0) as memory:
                os.pwrite(memory.fileno(), b"\x01", offset)
            return
    raise AssertionError("the daemon has no pool")


def failures(daemon: Daemon) -> dict[str, int]:
    """By kind; "" = the sum."""
    name = "integrity_failures"
    told = daemon.status().counters
    return {key.removeprefix(name): told[key] for key in told if key.startswith(name)}


def test_verify_finds_a_flipped_byte_once(daemon: Daemon) -> None:
    """Exit status 1; the block and what hangs on it are gone, the rest is served."""
    status, told = ctl(daemon, "verify")
    assert (status, told["num_blocks"], told["num_failures"]) == (0, 7, 0)
    flip(daemon, "hot2")
    status, told = ctl(daemon, "verify")
    assert (status, told["num_failures"]) == (1, 1)
    assert found(daemon, HOT) == HOT[:2]
    assert found(daemon, COLD) == COLD
    status, told = ctl(daemon, "verify")
    assert (status, told["num_blocks"], told["num_failures"]) == (0, 5, 0)
    assert failures(daemon) == {"": 1, "_verify": 1, "_scrub": 0, "_recovery": 0, "_snapshot": 0}


def test_the_scrubber_finds_a_flipped_byte_and_readers_see_it(host: Host) -> None:
    """Nobody asks; whoever holds the block sees another generation and a changed word."""
    with host.daemon("--scrub-bytes-per-second", "64MiB") as daemon:
        seal(daemon, HOT)
        with connect_worker(daemon.socket) as reader:
            blocks = reader.lookup(*HOT).blocks
            pool = reader.client.pool
            assert pool is not None
            word = pool.change_word
            flip(daemon, "hot1")
            wait_until(lambda: daemon.status().counters["integrity_failures"] == 1, "it is found")
            assert pool.change_word > word
            changed = [int(pool.records["generation"][b.slot]) - b.generation for b in blocks]
            assert changed == [0, 1, 1, 1]
        assert found(daemon, HOT) == HOT[:1]
        wait_until(lambda: bool(daemon.status().counters["scrub_passes"]), "the pass ends")
        assert failures(daemon)["_scrub"] == 1


# -- versions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-1, 1])
def test_a_client_of_another_version_is_refused_by_type(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """It is told both versions; who is connected goes on."""
    version = protocol.PROTOCOL_VERSION
    with connect_worker(daemon.socket) as worker:
        monkeypatch.setattr(protocol, "PROTOCOL_VERSION", version + step)
        told = f"protocol version {version + step}, this daemon speaks {version}"
        for role in (pb.ROLE_OBSERVER, pb.ROLE_ENGINE, pb.ROLE_ADMIN):
            with pytest.raises(VersionMismatchError, match=told):
                Client.connect(daemon.socket, role, "other", timeout=PATIENCE_S)
        assert _read(worker, HOT) == HOT


@pytest.mark.parametrize("step", [-1, 1])
def test_a_daemon_of_another_version_refuses_this_client_by_type(host: Host, step: int) -> None:
    """The other way round, after an upgrade or a roll-back of the daemon alone."""
    version = protocol.PROTOCOL_VERSION + step
    prelude = f"import cachewarmd.protocol as p; p.PROTOCOL_VERSION = {version}"
    with (
        host.daemon(prelude=prelude) as other,
        pytest.raises(VersionMismatchError, match=f"this daemon speaks {version}"),
    ):
        other.client()
