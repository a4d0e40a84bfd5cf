"""The pool of the daemon before: records, clients, leases and content with anything in them.

An input is a list of edits, 6 bytes each: what is edited, where, a value, and whether the record's
check is made right again after it (as it would be for a record that was written wrongly).
The geometry is small, so that everything is near: 8 slots in each of two extents.
"""

from __future__ import annotations

import functools
import os
from contextlib import AbstractContextManager

import numpy as np
import xxhash

from cachewarmd import layout

_EXTENT_BYTES = 128 << 10
# Before anything else takes over the figures.
layout.EXTENT_BYTES = _EXTENT_BYTES
layout.RECORDS_PER_EXTENT = _EXTENT_BYTES // layout.MIN_SLOT_BYTES
layout.MAX_CLIENTS, layout.MAX_LEASES_PER_CLIENT = 4, 8

from cachewarmd import recovery, segment  # noqa: E402 - see above
from cachewarmd.block import Block  # noqa: E402
from cachewarmd.keys import block_key  # noqa: E402
from cachewarmd.kv import BlockStore, NewBlock, Source  # noqa: E402
from cachewarmd.lease import LeaseTable  # noqa: E402
from cachewarmd.pool import Memfds, Pool  # noqa: E402
from cachewarmd.quarantine import Quarantine  # noqa: E402
from tests.fuzz.target import Target, replaced  # noqa: E402

_NUM_EXTENTS = 2
_EDIT_BYTES = 6
_RIGHT_AGAIN = 0x80
_BLOCK_SIZE = 4


class _Before:
    """A pool with chains of two stamps, and what each key's content is."""

    def __init__(self) -> None:
        self.pool = Pool(_NUM_EXTENTS * _EXTENT_BYTES, 1, b"s" * 32)
        while self.pool.commit_next():
            pass
        store = BlockStore(self.pool)
        self.infos = [
            store.register(b"a" * 32, 16 << 10, _BLOCK_SIZE, "one", b"w" * 32),
            store.register(b"b" * 32, 30 << 10, _BLOCK_SIZE, "other", b"w" * 32),
        ]
        table = LeaseTable(self.pool.shared)
        rows = table.open(1, 1)
        self.paths: list[tuple[int, list[bytes]]] = []
        for stamp, lengths in ((0, (4, 4, 2)), (0, (3,)), (1, (4,))):
            self._publish(store, stamp, lengths, len(self.paths), rows if not stamp else None)
        store.check_invariants()
        size = layout.records_bytes(_NUM_EXTENTS)
        self.records = os.pread(self.pool.memfds.records, size, 0)
        self.content = bytes(self.pool.memory)

    def _publish(
        self, store: BlockStore, stamp: int, lengths: tuple[int, ...], label: int, rows: object
    ) -> None:
        key, keys = bytes([label]) * 32, []
        lease = store.lookup(self.infos[stamp], [], [], rows)[0]  # type: ignore[arg-type]
        for number, length in enumerate(lengths):
            parent, key = key, block_key(key, (label,) * length)
            keys.append(key)
            fd = os.memfd_create("fuzz")
            os.write(fd, key * 1024)
            source = Source(fd, 32 << 10, lambda: True)
            new = NewBlock(parent, key, length, 0)
            _, refused = store.publish(lease, [new], source, is_root=number == 0)
            assert not refused
            os.close(fd)
        self.paths.append((stamp, keys))


# Every start does this anew, with the same result.
layout.layout_hash = functools.cache(layout.layout_hash)
segment.map_memory = functools.cache(segment.map_memory)
_before = _Before()
_memfds = _before.pool.memfds
_raw = _before.pool.shared


