"""Several engines and models on one real daemon: what they share, and what keeps them apart."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest

from cachewarmd.client import AttachedWeights, Client
from cachewarmd.errors import InvalidRequestError, NotFoundError
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, environment, private_pool, wait_until
from tests.fixtures.models import write_safetensors
from tests.stamped_worker import Kind, StampedWorker, connect

REPOSITORY = Path(__file__).resolve().parents[2]
MIB = 1 << 20
TOKENS = list(range(100, 100 + 96))
# Looks for broken invariants all the time, and soon gives back what a lost connection held.
WATCHFUL = "import cachewarmd.server as s; s.IDLE_CHECK_S = 0.05; s.QUARANTINE_S = 0.05"


@contextlib.contextmanager
def process(code: str, *args: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Python that finds our packages and the test helpers; killed at the end."""
    env = {**environment(), **variables}
    env["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, args)],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def next_line(of: subprocess.Popen[str]) -> str:
    """Blocks; an ended process gives an empty line."""
    assert of.stdout is not None
    return of.stdout.readline().strip()


def stamps_by_description(daemon: Daemon) -> dict[str, pb.StampStatus]:
    return {stamp.description: stamp for stamp in daemon.status().stamps}


@contextlib.contextmanager
def large_daemon(folder: Path) -> Iterator[Daemon]:
    """With three extents, all of them allocated: several slot sizes find their place."""
    size = 192 * MIB
    with Daemon(folder / "s", str(size), prelude=WATCHFUL) as daemon:
        wait_until(lambda: daemon.status().pool.committed_bytes == size, "all is allocated")
        yield daemon


# -- what keeps engines apart ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        Kind(kv_dtype="bf16", block_bytes=MIB // 2),
        Kind(block_size=32, block_bytes=2 * MIB),
        Kind(weights_sha256=b"x" * 32),
    ],
    ids=["kv dtype", "block size", "same shape, other model"],
)
def test_d6_engines_that_differ_never_hit_each_others_blocks(short_dir: Path, other: Kind) -> None:
    """Same tokens, one daemon: each finds what it published itself, byte for byte."""
    with (
        large_daemon(short_dir) as daemon,
        connect(daemon.socket, Kind()) as one,
        connect(daemon.socket, other) as two,
    ):
        assert one.request(TOKENS) == 0
        assert two.lookup(TOKENS)[1] == 0
        assert two.request(TOKENS) == 0
        for worker in (one, two):
            assert worker.request(TOKENS) == len(TOKENS) // worker.kind.block_size


def test_d6_key_of_another_stamp_opens_nothing(daemon: Daemon) -> None:
    """Even an engine that uses another's keys gets neither its blocks nor a place for its own."""
    with (
        connect(daemon.socket, Kind()) as one,
        connect(daemon.socket, Kind(weights_sha256=b"x" * 32)) as two,
    ):
        one.request(TOKENS)
        two.root = one.root
        assert two.lookup(TOKENS)[1] == 0
        peek = pb.Peek(stamp_id=two.stamp_id, keys=one.keys(TOKENS))
        assert two.call(peek=peek).peek_reply.num_blocks == 0
        peek.stamp_id = one.stamp_id
        assert one.call(peek=peek).peek_reply.num_blocks == len(TOKENS) // 16
        assert two.publish(two.lookup(TOKENS)[0], TOKENS) == (0, "MISMATCH")
        assert one.request(TOKENS) == len(TOKENS) // 16


def test_stamp_of_another_connection_opens_nothing(daemon: Daemon) -> None:
    """A stamp's number must have been registered by the one who uses it."""
    with (
        connect(daemon.socket, Kind()) as one,
        connect(daemon.socket, Kind(weights_sha256=b"x" * 32)) as two,
    ):
        for body in ({"lookup": pb.Lookup()}, {"peek": pb.Peek()}):
            (message,) = body.values()
            message.stamp_id = one.stamp_id
            with pytest.raises(InvalidRequestError, match="was not registered"):
                two.call(**body)


