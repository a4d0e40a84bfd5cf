"""What a daemon makes of the pool of the one before it: gates, records, content, the catalog."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachewarmd import catalog as catalog_module
from cachewarmd import layout, recovery, verification, weight_catalog
from cachewarmd.block import stamps_from_json
from cachewarmd.budget import Budget
from cachewarmd.catalog import Catalog
from cachewarmd.errors import NoSpaceError
from cachewarmd.fdstore import FdStore
from cachewarmd.kv import BlockStore
from cachewarmd.layout import EXTENT_BYTES, BlockState
from cachewarmd.notify import Notifier
from cachewarmd.pool import Memfds, Pool
from cachewarmd.weight_store import WeightStore
from tests.block_store import CAPACITY, Harness, full, key_of, keys_of, make_harness
from tests.daemon import private_pool


@pytest.fixture
def harness() -> Iterator[Harness]:
    with make_harness() as made:
        yield made


def recovered(harness: Harness, *, is_verified: bool = False) -> Harness:
    """Another daemon's view of the same memory; the harness keeps its descriptors."""
    pool = Pool(harness.pool.pool_bytes, 2, b"", harness.pool.memfds)
    store = BlockStore(pool)
    for info in harness.store.stamps:
        store.restore_stamp(info)
    recovery.restore(pool, store, is_verified=is_verified)
    store.check_invariants()
    return Harness(pool, harness.fd, store, harness.info)


def header_field(harness: Harness, name: str, value: object) -> None:
    harness.pool.header[name] = value


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("magic", np.void(b"notours!"), "no header of ours"),
        ("header_bytes", 512, "header has 512 bytes"),
        ("format_version", 77, "format is 77"),
        ("layout_hash", np.void(bytes(32)), "layout is another one"),
        ("pool_bytes", 2 * EXTENT_BYTES, "sizes don't go together"),
        ("num_records", 1, "sizes don't go together"),
        ("num_committed", 2, "sizes don't go together"),
        ("pool_inode", 1, "sizes don't go together"),
        ("num_starts", recovery.MAX_STARTS, "daemons died with it"),
    ],
)
def test_each_gate_refuses_all_of_it(
    harness: Harness, name: str, value: object, reason: str
) -> None:
    """And nothing else has to be right for that to be told."""
    assert recovery.refusal(harness.pool.memfds, None) == ""
    header_field(harness, name, value)
    assert reason in recovery.refusal(harness.pool.memfds, None)


def test_another_size_is_another_pool(harness: Harness) -> None:
    """What is asked for decides; unset takes what is there."""
    assert recovery.refusal(harness.pool.memfds, EXTENT_BYTES + 5) == ""
    assert "are wanted" in recovery.refusal(harness.pool.memfds, 2 * EXTENT_BYTES)


def test_memfds_that_could_shrink_are_refused(harness: Harness) -> None:
    """A map of them could end in a SIGBUS."""
    size = os.fstat(harness.pool.memfds.records).st_size
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.pwrite(fd, os.pread(harness.pool.memfds.records, layout.HEADER.itemsize, 0), 0)
        assert "not sealed" in recovery.refusal(Memfds(fd, harness.pool.memfds.pool), None)
    finally:
        os.close(fd)


def test_sealed_blocks_come_back_with_their_chains(harness: Harness) -> None:
    """Index, parents, free slots and extents; a full extent evicts as ever."""
    harness.seal_free(full(1, 2, 3))
    harness.seal_free((*full(1), (9, 9)))
    for label in range(10, 10 + CAPACITY - 4):
        harness.seal_free(full(label))
    after = recovered(harness)
    assert after.is_sealed(full(1, 2, 3))
    assert after.block(key_of(full(1, 2))).parent is after.block(key_of(full(1)))
    after.seal_free(full(99))
    after.check()
    after.store.check_invariants()


@pytest.mark.parametrize("field", layout.RECORD.names)
def test_a_record_with_a_flipped_bit_is_no_block_nor_what_hangs_on_it(
    harness: Harness, field: str
) -> None:
    """Whatever field it is in, except one that only says that the block is free."""
    harness.seal_free(full(1, 2, 3))
    harness.seal_free(full(7))
    slot = harness.block(key_of(full(1, 2))).slot
    generation = int(harness.pool.records["generation"][slot])
    raw = harness.pool.records[slot : slot + 1].view("u1")
    raw[layout.RECORD.fields[field][1]] ^= 1
    after = recovered(harness)
    assert [after.is_sealed(full(*labels)) for labels in ((1,), (1, 2), (1, 2, 3), (7,))] == [
        True,
        False,
        False,
        True,
    ]
    assert after.pool.records["state"][slot] == BlockState.FREE
    assert after.pool.records["generation"][slot] > generation
    after.check()


