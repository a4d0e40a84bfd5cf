"""L2: sealed KV blocks, their chains, leases, and which may go.

A block's life is FREE -> RESERVED -> SEALED -> FREE. Chains are prefix-closed: a block is sealed
only on a sealed parent and evicted only when it has no children, so one lease on the last block of
a chain keeps every ancestor. All calls run on the daemon's event loop; none of them waits.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cachewarmd import layout
from cachewarmd.errors import InvalidRequestError, LimitError, NotFoundError
from cachewarmd.layout import EXTENT_BYTES, KEY_BYTES, BlockState
from cachewarmd.pool import Extent, Pool

NO_PARENT, NO_SPACE, MISMATCH = "NO_PARENT", "NO_SPACE", "MISMATCH"
SHORT_READ, PEER_GONE = "SHORT_READ", "PEER_GONE"
MAX_STAMPS = 4096
_HEAP_SLACK = 256


@dataclass(frozen=True)
class StampInfo:
    """What a registered stamp's blocks look like."""

    stamp_id: int
    stamp: bytes
    slot_bytes: int  # of the pool, rounded
    block_bytes: int  # of content
    block_size: int  # tokens
    description: str
    weights_sha256: bytes


@dataclass(eq=False, slots=True)
class Block:
    """A sealed block. `last_used` is a tick; the eviction order compares nothing else."""

    key: bytes
    parent: Block | None
    stamp: StampInfo
    slot: int
    generation: int
    offset: int
    num_tokens: int
    num_children: int = 0
    num_leases: int = 0
    last_used: int = 0

    @property
    def is_evictable(self) -> bool:
        return not self.num_children and not self.num_leases

    @property
    def is_short(self) -> bool:
        return self.num_tokens < self.stamp.block_size


@dataclass(frozen=True)
class NewBlock:
    """One element of a publish: `num_tokens` of content at `private_offset` of the pool fd."""

    parent_key: bytes
    key: bytes
    num_tokens: int
    private_offset: int


@dataclass(frozen=True)
class Source:
    """Where published bytes come from. `is_open` is asked after each copy, see `publish`."""

    fd: int
    size: int
    is_open: Callable[[], bool]


