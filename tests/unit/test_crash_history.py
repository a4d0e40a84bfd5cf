"""Random histories with crashes: pool, index, leases and quarantine against a plain model.

A crash drops every object and goes on from the two memfds alone. It may come between two calls or
at any fail point within one, and it may find a flipped bit.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cachewarmd import failpoints, layout, recovery
from cachewarmd.block import Block, StampInfo
from cachewarmd.kv import BlockStore, NewBlock, Source
from cachewarmd.layout import EXTENT_BYTES, BlockState
from cachewarmd.lease import LeaseRows, LeaseTable
from cachewarmd.pool import Pool
from cachewarmd.quarantine import Quarantine
from tests.block_store import CAPACITY, SLOT_BYTES, WEIGHTS, B, Chain, key_of, keys_of
from tests.daemon import private_pool

NUM_CLIENTS = 2
BLOCKS = st.tuples(st.integers(0, 3), st.sampled_from([1, B, B, B])).map(
    lambda drawn: (drawn[0],) * drawn[1]
)
PATHS: st.SearchStrategy[Chain] = st.lists(BLOCKS, min_size=1, max_size=4).map(tuple)
NO_DEATH = 0
DEATHS = st.one_of(st.just(NO_DEATH), st.integers(1, 40))


class Died(BaseException):
    """The daemon is killed here; nothing in it may catch this."""


class _Every(dict[str, Any]):
    """Arms all fail points."""

    def __contains__(self, name: object) -> bool:
        return True

    def __getitem__(self, name: str) -> Any:
        return None

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Handle:
    """What a client reads: a slot, as long as the generation is this one."""

    slot: int
    generation: int
    offset: int
    key: bytes

    @classmethod
    def of(cls, block: Block) -> Handle:
        return cls(block.slot, block.generation, block.offset, block.key)


@dataclass
class Client:
    """One process and its leases, each with all that is read under it, in chain order."""

    rows: LeaseRows
    leases: dict[int, list[Handle]] = field(default_factory=dict)


class CrashHistory(RuleBasedStateMachine):
    """`sealed` is what must be found; `handles` is all that any client was ever told."""

    source_fd: int

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(EXTENT_BYTES, 1, b"s" * 32)
        self.pool.commit_next()
        self.store = BlockStore(self.pool)
        self.info = self.store.register(b"s" * 32, SLOT_BYTES, B, "test", WEIGHTS)
        self.table = LeaseTable(self.pool.shared)
        self.quarantine = Quarantine(self.table, self.store)
        self.num_clients = 0
        self.clients = [self.new_client() for _ in range(NUM_CLIENTS)]
        # Of daemons before: clients that have not come back yet.
        self.orphans: list[Client] = []
        self.handles: set[Handle] = set()
        self.sealed: set[bytes] = set()

    def new_client(self) -> Client:
        self.num_clients += 1
        return Client(self.table.open(os.getpid(), self.num_clients))

    @rule()
    def fill(self) -> None:
        """The next block that is published needs an eviction, also after a crash."""
        client = self.clients[0]

        def work() -> None:
            lease, _ = self.store.lookup(self.info, [], [], client.rows)
            for number in range(CAPACITY):
                path = ((100 + number,) * B,)
                os.pwrite(self.source_fd, key_of(path), 0)
                new = NewBlock(key_of(()), key_of(path), B, 0)
                source = Source(self.source_fd, SLOT_BYTES, lambda: True)
                self.store.publish(lease, [new], source, is_root=True)
            self.store.release(lease)

        self.call(NO_DEATH, work)

    # -- calls, each of which the daemon may not survive ----------------------------------------

    def call(self, death: int, work: Any) -> bool:
        """Run it; at its `death`-th fail point the daemon dies. True = it lived."""
        num_hits = 0

        def act(name: str, action: object) -> bool:
            nonlocal num_hits
            num_hits += 1
            if num_hits == death:
                raise Died(name)
            return False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "_armed", _Every())
            patch.setattr(failpoints, "_act", act)
            try:
                work()
            except Died:
                self.recover(is_clean=False)
                return False
        self.sealed = set(self.store._index)
        return True

    @rule(number=st.integers(0, NUM_CLIENTS - 1), path=PATHS, death=DEATHS)
    def lookup(self, number: int, path: Chain, death: int) -> None:
        client = self.clients[number]
        end = next((i for i, block in enumerate(path) if len(block) < B), len(path))
        keys, tails = keys_of(path[:end]), keys_of(path[: end + 1])[end:]

        def work() -> None:
            lease, found = self.store.lookup(self.info, keys, tails, client.rows)
            client.leases[lease] = self.told(found)
            for block in found:
                assert self.bytes_at(block.offset) == block.key, "a lookup gave wrong bytes"

        self.call(death, work)

    @rule(number=st.integers(0, NUM_CLIENTS - 1), path=PATHS, death=DEATHS, which=st.integers(0))
    def publish(self, number: int, path: Chain, death: int, which: int) -> None:
        client = self.clients[number]
        if not client.leases:
            return
        lease = sorted(client.leases)[which % len(client.leases)]

        def work() -> None:
            told: list[Handle] = []
            for index in range(len(path)):
                key, parent = key_of(path[: index + 1]), key_of(path[:index])
                os.pwrite(self.source_fd, key, 0)
                new = NewBlock(parent, key, len(path[index]), 0)
                source = Source(self.source_fd, SLOT_BYTES, lambda: True)
                sealed, refused = self.store.publish(lease, [new], source, is_root=index == 0)
                told += self.told(sealed)
                if told:
                    client.leases[lease] = told  # the answer has arrived
                if refused:
                    return

        self.call(death, work)

    @rule(number=st.integers(0, NUM_CLIENTS - 1), death=DEATHS, which=st.integers(0))
    def release(self, number: int, death: int, which: int) -> None:
        client = self.clients[number]
        if client.leases:
            lease = sorted(client.leases)[which % len(client.leases)]
            del client.leases[lease]  # whatever the daemon makes of it
            self.call(death, lambda: self.store.release(lease))

    @rule(death=DEATHS)
    def evict(self, death: int) -> None:
        self.call(death, lambda: self.store.evict(lambda _: True))

    @rule()
    def verify(self) -> None:
        self.call(NO_DEATH, lambda: self.look_at(SLOT_BYTES))

    def look_at(self, num_bytes: int) -> int:
        """As the daemon does in its background; how many blocks?"""
        blocks = self.store.next_unverified(num_bytes)
        for block in blocks:
            if block.is_sealed:
                self.store.settle(block, is_intact=self.store.is_intact(block))
        return len(blocks)

    # -- crashes and what comes after -----------------------------------------------------------

    @rule(is_clean=st.booleans())
    def crash(self, is_clean: bool) -> None:
        """Between two calls: nothing that was sealed is lost."""
        before = self.sealed
        if is_clean:
            recovery.end_clean(self.pool)
        self.recover(is_clean=is_clean)
        assert self.sealed == before

    @rule(data=st.data(), where=st.sampled_from(["record", "content"]))
    def crash_with_a_flipped_bit(self, data: st.DataObject, where: str) -> None:
        """Of a block that nobody holds: it may be lost, it is never served."""
        held = {handle.slot for client in self.everybody() for handle in self.read_by(client)}
        slots = [block.slot for block in self.store._index.values() if block.slot not in held]
        if not slots:
            return
        slot = data.draw(st.sampled_from(sorted(slots)))
        if where == "record":
            raw = self.pool.records[slot : slot + 1].view("u1")
            place = data.draw(st.integers(0, layout.RECORD.itemsize - 1))
        else:
            raw = self.pool.memory
            place = self.pool.offset_of(slot) + data.draw(st.integers(0, 31))
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
        # Who holds no lease reads nothing: these handles are nobody's.
        self.handles = {handle for handle in self.handles if handle.slot != slot}
        before = self.sealed
        self.recover(is_clean=False)
        while self.look_at(EXTENT_BYTES):
            pass
        self.sealed = set(self.store._index)
        assert self.sealed <= before
        # Only what hangs on it can be gone: what others hold is still there.
        for client in self.orphans:
            for handle in self.read_by(client):
                assert handle.key in self.sealed

    def recover(self, *, is_clean: bool) -> None:
        """Another daemon, from the memfds alone."""
        memfds, infos = self.pool.memfds, self.store.stamps
        assert recovery.refusal(memfds, EXTENT_BYTES) == ""
        epoch = int(self.pool.header["epoch"][0]) + 1
        self.pool = Pool(EXTENT_BYTES, epoch, b"", memfds)
        assert recovery.begin(self.pool) is is_clean
        recovery.serving(self.pool)
        self.store = BlockStore(self.pool)
        for info in infos:
            self.store.restore_stamp(StampInfo.from_json(info.to_json()))
        (self.info,) = self.store.stamps
        recovery.restore(self.pool, self.store, is_verified=is_clean)
        self.table = LeaseTable(self.pool.shared)
        self.quarantine = Quarantine(self.table, self.store)
        self.orphans += self.clients
        self.clients = [self.new_client() for _ in range(NUM_CLIENTS)]
        self.sealed = set(self.store._index)
        held = {handle.key for client in self.orphans for handle in self.read_by(client)}
        assert held <= self.sealed, "what a client holds was lost"

    @rule(which=st.integers(0), number=st.integers(0, NUM_CLIENTS - 1))
    def reattach(self, which: int, number: int) -> None:
        """Everything that a client still holds is there, and is its again."""
        if not self.orphans:
            return
        orphan = self.orphans.pop(which % len(self.orphans))
        client, identity = self.clients[number], orphan.rows.identity

        def work() -> None:
            for told in orphan.leases.values():
                last = (told[-1].slot, told[-1].generation) if told else None
                lease = self.store.claim(self.info, last, client.rows)
                assert lease is not None, "a quarantined block was lost"
                client.leases[lease] = told
            self.quarantine.end(identity.epoch, identity.client_id, identity.pid)

        self.call(NO_DEATH, work)

    @rule(which=st.integers(0))
    def never_come_back(self, which: int) -> None:
        """Dead, or too late: the quarantine ends without it."""
        if self.orphans:
            orphan = self.orphans.pop(which % len(self.orphans))
            identity = orphan.rows.identity
            self.quarantine.end(identity.epoch, identity.client_id, identity.pid)

    # -- what holds after every step ------------------------------------------------------------

    def told(self, blocks: list[Block]) -> list[Handle]:
        """These go to a client."""
        handles = [Handle.of(block) for block in blocks]
        self.handles.update(handles)
        return handles

    def everybody(self) -> list[Client]:
        return [*self.clients, *self.orphans]

    @staticmethod
    def read_by(client: Client) -> list[Handle]:
        return [handle for told in client.leases.values() for handle in told]

    def bytes_at(self, offset: int) -> bytes:
        return bytes(self.pool.memory[offset : offset + 32])

    @invariant()
    def what_is_held_does_not_change(self) -> None:
        for client in self.everybody():
            for handle in self.read_by(client):
                record = self.pool.records[handle.slot]
                assert record["state"] == BlockState.SEALED
                assert record["generation"] == handle.generation
                assert self.bytes_at(handle.offset) == handle.key

    @invariant()
    def an_old_handle_never_matches_other_bytes(self) -> None:
        for handle in self.handles:
            if self.pool.records["generation"][handle.slot] == handle.generation:
                assert self.bytes_at(handle.offset) == handle.key

    @invariant()
    def all_is_sound(self) -> None:
        self.store.check_invariants()

    def teardown(self) -> None:
        self.pool.close()


def test_random_histories_with_crashes_agree_with_a_plain_model() -> None:
    """No lease is lost, no handle ever matches other bytes, nothing sealed is forgotten."""
    with private_pool(SLOT_BYTES) as fd:

        class WithSource(CrashHistory):
            source_fd = fd

        run_state_machine_as_test(
            WithSource,
            settings=settings(
                max_examples=60,
                stateful_step_count=30,
                deadline=None,
                # Shrinking a failure takes minutes here; add Phase.shrink when there is one.
                phases=[Phase.reuse, Phase.generate],
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