def test_a_slot_that_was_being_filled_is_free_and_of_a_later_generation(harness: Harness) -> None:
    """Whoever had it before can't take it for what is sealed there next."""
    harness.seal_free(full(1))
    slot = harness.block(key_of(full(1))).slot
    generation = int(harness.pool.records["generation"][slot])
    harness.pool.records["state"][slot] = BlockState.RESERVED
    after = recovered(harness)
    assert not after.is_sealed(full(1))
    assert after.pool.records["generation"][slot] > generation


def test_a_key_that_stands_twice_is_nobodys(harness: Harness) -> None:
    """Which of the two is right can't be told."""
    harness.seal_free(full(1))
    harness.seal_free(full(2))
    one, two = (harness.block(key_of(full(label))).slot for label in (1, 2))
    records = harness.pool.records
    records["key"][two] = records["key"][one]
    records["check"][two] = layout.record_checks(records[two : two + 1])[0]
    after = recovered(harness)
    assert not after.is_sealed(full(1))
    assert not after.is_sealed(full(2))


def test_changed_content_is_a_miss_and_takes_its_descendants(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On demand, in the lookup; counted; the rest of the chain before it is served."""
    monkeypatch.setattr("cachewarmd.kv.VERIFY_BYTES", EXTENT_BYTES)
    harness.seal_free(full(1, 2, 3))
    middle = harness.block(key_of(full(1, 2)))
    harness.pool.memory[middle.offset + 1000] ^= 1
    after = recovered(harness)
    _, found = after.store.lookup(after.info, keys_of(full(1, 2, 3)), [])
    assert [block.key for block in found] == [key_of(full(1))]
    assert after.store.counters["integrity_failures"] == 1
    assert after.store.counters["integrity_failures_recovery"] == 1
    assert not after.is_sealed(full(1, 2, 3))
    assert after.pool.records["generation"][middle.slot] == middle.generation + 1
    after.store.check_invariants()


def test_changed_content_is_found_in_the_background_also_under_a_lease(harness: Harness) -> None:
    """Who holds it loses the lease's block, and sees it in the generation and the change word."""
    harness.seal_free(full(1))
    block = harness.block(key_of(full(1)))
    harness.pool.memory[block.offset] ^= 1
    after = recovered(harness)
    after.store.quarantine([block.slot])
    word = int(after.pool.header["change_word"][0])
    asyncio.run(verification.verify_all(after.store))
    assert after.pool.header["change_word"][0] > word
    assert after.pool.records["generation"][block.slot] == block.generation + 1
    after.store.check_invariants()


def test_a_lookup_hashes_only_so_much(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a long chain is a miss until the background has come to it."""
    monkeypatch.setattr("cachewarmd.kv.VERIFY_BYTES", 1)
    harness.seal_free(full(1, 2, 3))
    after = recovered(harness)
    for expected in (1, 2, 3):
        assert len(after.store.lookup(after.info, keys_of(full(1, 2, 3)), [])[1]) == expected


def test_a_long_chain_is_looked_at_before_its_lookup(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a lookup would not hash itself is named, and a hit once it has been hashed."""
    monkeypatch.setattr("cachewarmd.kv.VERIFY_BYTES", 1)
    harness.seal_free(full(1, 2, 3))
    after = recovered(harness)
    asked = after.store.unverified(after.info, keys_of(full(1, 2, 3)))
    assert [block.key for block in asked] == keys_of(full(1, 2, 3))
    asyncio.run(verification.verify(after.store, asked))
    assert not after.store.unverified(after.info, keys_of(full(1, 2, 3)))
    assert len(after.store.lookup(after.info, keys_of(full(1, 2, 3)), [])[1]) == 3


def test_what_was_evicted_while_it_was_hashed_is_not_judged(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may have read another block's bytes by then."""
    harness.seal_free(full(1))
    after = recovered(harness)

    def torn(_: object) -> bool:
        after.store.evict(lambda _: True)
        return False

    monkeypatch.setattr(after.store, "is_intact", torn)
    asyncio.run(verification.verify_all(after.store))
    assert after.store.counters["integrity_failures"] == 0
    assert not after.store.next_unverified(EXTENT_BYTES)
    after.store.check_invariants()


def test_after_a_clean_stop_nothing_is_hashed(harness: Harness) -> None:
    """The token says that no write was torn."""
    harness.seal_free(full(1, 2))
    recovery.end_clean(harness.pool)
    assert recovery.begin(harness.pool)
    assert not recovery.begin(harness.pool), "it is there once"
    after = recovered(harness, is_verified=True)
    assert all(block.is_verified for block in after.store._index.values())


# -- the catalog ------------------------------------------------------------------------------


def test_catalog_has_what_was_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after many writes, and when the last one was torn."""
    with contextlib.closing(Catalog()) as catalog:
        for number in range(5):
            catalog.write({"number": number})
        assert Catalog(catalog.fd).content["number"] == 4
        # The next one goes to the other half; its head never gets there.
        monkeypatch.setattr(os, "pwrite", _torn(os.pwrite))
        catalog.write({"number": 5})
        assert Catalog(catalog.fd).content["number"] == 4


def _torn(pwrite: object) -> object:
    written: list[int] = []

    def write(fd: int, data: bytes, offset: int) -> int:
        written.append(offset)
        return pwrite(fd, data, offset) if len(written) == 1 else 0  # type: ignore[operator]

    return write


def test_catalog_that_is_full_keeps_what_it_has() -> None:
    """Too many stamps and plans cost a restart its warmth, not this daemon its life."""
    with contextlib.closing(Catalog()) as catalog:
        catalog.write({"kept": 1})
        with pytest.raises(NoSpaceError):
            catalog.write({"text": "x" * (9 << 20)})
        assert Catalog(catalog.fd).content["kept"] == 1


@pytest.mark.parametrize("payload", [b"[1]", b"{", b"\xff", b"[" * 100_000])
def test_a_half_that_holds_no_object_is_no_catalog(payload: bytes) -> None:
    """Also with a right digest; what the other half has counts."""
    with contextlib.closing(Catalog()) as catalog:
        catalog.write({"kept": 1})
        number = 2
        head = catalog_module._HEAD.pack(
            number, len(payload), catalog_module._digest(number, payload)
        )
        os.pwrite(catalog.fd, head + payload, 0)
        assert Catalog(catalog.fd).content["kept"] == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"stamp": "zz"},
        {"stamp": "00"},
        {"stamp_id": 1},
        {"block_bytes": 0},
        {"slot_bytes": 5},
        {"block_size": "4"},
        {"block_size": None},
    ],
)
def test_stamps_that_can_not_be_are_refused(harness: Harness, changes: dict[str, object]) -> None:
    """Before any record that names them is looked at."""
    told = harness.info.to_json()
    assert stamps_from_json([told]) == [harness.info]
    with pytest.raises(ValueError, match=r"stamp|hexadecimal"):
        stamps_from_json([{**told, **changes}])
    for no_list in (None, {}, "x", 5, [5], [[]]):
        with pytest.raises(ValueError, match="stamp"):
            stamps_from_json(no_list)
    with pytest.raises(ValueError, match="stamp"):
        stamps_from_json([told, told])


@pytest.mark.parametrize(
    "told",
    [
        {"models": 5, "versions": {}},
        {"models": [], "versions": {"m": ["zz"]}},
        {"models": [5, {}, {"plan": "AAAA"}], "versions": {"m": ["00" * 32]}},
        {"versions": {}},
    ],
)
def test_weights_that_are_told_malformed_are_left_out(told: dict[str, object]) -> None:
    """They are read when somebody asks for them; the daemon starts."""
    store = WeightStore(Budget(Path("/nowhere")))
    weight_catalog.restore(store, told, FdStore(Notifier(), {}))
    assert store.models == []


def test_another_file_is_no_catalog() -> None:
    """Its size tells."""
    with private_pool(4096) as fd, pytest.raises(ValueError, match="another size"):
        Catalog(fd)


def test_record_checks_see_every_single_bit() -> None:
    """Of all that a record says but its state."""
    records = np.zeros(1, layout.RECORD)
    records["num_bytes"], records["key"] = 123456, np.void(b"k" * 32)
    before = layout.record_checks(records)[0]
    raw = records.view("u1")
    for place in range(8, layout.RECORD.itemsize - 4):
        for bit in range(8):
            raw[place] ^= 1 << bit
            assert layout.record_checks(records)[0] != before
            raw[place] ^= 1 << bit