class BlockStore:
    """Index, leases and eviction over a Pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._stamps: dict[bytes, StampInfo] = {}
        self._index: dict[bytes, Block] = {}
        self._leases: dict[int, tuple[StampInfo, Block | None]] = {}
        # One heap a slot size of (short first, tick): entries go stale, `_pop_victim` skips those.
        self._evictable: dict[int, list[tuple[bool, int, int, Block]]] = {}
        self._ticks = itertools.count(1)
        self._lease_ids = itertools.count(1)
        self.counters: Counter[str] = Counter()

    # -- stamps ---------------------------------------------------------------------------------

    def register(
        self, stamp: bytes, block_bytes: int, block_size: int, description: str, weights: bytes
    ) -> StampInfo:
        """Idempotent. Raises InvalidRequestError for sizes that can't be, or that differ now."""
        if len(stamp) != KEY_BYTES:
            raise InvalidRequestError(f"stamp: {KEY_BYTES} bytes are expected, got {len(stamp)}")
        slot_bytes = layout.round_slot_bytes(block_bytes)
        if not 0 < block_bytes <= EXTENT_BYTES or not block_size:
            raise InvalidRequestError(
                f"slot_bytes {block_bytes} is not allowed: 1 to {EXTENT_BYTES} (one extent)"
            )
        known = self._stamps.get(stamp)
        if known is None:
            if len(self._stamps) >= MAX_STAMPS:
                raise LimitError(f"{MAX_STAMPS} stamps are registered, no more are allowed")
            known = StampInfo(
                len(self._stamps), stamp, slot_bytes, block_bytes, block_size, description, weights
            )
            self._stamps[stamp] = known
            self._evictable.setdefault(slot_bytes, [])
        elif (known.block_bytes, known.block_size) != (block_bytes, block_size):
            raise InvalidRequestError(
                f"stamp is known with slot_bytes {known.block_bytes}, got {block_bytes}"
            )
        return known

    @property
    def stamps(self) -> list[StampInfo]:
        return list(self._stamps.values())

    # -- reading --------------------------------------------------------------------------------

    def peek(self, keys: Iterable[bytes]) -> int:
        """How many leading keys are sealed; leases nothing, so only an estimate."""
        return sum(1 for _ in itertools.takewhile(self._index.__contains__, keys))

    def lookup(
        self, stamp: StampInfo, keys: Sequence[bytes], tail_keys: Sequence[bytes]
    ) -> tuple[int, list[Block]]:
        """Longest sealed prefix, leased in the same step. A lease is given for a miss too."""
        found = []
        for key in keys:
            block = self._index.get(key)
            if block is None or block.stamp is not stamp:
                break
            found.append(block)
        else:
            tail = next((self._index[key] for key in tail_keys if key in self._index), None)
            if tail is not None and tail.stamp is stamp:
                found.append(tail)
        lease = next(self._lease_ids)
        self._leases[lease] = (stamp, None)
        self._move_lease(lease, found[-1] if found else None)
        self.counters["lookup_hit" if found else "lookup_miss"] += 1
        return lease, found

    def release(self, lease: int) -> None:
        """Give a lease back. Raises NotFoundError."""
        self._move_lease(lease, None)
        del self._leases[lease]

    def _move_lease(self, lease: int, block: Block | None) -> None:
        try:
            stamp, before = self._leases[lease]
        except KeyError:
            raise NotFoundError(f"lease {lease} is not known") from None
        # Claim the new one first: it may be the only thing that keeps an ancestor of both.
        if block is not None:
            block.num_leases += 1
            block.last_used = next(self._ticks)
        self._leases[lease] = (stamp, block)
        if before is not None:
            before.num_leases -= 1
            before.last_used = next(self._ticks)
            self._offer(before)

    # -- publishing -----------------------------------------------------------------------------

    def publish(
        self, lease: int, chain: Sequence[NewBlock], source: Source, *, is_root: bool
    ) -> tuple[list[Block], str]:
        """Seal `chain` in order; stops at the first refusal and names it ("" = all sealed).

        The lease then names the last sealed block. A key that is sealed already gives the existing
        block, nothing is copied. After each copy the peer's connection must still be open: a client
        reuses private blocks only after it closed the connection or had the reply, so an open one
        proves that the bytes copied were the bytes meant.
        Raises NotFoundError (lease) and InvalidRequestError (sizes outside the private pool).
        """
        if lease not in self._leases:
            raise NotFoundError(f"lease {lease} is not known")
        stamp, _ = self._leases[lease]
        sealed: list[Block] = []
        for number, new in enumerate(chain):
            self._check_new(new, stamp, source)
            at_root = is_root and number == 0
            block = self._index.get(new.key)
            if block is None:
                parent = None if at_root else self._index.get(new.parent_key)
                if not at_root and (parent is None or parent.is_short or parent.stamp is not stamp):
                    return sealed, self._refuse(NO_PARENT)
                made = self._copy_in(new, parent, stamp, source)
                if isinstance(made, str):
                    return sealed, self._refuse(made)
                block = made
            elif block.stamp is not stamp or block.num_tokens != new.num_tokens:
                return sealed, self._refuse(MISMATCH)
            sealed.append(block)
            # At once, so that making room for the next one cannot evict this one.
            self._move_lease(lease, block)
        return sealed, ""

    @staticmethod
    def _check_new(new: NewBlock, stamp: StampInfo, source: Source) -> None:
        if len(new.key) != KEY_BYTES or len(new.parent_key) != KEY_BYTES:
            raise InvalidRequestError(f"key: {KEY_BYTES} bytes are expected")
        if not 0 < new.num_tokens <= stamp.block_size:
            raise InvalidRequestError(
                f"num_tokens {new.num_tokens} is not allowed: 1 to {stamp.block_size}"
            )
        if new.private_offset + stamp.block_bytes > source.size:
            raise InvalidRequestError("private_offset lies outside the private pool")

    def _copy_in(
        self, new: NewBlock, parent: Block | None, stamp: StampInfo, source: Source
    ) -> Block | str:
        slot = self._make_room(stamp.slot_bytes, keep=parent)
        if slot is None:
            return NO_SPACE
        copied = self._pool.fill(slot, source.fd, new.private_offset, stamp.block_bytes)
        if not copied or not source.is_open():
            self._pool.give_back(slot)
            return PEER_GONE if copied else SHORT_READ
        generation = self._pool.seal(
            slot, new.key, new.parent_key, new.num_tokens, stamp.stamp_id, stamp.block_bytes
        )
        offset = self._pool.offset_of(slot)
        block = Block(new.key, parent, stamp, slot, generation, offset, new.num_tokens)
        self._index[new.key] = block
        if parent is not None:
            parent.num_children += 1
        self.counters["published"] += 1
        return block

    def _refuse(self, reason: str) -> str:
        self.counters[f"refused_{reason.lower()}"] += 1
        return reason

    # -- eviction -------------------------------------------------------------------------------

    def _offer(self, block: Block) -> None:
        if block.is_evictable:
            heap = self._evictable[block.stamp.slot_bytes]
            heapq.heappush(heap, (not block.is_short, block.last_used, block.slot, block))
            if len(heap) > 2 * len(self._index) + _HEAP_SLACK:
                # Without pressure nothing is popped, and every lease leaves a stale entry.
                heap[:] = {id(e[3]): e for e in heap if self._is_current(e)}.values()
                heapq.heapify(heap)

    def _is_current(self, entry: tuple[bool, int, int, Block]) -> bool:
        _, tick, _, block = entry
        is_live = self._index.get(block.key) is block
        return is_live and block.is_evictable and block.last_used == tick

    def _make_room(self, slot_bytes: int, keep: Block | None) -> int | None:
        """A slot: free, else by evicting the oldest leaf of this size, else another size's extent.

        `keep` is about to get a child and must not go.
        """
        if keep is not None:
            keep.num_leases += 1
        try:
            slot = self._pool.take_slot(slot_bytes)
            if slot is None and self._evict_oldest(slot_bytes):
                slot = self._pool.take_slot(slot_bytes)
            if slot is None and self._evict_extent_for(slot_bytes):
                slot = self._pool.take_slot(slot_bytes)
            return slot
        finally:
            if keep is not None:
                keep.num_leases -= 1
                self._offer(keep)

    def _evict_oldest(self, slot_bytes: int) -> bool:
        heap = self._evictable[slot_bytes]
        while heap:
            entry = heapq.heappop(heap)
            if self._is_current(entry):
                self._drop(entry[3], "pressure")
                return True
        return False

    def _evict_extent_for(self, slot_bytes: int) -> bool:
        """Empty an extent of another size, the one with the fewest leased chains.

        Only for a size that has none: each registered size is guaranteed one extent, and no size
        is robbed of its last.
        """
        in_use = Counter(extent.slot_bytes for extent in self._pool.extents)
        if in_use[slot_bytes]:
            return False
        by_extent: dict[int, list[Block]] = {}
        for block in self._index.values():
            by_extent.setdefault(self._pool.extent_of(block.slot).number, []).append(block)
        children: dict[Block, list[Block]] = {}
        for block in self._index.values():
            if block.parent is not None:
                children.setdefault(block.parent, []).append(block)

        def subtree(block: Block) -> list[Block]:
            found, todo = [], [block]
            while todo:
                found.append(todo.pop())
                todo.extend(children.get(found[-1], []))
            return found

        def cost(extent: Extent) -> tuple[int, int]:
            blocks = by_extent.get(extent.number, [])
            return sum(block.num_leases for block in blocks), len(blocks)

        candidates = [e for e in self._pool.extents if e.slot_bytes and in_use[e.slot_bytes] > 1]
        for extent in sorted(candidates, key=cost):
            doomed = {b for block in by_extent[extent.number] for b in subtree(block)}
            if any(block.num_leases for block in doomed):
                continue
            self._drop_all(doomed, "other_size")
            return True
        return False

    def evict(self, wanted: Callable[[StampInfo], bool]) -> tuple[int, int, int]:
        """Drop every block of the wanted stamps that no lease keeps: (blocks, bytes, kept)."""
        chosen = [b for b in self._index.values() if wanted(b.stamp)]
        kept: set[Block] = set()
        for block in chosen:
            node: Block | None = block if block.num_leases else None
            while node is not None and node not in kept:
                kept.add(node)
                node = node.parent
        doomed = {block for block in chosen if block not in kept}
        num_bytes = sum(block.stamp.block_bytes for block in doomed)
        self._drop_all(doomed, "asked")
        return len(doomed), num_bytes, len(kept)

    def _drop_all(self, doomed: set[Block], cause: str) -> None:
        """Children before parents; `doomed` holds every descendant of its members."""
        leaves = [block for block in doomed if not block.num_children]
        while leaves:
            block = leaves.pop()
            parent = block.parent
            self._drop(block, cause)
            if parent in doomed and not parent.num_children:
                leaves.append(parent)

    def _drop(self, block: Block, cause: str) -> None:
        del self._index[block.key]
        self._pool.give_back(block.slot)
        self.counters[f"evicted_{cause}"] += 1
        parent = block.parent
        if parent is not None:
            parent.num_children -= 1
            # It was needed as lately as its child was.
            parent.last_used = max(parent.last_used, block.last_used)
            self._offer(parent)

    # -- views ----------------------------------------------------------------------------------

    def usage(self) -> tuple[Counter[str], Counter[str]]:
        """Blocks and bytes by state, from the records themselves."""
        blocks: Counter[str] = Counter({state.name.lower(): 0 for state in BlockState})
        sizes: Counter[str] = Counter(blocks)
        for extent in self._pool.extents:
            used = 0
            first = extent.number * layout.RECORDS_PER_EXTENT
            states = self._pool.records["state"][first : first + extent.num_slots]
            for state in BlockState:
                count = int((states == state).sum())
                blocks[state.name.lower()] += count
                if state is not BlockState.FREE:
                    sizes[state.name.lower()] += count * extent.slot_bytes
                    used += count * extent.slot_bytes
            sizes["free"] += EXTENT_BYTES - used
        return blocks, sizes

    def num_blocks(self, stamp: StampInfo) -> int:
        return sum(1 for block in self._index.values() if block.stamp is stamp)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check_invariants(self) -> None:
        """Raises AssertionError naming the first thing that is not as it must be."""
        blocks, _ = self.usage()
        assert sum(blocks.values()) == sum(e.num_slots for e in self._pool.extents), "capacity"
        free = sum(len(e.free_slots) for e in self._pool.extents)
        assert blocks["free"] == free, f"free records {blocks['free']}, free slots {free}"
        assert blocks["sealed"] == len(self._index), "sealed records and index differ"
        assert not blocks["reserved"], "a slot stayed reserved"
        slots = [block.slot for block in self._index.values()]
        assert len(set(slots)) == len(slots), "two blocks in one slot"
        children: Counter[Block] = Counter()
        leases: Counter[Block] = Counter(b for _, b in self._leases.values() if b is not None)
        for key, block in self._index.items():
            record = self._pool.records[block.slot]
            assert block.key == key == bytes(record["key"]), "key"
            assert record["state"] == BlockState.SEALED, "an indexed block is not sealed"
            assert record["generation"] == block.generation, "generation"
            assert record["offset"] == block.offset == self._pool.offset_of(block.slot), "offset"
            if block.parent is not None:
                assert self._index.get(block.parent.key) is block.parent, "not prefix-closed"
                children[block.parent] += 1
        for block in self._index.values():
            assert block.num_children == children[block], "children count"
            assert block.num_leases == leases[block], "lease count"
        for block in leases:
            assert self._index.get(block.key) is block, "leased, not sealed"
        entries = [entry for heap in self._evictable.values() for entry in heap]
        offered = {block for _, tick, _, block in entries if tick == block.last_used}
        missing = [b for b in self._index.values() if b.is_evictable and b not in offered]
        assert not missing, "an evictable block is on no heap"
