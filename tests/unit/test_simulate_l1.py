"""Tests of what the simulator says about ids of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cachewarmd import simulate, simulate_l1
from cachewarmd.ctl.__main__ import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Requests that begin with the same block; one document comes back after a flood."""
    chains = [[0, 1, 2], [0, 1, 2], *([0, 10 + 2 * n, 11 + 2 * n] for n in range(20)), [0, 1, 2]]
    path = tmp_path / "trace.jsonl"
    with path.open("w") as file:
        for number, chain in enumerate(chains):
            about = {"timestamp": 10_000 * number, "input_length": 512 * len(chain) - 12}
            file.write(json.dumps({**about, "output_length": 1, "hash_ids": chain}) + "\n")
    return path


def row(rows: list[dict[str, Any]], policy: str, prefill: bool) -> dict[str, Any]:
    """The one of a policy."""
    (found,) = (r for r in rows if (r["policy"], r["prefill"]) == (policy, prefill))
    return found


def test_what_came_back_is_found_by_lru2_and_not_by_lru(trace: Path) -> None:
    """A document seen twice outlives a flood that is larger than the cache."""
    rows = simulate_l1.rows(simulate.load(trace), [512 * 8], 2.0)
    none, lru, lru2 = (row(rows, policy, False) for policy in simulate_l1.POLICIES)
    assert none["hit_tokens"] == 0
    assert none["mean_ms"] == pytest.approx(1524 * 2.0 / 1000)
    shared = 512 * 22  # the first block, of all but the first request
    document = 512 + 500
    assert lru["hit_tokens"] == shared + document
    assert lru2["hit_tokens"] == shared + 2 * document
    assert lru2["mean_ms"] < lru["mean_ms"] < none["mean_ms"]


def test_prefill_helps_the_first_request(trace: Path) -> None:
    """What most requests begin with is there from the start, no more."""
    rows = simulate_l1.rows(simulate.load(trace), [512 * 8], 2.0)
    cold, warm = (row(rows, "lru2", prefill) for prefill in (False, True))
    assert cold["first_request_ms"] - warm["first_request_ms"] == pytest.approx(512 * 2.0 / 1000)
    assert warm["hit_tokens"] == cold["hit_tokens"] + 512


def test_the_command_shows_tier_l1(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`simulate --tier l1` has a row for each policy; options of the other tier are refused."""
    verb = ["simulate", str(trace), "--tier", "l1"]
    assert main([*verb, "--pool-bytes", "16KiB", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(r["policy"], r["capacity_tokens"]) for r in rows] == [
        (policy, 4096) for policy in ("none", "lru", "lru", "lru2", "lru2")
    ]
    assert main([*verb, "--policy", "arc"]) == 2
    assert "--policy" in capsys.readouterr().err
