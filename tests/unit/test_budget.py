"""Memory is refused before it is taken: host, cgroup limits, and what is promised already."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachewarmd import budget
from cachewarmd.budget import RESERVE_BYTES, Budget
from cachewarmd.errors import NoSpaceError
from tests.daemon import fake_cgroup, private_pool

MIB = 1 << 20


def test_tightest_limit_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    """Own group and parents are asked; `max` is no limit."""
    fake_cgroup(tmp_path, RESERVE_BYTES + 100 * MIB, used=30 * MIB)
    assert budget.available_bytes(tmp_path) == 70 * MIB


def test_page_cache_that_can_go_is_room(tmp_path: Path) -> None:
    """Having read large files does not make a cgroup full."""
    fake_cgroup(tmp_path, RESERVE_BYTES + 100 * MIB, used=90 * MIB, inactive_file=50 * MIB)
    assert budget.available_bytes(tmp_path) == 60 * MIB


def test_throttling_begins_where_memory_high_is(tmp_path: Path) -> None:
    """The lower of both limits counts: nobody is killed above memory.high, but nothing moves."""
    fake_cgroup(tmp_path, RESERVE_BYTES + 100 * MIB, used=30 * MIB)
    for limit in list(tmp_path.rglob("memory.max")):
        limit.with_name("memory.high").write_text(f"{RESERVE_BYTES + 50 * MIB}\n")
    assert budget.available_bytes(tmp_path) == 20 * MIB


def test_cgroup_without_limit_leaves_the_host(tmp_path: Path) -> None:
    """Neither files nor a limit: what the host has."""
    without = budget.available_bytes(tmp_path)
    fake_cgroup(tmp_path, None, used=1 << 50)
    assert without > 0
    assert budget.available_bytes(tmp_path) > without // 2


def test_promised_bytes_are_not_promised_again(tmp_path: Path) -> None:
    """Two that fit alone but not together: the second is refused, with both numbers."""
    fake_cgroup(tmp_path, RESERVE_BYTES + 100 * MIB)
    ledger = Budget(tmp_path)
    ledger.promise(60 * MIB, "first")
    with pytest.raises(NoSpaceError, match=f"second needs {60 * MIB} bytes, {40 * MIB} are avail"):
        ledger.promise(60 * MIB, "second")
    ledger.settle(60 * MIB)
    ledger.promise(60 * MIB, "second")


def test_allocation_tells_its_progress_and_settles_its_promise(tmp_path: Path) -> None:
    """Also when it breaks off halfway nothing stays promised."""
    fake_cgroup(tmp_path, RESERVE_BYTES + 100 * MIB)
    ledger = Budget(tmp_path)
    told: list[int] = []
    with private_pool(96 * MIB) as fd:
        ledger.allocate(fd, 96 * MIB, "it", told.append)
        assert told == [64 * MIB, 96 * MIB]
        with pytest.raises(ZeroDivisionError):
            ledger.allocate(fd, 96 * MIB, "it", lambda done: told.append(done // 0))
    assert ledger.available_bytes() == 100 * MIB
