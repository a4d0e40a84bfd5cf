"""A worker's side of the daemon's pool: lookups with a budget, publishes nobody waits for.

The daemon absent, slow or stopped is never an error here: a lookup is a miss, blocks stay private.
A connection that is given up is closed *before* any private block it may still copy from is reused;
the daemon seals nothing it copied for a closed connection.

When a daemon comes back with the same pool, it is told every lease that is still in use (Reattach).
Until it has confirmed one, what is read under it is checked at every step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from cachewarmd.client import blocks_of
from cachewarmd.errors import CachewarmError
from cachewarmd.keys import block_key, chain_keys, tail_keys
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from engine.block_table import PrivateBlock, PrivatePool, SharedBlock
from engine.daemon_link import DaemonLink, Link
from engine.scheduler import Sequence as Request

_log = get_logger()

_PUBLISH_TIMEOUT_S = 2.0
# After a lookup that got no answer in time the next ones don't try: each would cost its budget.
_LOOKUP_PAUSE_S = 1.0
_MAX_TOLD_IDS = 1 << 20  # token ids in a lookup, for a daemon that wants them; a frame has 8 MiB


@dataclass(eq=False)
class CachedPrefix:
    """A request's claim on the pool: lease, keys of its chain, and what is sealed of it."""

    link: Link
    lease: int
    root: bytes  # key before the first block
    keys: list[bytes]  # of full blocks, as far as they are known
    num_sealed_blocks: int  # leading full blocks that are sealed or on their way
    num_tokens: int  # positions covered by the blocks that were found
    num_known_blocks: int  # leading full blocks that are sealed for sure
    last: pb.Handle | None  # the block that the lease names
    change_word: int  # of the pool, when all that is read under the lease was intact
    may_publish: bool = True
    is_released: bool = False

    @property
    def is_lost(self) -> bool:
        """The lease ended with its connection: what is read under it must be checked."""
        return self.link.client.is_lost


@dataclass(frozen=True)
class Lookup:
    """One that was sent."""

    future: Future[tuple[pb.Envelope, list[int]]]
    link: Link
    root: bytes
    keys: list[bytes]
    limit_s: float
    deadline: float
    change_word: int


@dataclass(eq=False)
class _Publish:
    future: Future[tuple[pb.Envelope, list[int]]]
    request: Request
    prefix: CachedPrefix
    blocks: list[tuple[int, PrivateBlock]]  # (index in the table, block)
    is_void: bool = False  # a later daemon was told what is leased without it
    deadline: float = field(default_factory=lambda: time.monotonic() + _PUBLISH_TIMEOUT_S)


@dataclass(frozen=True)
class _Reattach:
    link: Link
    old: Link
    future: Future[tuple[pb.Envelope, list[int]]]
    prefixes: list[CachedPrefix]


