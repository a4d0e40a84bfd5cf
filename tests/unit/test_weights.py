"""Weight files in, sealed segments out: what is refused, what is read how, what can't change."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cachewarmd import segment, weights
from cachewarmd.errors import CachewarmError, InvalidRequestError, ModelFilesError, NoSpaceError
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import INDEX_NAME, SINGLE_NAME, file_identities
from cachewarmd.weights import Segment
from tests.daemon import open_fds
from tests.fixtures.weight_files import MALFORMED, entry, write_file, write_index


@pytest.fixture(autouse=True)
def no_fd_leak() -> Iterator[None]:
    """Every test here must close what it opened, and so must the code after every error."""
    before = open_fds()
    yield
    assert open_fds() == before


def plan_of(*items: tuple[str, list[int], str, int], copy: bool = False) -> pb.PackPlan:
    """Tensors (name, shape, dtype in the file, bytes in the file), 64-byte aligned in order."""
    plan = pb.PackPlan(description="test")
    offset = 0
    for name, shape, _, num_bytes in items:
        size = num_bytes if copy else 4 * int(np.prod(shape, dtype=int))
        op, dtype = (pb.PACK_OP_COPY, "") if copy else (pb.PACK_OP_CAST, "F32")
        plan.tensors.add(name=name, op=op, shape=shape, dtype=dtype, offset=offset, num_bytes=size)
        offset += -(-size // 64) * 64
    plan.segment_bytes = max(offset, 64)
    return plan


ONE = plan_of(("a", [2], "F32", 8))


def allocate(fd: int, size: int, _: object) -> None:
    """Takes the pages without asking a budget."""
    segment.reserve(fd, 0, size)


def load(
    folder: Path, plan: pb.PackPlan = ONE, progress: weights.Progress = lambda *_: None
) -> tuple[Segment, npt.NDArray[np.uint8]]:
    """Load, and map what was loaded; the segment's own descriptor is closed."""
    dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        loaded, _ = weights.load(dir_fd, plan, progress, allocate, follow=False)
    finally:
        os.close(dir_fd)
    try:
        memory = np.array(segment.map_memory(loaded.fd, loaded.size))
    finally:
        os.close(loaded.fd)
    return loaded, memory


def floats(memory: npt.NDArray[np.uint8], plan: pb.PackPlan, name: str) -> list[float]:
    item = next(tensor for tensor in plan.tensors if tensor.name == name)
    data = memory[item.offset : item.offset + item.num_bytes].tobytes()
    return [value for (value,) in struct.iter_unpack("<f", data)]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MALFORMED)
def test_h5_malformed_file_is_refused_with_its_name_and_reason(case: str, tmp_path: Path) -> None:
    """Anything that is not exactly a safetensors file is an error, before anything is allocated."""
    (tmp_path / SINGLE_NAME).write_bytes(MALFORMED[case].content)
    with pytest.raises(ModelFilesError, match=f"{SINGLE_NAME}: .*{MALFORMED[case].reason}"):
        load(tmp_path)


