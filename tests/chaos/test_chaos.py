"""Kills at random under load: no wrong byte, no wrong token, no leak; and proof that it would show.

More of it: `python -m tests.chaos.run --kills N --seed S`; a failed run prints its seed.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.plants import PLANTS
from tests.chaos.run import run, run_plant

# Everything here is the last to get a turn on a busy machine.
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def seed() -> int:
    """Another one each time; pytest shows it when the test fails."""
    chosen = random.randrange(1 << 32)
    print(f"seed {chosen}")
    return chosen


def test_kills_of_daemon_and_clients(seed: int) -> None:
    """Sixty daemons and ten clients."""
    report = run(60, seed, client_kills=10)
    print(report)
    assert report.faults == []
    assert report.counts["epoch"] >= 40, "most of the daemons served"
    assert report.counts["reads"] > 0
    assert report.counts["hits"] > 0


def test_kills_of_everything_with_an_engine(seed: int, m_rand_dir: Path) -> None:
    """Forty daemons, thirty workers, ten engines: its streams have the tokens they have alone."""
    report = run(40, seed, client_kills=2, worker_kills=30, engine_kills=10, model_dir=m_rand_dir)
    print(report)
    assert report.faults == []
    assert report.counts["streams"] > 0


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_a_planted_bug_is_found(plant: str, seed: int) -> None:
    """A run that can't go red proves nothing."""
    report = run_plant(plant, seed)
    print(report)
    assert report.faults, f"{plant} was not found"
