"""Weights as clients get them: one copy for all, vouched for by their bytes, whatever files do."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachewarmd.budget import RESERVE_BYTES
from cachewarmd.client import Client, load_private
from cachewarmd.errors import ModelFilesError, NoSpaceError, ProtocolError
from cachewarmd.v1 import control_pb2 as pb
from engine.models.config import load_config
from engine.models.packing import reference_plan
from tests.daemon import PATIENCE_S, Daemon, fake_cgroup, pmd_mapped_bytes, wait_until
from tests.fixtures.models import write_m_rand
from tests.fixtures.weight_files import (
    MALFORMED,
    add_old_copy,
    entry,
    write_file,
    write_index,
    write_safetensors,
)

MIB = 1 << 20
# Loads that take a moment, so that something can happen meanwhile.
SLOW_LOADS = """
import cachewarmd.packers as p
p.CODE = '''
import time, cachewarmd.weights as w
read_all = w._read_all
w._read_all = lambda *args: (time.sleep(0.5), read_all(*args))[1]
''' + p.CODE
"""


def write_model(folder: Path, *values: float) -> Path:
    """A model directory with one F32 tensor `a`."""
    folder.mkdir(exist_ok=True)
    data = struct.pack(f"<{len(values)}f", *values)
    entry = {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, len(data)]}
    head = json.dumps({"a": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    return folder


def plan_of(num_values: int, segment_bytes: int = 4096) -> pb.PackPlan:
    plan = pb.PackPlan(description="test plan", segment_bytes=segment_bytes)
    plan.tensors.add(
        name="a", op=pb.PACK_OP_CAST, dtype="F32", shape=[num_values], num_bytes=4 * num_values
    )
    return plan


@contextlib.contextmanager
def directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def attach_fd(client: Client, folder: Path, plan: pb.PackPlan) -> tuple[pb.AttachWeightsReply, int]:
    """The reply, and the segment's descriptor."""
    request = pb.AttachWeights(model_name=folder.name, plan=plan)
    with directory(folder) as fd:
        reply, fds = client.call(pb.Envelope(attach_weights=request), PATIENCE_S, [fd])
    (segment_fd,) = fds
    return reply.attach_weights_reply, segment_fd


def attach(client: Client, folder: Path, plan: pb.PackPlan) -> tuple[bytes, bytes, bool]:
    """(SHA-256, first bytes of the segment, already warm)."""
    reply, fd = attach_fd(client, folder, plan)
    try:
        return reply.weights_sha256, os.pread(fd, 8, 0), reply.already_warm
    finally:
        os.close(fd)


def digest_of(folder: Path) -> bytes:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).digest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m", 1.0, 2.0)


@pytest.fixture
def engine(module_daemon: Daemon) -> Iterator[Client]:
    with module_daemon.client(pb.ROLE_ENGINE) as client:
        yield client


def test_two_clients_map_the_same_memory(module_daemon: Daemon, model: Path) -> None:
    """The second attach reads nothing and gets the same inode."""
    with module_daemon.client(pb.ROLE_ENGINE) as one, module_daemon.client(pb.ROLE_ENGINE) as two:
        first, first_fd = attach_fd(one, model, plan_of(2))
        second, second_fd = attach_fd(two, model, plan_of(2))
    assert (first.already_warm, second.already_warm) == (False, True)
    assert os.fstat(first_fd).st_ino == os.fstat(second_fd).st_ino
    for fd in (first_fd, second_fd):
        os.close(fd)


def test_two_clients_at_once_share_one_load(short_dir: Path, model: Path) -> None:
    """Who asks during a load waits for it; one copy results."""
    with Daemon(short_dir / "s", "64MiB", prelude=SLOW_LOADS) as daemon:
        warm: list[bool] = []

        def run() -> None:
            with daemon.client(pb.ROLE_ENGINE) as client:
                warm.append(attach(client, model, plan_of(2))[2])

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(warm) == [False, True, True, True]
        assert len(daemon.status().models) == 1


def test_same_bytes_in_another_directory_are_one_copy(
    engine: Client, model: Path, tmp_path: Path
) -> None:
    """Identity is the bytes, not the path."""
    copy = write_model(tmp_path / "copy", 1.0, 2.0)
    _, one = attach_fd(engine, model, plan_of(2))
    _, two = attach_fd(engine, copy, plan_of(2))
    assert os.fstat(one).st_ino == os.fstat(two).st_ino
    os.close(one)
    os.close(two)


def test_segment_can_only_be_read(engine: Client, model: Path) -> None:
    """Clients can neither write nor map it for writing."""
    _, fd = attach_fd(engine, model, plan_of(2))
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    os.close(fd)