def test_long_texts_of_a_file_are_cut_in_errors(tmp_path: Path) -> None:
    """An error fits in a message, whatever a file has in the place of a number."""
    header = {"a": {**entry([2], 0, 8), "shape": ["x" * 1_000_000]}}
    write_file(tmp_path / SINGLE_NAME, header, bytes(8))
    with pytest.raises(ModelFilesError) as caught:
        load(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("raw", [b"\\ud800", b"\xed\xa0\x80"])
def test_name_that_is_no_text_is_refused_in_an_error_that_can_be_told(
    raw: bytes, tmp_path: Path
) -> None:
    """A lone surrogate, escaped or not: no message could carry it."""
    header = b'{"%s":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' % raw
    write_file(tmp_path / SINGLE_NAME, header, bytes(8))
    with pytest.raises(ModelFilesError, match="malformed header") as caught:
        load(tmp_path)
    assert pb.ErrorReply(message=str(caught.value)).SerializeToString()


def test_missing_file_is_named(tmp_path: Path) -> None:
    """An empty directory is an error that says which file was looked for."""
    with pytest.raises(ModelFilesError, match=f"{SINGLE_NAME}: No such file"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["directory", "fifo", "link"])
def test_only_plain_files_are_opened(kind: str, tmp_path: Path) -> None:
    """Neither a FIFO (it would hang) nor a link (it may lead anywhere) is followed."""
    path = tmp_path / SINGLE_NAME
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        write_file(tmp_path / "elsewhere", {"a": entry([2], 0, 8)}, bytes(8))
        path.symlink_to("elsewhere")
    with pytest.raises(ModelFilesError, match=SINGLE_NAME):
        load(tmp_path)


INDEXES: Mapping[str, tuple[Any, str]] = {
    "missing shard": ({"a": "gone.safetensors"}, "gone.safetensors: No such file"),
    "parent directory": ({"a": "../x.safetensors"}, "not a file name"),
    "absolute path": ({"a": "/etc/passwd"}, "not a file name"),
    "the directory itself": ({"a": "."}, "not a file name"),
    "NUL": ({"a": "x\0y"}, "not a file name"),
    "lone surrogate": ({"a": "\ud800"}, "not a file name"),
    "very long name": ({"a": "\n" * 1_000_000}, "not a file name"),
    "index for a shard": ({"a": INDEX_NAME}, "malformed: .* the index itself"),
    "map is a list": (["a"], "malformed"),
    "empty map": ({}, "malformed"),
    "number for a file": ({"a": 1}, "malformed"),
    "list for a file": ({"a": ["b"]}, "malformed"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_bad_index_is_refused(case: str, tmp_path: Path) -> None:
    """A map that is no map, or that leads out of the directory, is an error."""
    weight_map, reason = INDEXES[case]
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8)}, bytes(8))
    with pytest.raises(ModelFilesError, match=reason) as caught:
        load(tmp_path)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", "{}", "[" * 100_000, '{"weight_map": {"a": "x", "a": "y"}}', "\xff"],
    ids=["empty", "list", "no map", "too deep", "name twice", "not UTF-8"],
)
def test_index_that_is_no_index_is_refused(text: str, tmp_path: Path) -> None:
    """It is named, and the single file does not stand in for it."""
    (tmp_path / INDEX_NAME).write_bytes(text.encode("latin-1"))
    write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8)}, bytes(8))
    with pytest.raises(ModelFilesError, match=f"{INDEX_NAME}: malformed"):
        load(tmp_path)


def test_index_that_can_not_be_opened_is_not_passed_over(tmp_path: Path) -> None:
    """Only a missing index means that there is a single file."""
    (tmp_path / INDEX_NAME).symlink_to("nowhere")
    write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8)}, bytes(8))
    with pytest.raises(ModelFilesError, match=INDEX_NAME):
        load(tmp_path)


def test_h3_tensor_that_its_shard_lacks_is_refused(tmp_path: Path) -> None:
    """The error names shard and tensor, even when another shard has a tensor of that name."""
    write_file(tmp_path / "1", {"a": entry([2], 0, 8), "b": entry([2], 8, 16)}, bytes(16))
    write_file(tmp_path / "2", {"c": entry([2], 0, 8)}, bytes(8))
    write_index(tmp_path, {"a": "1", "b": "2", "c": "2"})
    with pytest.raises(ModelFilesError, match=f"2: b: is missing, though {INDEX_NAME}"):
        load(tmp_path)


def test_h3_tensor_that_the_index_does_not_name_is_missing(tmp_path: Path) -> None:
    """What the index leaves out does not count, though it stands in a shard."""
    write_file(tmp_path / "1", {"a": entry([2], 0, 8), "b": entry([2], 8, 16)}, bytes(16))
    write_index(tmp_path, {"b": "1"})
    with pytest.raises(ModelFilesError, match="tensor a is missing"):
        load(tmp_path)


# -- what is read ---------------------------------------------------------------------------------


