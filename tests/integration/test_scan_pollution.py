"""Scans: what users share stays, without pins, whatever else passes through the pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.worker import BLOCK_BYTES, Worker, connect_worker

POOL_BLOCKS = (64 << 20) // BLOCK_BYTES
TEMPLATES = [[f"t{number}.{block}" for block in range(4)] for number in range(3)]


def request(worker: Worker, *labels: str) -> int:
    """Look up, publish what is missing, release: how many blocks were found?"""
    found = worker.lookup(*labels)
    assert not worker.publish(found.lease, *labels).refused
    worker.release(found.lease)
    return len(found.blocks)


def hits_after_a_flood(daemon: Daemon) -> int:
    """Templates are preheated and asked for once; then one-off prompts of twice the pool come."""
    with connect_worker(daemon.socket) as worker:
        for template in TEMPLATES:
            assert request(worker, *template) == 0
        for number, template in enumerate(TEMPLATES):
            assert request(worker, *template, f"question{number}") == len(template)
        for number in range(2 * POOL_BLOCKS // 4):
            request(worker, *(f"f{number}.{block}" for block in range(4)))
        found = 0
        for template in TEMPLATES:
            lease = worker.lookup(*template)
            found += len(lease.blocks)
            worker.release(lease.lease)
    counters = daemon.status().counters
    assert counters["evicted_pressure"] >= POOL_BLOCKS
    return found


@pytest.mark.parametrize(
    ("flags", "expected"), [([], 12), (["--l2-policy", "lru"], 0)], ids=["default", "lru"]
)
def test_templates_outlive_a_flood_of_one_off_prompts(
    short_dir: Path, flags: list[str], expected: int
) -> None:
    """All blocks of all three by default; least-recently-used alone would lose them all."""
    with Daemon(short_dir / "s", "64MiB", flags) as daemon:
        assert hits_after_a_flood(daemon) == expected
