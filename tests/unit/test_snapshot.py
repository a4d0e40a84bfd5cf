"""Snapshot files: what goes in, what comes back, and what of a damaged one does."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachewarmd import scrub, snapshot, snapshot_format, state_dir
from cachewarmd.errors import InvalidRequestError
from cachewarmd.layout import EXTENT_BYTES
from cachewarmd.snapshot_format import BLOCK, HEADER_BYTES, STAMP, Header, SavedBlock, SavedStamp
from tests.block_store import CAPACITY, Harness, full, key_of, keys_of, make_harness

SIZE = 16  # of the small blocks of files that no pool has written
MARK = b"m" * 32


@pytest.fixture
def harness() -> Iterator[Harness]:
    with make_harness() as made:
        yield made


def save(harness: Harness, folder: Path, max_bytes: int = EXTENT_BYTES) -> snapshot.Outcome:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        blocks = harness.store.blocks
        never = bool
        return snapshot.save(harness.pool, blocks, fd, "snap", max_bytes, lambda *_: None, never)
    finally:
        os.close(fd)


def load(harness: Harness, path: Path) -> snapshot.Outcome:
    fd = os.open(path, os.O_RDONLY)
    try:
        work = snapshot.load(fd, harness.pool, harness.store, lambda: None, lambda *_: None)
        return asyncio.run(work)
    finally:
        os.close(fd)


# -- pool to file to pool ---------------------------------------------------------------------


def test_chains_come_back_with_their_bytes(harness: Harness, tmp_path: Path) -> None:
    """Into an empty pool of the same salt; a second load finds all of it there."""
    harness.seal_free(full(1, 2, 3))
    harness.seal_free((*full(1), (9, 9)))
    assert save(harness, tmp_path).num_blocks == 4
    assert (tmp_path / "snap").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["snap"]
    with make_harness() as other:
        assert load(other, tmp_path / "snap").num_blocks == 4
        other.check()
        assert len(other.store.lookup(other.info, keys_of(full(1, 2, 3)), [])[1]) == 3
        again = load(other, tmp_path / "snap")
        assert (again.num_blocks, again.num_known, +again.refused) == (0, 4, {})
        other.check()


def test_the_most_recently_used_chains_come_first(harness: Harness, tmp_path: Path) -> None:
    """A limit cuts off the coldest; what is in is prefix-closed."""
    for label in (1, 2, 3):
        harness.seal_free(full(label, 10 + label))
    harness.store.release(harness.store.lookup(harness.info, keys_of(full(1, 11)), [])[0])
    ordered = snapshot.priority(harness.store.blocks, EXTENT_BYTES)
    wanted = [full(1), full(1, 11), full(3), full(3, 13), full(2), full(2, 12)]
    assert [block.key for block in ordered] == [key_of(path) for path in wanted]
    save(harness, tmp_path, 4 * harness.info.block_bytes)
    with make_harness() as other:
        assert load(other, tmp_path / "snap").num_blocks == 4
        assert other.is_sealed(full(3, 13))
        assert not other.is_sealed(full(2))


def test_pinned_chains_come_before_hotter_ones(harness: Harness) -> None:
    """A limit cuts off what is not pinned first."""
    for label in (1, 2, 3):
        harness.seal_free(full(label, 10 + label))
    pinned = {harness.block(key) for key in keys_of(full(2, 12))}
    limit = 4 * harness.info.block_bytes
    ordered = snapshot.priority(harness.store.blocks, limit, pinned)
    wanted = [full(2), full(2, 12), full(3), full(3, 13)]
    assert [block.key for block in ordered] == [key_of(path) for path in wanted]


def test_restored_blocks_are_evicted_coldest_first(harness: Harness, tmp_path: Path) -> None:
    """The snapshot's order is the new pool's, and what is used there is hotter than all of it."""
    for label in range(1, CAPACITY):
        harness.seal_free(full(label))
    save(harness, tmp_path)
    with make_harness() as other:
        other.seal_free(full(100))
        load(other, tmp_path / "snap")
        other.seal_free(full(101))
        assert not other.is_sealed(full(1)), "the one that was used first"
        assert all(other.is_sealed(full(label)) for label in (*range(2, CAPACITY), 100, 101))
        other.check()


def test_a_load_evicts_nothing(harness: Harness, tmp_path: Path) -> None:
    """What does not fit is told."""
    for label in range(CAPACITY):
        harness.seal_free(full(label))
    save(harness, tmp_path)
    with make_harness() as other:
        for label in range(100, 102):
            other.seal_free(full(label))
        outcome = load(other, tmp_path / "snap")
        assert (outcome.num_blocks, +outcome.refused) == (CAPACITY - 2, {"no_space": 2})
        assert other.is_sealed(full(100))
        assert other.is_sealed(full(CAPACITY - 1)), "the hottest came first"
        other.check()


def test_blocks_that_change_while_they_are_copied_are_left_out(
    harness: Harness, tmp_path: Path
) -> None:
    """Evicted and sealed anew, or with content that is not what was sealed: not in the file."""
    harness.seal_free(full(1, 2))
    harness.seal_free(full(3))
    seen = harness.store.blocks
    harness.store.evict(lambda stamp: True)
    harness.seal_free(full(4))
    harness.pool.memory[harness.block(key_of(full(4))).offset] ^= 1
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        blocks = [*seen, *harness.store.blocks]
        outcome = snapshot.save(
            harness.pool, blocks, fd, "snap", EXTENT_BYTES, lambda *_: None, bool
        )
    finally:
        os.close(fd)
    assert (outcome.num_blocks, outcome.refused) == (0, {"gone": 4})
    with make_harness() as other:
        assert load(other, tmp_path / "snap").num_blocks == 0


@pytest.mark.parametrize("which", ["content", "row", "stamp", "end"])
def test_damage_costs_only_what_it_lies_in(harness: Harness, tmp_path: Path, which: str) -> None:
    """The middle of a chain takes the rest of that chain with it, and nothing else."""
    harness.seal_free(full(7))
    harness.seal_free(full(1, 2, 3))
    save(harness, tmp_path)
    raw = bytearray((tmp_path / "snap").read_bytes())
    size = harness.info.block_bytes
    content = len(raw) - 4 * size
    match which:
        case "content":
            raw[content + size + 1000] ^= 1
            lost, refused = {(1, 2), (1, 2, 3)}, {"checksum": 1, "no_parent": 1}
        case "row":
            raw[HEADER_BYTES + STAMP.size + BLOCK.size + 3] ^= 1
            lost, refused = {(1, 2), (1, 2, 3)}, {"damaged": 1, "no_parent": 1}
        case "stamp":
            raw[HEADER_BYTES] ^= 1
            lost, refused = {(1,), (1, 2), (1, 2, 3), (7,)}, {"stamp": 4}
        case _:
            del raw[-1:]
            lost, refused = {(7,)}, {"truncated": 1}
    (tmp_path / "snap").write_bytes(raw)
    with make_harness() as other:
        outcome = load(other, tmp_path / "snap")
        assert +outcome.refused == refused
        for labels in ((1,), (1, 2), (1, 2, 3), (7,)):
            assert other.is_sealed(full(*labels)) == (labels not in lost), labels
        other.check()


class SmallFile:
    """A snapshot of two chains of small blocks, and a pool that they can come back to."""

    def __init__(self, harness: Harness, path: Path) -> None:
        self.harness = harness
        self.path = path
        self.raw = path.read_bytes()


@pytest.fixture(scope="module")
def small_snapshot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallFile]:
    with make_harness() as harness:
        info = harness.new_stamp(4096)
        harness.seal_free(full(1, 2), info)
        harness.seal_free((*full(3), (4, 4)), info)
        folder = tmp_path_factory.mktemp("small")
        save(harness, folder)
        yield SmallFile(harness, folder / "snap")


TABLE = HEADER_BYTES + STAMP.size + 4 * BLOCK.size


@settings(deadline=None)
@given(
    place=st.integers(0, TABLE) | st.integers(0, TABLE + 4 * 4096 - 1),
    bit=st.integers(0, 7),
    cut=st.booleans(),
)
def test_no_flip_and_no_cut_gives_a_wrong_byte(
    small_snapshot: SmallFile, place: int, bit: int, cut: bool
) -> None:
    """Wherever it is: what comes back is right, and what does not is a miss."""
    harness = small_snapshot.harness
    raw = bytearray(small_snapshot.raw)
    if cut:
        del raw[place:]
    else:
        raw[place] ^= 1 << bit
    small_snapshot.path.write_bytes(raw)
    harness.store.evict(lambda stamp: True)
    try:
        outcome = load(harness, small_snapshot.path)
    except InvalidRequestError:
        assert place < HEADER_BYTES
        assert not harness.store.blocks
        return
    assert outcome.num_blocks == len(harness.store.blocks)
    assert outcome.num_blocks + sum(outcome.refused.values()) == 4
    assert +outcome.refused
    harness.check()


@given(data=st.binary(max_size=600), keep=st.integers(0, HEADER_BYTES))
def test_the_parser_takes_any_bytes(data: bytes, keep: int) -> None:
    """An error of ours or something that can be believed; never another end."""
    whole = small_file()[:keep] + data
    with_table = small_file()[: len(small_file()) - len(data)] + data
    for raw in (data, whole, with_table):
        try:
            found = parse(raw)
        except InvalidRequestError:
            continue
        assert all(block.offset + block.num_bytes <= len(raw) for block in found.blocks)


# -- the parser -------------------------------------------------------------------------------


def small_file(**changes: int) -> bytes:
    """Two stamps and two blocks of the second; `changes` are to the header."""
    stamps = [SavedStamp(bytes([n]) * 32, b"w" * 32, SIZE, 4, f"stamp {n}") for n in (1, 2)]
    header = Header(2, 2, 2, 0, 77, MARK)
    at = header.content_offset
    blocks = [
        SavedBlock(bytes([n]) * 32, b"r" * 32, 4, 1, at + n * SIZE, SIZE, b"x" * 16, n == 0)
        for n in range(2)
    ]
    header = dataclasses.replace(header, file_bytes=at + 2 * SIZE, **changes)
    rows = [header, *stamps, *blocks]
    return b"".join(row.pack() for row in rows) + bytes(2 * SIZE)


def parse(raw: bytes, max_blocks: int = 100) -> snapshot_format.Contents:
    return snapshot_format.parse(lambda at, n: raw[at : at + n], len(raw), max_blocks)


def test_what_was_packed_is_parsed() -> None:
    """Header, stamps, blocks."""
    found = parse(small_file())
    assert found.header.salt_mark == MARK
    assert [stamp.description for stamp in found.stamps if stamp] == ["stamp 1", "stamp 2"]
    assert [(block.key[0], block.is_root) for block in found.blocks] == [(0, True), (1, False)]
    assert not +found.refused


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not a snapshot"),
        (b"x" * 1000, "not a snapshot"),
        (snapshot_format.MAGIC, "not a snapshot"),
        (small_file(num_stamps=snapshot_format.MAX_STAMPS + 1), "what can't be"),
        (small_file(num_blocks=3), "what can't be"),
        (small_file()[:12] + b"\x63" + small_file()[13:], "format is 99, ours 1"),
        (small_file()[:40] + b"\xff" + small_file()[41:], "header is damaged"),
    ],
)
def test_what_is_of_no_use_at_all_is_refused(raw: bytes, reason: str) -> None:
    """With a reason that an operator understands."""
    with pytest.raises(InvalidRequestError, match=reason):
        parse(raw)


def test_sizes_that_a_file_claims_allocate_nothing() -> None:
    """Rows that are not there are not looked at; of too many, the first ones are."""
    asked: list[int] = []
    raw = small_file(table_rows=(1 << 32) - 1, num_blocks=(1 << 32) - 1)

    def read(at: int, count: int) -> bytes:
        asked.append(count)
        return raw[at : at + count]

    found = snapshot_format.parse(read, len(raw), 1 << 24)
    assert max(asked) < 1 << 20
    assert found.refused["truncated"] > 1 << 23
    assert parse(small_file(), max_blocks=1).refused == {"no_space": 1}


# -- the directory ----------------------------------------------------------------------------


def test_another_salt_and_files_of_others_are_refused(harness: Harness, tmp_path: Path) -> None:
    """Keys of another salt can't hit; what others may read or write is not trusted."""
    harness.seal_free(full(1))
    save(harness, tmp_path)
    (tmp_path / "snap").chmod(0o640)
    with pytest.raises(InvalidRequestError, match="lets others"):
        load(harness, tmp_path / "snap")
    (tmp_path / "snap").chmod(0o600)
    harness.pool.header["salt"] = b"t" * 32
    with pytest.raises(InvalidRequestError, match="another salt"):
        load(harness, tmp_path / "snap")
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidRequestError, match="lets others write"):
        save(harness, tmp_path)