PAIR = struct.Struct("<2f")


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, bytes]]) -> None:
    """F32[2] tensors by shard, and an index by which the first shard with a tensor has it."""
    weight_map: dict[str, str] = {}
    for shard, tensors in shards.items():
        header = {name: entry([2], 8 * at, 8 * at + 8) for at, name in enumerate(tensors)}
        write_file(folder / shard, header, b"".join(tensors.values()))
        weight_map = {**dict.fromkeys(tensors, shard), **weight_map}
    write_index(folder, weight_map)


def digest_of(folder: Path, *names: str) -> bytes:
    """SHA-256 of the named files' SHA-256s."""
    files = [hashlib.sha256((folder / name).read_bytes()).digest() for name in names]
    return hashlib.sha256(b"".join(files)).digest()


def test_digest_is_the_sha256_of_the_file(tmp_path: Path) -> None:
    """`sha256sum` of the weight file gives the same."""
    whole = write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8)}, PAIR.pack(1.5, -2.0))
    loaded, memory = load(tmp_path)
    assert loaded.weights_sha256 == hashlib.sha256(whole).digest()
    assert floats(memory, ONE, "a") == [1.5, -2.0]


def test_digest_of_shards_is_the_sha256_of_their_and_the_indexs_digests(tmp_path: Path) -> None:
    """In name order, whatever order the index names them in."""
    write_shards(tmp_path, {"z": {"a": PAIR.pack(1, 2)}, "b": {"c": PAIR.pack(3, 4)}})
    plan = plan_of(("a", [2], "F32", 8), ("c", [2], "F32", 8))
    loaded, memory = load(tmp_path, plan)
    assert loaded.weights_sha256 == digest_of(tmp_path, "b", INDEX_NAME, "z")
    assert floats(memory, plan, "a") == [1, 2]
    assert floats(memory, plan, "c") == [3, 4]


@pytest.mark.parametrize("order", [("1", "2"), ("2", "1")])
def test_h3_index_decides_between_two_copies(order: tuple[str, str], tmp_path: Path) -> None:
    """An old copy of a tensor in another shard is hashed, but not loaded, wherever it stands."""
    new, old = order
    tensors = {
        new: {"b": PAIR.pack(5, 6), "a": PAIR.pack(1, 2)},
        old: {"x": PAIR.pack(8, 8), "a": PAIR.pack(9, 9), "c": PAIR.pack(3, 4)},
    }
    write_shards(tmp_path, tensors)
    plan = plan_of(*((name, [2], "F32", 8) for name in "abcx"))
    loaded, memory = load(tmp_path, plan)
    assert [floats(memory, plan, name) for name in "abcx"] == [[1, 2], [5, 6], [3, 4], [8, 8]]
    assert loaded.weights_sha256 == digest_of(tmp_path, "1", "2", INDEX_NAME)


def test_h3_other_index_over_the_same_shards_is_another_digest(tmp_path: Path) -> None:
    """The digest names what is loaded, and the index decides on that."""
    write_shards(
        tmp_path, {"1": {"a": PAIR.pack(1, 2)}, "2": {"a": PAIR.pack(9, 9), "b": bytes(8)}}
    )
    before, memory = load(tmp_path)
    assert floats(memory, ONE, "a") == [1, 2]
    write_index(tmp_path, {"a": "2", "b": "2"})
    after, memory = load(tmp_path)
    assert floats(memory, ONE, "a") == [9, 9]
    assert after.weights_sha256 != before.weights_sha256


def test_identities_are_those_of_the_files_that_are_read(tmp_path: Path) -> None:
    """What is compared to see a change is what was loaded, the index included."""
    write_shards(tmp_path, {"z": {"a": bytes(8)}, "b": {"c": bytes(8)}})
    dir_fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _, identities = weights.read_files(
            dir_fd, None, lambda *_: None, lambda: pytest.fail("no memory"), follow=False
        )
        assert file_identities(dir_fd, follow=False) == identities
        assert [identity[0] for identity in identities] == ["b", INDEX_NAME, "z"]
        os.utime(tmp_path / INDEX_NAME)
        assert file_identities(dir_fd, follow=False) != identities
        (tmp_path / "z").unlink()
        assert file_identities(dir_fd, follow=False) is None
    finally:
        os.close(dir_fd)