def test_client_maps_what_a_private_load_gives(module_daemon: Daemon, model: Path) -> None:
    """With and without the daemon an engine sees the same bytes and the same digest."""
    told: list[str] = []
    with module_daemon.client(pb.ROLE_ENGINE) as client:
        shared = client.attach_weights(
            model, "m", "", plan_of(2), lambda phase, *_: told.append(phase), PATIENCE_S
        )
    private = load_private(model, "", plan_of(2))
    assert shared.is_shared
    assert not private.is_shared
    assert shared.weights_sha256 == private.weights_sha256 == digest_of(model)
    assert shared.version == private.version == digest_of(model).hex()[:12]
    assert bytes(shared.memory) == bytes(private.memory)
    assert bytes(shared.memory[:8]) == struct.pack("<2f", 1, 2)


def test_huge_pages_of_a_segment_are_mapped_as_such_and_told(
    module_daemon: Daemon, tmp_path: Path
) -> None:
    """What status calls huge is so in a client's map; the rest is small, and as good."""
    model = write_model(tmp_path / "large", *range(MIB))
    with module_daemon.client(pb.ROLE_ENGINE) as client:
        plan = plan_of(MIB, 4 * MIB + 64)
        shared = client.attach_weights(model, "large", "", plan, lambda *_: None, PATIENCE_S)
    assert np.array_equal(shared.memory[: 4 * MIB].view("<f4"), np.arange(MIB, dtype="<f4"))
    assert not shared.memory[4 * MIB :].any()
    assert len(shared.memory) == 6 * MIB

    def is_told() -> bool:  # when the background is done too
        shared.memory[::4096].sum()  # a page that moved is mapped again when it is read
        (told,) = [m for m in module_daemon.status().models if m.model_name == "large"]
        return pmd_mapped_bytes(shared.memory.ctypes.data) == told.huge_bytes

    wait_until(is_told, "status and map agree")
    status = module_daemon.status()
    assert status.pool.huge_bytes <= status.pool.committed_bytes


def test_files_that_went_missing_leave_the_loaded_weights_in_service(
    module_daemon: Daemon, engine: Client, tmp_path: Path
) -> None:
    """A deploy in progress does not take the running version away; status tells."""
    model = write_model(tmp_path / "moving", 7.0, 8.0)
    loaded = attach(engine, model, plan_of(2))
    (model / "model.safetensors").rename(model / "moved")
    assert attach(engine, model, plan_of(2)) == (*loaded[:2], True)
    (told,) = [m for m in module_daemon.status().models if m.model_name == "moving"]
    assert not told.files_present


def test_changed_byte_is_another_model_even_with_size_and_times_restored(
    engine: Client, model: Path
) -> None:
    """The bytes decide; a file's clock can be set back, its change time can't."""
    before = attach(engine, model, plan_of(2))
    path = model / "model.safetensors"
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 3.0))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert path.stat().st_size == info.st_size
    after = attach(engine, model, plan_of(2))
    assert after == (digest_of(model), struct.pack("<2f", 1, 3), False)
    assert after[0] != before[0]


def test_touched_file_with_the_same_bytes_is_only_hashed(engine: Client, model: Path) -> None:
    """Nothing is packed again, and the segment is the same."""
    _, one = attach_fd(engine, model, plan_of(2))
    os.utime(model / "model.safetensors")
    reply, two = attach_fd(engine, model, plan_of(2))
    assert reply.already_warm
    assert os.fstat(one).st_ino == os.fstat(two).st_ino
    os.close(one)
    os.close(two)


def test_old_mapping_survives_new_weights(engine: Client, model: Path) -> None:
    """An engine on the old version keeps its memory when the daemon has gone on."""
    _, old = attach_fd(engine, model, plan_of(2))
    write_model(model, 5.0, 6.0)
    assert attach(engine, model, plan_of(2))[1] == struct.pack("<2f", 5, 6)
    assert os.pread(old, 8, 0) == struct.pack("<2f", 1, 2)
    os.close(old)


def test_malformed_files_are_an_error_and_nothing_stays_behind(
    short_dir: Path, model: Path
) -> None:
    """Clients that wait for the same bad load all get the error; a repaired file then loads."""
    whole = (model / "model.safetensors").read_bytes()
    with Daemon(short_dir / "s", "64MiB", prelude=SLOW_LOADS) as daemon:
        # With or without one for the packer that is started ahead, which is used up below.
        before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        (model / "model.safetensors").write_bytes(whole[:-1])
        errors: list[str] = []

        def run() -> None:
            with daemon.client(pb.ROLE_ENGINE) as client:
                try:
                    attach(client, model, plan_of(2))
                except ModelFilesError as exc:
                    errors.append(str(exc))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 4
        assert all("truncated or padded" in error for error in errors)
        wait_until(
            lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= before, "no descriptor is left"
        )
        (model / "model.safetensors").write_bytes(whole)
        with daemon.client(pb.ROLE_ENGINE) as client:
            assert attach(client, model, plan_of(2))[0] == digest_of(model)