class SharedCache:
    """What a worker does with the pool. All calls from the worker's loop."""

    def __init__(
        self, link: DaemonLink, pool: PrivatePool, block_size: int, wake: Callable[[], None]
    ) -> None:
        self._link = link
        self._pool = pool
        self._block_size = block_size
        self._wake = wake
        self._publishes: list[_Publish] = []
        self._live: set[CachedPrefix] = set()
        self._followed: Link | None = None
        self._owed: list[Link] = []  # lost ones, of which no daemon has confirmed what is kept
        self._reattaches: list[_Reattach] = []
        self._next_lookup = 0.0

    @property
    def epoch(self) -> int:
        """Of the daemon that is connected; 0 = none is."""
        link = self._link.current
        return link.epoch if link is not None else 0

    def close(self) -> None:
        """Wait a moment for publishes that are under way, then leave."""
        end = time.monotonic() + _PUBLISH_TIMEOUT_S
        while self._publishes and time.monotonic() < end:
            self.poll()
            time.sleep(0.005)
        self._link.close()

    # -- reading --------------------------------------------------------------------------------

    def ask(
        self,
        tokens: Sequence[int],
        wait_s: float,
        limit_s: float,
        domain: tuple[str, str | None] = ("", None),
        *,
        is_prefill_only: bool = False,
    ) -> Lookup | None:
        """Look for the longest sealed prefix of `tokens`; None = no daemon: stay private.

        Waits at most `wait_s` here; `answer` tells what came of it, within `limit_s`. `domain` is
        (tenant, cache salt): nothing is found, or published later, of another.
        """
        link, now = self._link.current, time.monotonic()
        if link is None or now < self._next_lookup:
            return None
        root = link.root(domain)
        keys = chain_keys(root, tokens, self._block_size)
        rest = tokens[len(keys) * self._block_size :]
        tails = tail_keys(keys[-1] if keys else root, rest)
        request = pb.Lookup(stamp_id=link.stamp_id, keys=b"".join(keys), tail_keys=b"".join(tails))
        request.is_prefill_only = is_prefill_only
        word = link.pool.change_word  # before anything is leased: what changes after it is seen
        num_ids = len(keys) * self._block_size
        if link.wants_token_ids and num_ids <= _MAX_TOLD_IDS:
            request.token_ids = np.asarray(tokens[:num_ids], dtype="<u4").tobytes()
            request.tenant, salt = domain
            if salt is not None:
                request.cache_salt = salt
        try:
            future = link.client.ask(pb.Envelope(lookup=request), min(wait_s, limit_s))
        except CachewarmError as exc:
            _log.info("lookup_missed", reason=str(exc))
            return None
        return Lookup(future, link, root, keys, limit_s, now + limit_s, word)

    def answer(
        self, lookup: Lookup, *, is_waiting: bool
    ) -> tuple[CachedPrefix | None, list[SharedBlock]] | None:
        """The prefix, leased; None, [] = a miss, also when time is over; None = not there yet.

        `is_waiting`: not before there is one of the first two.
        """
        remaining = lookup.deadline - time.monotonic()
        try:
            reply, _ = lookup.future.result(max(0.0, remaining) if is_waiting else 0.0)
        except TimeoutError:
            if not is_waiting and remaining > 0:
                return None
            self.forget(lookup)
            _log.info("lookup_missed", reason=f"no answer within {lookup.limit_s:g} s")
            self._next_lookup = time.monotonic() + _LOOKUP_PAUSE_S
            return None, []
        except CachewarmError as exc:
            _log.info("lookup_missed", reason=str(exc))
            return None, []
        found, link = reply.lookup_reply, lookup.link
        shared = [self._shared(link, *block) for block in blocks_of(found)]
        num_tokens = sum(block.num_tokens for block in shared)
        full = num_tokens // self._block_size
        last = _handle(shared[-1]) if shared else None
        prefix = CachedPrefix(
            link,
            found.lease,
            lookup.root,
            lookup.keys,
            full,
            num_tokens,
            full,
            last,
            lookup.change_word,
        )
        self._live.add(prefix)
        return prefix, shared

    @staticmethod
    def forget(lookup: Lookup) -> None:
        """Nobody wants the answer any more: its lease is released when it comes."""
        lookup.future.add_done_callback(lambda late: _release_late(lookup.link, late))

    def _shared(
        self, link: Link, slot: int, num_tokens: int, generation: int, offset: int
    ) -> SharedBlock:
        memory = link.pool.memory[offset : offset + self._pool.block_bytes]
        return SharedBlock(memory, slot, generation, num_tokens)

    @staticmethod
    def is_intact(prefix: CachedPrefix, blocks: Sequence[SharedBlock]) -> bool:
        """Still the bytes that were leased? To be asked after a step has read them.

        While the lease holds only a poisoned block can be lost, and that moves the change word.
        """
        word = prefix.link.pool.change_word
        if not blocks or (word == prefix.change_word and not prefix.is_lost):
            return True
        slots = np.array([block.slot for block in blocks], dtype=np.uint32)
        generations = np.array([block.generation for block in blocks], dtype=np.uint64)
        is_intact = prefix.link.pool.is_intact(slots, generations)
        if is_intact:
            prefix.change_word = word
        return is_intact

    def pin(
        self, prefix: CachedPrefix, ttl_ms: int, label: str
    ) -> Future[tuple[pb.Envelope, list[int]]] | None:
        """Keep what its lease names once the publishes so far are done; None = that is nothing."""
        request = pb.Pin(lease=prefix.lease, ttl_ms=ttl_ms, label=label)
        try:
            return prefix.link.client.submit(pb.Envelope(pin=request))
        except CachewarmError:
            return None

    # -- publishing -----------------------------------------------------------------------------

    def publish(self, request: Request, prefix: CachedPrefix, *, with_tail: bool) -> None:
        """Send every full private block not sent yet, and the short last one if asked to.

        Nothing is waited for: `poll` swaps table entries when the daemon has acknowledged.
        """
        if not prefix.may_publish or prefix.link.client.is_lost:
            return
        size = self._block_size
        tokens, computed = request.tokens, request.num_computed
        first = prefix.num_sealed_blocks
        chain: list[pb.PublishBlock] = []
        blocks: list[tuple[int, PrivateBlock]] = []
        for index in range(first, -(-computed // size)):
            end = min((index + 1) * size, computed)
            is_short = end - index * size < size
            block = request.table.blocks[index]
            if (is_short and not with_tail) or not isinstance(block, PrivateBlock):
                break
            parent = prefix.keys[index - 1] if index else prefix.root
            key = block_key(parent, tokens[index * size : end])
            if not is_short:
                prefix.keys[index:] = [key]
                prefix.num_sealed_blocks = index + 1
            chain.append(
                pb.PublishBlock(
                    parent_key=parent,
                    key=key,
                    num_tokens=end - index * size,
                    private_offset=block.offset,
                )
            )
            blocks.append((index, block))
        if not chain:
            return
        message = pb.Publish(lease=prefix.lease, chain=chain, is_root=first == 0)
        try:
            future = prefix.link.client.submit(pb.Envelope(publish=message))
        except CachewarmError:
            return
        for _, block in blocks:
            self._pool.hold(block)
        self._publishes.append(_Publish(future, request, prefix, blocks))
        future.add_done_callback(lambda _: self._wake())

    def poll(self) -> None:
        """Take the acknowledgements that are there; give up on a daemon that owes one too long."""
        now = time.monotonic()
        for publish in list(self._publishes):
            if not publish.future.done() and now > publish.deadline:
                _log.warning("daemon_too_slow", seconds=_PUBLISH_TIMEOUT_S)
                # Closed first: from here on the daemon seals nothing that it copies for us.
                publish.prefix.link.client.close()
            if publish.future.done():
                self._publishes.remove(publish)
                self._acknowledge(publish)
        self._follow_daemon()

    def _acknowledge(self, publish: _Publish) -> None:
        sealed: Sequence[pb.Block] = ()
        try:
            reply = publish.future.result()[0].publish_reply
            sealed = reply.blocks if not publish.is_void else ()
            if reply.refused:
                publish.prefix.may_publish = False
                _log.info("publish_refused", reason=reply.refused)
        except CachewarmError:
            publish.prefix.may_publish = False
        if sealed:
            publish.prefix.last = _handle(sealed[-1])
        for (index, private), block in zip(publish.blocks, sealed, strict=False):
            if block.num_tokens == self._block_size:
                publish.prefix.num_known_blocks = index + 1
            # Without its lease nothing would keep the shared block.
            if block.num_tokens == self._block_size and not publish.prefix.is_released:
                place = (block.slot, block.num_tokens, block.generation, block.offset)
                shared = self._shared(publish.prefix.link, *place)
                publish.request.table.replace(index, private, shared)
        for _, private in publish.blocks:
            self._pool.drop(private)

    def release(self, prefix: CachedPrefix) -> None:
        """Give the lease back; it follows what was published before on the same connection."""
        prefix.is_released = True
        self._live.discard(prefix)
        _release(prefix.link, prefix.lease)

    # -- a daemon that came back ----------------------------------------------------------------

    def _follow_daemon(self) -> None:
        """Tell a new daemon with the same pool what is leased; take its answers."""
        for reattach in list(self._reattaches):
            if reattach.future.done():
                self._reattaches.remove(reattach)
                self._take_leases(reattach)
        link = self._link.current
        if link is not None and link is not self._followed:
            before, self._followed = self._followed, link
            owed = [*self._owed, before] if before is not None else self._owed
            self._owed = [old for old in owed if _is_same_pool(old, link)]
            # The oldest first: what it names may be kept by a later one's claim that was made and
            # not confirmed, and must be claimed again before that one's is given up.
            for old in self._owed:
                self._reattach(link, old, [p for p in self._live if p.link is old])

    def _reattach(self, link: Link, old: Link, prefixes: list[CachedPrefix]) -> None:
        for publish in self._publishes:
            publish.is_void = publish.is_void or publish.prefix in prefixes
        claims = [pb.Claim(stamp_id=link.stamp_id, block=prefix.last) for prefix in prefixes]
        message = pb.Reattach(epoch=old.epoch, client_id=old.client_id, claims=claims)
        with contextlib.suppress(CachewarmError):  # lost again: the next link is told
            future = link.client.submit(pb.Envelope(reattach=message))
            self._reattaches.append(_Reattach(link, old, future, prefixes))
            future.add_done_callback(lambda _: self._wake())

    def _take_leases(self, reattach: _Reattach) -> None:
        try:
            leases = reattach.future.result()[0].reattach_reply.leases
        except CachewarmError as exc:
            _log.warning("reattach_failed", reason=str(exc))
            return
        if reattach.link is not self._followed:
            return  # that one is gone as well, and a later one was asked
        self._owed.remove(reattach.old)
        _log.info("reattached", leases=len(leases), lost=list(leases).count(0))
        for prefix, lease in zip(reattach.prefixes, leases, strict=True):
            if not lease:
                continue  # it stays lost, and so is checked at every step
            if prefix.is_released:
                _release(reattach.link, lease)
                continue
            prefix.link, prefix.lease = reattach.link, lease
            # What was on its way may be sealed or not; a block that is already is not copied again.
            prefix.num_sealed_blocks, prefix.may_publish = prefix.num_known_blocks, True

    @property
    def num_pending(self) -> int:
        return len(self._publishes)

    def is_pending(self, request: Request) -> bool:
        """Is a publish of that sequence under way?"""
        return any(publish.request is request for publish in self._publishes)


def _handle(block: pb.Block | SharedBlock) -> pb.Handle:
    return pb.Handle(slot=block.slot, generation=block.generation)


def _is_same_pool(one: Link, other: Link) -> bool:
    return one.pool.pool_id == other.pool.pool_id


def _release(link: Link, lease: int) -> None:
    # On a lost connection the lease has ended already.
    with contextlib.suppress(CachewarmError):
        link.client.submit(pb.Envelope(release=pb.Release(lease=lease)))


def _release_late(link: Link, late: Future[tuple[pb.Envelope, list[int]]]) -> None:
    """Of a lookup that was answered too late: nobody uses the lease."""
    if late.exception() is None:
        _release(link, late.result()[0].lookup_reply.lease)