def test_two_slot_sizes_work_side_by_side_under_pressure(short_dir: Path) -> None:
    """Two engines with other block sizes fill a pool far too small for both: none is refused."""
    kinds = [Kind(block_bytes=MIB), Kind(kv_dtype="bf16", block_bytes=3 * MIB)]
    failures: list[BaseException] = []

    def run(worker: StampedWorker) -> None:
        try:
            for number in range(120):
                start = 1000 * (number % 40)
                worker.request(range(start, start + 3 * worker.kind.block_size))
        except BaseException as exc:
            failures.append(exc)

    with large_daemon(short_dir) as daemon, ExitStack() as stack:
        # Room is kept for the size of a worker that is connected: both are until all is checked.
        workers = [stack.enter_context(connect(daemon.socket, kind)) for kind in kinds]
        threads = [threading.Thread(target=run, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        status = daemon.status()
        assert all(stamp.num_blocks for stamp in status.stamps)
        assert {stamp.slot_bytes for stamp in status.stamps} == {MIB, 3 * MIB}
        evicted = [n for name, n in status.counters.items() if name.startswith("evicted_")]
        assert sum(evicted) > 100
        assert "refused_no_space" not in status.counters
        assert "broken_invariants" not in status.counters


# -- what they share ------------------------------------------------------------------------------

SHARER = """
import json, sys
from pathlib import Path
from tests.stamped_worker import Kind, connect
with connect(Path(sys.argv[1]), Kind()) as worker:
    tokens = json.loads(sys.argv[2])
    lease, found = worker.lookup(tokens)
    worker.publish(lease, tokens, found)
    keys = [key.hex() for key in worker.keys(tokens)]
    print(json.dumps({"found": found, "keys": keys}), flush=True)
    sys.stdin.readline()
    worker.release(lease)
    print("released", flush=True)
    sys.stdin.readline()
"""


def test_d3_processes_with_other_hash_seeds_make_the_same_keys_and_hit(daemon: Daemon) -> None:
    """Keys depend on stamp, tokens and the daemon's salt alone."""
    args = (daemon.socket, json.dumps(TOKENS))
    with process(SHARER, *args, PYTHONHASHSEED="1") as one:
        first = json.loads(next_line(one))
    with process(SHARER, *args, PYTHONHASHSEED="2") as two:
        second = json.loads(next_line(two))
    assert first["keys"] == second["keys"]
    assert (first["found"], second["found"]) == (0, len(TOKENS) // 16)


def test_prefix_is_hit_while_its_publisher_lives_lets_go_and_dies(daemon: Daemon) -> None:
    """Blocks belong to the daemon: the publisher's lease, release and SIGKILL change nothing."""
    num_blocks = len(TOKENS) // 16
    with (
        process(SHARER, daemon.socket, json.dumps(TOKENS)) as publisher,
        connect(daemon.socket, Kind()) as other,
    ):
        assert json.loads(next_line(publisher))["found"] == 0
        assert publisher.stdin is not None
        assert daemon.status().counters["leases"] == 1
        assert other.request([*TOKENS, *range(16)]) == num_blocks
        publisher.stdin.write("release\n")
        publisher.stdin.flush()
        assert next_line(publisher) == "released"
        assert daemon.status().counters["leases"] == 0
        assert other.request(TOKENS) == num_blocks
        publisher.kill()
        publisher.wait(PATIENCE_S)
        assert other.request([*TOKENS, *range(32)]) == num_blocks + 1


def test_prefix_is_hit_after_its_publisher_was_killed_with_a_lease(daemon: Daemon) -> None:
    """What a dead process held is neither lost nor kept for ever."""
    with connect(daemon.socket, Kind()) as other:
        with process(SHARER, daemon.socket, json.dumps(TOKENS)) as publisher:
            assert json.loads(next_line(publisher))["found"] == 0
        wait_until(lambda: daemon.status().counters["leases"] == 0, "the lease is revoked")
        assert other.request(TOKENS) == len(TOKENS) // 16


# -- nothing is lost ------------------------------------------------------------------------------


def one_short_request(worker: StampedWorker, number: int) -> None:
    """Look up, publish, release; or one of the things that go wrong in between."""
    tokens = range(1000 * (number % 50), 1000 * (number % 50) + 48)
    lease, found = worker.lookup(tokens)
    match number % 8:
        case 1:
            return  # the connection ends with the lease on it
        case 2:
            with pytest.raises(InvalidRequestError):
                bad = pb.PublishBlock(parent_key=worker.root, key=bytes(32), num_tokens=99)
                worker.call(publish=pb.Publish(lease=lease, chain=[bad], is_root=True))
        case 3:
            with pytest.raises(NotFoundError):
                worker.release(lease + 10_000)
        case 4:
            assert worker.publish(lease, range(9_000_000, 9_000_032), first=1) == (0, "NO_PARENT")
        case 5:
            # Closed before the reply: sealed or not, nobody holds it.
            worker.client.submit(pb.Envelope(publish=pb.Publish(lease=lease)))
            return
        case 6:
            worker.lookup(tokens)  # a second lease, never given back
            assert worker.publish(lease, tokens, found)[1] == ""
            return
        case _:
            assert worker.publish(lease, tokens, found)[1] == ""
    worker.release(lease)


def test_d10_four_hundred_short_requests_lose_no_block_and_no_lease(short_dir: Path) -> None:
    """Stops, errors and lost connections leave the daemon as it was; then one client has it all."""
    with Daemon(short_dir / "s", "64MiB", prelude=WATCHFUL) as daemon:

        def fds_of_daemon() -> int:
            return len(os.listdir(f"/proc/{daemon.pid}/fd"))

        # With no connection so far, and the process that will read weights one day beside it.
        wait_until(lambda: psutil.Process(daemon.pid).children(), "a packer")
        fds = fds_of_daemon()
        for number in range(0, 400, 8):
            with connect(daemon.socket, Kind()) as worker:
                for i in (0, 2, 3, 4, 7):
                    one_short_request(worker, number + i)
            for i in (1, 5, 6):
                with connect(daemon.socket, Kind()) as worker:
                    one_short_request(worker, number + i)
        wait_until(lambda: daemon.status().counters["leases"] == 0, "all leases are back")
        with daemon.client(pb.ROLE_ADMIN) as admin:
            reply = admin.call(pb.Envelope(evict=pb.Evict()), PATIENCE_S)[0].evict_reply
        assert reply.num_kept == 0
        wait_until(lambda: fds_of_daemon() <= fds, "no more descriptors than before")
        pool = daemon.status().pool
        assert pool.num_extents_free == pool.num_extents == 1
        assert pool.bytes["free"] == pool.pool_bytes
        with connect(daemon.socket, Kind()) as worker:
            tokens = range(64 * 16)
            lease, _ = worker.lookup(tokens)
            assert worker.publish(lease, tokens) == (64, "")
            assert worker.publish(worker.lookup([])[0], TOKENS) == (0, "NO_SPACE")
            worker.release(lease)
            assert worker.request(TOKENS) == 0
        assert "broken_invariants" not in daemon.status().counters


# -- versions of a model --------------------------------------------------------------------------


def write_model(folder: Path, seed: int, num_values: int = 2) -> Path:
    folder.mkdir()
    values = np.random.default_rng(seed).standard_normal(num_values, np.float32)
    write_safetensors(folder / "model.safetensors", {"a": values})
    return folder


def plan_of(num_values: int = 2) -> pb.PackPlan:
    size = 4 * num_values
    plan = pb.PackPlan(description="test plan", segment_bytes=-(-size // 4096) * 4096)
    plan.tensors.add(name="a", op=pb.PACK_OP_CAST, dtype="F32", shape=[num_values], num_bytes=size)
    return plan


def attach(client: Client, folder: Path, name: str) -> AttachedWeights:
    return client.attach_weights(folder, name, "", plan_of(), lambda *_: None, PATIENCE_S)


@contextlib.contextmanager
def serving(daemon: Daemon, folder: Path, name: str) -> Iterator[StampedWorker]:
    """An engine that starts: it attaches the weights, then registers its stamp."""
    with private_pool(MIB) as fd, daemon.client(pb.ROLE_ENGINE, private_pool=(fd, MIB)) as client:
        digest = attach(client, folder, name).weights_sha256
        yield StampedWorker(client, fd, Kind(digest, kv_dtype=folder.name))


def superseded(daemon: Daemon) -> dict[str, bool]:
    """By the stamp's description, which names the directory."""
    return {name.split(";")[0]: s.superseded for name, s in stamps_by_description(daemon).items()}


def sequences(count: int, first: int = 0) -> list[Sequence[int]]:
    """Prompts of one block each."""
    return [range(1000 * i, 1000 * i + 16) for i in range(first, first + count)]


def test_new_version_evicts_the_old_ones_blocks_first(daemon: Daemon, tmp_path: Path) -> None:
    """Until there is no room they hit; then they go before everything of the new version."""
    v1, v2 = write_model(tmp_path / "v1", 1), write_model(tmp_path / "v2", 2)
    with serving(daemon, v1, "m") as old, serving(daemon, v2, "m") as new:
        for tokens in sequences(32):
            assert new.request(tokens) == 0
        for tokens in sequences(32):
            assert old.request(tokens) == 0
        assert superseded(daemon) == {"v1": True, "v2": False}
        assert [old.request(tokens) for tokens in sequences(32)] == [1] * 32
        held, found = old.lookup(sequences(1)[0])
        assert found == 1
        for tokens in sequences(31, 100):
            assert new.request(tokens) == 0
        assert [new.request(tokens) for tokens in sequences(32)] == [1] * 32
        assert [new.request(tokens) for tokens in sequences(31, 100)] == [1] * 31
        assert old.lookup(sequences(1)[0])[1] == 1  # leased: it never goes
        counters = daemon.status().counters
        assert counters["evicted_superseded"] == 31
        assert "evicted_pressure" not in counters
        old.release(held)


def test_rollback_makes_the_old_version_current_again(daemon: Daemon, tmp_path: Path) -> None:
    """Its blocks still hit, and now the newer version's are the first to go."""
    v1, v2 = write_model(tmp_path / "v1", 1), write_model(tmp_path / "v2", 2)
    with serving(daemon, v1, "m") as old:
        for tokens in sequences(16):
            old.request(tokens)
    with serving(daemon, v2, "m") as new:
        for tokens in sequences(48):
            new.request(tokens)
    with serving(daemon, v1, "m") as again:
        assert superseded(daemon) == {"v1": False, "v2": True}
        assert [again.request(tokens) for tokens in sequences(16)] == [1] * 16
        for tokens in sequences(48, 100):
            again.request(tokens)
        assert [again.request(tokens) for tokens in sequences(16)] == [1] * 16
    counters = daemon.status().counters
    assert counters["evicted_superseded"] == 48
    assert "evicted_pressure" not in counters


def test_warming_the_next_version_supersedes_nothing_yet(daemon: Daemon, tmp_path: Path) -> None:
    """Only an engine that attaches the new weights moves the name to them."""
    v1, v2 = write_model(tmp_path / "v1", 1), write_model(tmp_path / "v2", 2)
    with serving(daemon, v1, "m"):
        with daemon.client(pb.ROLE_ADMIN) as admin:
            fd = os.open(v2, os.O_RDONLY | os.O_DIRECTORY)
            try:
                warmup = pb.Warmup(model_name="m", plan=plan_of())
                admin.call(pb.Envelope(warmup=warmup), PATIENCE_S, [fd])
            finally:
                os.close(fd)
        wait_until(lambda: len(daemon.status().models) == 2, "both versions are loaded")
        assert not any(model.superseded for model in daemon.status().models)
        assert superseded(daemon) == {"v1": False}
        with daemon.client(pb.ROLE_ENGINE) as engine:
            assert attach(engine, v2, "m").already_warm
            assert superseded(daemon) == {"v1": True}


def test_status_tells_who_uses_which_weights(daemon: Daemon, tmp_path: Path) -> None:
    """By connection: an engine counts from its attach until it is gone."""
    v1, v2 = write_model(tmp_path / "v1", 1), write_model(tmp_path / "v2", 2)

    def users() -> list[tuple[int, bool]]:
        return [(model.num_clients, model.superseded) for model in daemon.status().models]

    with daemon.client(pb.ROLE_ENGINE) as one:
        attach(one, v1, "m")
        with serving(daemon, v1, "m"), daemon.client(pb.ROLE_ENGINE) as three:
            assert users() == [(2, False)]
            attach(three, v2, "m")
            assert users() == [(2, True), (1, False)]
        wait_until(lambda: users() == [(1, True), (0, False)], "two have left")


def test_evict_by_name_takes_all_versions(daemon: Daemon, tmp_path: Path) -> None:
    """Also those whose weights are no longer in memory: files replaced in place."""
    folder = write_model(tmp_path / "m", 1)
    with serving(daemon, folder, "m") as old:
        old.request(TOKENS)
    write_model(tmp_path / "next", 2)
    (tmp_path / "next" / "model.safetensors").replace(folder / "model.safetensors")
    with serving(daemon, folder, "m") as new, connect(daemon.socket, Kind()) as stranger:
        new.request(TOKENS)
        stranger.request(TOKENS)
        assert len(daemon.status().models) == 1
        with daemon.client(pb.ROLE_ADMIN) as admin:
            reply = admin.call(pb.Envelope(evict=pb.Evict(model="m")), PATIENCE_S)[0].evict_reply
        assert reply.num_blocks == 2 * len(TOKENS) // 16
        assert stranger.request(TOKENS) == len(TOKENS) // 16


# -- weights in memory ----------------------------------------------------------------------------

ATTACHER = """
import sys
from pathlib import Path
import numpy as np
from cachewarmd.client import Client
from cachewarmd.v1 import control_pb2 as pb
socket, folder, plan = sys.argv[1:]
with Client.connect(Path(socket), pb.ROLE_ENGINE, "attacher", timeout=30) as client:
    print("connected", flush=True)
    sys.stdin.readline()
    plan = pb.PackPlan.FromString(bytes.fromhex(plan))
    weights = client.attach_weights(Path(folder), "m", "", plan, lambda *_: None, 30)
    print(int(np.bitwise_xor.reduce(weights.memory.view(np.uint64))), flush=True)
    sys.stdin.readline()
"""


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by field of smaps_rollup: Rss, Pss, Private_Clean, ..."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return {name: int(kb) << 10 for name, kb in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}


def private_bytes(pid: int) -> int:
    told = memory_of(pid)
    return told["Private_Clean"] + told["Private_Dirty"]


def touch_weights(attacher: subprocess.Popen[str]) -> int:
    """Let it attach and read every byte; what it read, folded."""
    assert attacher.stdin is not None
    attacher.stdin.write("attach\n")
    attacher.stdin.flush()
    return int(next_line(attacher))


def test_second_engine_adds_less_than_5_mb_for_the_same_weights(
    daemon: Daemon, tmp_path: Path
) -> None:
    """All processes together hold one copy: attaching and touching all of it costs page tables."""
    num_values = 24 * MIB
    size = 4 * num_values
    folder = write_model(tmp_path / "large", 1, num_values)
    args = (daemon.socket, folder, plan_of(num_values).SerializeToString().hex())
    with process(ATTACHER, *args) as one, process(ATTACHER, *args) as two:
        assert next_line(one) == next_line(two) == "connected"
        everybody = (daemon.pid, one.pid, two.pid)

        def pss() -> int:
            return sum(memory_of(pid)["Pss"] for pid in everybody)

        nobody_attached = pss()
        folded = touch_weights(one)
        before, private, rss = pss(), private_bytes(two.pid), memory_of(two.pid)["Rss"]
        # The measure sees weights at all: the first one has them now, and alone. Not exactly,
        # because libraries that other processes of the machine map count by their number.
        assert before - nobody_attached > size // 2
        assert touch_weights(two) == folded
        assert memory_of(two.pid)["Rss"] - rss > size - 5_000_000
        assert pss() - before < 5_000_000
        assert private_bytes(two.pid) - private < 5_000_000