def test_h3_files_that_nobody_names_are_ignored(tmp_path: Path) -> None:
    """A consolidated file beside the shards, or a single file beside them, is not even hashed."""
    write_shards(tmp_path, {"1": {"a": PAIR.pack(1, 2)}})
    for name in ("consolidated.safetensors", SINGLE_NAME, "2"):
        (tmp_path / name).write_bytes(b"junk")
    loaded, memory = load(tmp_path)
    assert floats(memory, ONE, "a") == [1, 2]
    assert loaded.weights_sha256 == digest_of(tmp_path, "1", INDEX_NAME)


def test_stray_file_beside_the_single_file_is_ignored(tmp_path: Path) -> None:
    """Without an index one name counts."""
    whole = write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8)}, PAIR.pack(1, 2))
    (tmp_path / "consolidated.safetensors").write_bytes(b"junk")
    assert load(tmp_path)[0].weights_sha256 == hashlib.sha256(whole).digest()


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    """The header's `__metadata__` is skipped."""
    header = {"__metadata__": {"format": "pt"}, "a": entry([2], 0, 8)}
    write_file(tmp_path / SINGLE_NAME, header, PAIR.pack(1, 2))
    assert floats(load(tmp_path)[1], ONE, "a") == [1, 2]


@pytest.mark.parametrize("copy", [False, True])
def test_h5_scalars_and_empty_tensors_load(copy: bool, tmp_path: Path) -> None:
    """Zero dimensions is one element; a zero among them is none."""
    header = {"e": entry([0, 3], 0, 0), "s": entry([], 0, 4), "f": entry([3, 0], 4, 4)}
    write_file(tmp_path / SINGLE_NAME, header, struct.pack("<f", 2.5))
    plan = plan_of(("e", [0, 3], "F32", 0), ("s", [], "F32", 4), ("f", [0], "F32", 0), copy=copy)
    plan.tensors[2].shape[:] = [3, 0]
    assert floats(load(tmp_path, plan)[1], plan, "s") == [2.5]


def test_h12_casts_to_float32_are_exact(tmp_path: Path) -> None:
    """BF16, F16 and F32 give the values that struct and bit arithmetic give."""
    bf16 = np.arange(1 << 16, dtype="<u2")
    f16 = np.arange(1 << 16, dtype="<u2")
    f32 = np.random.default_rng(1).integers(0, 1 << 32, 1000, dtype=np.uint32).astype("<u4")
    data = bf16.tobytes() + f16.tobytes() + f32.tobytes()
    ends = np.cumsum([bf16.nbytes, f16.nbytes, f32.nbytes]).tolist()
    header = {
        "bf16": entry([256, 256], 0, ends[0], "BF16"),
        "f16": entry([1 << 16], ends[0], ends[1], "F16"),
        "f32": entry([1000], ends[1], ends[2]),
    }
    write_file(tmp_path / SINGLE_NAME, header, data)
    plan = plan_of(("bf16", [256, 256], "", 0), ("f16", [1 << 16], "", 0), ("f32", [1000], "", 0))
    _, memory = load(tmp_path, plan)
    got = {
        item.name: memory[item.offset : item.offset + item.num_bytes].view("<u4")
        for item in plan.tensors
    }
    assert np.array_equal(got["bf16"], bf16.astype(np.uint32) << 16)
    assert np.array_equal(got["f32"], f32)
    by_hand = [value for (value,) in struct.iter_unpack("<e", f16.tobytes())]
    np.testing.assert_array_equal(got["f16"].view("<f4"), np.array(by_hand, "<f4"))


def test_copy_keeps_bytes_of_any_dtype(tmp_path: Path) -> None:
    """COPY does not look at what it copies."""
    header = {"q": entry([3], 0, 3, "I8"), "w": entry([2], 3, 7, "BF16")}
    write_file(tmp_path / SINGLE_NAME, header, b"abcdefg")
    plan = plan_of(("q", [3], "I8", 3), ("w", [2], "BF16", 4), copy=True)
    _, memory = load(tmp_path, plan)
    assert memory[:3].tobytes() == b"abc"
    assert memory[64:68].tobytes() == b"defg"
    assert not memory[3:64].any()


