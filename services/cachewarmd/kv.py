"""L2: sealed KV blocks, their chains, leases, and room for new ones.

A block's life is FREE -> RESERVED -> SEALED -> FREE. Chains are prefix-closed: a block is sealed
only on a sealed parent and evicted only when it has no children, so one lease on the last block of
a chain keeps every ancestor. All calls run on the daemon's event loop; none of them waits.

Slots of several sizes share the pool by extents. Each size that is in use is guaranteed one; beyond
that an extent goes to another size when all in it is older than the next block of that size to go.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

from cachewarmd import invariants, layout
from cachewarmd.block import Block, StampInfo
from cachewarmd.errors import InvalidRequestError, LimitError, NotFoundError
from cachewarmd.eviction import EvictionOrder, ExtentChoice
from cachewarmd.failpoints import hit, may_fail
from cachewarmd.holding import Holding
from cachewarmd.layout import EXTENT_BYTES, RECORDS_PER_EXTENT
from cachewarmd.lease import Lease, LeaseRows
from cachewarmd.pool import Extent, Pool
from cachewarmd.protocol import BLOCK, KEY_BYTES

NO_PARENT, NO_SPACE, MISMATCH = "NO_PARENT", "NO_SPACE", "MISMATCH"
SHORT_READ, PEER_GONE, CHECKSUM = "SHORT_READ", "PEER_GONE", "CHECKSUM"
CLIENT_LIMIT, RETIRED = "CLIENT_LIMIT", "RETIRED"
# Where content was seen that is not what was sealed.
RECOVERY, SCRUB, VERIFY, SNAPSHOT = FAILURE_KINDS = ("recovery", "scrub", "verify", "snapshot")
MAX_STAMPS = 4096
# What one lookup hashes at most of content that a daemon before this one sealed; 1-2 ms.
VERIFY_BYTES = 8 << 20


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


def _counter_of(kind: str) -> str:
    """Name of the counter of failures of that kind; "" = of all."""
    return f"integrity_failures_{kind}" if kind else "integrity_failures"


class BlockStore:
    """Index, leases and eviction over a Pool.

    `sizes_in_use` tells the slot sizes of those who are connected; without it every size that was
    ever registered counts as in use.
    """

    def __init__(self, pool: Pool, sizes_in_use: Callable[[], Set[int]] | None = None) -> None:
        self._pool = pool
        self._stamps: dict[bytes, StampInfo] = {}
        self._superseded_weights: Set[bytes] = frozenset()
        self._retired: set[bytes] = set()  # weights
        self._index: dict[bytes, Block] = {}
        self._leases: dict[int, Lease] = {}
        # Content that another daemon sealed and nobody has looked at since; in order, None each.
        self._unverified: dict[Block, None] = {}
        self._order = EvictionOrder()
        self._choice = ExtentChoice(pool, self._order, sizes_in_use or (lambda: self._order.sizes))
        self._tick = 0
        self._coldest = 0  # tick of what a snapshot brought last
        self._lease_ids = itertools.count(1)
        # These also where they are 0: whoever watches them must see them before they count.
        self.counters: Counter[str] = Counter(
            dict.fromkeys(map(_counter_of, ("", *FAILURE_KINDS)), 0)
        )

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
            self.restore_stamp(known)
            if weights in self._superseded_weights:
                self.supersede(self._superseded_weights)
        elif (known.block_bytes, known.block_size) != (block_bytes, block_size):
            raise InvalidRequestError(
                f"stamp is known with slot_bytes {known.block_bytes}, got {block_bytes}"
            )
        return known

    def restore_stamp(self, info: StampInfo) -> None:
        """One that was registered before, with its number, which is the next."""
        assert info.stamp_id == len(self._stamps), "stamps are numbered in their order"
        self._stamps[info.stamp] = info
        self._order.add_size(info.slot_bytes)

    @property
    def stamps(self) -> list[StampInfo]:
        return list(self._stamps.values())

    def supersede(self, weights: Set[bytes]) -> None:
        """Blocks of exactly these weights are the first to be evicted from now on.

        They still hit. Walks over all blocks, but only when something changes: new weights came.
        """
        self._superseded_weights = weights
        ids = {info.stamp_id for info in self.stamps if info.weights_sha256 in weights}
        changed = self._order.supersede(ids)
        if changed:
            for block in self._index.values():
                if block.stamp.stamp_id in changed:
                    self._order.offer(block)
            self._choice.look_again()

    def is_superseded(self, stamp: StampInfo) -> bool:
        return self._order.is_superseded(stamp.stamp_id)

    def retire(self, weights: Set[bytes]) -> int:
        """Blocks of these weights are found no more, nor published: how many went?

        Those that a lease keeps go when it is released; whoever reads them does so till then.
        """
        self._retired |= weights
        return self.evict(lambda stamp: stamp.weights_sha256 in weights, "retired")[0]

    def revive(self, weights: bytes) -> None:
        """They are served again. Idempotent."""
        self._retired.discard(weights)

    def is_retired(self, stamp: StampInfo) -> bool:
        return stamp.weights_sha256 in self._retired

    # -- reading --------------------------------------------------------------------------------

    def peek(self, stamp: StampInfo, keys: Iterable[bytes]) -> int:
        """How many leading keys are sealed; leases nothing, so only an estimate."""
        return sum(1 for _ in itertools.takewhile(lambda key: self._find(stamp, key), keys))

    def _find(self, stamp: StampInfo, key: bytes) -> Block | None:
        """What may be leased under this key: nothing of another stamp, nothing that drains."""
        block = self._index.get(key)
        if block is None or block.stamp is not stamp or self._is_draining(block):
            return None
        if self._retired and self.is_retired(stamp):
            return None
        return block

    def _is_draining(self, block: Block) -> bool:
        draining = self._pool.draining
        return draining is not None and self._pool.extent_of(block.slot) is draining

    def lookup(
        self,
        stamp: StampInfo,
        keys: Sequence[bytes],
        tail_keys: Sequence[bytes],
        rows: LeaseRows | None = None,
        holding: Holding | None = None,
    ) -> tuple[int, list[Block]]:
        """Longest sealed prefix, leased in the same step. A lease is given for a miss too.

        Of content that was not verified since a restart, VERIFY_BYTES are; the rest is a miss for
        now, and so is what `holding`, the client's, has no room for. `rows` are the client's in
        shared memory. Raises LimitError.
        """
        hit("lookup.before")
        found = self._find_chain(stamp, keys)
        if found is None:
            found = self._verified_prefix(stamp, keys)
        if len(found) == len(keys):
            tails = (self._find(stamp, key) for key in tail_keys)
            found += itertools.islice(filter(self._verify, filter(None, tails)), 1)
        limit = holding.limit() if holding is not None else None
        if holding is not None and limit is not None:
            num_found, found = len(found), holding.cut(found, limit)
            self.counters["lookup_cut_client_limit"] += len(found) < num_found
        lease = self._new_lease(stamp, found[-1] if found else None, rows, holding)
        self.counters["lookup_hit" if found else "lookup_miss"] += 1
        hit("lookup.after")
        return lease, found

    def _find_chain(self, stamp: StampInfo, keys: Sequence[bytes]) -> list[Block] | None:
        """The prefix by its last block, whose ancestors are the rest: sealed, so all of them are.

        None where each has to be looked at: some may drain, some are not verified, or the keys are
        no chain.
        """
        if self._unverified or self._pool.draining is not None:
            return None
        index = self._index
        count = bisect.bisect_left(keys, True, key=lambda key: self._find(stamp, key) is None)
        found = []
        node = index[keys[count - 1]] if count else None
        while node is not None:
            found.append(node)
            node = node.parent
        found.reverse()
        return found if [block.key for block in found] == list(keys[:count]) else None

    def _verified_prefix(self, stamp: StampInfo, keys: Sequence[bytes]) -> list[Block]:
        found: list[Block] = []
        budget = VERIFY_BYTES
        for key in keys:
            block = self._find(stamp, key)
            if block is None or (not block.is_verified and budget <= 0):
                break
            budget -= 0 if block.is_verified else stamp.block_bytes
            if not self._verify(block):
                break
            found.append(block)
        return found

    def _new_lease(
        self,
        stamp: StampInfo,
        block: Block | None,
        rows: LeaseRows | None,
        holding: Holding | None = None,
    ) -> int:
        row = rows.take() if rows is not None else 0
        lease = next(self._lease_ids)
        self._leases[lease] = Lease(stamp, rows, row, holding)
        self._move_lease(lease, block)
        return lease

    def claim(
        self,
        stamp: StampInfo,
        handle: tuple[int, int] | None,
        rows: LeaseRows | None = None,
        holding: Holding | None = None,
    ) -> int | None:
        """A lease of (slot, generation), or of nothing; None when that block is gone.

        Whatever the client's limit is: it reads that block already.
        """
        block = None
        if handle is not None:
            block = self._at(handle[0])
            if block is None or block.generation != handle[1] or block.stamp is not stamp:
                return None
        return self._new_lease(stamp, block, rows, holding)

    def quarantine(self, slots: Iterable[int]) -> list[int]:
        """Leases for whoever may still read the blocks in these slots."""
        found = filter(None, map(self._at, slots))
        return [self._new_lease(block.stamp, block, None) for block in found]

    def _at(self, slot: int) -> Block | None:
        if not 0 <= slot < len(self._pool.records):
            return None
        block = self._index.get(bytes(self._pool.records["key"][slot]))
        return block if block is not None and block.slot == slot else None

    def release(self, lease: int) -> None:
        """Give a lease back. Raises NotFoundError."""
        hit("release.before")
        self._move_lease(lease, None)
        ended = self._leases.pop(lease)
        if ended.rows is not None:
            ended.rows.give_back(ended.row)
        hit("release.after")

    def _move_lease(self, lease: int, block: Block | None) -> None:
        try:
            entry = self._leases[lease]
        except KeyError:
            raise NotFoundError(f"lease {lease} is not known") from None
        # Claim the new one first: it may be the only thing that keeps an ancestor of both.
        if block is not None:
            self._hold(block)
            self._touch(block)
            if entry.holding is not None:
                entry.holding.hold(block)
        if entry.rows is not None:
            entry.rows.set(entry.row, block.slot if block is not None else None)
        before, entry.block = entry.block, block
        if before is not None:
            self._touch(before)
            if entry.holding is not None:
                entry.holding.let_go(before)
            self._let_go(before)
            self._drop_retired(before)

    def _drop_retired(self, block: Block) -> None:
        """A lease is off it: what stayed for that alone goes now."""
        node: Block | None = block
        while node is not None and node.is_evictable and self.is_retired(node.stamp):
            parent = node.parent
            self._drop(node, "retired")
            node = parent

    def _touch(self, block: Block) -> None:
        self._tick += 1
        block.last_used = self._tick
        self._pool.extent_of(block.slot).last_used = self._tick

    def _hold(self, block: Block) -> None:
        """Keep a block and its ancestors. Costs a step for each that nothing kept before."""
        extents = self._pool.extents
        node: Block | None = block
        while node is not None:
            node.num_holds += 1
            if node.num_holds > 1:
                return
            extents[node.slot // RECORDS_PER_EXTENT].num_held += 1
            node = node.parent

    def _let_go(self, block: Block) -> None:
        extents, tick = self._pool.extents, self._tick
        node: Block | None = block
        while node is not None:
            node.num_holds -= 1
            if node.num_holds:
                break
            extent = extents[node.slot // RECORDS_PER_EXTENT]
            extent.num_held -= 1
            # What is released now was needed till now, whatever else happened in its extent.
            extent.last_used = tick
            node = node.parent
        self._order.offer(block)

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
        stamp, holding = self._leases[lease].stamp, self._leases[lease].holding
        limit = None if holding is None else holding.limit()
        sealed: list[Block] = []
        hit("publish.before")
        if self.is_retired(stamp):
            return sealed, self._refuse(RETIRED)
        for number, new in enumerate(chain):
            self._check_new(new, stamp, source)
            at_root = is_root and number == 0
            block = self._index.get(new.key)
            is_new = holding is None or block is None or block not in holding
            if holding is not None and limit is not None and is_new:
                num_bytes = holding.num_bytes + stamp.slot_bytes
                if num_bytes > limit:
                    return sealed, self._refuse(CLIENT_LIMIT)
            if block is None or not self._verify(block):
                parent = None if at_root else self._index.get(new.parent_key)
                if not at_root and (parent is None or parent.is_short or parent.stamp is not stamp):
                    return sealed, self._refuse(NO_PARENT)
                made = self._copy_in(new, parent, stamp, source)
                if isinstance(made, str):
                    return sealed, self._refuse(made)
                block = made
            elif block.stamp is not stamp or block.num_tokens != new.num_tokens:
                return sealed, self._refuse(MISMATCH)
            elif self._is_draining(block):
                return sealed, self._refuse(NO_SPACE)
            sealed.append(block)
            # At once, so that making room for the next one cannot evict this one.
            self._move_lease(lease, block)
            hit("publish.block")
        hit("publish.after")
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
        try:
            may_fail("copy.before")
            copied = self._pool.fill(slot, source.fd, new.private_offset, stamp.block_bytes)
            may_fail("copy.after")
        except OSError:
            self._pool.give_back(slot)
            raise
        if not copied or not source.is_open():
            self._pool.give_back(slot)
            return PEER_GONE if copied else SHORT_READ
        self.counters["published"] += 1
        return self._seal(slot, new, parent, stamp)

    def _seal(self, slot: int, new: NewBlock, parent: Block | None, stamp: StampInfo) -> Block:
        generation = self._pool.seal(
            slot,
            new.key,
            new.parent_key,
            new.num_tokens,
            stamp.stamp_id,
            stamp.block_bytes,
            is_root=parent is None,
        )
        offset = self._pool.offset_of(slot)
        block = Block(new.key, parent, stamp, slot, generation, offset, new.num_tokens)
        self._enter(block)
        return block

    def _enter(self, block: Block) -> None:
        self._index[block.key] = block
        block.packed = BLOCK.pack(block.slot, block.num_tokens, block.generation, block.offset)
        self._pool.extent_of(block.slot).stamp_ids[block.stamp.stamp_id] += 1
        if block.parent is not None:
            block.parent.children.add(block)

    def _refuse(self, reason: str) -> str:
        self.counters[f"refused_{reason.lower()}"] += 1
        return reason

    # -- snapshots ------------------------------------------------------------------------------

    @property
    def blocks(self) -> list[Block]:
        """All that are sealed now, in no order."""
        return list(self._index.values())

    def is_known(self, key: bytes) -> bool:
        return key in self._index

    def admit(
        self,
        new: NewBlock,
        stamp: StampInfo,
        source: Source,
        xxh3: bytes,
        *,
        is_root: bool,
    ) -> str:
        """Seal a block of a snapshot if its content has this digest; "" or why not.

        Takes free slots only: nothing is evicted for it. The later it comes, the sooner it is
        evicted, and before all that was ever used here.
        """
        parent = None if is_root else self._index.get(new.parent_key)
        if not is_root and (parent is None or parent.is_short or parent.stamp is not stamp):
            return NO_PARENT
        slot = self._free_slot(stamp.slot_bytes)
        if slot is None:
            return NO_SPACE
        num_bytes = stamp.block_bytes
        if not self._pool.fill(slot, source.fd, new.private_offset, num_bytes):
            self._pool.give_back(slot)
            return SHORT_READ
        # Of the pool's own copy: whatever happened on the way here is seen.
        if not self._pool.holds(slot, num_bytes, xxh3):
            self._pool.give_back(slot)
            self._count_failure(SNAPSHOT)
            return CHECKSUM
        # Unlike every other: the order tells stale entries apart by ticks.
        self._coldest -= 1
        block = self._seal(slot, new, parent, stamp)
        block.last_used = self._coldest
        self._order.offer(block)
        return ""

    def _free_slot(self, slot_bytes: int) -> int | None:
        slot = self._pool.take_slot(slot_bytes)
        if (
            slot is None
            and self._choice.may_open(slot_bytes)
            and self._pool.open_extent(slot_bytes)
        ):
            slot = self._pool.take_slot(slot_bytes)
        return slot

    # -- room -----------------------------------------------------------------------------------

    def _make_room(self, slot_bytes: int, keep: Block | None) -> int | None:
        """A slot of that size, None when nothing may go for it.

        `keep` is about to get a child and must not go.
        """
        if keep is not None:
            self._hold(keep)
        try:
            slot = self._pool.take_slot(slot_bytes)
            while slot is None and self._free_something(slot_bytes):
                slot = self._pool.take_slot(slot_bytes)
            return slot
        finally:
            if keep is not None:
                self._let_go(keep)

    def _free_something(self, slot_bytes: int) -> bool:
        """An extent, or a block of this size; False when nothing may go."""
        pool, choice = self._pool, self._choice
        if choice.may_open(slot_bytes) and pool.open_extent(slot_bytes):
            return True
        if not pool.num_extents_of[slot_bytes]:
            extent = choice.claimed(slot_bytes)
            return extent is not None and self._empty(extent) and pool.open_extent(slot_bytes)
        victim = self._order.first(slot_bytes)
        extent = choice.older(slot_bytes, victim)
        if extent is not None:
            return self._empty(extent) and pool.open_extent(slot_bytes)
        if victim is not None:
            self._drop(victim, "pressure")
        return victim is not None

    def _empty(self, extent: Extent) -> bool:
        """Drop what no lease keeps, with all that hangs on it; is the extent free now?"""
        if extent.num_used > extent.num_held:
            keys = (bytes(self._pool.records["key"][s]) for s in self._pool.sealed_slots(extent))
            tops = [block for key in keys if not (block := self._index[key]).num_holds]
            self._drop_all({block for top in tops for block in top.subtree()}, "other_size")
        return not extent.slot_bytes

    # -- eviction -------------------------------------------------------------------------------

    def evict(
        self, wanted: Callable[[StampInfo], bool], cause: str = "asked"
    ) -> tuple[int, int, int]:
        """Drop every block of the wanted stamps that no lease keeps: (blocks, bytes, kept)."""
        chosen = [block for block in self._index.values() if wanted(block.stamp)]
        doomed = {block for block in chosen if not block.num_holds}
        num_bytes = sum(block.stamp.block_bytes for block in doomed)
        self._drop_all(doomed, cause)
        return len(doomed), num_bytes, len(chosen) - len(doomed)

    def _drop_all(self, doomed: set[Block], cause: str) -> None:
        """Children before parents; `doomed` holds every descendant of its members."""
        leaves = [block for block in doomed if not block.children]
        while leaves:
            block = leaves.pop()
            parent = block.parent
            self._drop(block, cause)
            if parent in doomed and not parent.children:
                leaves.append(parent)

    def _drop(self, block: Block, cause: str) -> None:
        hit("evict.before")
        del self._index[block.key]
        self._unverified.pop(block, None)
        block.is_sealed = False
        extent = self._pool.extent_of(block.slot)
        extent.stamp_ids[block.stamp.stamp_id] -= 1
        if not extent.stamp_ids[block.stamp.stamp_id]:
            del extent.stamp_ids[block.stamp.stamp_id]
        self._pool.give_back(block.slot)
        hit("evict.after")
        if cause not in ("asked", "poisoned", "retired") and self.is_superseded(block.stamp):
            cause = "superseded"
        self.counters[f"evicted_{cause}"] += 1
        parent = block.parent
        if parent is not None:
            parent.children.discard(block)
            # It was needed as lately as its child was.
            parent.last_used = max(parent.last_used, block.last_used)
            self._order.offer(parent)

    # -- after a restart ------------------------------------------------------------------------

    def restore(self, blocks: Sequence[Block]) -> None:
        """Blocks that an earlier daemon sealed, parents first; see `recovery`."""
        for block in blocks:
            self._enter(block)
        for block in blocks:
            self._order.offer(block)
        self._unverified = {block: None for block in blocks if not block.is_verified}

    def next_unverified(self, num_bytes: int) -> list[Block]:
        """So much of what another daemon sealed and nobody has looked at, at least a block."""
        chosen: list[Block] = []
        for block in self._unverified:
            if chosen and num_bytes <= 0:
                break
            chosen.append(block)
            num_bytes -= block.stamp.block_bytes
        return chosen

    def unverified(self, stamp: StampInfo, keys: Iterable[bytes]) -> list[Block]:
        """The same of the sealed prefix of a chain, if it is more than a lookup hashes itself."""
        if not self._unverified:
            return []
        found = itertools.takewhile(bool, (self._find(stamp, key) for key in keys))
        chosen = [block for block in found if block is not None and not block.is_verified]
        return chosen if len(chosen) * stamp.block_bytes > VERIFY_BYTES else []

    def is_intact(self, block: Block) -> bool:
        """Hash a block, in any thread: what comes out counts if it is still sealed afterwards."""
        return self._pool.is_content_intact(block.slot)

    def settle(self, block: Block, *, is_intact: bool, kind: str = RECOVERY) -> None:
        """What `is_intact` said of a block that is sealed; if not, it is gone afterwards."""
        hit("verify.before")
        self._unverified.pop(block, None)
        block.is_verified = is_intact
        if not is_intact:
            self.poison(block, kind)

    def scrub(self, block: Block, kind: str) -> bool:
        """Hash a sealed block now, whoever looked before; if it is not what was sealed, it goes."""
        block.is_verified = False
        return self._verify(block, kind)

    def _verify(self, block: Block, kind: str = RECOVERY) -> bool:
        """Is the content what was sealed? Asked once; if not, the block is gone afterwards."""
        if not block.is_verified:
            self.settle(block, is_intact=self.is_intact(block), kind=kind)
        return block.is_verified

    def poison(self, block: Block, kind: str) -> None:
        """Nobody gets it any more, nor what was computed from it, and who reads it notices."""
        doomed = set(block.subtree())
        for lease, entry in self._leases.items():
            if entry.block in doomed:
                self._move_lease(lease, None)
        # Of retired weights they may have gone with the lease.
        self._drop_all({gone for gone in doomed if gone.is_sealed}, "poisoned")
        self._count_failure(kind)

    def _count_failure(self, kind: str) -> None:
        self.counters[_counter_of("")] += 1
        self.counters[_counter_of(kind)] += 1

    # -- views ----------------------------------------------------------------------------------

    def num_blocks(self, stamp: StampInfo) -> int:
        return sum(extent.stamp_ids[stamp.stamp_id] for extent in self._pool.extents)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def check_invariants(self) -> None:
        """Raises AssertionError naming the first thing that is not as it must be."""
        invariants.check(self._pool, self._index, self._leases.values(), self._order)