def test_load_goes_on_when_its_client_leaves(short_dir: Path, model: Path) -> None:
    """An engine killed while it starts leaves neither a leak nor wasted reading."""
    with Daemon(short_dir / "s", "64MiB", prelude=SLOW_LOADS) as daemon:
        with daemon.client(pb.ROLE_ENGINE) as client, directory(model) as fd:
            request = pb.AttachWeights(model_name="m", plan=plan_of(2))
            client.submit(pb.Envelope(attach_weights=request), [fd])
        wait_until(lambda: len(daemon.status().models) == 1, "the load has ended")
        with daemon.client(pb.ROLE_ENGINE) as client:
            assert attach(client, model, plan_of(2)) == (
                digest_of(model), struct.pack("<2f", 1, 2), True,
            )  # fmt: skip


def test_stop_does_not_wait_for_a_load(short_dir: Path, model: Path) -> None:
    """SIGTERM in the middle of reading ends cleanly, without the rest of the file."""
    prelude = SLOW_LOADS.replace("0.5", "1.0")
    with Daemon(short_dir / "s", "64MiB", prelude=prelude) as daemon:
        with daemon.client(pb.ROLE_ENGINE) as client, directory(model) as fd:
            request = pb.AttachWeights(model_name="m", plan=plan_of(2))
            future = client.submit(pb.Envelope(attach_weights=request), [fd])
            client.call(pb.Envelope(status=pb.Status()), PATIENCE_S)
            daemon.stop()
            assert future.exception(PATIENCE_S) is not None
        assert daemon.wait() == 0
        assert "weights_loaded" not in daemon.log()
        assert "Traceback" not in daemon.log()


def test_g3_weights_beyond_the_limit_are_refused_and_the_daemon_lives(
    short_dir: Path, tmp_path: Path, model: Path
) -> None:
    """NO_SPACE with needed and available bytes; what fits is still served."""
    fake_cgroup(tmp_path, RESERVE_BYTES + 200 * MIB)
    with Daemon(short_dir / "s", "64MiB", ["--cgroup-root", str(tmp_path)]) as daemon:
        fake_cgroup(tmp_path, RESERVE_BYTES + 50 * MIB)
        with daemon.client(pb.ROLE_ENGINE) as client:
            expected = f"weights of m needs {60 * MIB} bytes, {50 * MIB} are available"
            with pytest.raises(NoSpaceError, match=expected):
                attach(client, model, plan_of(2, 60 * MIB))
            assert not attach(client, model, plan_of(2, 40 * MIB))[2]
        assert daemon.status().pid == daemon.pid


def test_attach_needs_exactly_one_descriptor(module_daemon: Daemon, model: Path) -> None:
    """Without a directory there is nothing to read; a file is no directory."""
    request = pb.AttachWeights(model_name="m", plan=plan_of(2))
    envelope = pb.Envelope(attach_weights=request)
    with (
        module_daemon.client(pb.ROLE_ENGINE) as client,
        pytest.raises(ProtocolError, match="attach_weights takes 1 to 1"),
    ):
        client.call(envelope, PATIENCE_S)
    with (
        module_daemon.client(pb.ROLE_ENGINE) as client,
        (model / "model.safetensors").open("rb") as file,
        pytest.raises(ModelFilesError),
    ):
        client.call(envelope, PATIENCE_S, [file.fileno()])


def test_h5_daemon_survives_every_malformed_file(daemon: Daemon, tmp_path: Path) -> None:
    """Each is an error with file and reason, nothing is published, and what is right loads."""
    good = write_model(tmp_path / "good", 1.0, 2.0)
    with daemon.client(pb.ROLE_ENGINE) as client:
        loaded = attach(client, good, plan_of(2))
        for number, (case, malformed) in enumerate(MALFORMED.items()):
            bad = tmp_path / str(number)
            bad.mkdir()
            (bad / "model.safetensors").write_bytes(malformed.content)
            with pytest.raises(ModelFilesError, match=f"model.safetensors: .*{malformed.reason}"):
                attach(client, bad, plan_of(2))
            assert [model.model_name for model in daemon.status().models] == ["good"], case
        assert attach(client, good, plan_of(2)) == (*loaded[:2], True)
    assert daemon.is_running()
    assert "Traceback" not in daemon.log()