def test_tensor_larger_than_a_chunk_is_packed_whole(tmp_path: Path) -> None:
    """Chunk borders inside a tensor leave no seam, and progress ends at the total."""
    values = np.arange(5 << 20, dtype="<u2")  # 10 MiB of BF16
    write_file(
        tmp_path / SINGLE_NAME,
        {"a": entry([len(values)], 0, values.nbytes, "BF16")},
        values.tobytes(),
    )
    plan = plan_of(("a", [len(values)], "BF16", values.nbytes))
    told: list[tuple[str, int, int]] = []
    _, memory = load(tmp_path, plan, lambda *args: told.append(args))
    assert np.array_equal(memory[: 4 * len(values)].view("<u4"), values.astype(np.uint32) << 16)
    size = (tmp_path / SINGLE_NAME).stat().st_size
    assert told[-1] == ("hash and pack", size, size)
    assert len(told) >= 3


# -- plans ----------------------------------------------------------------------------------------


def spoil(change: Callable[[pb.PackPlan], None]) -> pb.PackPlan:
    plan = plan_of(("a", [2], "F32", 8), ("b", [1], "F32", 4))
    change(plan)
    return plan


def set_item(number: int, **fields: Any) -> pb.PackPlan:
    def change(plan: pb.PackPlan) -> None:
        for name, value in fields.items():
            if name == "shape":
                plan.tensors[number].shape[:] = value
            else:
                setattr(plan.tensors[number], name, value)

    return spoil(change)


def set_segment_bytes(size: int) -> pb.PackPlan:
    def change(plan: pb.PackPlan) -> None:
        plan.segment_bytes = size

    return spoil(change)


BAD_PLANS: Mapping[str, tuple[pb.PackPlan, type[CachewarmError], str]] = {
    "no such tensor": (set_item(0, name="x"), ModelFilesError, "tensor x is missing"),
    "other shape": (set_item(0, shape=[1, 2]), ModelFilesError, r"has shape \[2\].*\[1, 2\]"),
    "same tensor twice": (
        set_item(1, name="a", shape=[2], num_bytes=8), InvalidRequestError, "placed twice",
    ),
    "overlap": (set_item(1, offset=0), InvalidRequestError, "overlap"),
    "one place for two shapes": (
        set_item(1, offset=0, num_bytes=8, shape=[2, 1]), InvalidRequestError, "tied to another",
    ),
    "not aligned": (set_item(1, offset=100), InvalidRequestError, "alignment"),
    "wrong size": (set_item(1, num_bytes=5), InvalidRequestError, "bad size"),
    "no op": (set_item(1, op=pb.PACK_OP_UNSPECIFIED), InvalidRequestError, "op or dtype"),
    "unknown dtype": (set_item(1, dtype="F64"), InvalidRequestError, "op or dtype 'F64'"),
    "segment too small": (set_segment_bytes(64), InvalidRequestError, "too small"),
    "no segment": (set_segment_bytes(0), InvalidRequestError, "segment_bytes"),
    "segment too large": (set_segment_bytes(1 << 63), InvalidRequestError, "segment_bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_plan_is_refused_and_names_the_tensor(case: str, tmp_path: Path) -> None:
    """A plan that can't be, or files that don't have what it asks for, cost no memory."""
    write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8), "b": entry([1], 8, 12)}, bytes(12))
    plan, error, reason = BAD_PLANS[case]
    with pytest.raises(error, match=reason):
        load(tmp_path, plan)


def test_h5_tensors_of_modules_that_are_not_used_are_ignored(tmp_path: Path) -> None:
    """Such as the rotary frequencies that older checkpoints hold, of any dtype."""
    header = {
        "attn.rotary_emb.inv_freq": entry([1], 0, 4),
        "attn.q.weight": entry([2], 4, 12),
        "attn.q.lora_A.weight": entry([1], 12, 20, "I64"),
    }
    write_file(tmp_path / SINGLE_NAME, header, bytes(4) + PAIR.pack(1, 2) + bytes(8))
    plan = plan_of(("attn.q.weight", [2], "F32", 8))
    assert floats(load(tmp_path, plan)[1], plan, "attn.q.weight") == [1, 2]


