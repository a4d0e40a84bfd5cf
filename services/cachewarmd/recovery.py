"""What a daemon does with the pool of the one before it: gates, then record by record.

Gates decide all or nothing; behind them every block is believed or freed. A doubt is a miss. Only
content is not looked at here: `kv` verifies it before it serves it.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachewarmd import layout, segment
from cachewarmd.block import Block, StampInfo
from cachewarmd.failpoints import hit
from cachewarmd.kv import BlockStore
from cachewarmd.layout import EXTENT_BYTES, RECORDS_PER_EXTENT, BlockState
from cachewarmd.pool import Memfds, Pool

# A pool with which so many daemons died before they served is not tried again.
MAX_STARTS = 5
# A doubtful record's generation may have lost a bit: further on than it can ever have been.
_DOUBTFUL_STEP = 1 << 32
_SIZE_SEALS = segment.F_SEAL_SHRINK | segment.F_SEAL_GROW


@dataclass(frozen=True)
class Recovered:
    """How much was found."""

    num_blocks: int
    num_doubtful: int  # records that were freed


def refusal(memfds: Memfds, wanted_bytes: int | None) -> str:
    """Why these memfds can't be adopted; "" = they can, and their header is ours.

    In the order that lets an older or newer format be recognised before anything else is read.
    """
    sizes = [os.fstat(fd).st_size for fd in (memfds.records, memfds.pool)]
    raw = os.pread(memfds.records, layout.HEADER.itemsize, 0)
    if len(raw) < layout.HEADER.itemsize or raw[:8] != layout.MAGIC:
        return "it has no header of ours"
    header = np.frombuffer(raw, layout.HEADER)[0]
    num_extents = int(header["pool_bytes"]) // EXTENT_BYTES
    if header["header_bytes"] != layout.HEADER.itemsize:
        return f"its header has {header['header_bytes']} bytes"
    if header["format_version"] != layout.FORMAT_VERSION:
        return f"its format is {header['format_version']}, ours {layout.FORMAT_VERSION}"
    if bytes(header["layout_hash"]) != layout.layout_hash():
        return "its layout is another one"
    if (
        not 0 < num_extents <= sizes[1] // EXTENT_BYTES
        or sizes != [layout.records_bytes(num_extents), num_extents * EXTENT_BYTES]
        or header["num_records"] != num_extents * RECORDS_PER_EXTENT
        or header["num_committed"] > num_extents
        or header["pool_inode"] != os.fstat(memfds.pool).st_ino
    ):
        return "its sizes don't go together"
    for fd in (memfds.records, memfds.pool):
        if fcntl.fcntl(fd, segment.F_GET_SEALS) & _SIZE_SEALS != _SIZE_SEALS:
            return "its size is not sealed"
    if wanted_bytes is not None and wanted_bytes // EXTENT_BYTES != num_extents:
        return f"it has {sizes[1]} bytes, {wanted_bytes} are wanted"
    if header["num_starts"] >= MAX_STARTS:
        return f"{header['num_starts']} daemons died with it before they served"
    return ""


def begin(pool: Pool) -> bool:
    """Note the start in an adopted pool, take the clean-stop token: was it there?"""
    hit("attach.before")
    is_clean = bool(pool.header["is_clean"][0])
    pool.header["is_clean"] = 0
    pool.header["num_starts"] += 1
    hit("attach.after")
    return is_clean


def serving(pool: Pool) -> None:
    """The start is over."""
    pool.header["num_starts"] = 0


def end_clean(pool: Pool) -> None:
    """The last word of a daemon that ends in order: no write was torn."""
    hit("clean.before")
    pool.header["is_clean"] = 1
    hit("clean.after")


def restore(pool: Pool, store: BlockStore, *, is_verified: bool) -> Recovered:
    """Fill an empty store, whose stamps are known, from the records of an adopted pool.

    Whatever is no sealed block beyond doubt is freed. A daemon that dies here is no loss: nothing
    is changed but doubtful records.
    """
    hit("recover.before")
    stamps = _StampTable.of(store.stamps)
    surveys = [_survey(pool, number, stamps) for number in range(pool.header["num_committed"][0])]
    blocks = _link(pool, store.stamps, np.concatenate([s.slots for s in surveys] or [_NONE]))
    good = {block.slot for block in blocks}
    doubtful = [slot for survey in surveys for slot in survey.busy if slot not in good]
    for slot in doubtful:
        hit("recover.free")
        record = pool.records[slot]
        record["generation"] += _DOUBTFUL_STEP
        record["state"] = BlockState.FREE
    if doubtful:
        pool.header["change_word"] += 1
    for survey in surveys:
        used = [slot for slot in survey.busy if slot in good]
        pool.take_over(survey.slot_bytes if used else 0, used)
    for block in blocks:
        block.offset = pool.offset_of(block.slot)
        block.is_verified = is_verified
    store.restore(blocks)
    hit("recover.after")
    return Recovered(len(blocks), len(doubtful))


_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class _StampTable:
    """By stamp id."""

    block_bytes: npt.NDArray[np.uint64]
    block_size: npt.NDArray[np.uint32]

    @classmethod
    def of(cls, stamps: Sequence[StampInfo]) -> _StampTable:
        return cls(
            np.array([info.block_bytes for info in stamps], dtype=np.uint64),
            np.array([info.block_size for info in stamps], dtype=np.uint32),
        )


@dataclass(frozen=True)
class _Survey:
    """One extent: what is not free in it, and of that what can be a block of its slot size."""

    slot_bytes: int
    busy: list[int]
    slots: npt.NDArray[np.int64]


def _survey(pool: Pool, number: int, stamps: _StampTable) -> _Survey:
    # Read, not mapped: a page of records that was never written is not allocated by that.
    size = RECORDS_PER_EXTENT * layout.RECORD.itemsize
    raw = os.pread(pool.memfds.records, size, layout.RECORDS_OFFSET + number * size)
    records = np.frombuffer(raw, layout.RECORD)
    first = number * RECORDS_PER_EXTENT
    busy = np.flatnonzero(records["state"] != BlockState.FREE)
    places = np.flatnonzero(records["state"] == BlockState.SEALED)
    sealed = records[places]
    known = sealed["stamp_id"] < len(stamps.block_size)
    places, sealed = places[known], sealed[known]
    good = layout.record_checks(sealed) == sealed["check"]
    good &= sealed["num_bytes"] == stamps.block_bytes[sealed["stamp_id"]]
    good &= (sealed["num_tokens"] > 0) & (
        sealed["num_tokens"] <= stamps.block_size[sealed["stamp_id"]]
    )
    places, sealed = places[good], sealed[good]
    sizes = np.array([layout.round_slot_bytes(int(n)) for n in sealed["num_bytes"]], np.int64)
    offsets = number * EXTENT_BYTES + places * sizes
    good = (sealed["offset"] == offsets) & (places < EXTENT_BYTES // np.maximum(sizes, 1))
    places, sizes = places[good], sizes[good]
    slot_bytes = 0
    if len(sizes):
        slot_bytes = Counter(sizes.tolist()).most_common(1)[0][0]
        places = places[sizes == slot_bytes]
    return _Survey(slot_bytes, (first + busy).tolist(), first + places)


def _link(pool: Pool, stamps: Sequence[StampInfo], slots: npt.NDArray[np.int64]) -> list[Block]:
    """Blocks whose chain reaches its root, parents first. A key that stands twice is in doubt."""
    by_key: dict[bytes, Block] = {}
    parents: dict[bytes, bytes] = {}
    twice: set[bytes] = set()
    for block, parent_key in _read(pool, stamps, slots):
        if block.key in by_key:
            twice.add(block.key)
        by_key[block.key] = block
        parents[block.key] = parent_key
    linked = []
    children: dict[bytes, list[Block]] = {}
    for key, block in by_key.items():
        if key in twice:
            continue
        if not parents[key]:
            linked.append(block)
        else:
            children.setdefault(parents[key], []).append(block)
    for parent in linked:
        for child in children.get(parent.key, ()):
            if child.stamp is parent.stamp and not parent.is_short:
                child.parent = parent
                linked.append(child)
    return linked


def _read(
    pool: Pool, stamps: Sequence[StampInfo], slots: npt.NDArray[np.int64]
) -> Iterator[tuple[Block, bytes]]:
    """Each with its parent's key, empty for a root."""
    records = pool.records[slots]
    columns = (
        records[name].tolist()
        for name in ("key", "parent_key", "is_root", "stamp_id", "generation", "num_tokens")
    )
    for slot, key, parent, is_root, stamp_id, generation, num_tokens in zip(
        slots.tolist(), *columns, strict=True
    ):
        block = Block(bytes(key), None, stamps[stamp_id], slot, generation, 0, num_tokens)
        yield block, b"" if is_root else bytes(parent)
