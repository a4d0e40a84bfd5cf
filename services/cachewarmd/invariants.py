"""What holds between pool, index, leases and eviction order whenever no call is under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from cachewarmd.block import Block
from cachewarmd.eviction import EvictionOrder
from cachewarmd.holding import Holding
from cachewarmd.layout import BlockState
from cachewarmd.lease import Lease
from cachewarmd.pool import Extent, Pool


def check(
    pool: Pool, index: Mapping[bytes, Block], leases: Collection[Lease], order: EvictionOrder
) -> None:
    """Raises AssertionError naming the first thing that is not as it must be."""
    blocks, _ = pool.usage()
    assert sum(blocks.values()) == sum(e.num_slots for e in pool.extents), "capacity"
    free = sum(len(e.free_slots) for e in pool.extents)
    assert blocks["free"] == free, f"free records {blocks['free']}, free slots {free}"
    assert blocks["sealed"] == len(index), "sealed records and index differ"
    assert not blocks["reserved"], "a slot stayed reserved"
    slots = [block.slot for block in index.values()]
    assert len(set(slots)) == len(slots), "two blocks in one slot"
    children: Counter[Block] = Counter()
    holds: Counter[Block] = Counter(lease.block for lease in leases if lease.block is not None)
    for block in holds:
        assert index.get(block.key) is block, "leased, not sealed"
    _check_holdings(leases)
    for lease in leases:
        told = lease.block.slot if lease.block is not None else None
        assert lease.rows is None or lease.rows.slot(lease.row) == told, "a lease's row"
    for key, block in index.items():
        record = pool.records[block.slot]
        assert block.key == key == bytes(record["key"]), "key"
        assert record["state"] == BlockState.SEALED, "an indexed block is not sealed"
        assert record["generation"] == block.generation, "generation"
        assert record["offset"] == block.offset == pool.offset_of(block.slot), "offset"
        assert block.is_sealed, "an indexed block is not sealed"
        if block.parent is not None:
            assert index.get(block.parent.key) is block.parent, "not prefix-closed"
            assert block in block.parent.children, "a child its parent does not know"
            children[block.parent] += 1
            holds[block.parent] += bool(block.num_holds)
    for block in index.values():
        assert len(block.children) == children[block], "children count"
        assert block.num_holds == holds[block], "lease count"
    _check_extents(pool, index)
    places = Counter((block.stamp.slot_bytes, block.place[0]) for block in index.values())
    for slot_bytes, counts in order.counts().items():
        expected = [places[slot_bytes, number] for number in range(len(counts))]
        assert counts == expected, "blocks in the lists of the policy"
    offered = order.offered()
    missing = [b for b in index.values() if b.is_evictable and b not in offered]
    assert not missing, "an evictable block is on no heap"


def _check_holdings(leases: Collection[Lease]) -> None:
    chains: dict[Holding, set[Block]] = {}
    for lease in leases:
        if lease.holding is None:
            continue
        chain = chains.setdefault(lease.holding, set())
        node = lease.block
        while node is not None and node not in chain:
            chain.add(node)
            node = node.parent
    for holding, chain in chains.items():
        assert all(block in holding for block in chain), "held, not counted for its client"
        num_bytes = sum(block.stamp.slot_bytes for block in chain)
        assert holding.num_bytes == num_bytes, "bytes held by a client"


def _check_extents(pool: Pool, index: Mapping[bytes, Block]) -> None:
    by_extent: dict[Extent, list[Block]] = {extent: [] for extent in pool.extents}
    for block in index.values():
        by_extent[pool.extent_of(block.slot)].append(block)
    for extent, blocks in by_extent.items():
        assert bool(extent.slot_bytes) == bool(blocks), "an extent in use is empty"
        stamp_ids = Counter(block.stamp.stamp_id for block in blocks)
        assert extent.stamp_ids == stamp_ids, "stamps of an extent"
        assert extent.num_held == sum(bool(b.num_holds) for b in blocks), "slots held"
        unheld = [tail.last_used for b in blocks if not b.num_holds for tail in b.subtree()]
        assert extent.last_used >= max(unheld, default=0), "an extent's last use"
    sizes = Counter(e.slot_bytes for e in pool.extents if e is not pool.draining)
    assert pool.num_free == sizes.pop(0, 0), "free extents"
    assert +pool.num_extents_of == sizes, "extents of each size"