@pytest.mark.parametrize("extra", ["attn.q.bias", "attn.q.weight_scale"])
def test_h8_tensor_left_out_of_a_module_that_is_used_is_refused(extra: str, tmp_path: Path) -> None:
    """A bias or scale beside a weight that is loaded is never dropped in silence."""
    header = {"attn.q.weight": entry([2], 0, 8), extra: entry([2], 8, 16)}
    write_file(tmp_path / SINGLE_NAME, header, bytes(16))
    with pytest.raises(ModelFilesError, match=f"tensor {extra} is in the weight files, but"):
        load(tmp_path, plan_of(("attn.q.weight", [2], "F32", 8)))


# -- ties -----------------------------------------------------------------------------------------

TIED = plan_of(("a", [2], "F32", 8))
TIED.tensors.add().CopyFrom(TIED.tensors[0])
TIED.tensors[1].name = "b"


@pytest.mark.parametrize("present", ["a", "b", "ab", "ba"])
def test_h1_tied_tensors_need_one_of_them_or_equal_ones(present: str, tmp_path: Path) -> None:
    """Whichever is there, in whatever order, fills their one place."""
    header = {name: entry([2], 8 * at, 8 * at + 8) for at, name in enumerate(present)}
    write_file(tmp_path / SINGLE_NAME, header, PAIR.pack(1, 2) * len(present))
    _, memory = load(tmp_path, TIED)
    assert floats(memory, TIED, "a") == floats(memory, TIED, "b") == [1, 2]


def test_h1_tied_tensors_may_differ_in_dtype_but_not_in_value(tmp_path: Path) -> None:
    """What is compared is what would be computed with."""
    header = {"a": entry([2], 0, 4, "BF16"), "b": entry([2], 4, 12)}
    write_file(tmp_path / SINGLE_NAME, header, b"\x80\x3f\0\x40" + PAIR.pack(1, 2))
    assert floats(load(tmp_path, TIED)[1], TIED, "a") == [1, 2]
    write_file(tmp_path / SINGLE_NAME, header, b"\x80\x3f\0\x40" + PAIR.pack(1, 2.0001))
    with pytest.raises(ModelFilesError, match="tensors a and b differ, but"):
        load(tmp_path, TIED)


@pytest.mark.parametrize("shard", ["1", "3"])
def test_h1_tied_tensors_that_differ_are_refused_across_shards(shard: str, tmp_path: Path) -> None:
    """Whichever is read first; the daemon does not choose between them."""
    write_shards(tmp_path, {"2": {"a": PAIR.pack(1, 2)}, shard: {"b": PAIR.pack(1, 3)}})
    with pytest.raises(ModelFilesError, match=r"tensors . and . differ"):
        load(tmp_path, TIED)


def test_h1_tied_tensors_that_are_all_missing_are_an_error(tmp_path: Path) -> None:
    """A place that nothing fills is not left as zeros."""
    write_file(tmp_path / SINGLE_NAME, {"c": entry([2], 0, 8)}, bytes(8))
    with pytest.raises(ModelFilesError, match="tensor a is missing"):
        load(tmp_path, TIED)


def test_h1_difference_in_the_last_chunk_is_found(tmp_path: Path) -> None:
    """Large tied tensors are compared to their end."""
    values = np.arange(5 << 20, dtype="<u2")  # 10 MiB of BF16
    other = values.copy()
    other[-1] ^= 1
    size = values.nbytes
    header = {
        "a": entry([len(values)], 0, size, "BF16"),
        "b": entry([len(values)], size, 2 * size, "BF16"),
    }
    plan = plan_of(("a", [len(values)], "BF16", size))
    plan.tensors.add().CopyFrom(plan.tensors[0])
    plan.tensors[1].name = "b"
    write_file(tmp_path / SINGLE_NAME, header, values.tobytes() * 2)
    load(tmp_path, plan)
    write_file(tmp_path / SINGLE_NAME, header, values.tobytes() + other.tobytes())
    with pytest.raises(ModelFilesError, match="differ"):
        load(tmp_path, plan)