def test_h5_unusual_tensors_load(engine: Client, tmp_path: Path) -> None:
    """Empty ones, scalars, unknown ones and a mix of dtypes are no reason to refuse a model."""
    folder = tmp_path / "unusual"
    folder.mkdir()
    tensors = {
        "layer.rotary_emb.inv_freq": np.ones(3),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(2.5, np.float16),
        "a": np.array([1.0, 1e5], np.float32),
        "steps": np.array([7]),
    }
    write_safetensors(folder / "model.safetensors", {**tensors, "h": ("BF16", [1], b"\x80\x3f")})
    plan = plan_of(2)
    for name, shape, offset in (("scalar", [], 64), ("h", [1], 128), ("empty", [0, 4], 192)):
        size = 4 * int(np.prod(shape))
        plan.tensors.add(
            name=name, op=pb.PACK_OP_CAST, dtype="F32", shape=shape, offset=offset, num_bytes=size
        )
    _, fd = attach_fd(engine, folder, plan)
    found = np.frombuffer(os.pread(fd, 192, 0), "<f4")
    os.close(fd)
    assert found[[0, 1, 16, 32]].tolist() == [1.0, 1e5, 2.5, 1.0]


def test_h3_index_decides_and_a_new_index_is_a_new_model(
    module_daemon: Daemon, engine: Client, tmp_path: Path
) -> None:
    """Of two copies the index names one; when it names the other, that one is loaded."""
    folder = tmp_path / "indexed"
    folder.mkdir()
    write_file(folder / "1", {"a": entry([2], 0, 8)}, struct.pack("<2f", 9, 9))
    write_file(
        folder / "2", {"a": entry([2], 0, 8), "b": entry([0], 8, 8)}, struct.pack("<2f", 1, 2)
    )
    (folder / "consolidated.safetensors").write_bytes(b"junk")
    write_index(folder, {"a": "2", "b": "2"})
    first = attach(engine, folder, plan_of(2))
    assert first[1] == struct.pack("<2f", 1, 2)
    assert attach(engine, folder, plan_of(2)) == (*first[:2], True)
    write_index(folder, {"a": "1", "b": "2"})
    second = attach(engine, folder, plan_of(2))
    assert second[1:] == (struct.pack("<2f", 9, 9), False)
    assert second[0] != first[0]
    write_index(folder, {"a": "3", "b": "2"})
    with pytest.raises(ModelFilesError, match="3: No such file"):
        attach(engine, Path(shutil.copytree(folder, tmp_path / "copy")), plan_of(2))
    assert attach(engine, folder, plan_of(2))[1] == second[1]
    (told,) = [m for m in module_daemon.status().models if m.model_name == "indexed"]
    assert not told.files_present


@pytest.mark.parametrize("shards", [1, 3])
def test_h1_tied_head_is_checked_by_the_daemon(shards: int, engine: Client, tmp_path: Path) -> None:
    """Through the engine's own plan: equal loads, absent gives the same bytes, other is refused."""
    tied = {"tie_word_embeddings": True}
    folders = {
        head: write_m_rand(tmp_path / head, head=head, config=tied, shards=shards)
        for head in ("none", "embedding", "own")
    }
    plan = reference_plan(load_config(folders["none"]))
    segments = []
    for head in ("none", "embedding"):
        _, fd = attach_fd(engine, folders[head], plan)
        segments.append(os.pread(fd, plan.segment_bytes, 0))
        os.close(fd)
    assert segments[0] == segments[1]
    with pytest.raises(ModelFilesError, match=r"embed_tokens.weight and lm_head.weight differ"):
        attach(engine, folders["own"], plan)


def test_h3_old_copies_in_real_shards_change_no_byte(engine: Client, tmp_path: Path) -> None:
    """A model whose shards hold outdated tensors is packed like one without them."""
    segments = []
    for number in range(2):
        folder = write_m_rand(tmp_path / str(number), shards=2)
        if number:
            add_old_copy(folder, "lm_head.weight", "model-00001-of-00002.safetensors")
            add_old_copy(folder, "model.norm.weight", "model-00001-of-00002.safetensors")
        plan = reference_plan(load_config(folder))
        reply, fd = attach_fd(engine, folder, plan)
        segments.append((os.pread(fd, plan.segment_bytes, 0), reply.weights_sha256))
        os.close(fd)
    assert segments[0][0] == segments[1][0]
    assert segments[0][1] != segments[1][1]