def _edit(data: bytes) -> bool:
    """Apply all edits; True when no wrong record was made to look right."""
    is_plain = True
    slots = len(_before.pool.records)
    for start in range(0, len(data) - _EDIT_BYTES + 1, _EDIT_BYTES):
        kind, where, at, value = data[start], data[start + 1], data[start + 2], data[start + 3]
        wide = int.from_bytes(data[start + 3 : start + 6], "little")
        slot = where % slots
        match kind & 7:
            case 0:
                _raw.records[slot : slot + 1].view("u1")[at % layout.RECORD.itemsize] = value
            case 1:
                name = layout.RECORD.names[at % len(layout.RECORD.names)]
                if layout.RECORD[name].kind == "u":
                    _raw.records[name][slot] = wide
            case 2:  # one record over another
                _raw.records[slot] = _raw.records[at % slots]
                is_plain = False
            case 3:
                _before.pool.memory[wide % len(_before.pool.memory)] ^= 1 + at % 255
            case 4:
                _raw.clients.view("u1")[(where << 8 | at) % _raw.clients.nbytes] = value
            case 5:
                _raw.leases[where % layout.MAX_CLIENTS, at % layout.MAX_LEASES_PER_CLIENT] = wide
            case 6:
                _raw.header.view("u1")[(where << 8 | at) % layout.HEADER.itemsize] = value
            case 7:
                _raw.records["key"][slot] = _raw.records["parent_key"][at % slots]
        if kind & _RIGHT_AGAIN:
            _raw.records["check"][slot] = layout.record_checks(_raw.records[slot : slot + 1])[0]
            is_plain = False
    return is_plain


def check(data: bytes) -> None:
    """Refused, or a store that is in order and serves no block but one whose content is right."""
    try:
        _look(_edit(data))
    finally:
        os.pwrite(_memfds.records, _before.records, 0)
        _before.pool.memory[:] = np.frombuffer(_before.content, np.uint8)


def _look(is_plain: bool) -> None:
    if recovery.refusal(_memfds, None):
        return
    pool = Pool(_before.pool.pool_bytes, 2, b"", Memfds(_memfds.records, _memfds.pool))
    recovery.begin(pool)
    store = BlockStore(pool)
    for info in _before.infos:
        store.restore_stamp(info)
    recovery.restore(pool, store, is_verified=False)
    quarantine = Quarantine(LeaseTable(pool.shared), store)
    store.check_invariants()
    for stamp, keys in _before.paths:
        store.lookup(_before.infos[stamp], keys, [])
    for block in list(store._index.values()):
        for found in store.lookup(block.stamp, [block.key], [])[1]:
            _check_content(pool, found, is_plain)
    for block in store.next_unverified(1 << 30):
        if block.is_sealed:
            store.settle(block, is_intact=store.is_intact(block))
    for epoch, client_id in list(quarantine._orphans):
        quarantine.end(epoch, client_id, 1)
    for lease in list(store._leases):  # the lookups', and of clients of other processes
        store.release(lease)
    store.evict(lambda _: True)
    assert not store._index, "a block that nothing holds can't be evicted"
    assert pool.num_free == len(pool.extents), "a block is gone, its extent is not free"


def _check_content(pool: Pool, block: Block, is_plain: bool) -> None:
    size = block.stamp.block_bytes
    served = pool.memory[block.offset : block.offset + size]
    digest = xxhash.xxh3_128_digest(served.data)
    assert digest == bytes(pool.records["xxh3"][block.slot]), "content that was never sealed"
    if is_plain:
        assert bytes(served[:32]) == block.key, "the content of another key"


def plant() -> AbstractContextManager[object]:
    """The content of short blocks is not looked at."""
    real = Pool.is_content_intact

    def is_content_intact(self: Pool, slot: int) -> bool:
        return bool(self.records["num_tokens"][slot] < _BLOCK_SIZE) or real(self, slot)

    return replaced(Pool, "is_content_intact", is_content_intact)


def make() -> Target:
    """An edit of each kind, and some in a row."""
    edits = [bytes((kind, 1, 8, 3, 0, 0)) for kind in (*range(8), 0x80, 0x81)]
    seeds = [b"", *edits, b"".join(edits[:3]), edits[3] + edits[5]]
    return Target(check, seeds, plant)