def test_integers_can_not_be_cast(tmp_path: Path) -> None:
    """A quantised tensor is an error that names it, not a wrong number."""
    write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8, "I32")}, bytes(8))
    with pytest.raises(ModelFilesError, match="tensor a is I32"):
        load(tmp_path)


def test_layout_id_follows_the_plan_alone() -> None:
    """The same plan has the same id, any change another."""
    again = pb.PackPlan.FromString(ONE.SerializeToString())
    assert weights.layout_id(again) == weights.layout_id(ONE)
    again.tensors[0].offset += 64
    assert weights.layout_id(again) != weights.layout_id(ONE)


# -- what can't change ----------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[int]:
    """The daemon's own descriptor of a sealed segment."""
    write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8)}, PAIR.pack(1, 2))
    dir_fd = os.open(tmp_path, os.O_RDONLY)
    loaded, _ = weights.load(dir_fd, ONE, lambda *_: None, allocate, follow=False)
    os.close(dir_fd)
    yield loaded.fd
    os.close(loaded.fd)


def test_sealed_segment_can_not_be_written_by_anybody(sealed: int) -> None:
    """Not even through the daemon's own descriptor: write, resize, map and unseal all fail."""
    with pytest.raises(PermissionError):
        os.pwrite(sealed, b"x", 0)
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(sealed, size)
    with pytest.raises(PermissionError):
        mmap.mmap(sealed, 64, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        fcntl.fcntl(sealed, segment.F_ADD_SEALS, 0x10)
    seals = fcntl.fcntl(sealed, segment.F_GET_SEALS)
    wanted = segment.F_SEAL_WRITE | segment.F_SEAL_SHRINK | segment.F_SEAL_GROW
    assert seals & wanted == wanted
    assert seals & segment.F_SEAL_SEAL


def test_descriptor_for_clients_can_only_be_read(sealed: int) -> None:
    """No writable map, and a map made for reading can't be made writable afterwards."""
    readonly = segment.reopen_readonly(sealed)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(readonly, 64, mmap.MAP_SHARED, mmap.PROT_WRITE)
        array = segment.map_memory(readonly, 64)
        assert not array.flags.writeable
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(array.ctypes.data)
        assert libc.mprotect(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert array[:8].tobytes() == PAIR.pack(1, 2)
    finally:
        os.close(readonly)


def test_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """Bytes of two versions are never served as one, whatever the clock of the file says."""
    path = tmp_path / SINGLE_NAME
    write_file(path, {"a": entry([2], 0, 8)}, PAIR.pack(1, 2))
    info = path.stat()

    def change(*_: object) -> None:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    with pytest.raises(ModelFilesError, match="changed while it was read"):
        load(tmp_path, ONE, change)


def test_file_that_is_truncated_while_it_is_read_is_refused(tmp_path: Path) -> None:
    """A short read is an error, not a segment that ends in zeros."""
    path = tmp_path / SINGLE_NAME
    write_file(path, {"a": entry([2], 0, 8)}, bytes(8))
    with pytest.raises(ModelFilesError, match="truncated while"):
        load(tmp_path, ONE, lambda *_: os.truncate(path, 20))


def test_refused_memory_leaves_nothing_behind(tmp_path: Path) -> None:
    """What the budget refuses is raised as it is, and the segment is closed."""
    write_file(tmp_path / SINGLE_NAME, {"a": entry([2], 0, 8)}, bytes(8))

    def refuse(fd: int, size: int, _: Callable[[int], None]) -> None:
        assert os.fstat(fd).st_size == size
        raise NoSpaceError("no")

    dir_fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(NoSpaceError):
            weights.load(dir_fd, ONE, lambda *_: None, refuse, follow=False)
    finally:
        os.close(dir_fd)