def test_what_a_killed_writer_left_is_removed(harness: Harness, tmp_path: Path) -> None:
    """And nothing else."""
    (tmp_path / ".snap.0011aabb.new").write_bytes(b"half")
    (tmp_path / ".other.0011aabb.new").write_bytes(b"half")
    save(harness, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".other.0011aabb.new", "snap"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "x" * 201, "a\0b"])
def test_names_that_are_no_file_in_the_directory(name: str) -> None:
    """They are refused before anything is opened."""
    with pytest.raises(InvalidRequestError, match="is not allowed"):
        snapshot.check_name(name)


def test_a_salt_is_kept_once(tmp_path: Path) -> None:
    """0600; another pool's is not written over it, and one that others can read is not used."""
    folder = tmp_path / "state"
    assert state_dir.read_salt(folder) is None
    state_dir.keep_salt(folder, b"s" * 32)
    state_dir.keep_salt(folder, b"s" * 32)
    assert os.listdir(folder) == ["salt"]
    assert (folder / "salt").stat().st_mode & 0o777 == 0o600
    assert state_dir.read_salt(folder) == b"s" * 32
    with pytest.raises(InvalidRequestError, match="keeps another salt"):
        state_dir.keep_salt(folder, b"t" * 32)
    (folder / "salt").chmod(0o644)
    with pytest.raises(InvalidRequestError, match="lets others read"):
        state_dir.read_salt(folder)


# -- scrubbing --------------------------------------------------------------------------------


def test_a_scrub_finds_what_changed_after_it_was_sealed(harness: Harness) -> None:
    """The block goes with its descendants; its reader sees the generation."""
    harness.seal_free(full(1, 2, 3))
    harness.seal_free(full(4))
    middle = harness.block(key_of(full(1, 2)))
    harness.pool.memory[middle.offset + 5] ^= 1
    done = scrub.Pass()
    asyncio.run(scrub.verify(harness.store, lambda _: 0, done))
    assert done.num_failures == 1
    assert harness.store.counters["integrity_failures"] == 1
    assert [harness.is_sealed(full(*x)) for x in ((1,), (1, 2), (1, 2, 3), (4,))] == [
        True,
        False,
        False,
        True,
    ]
    assert harness.pool.records["generation"][middle.slot] == middle.generation + 1
    harness.check()
