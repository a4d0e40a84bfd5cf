"""Many inputs for everything that reads what others wrote; and proof that a fault is found.

More of it: `python -m tests.fuzz.run TARGET --runs N --seed S`; a failed run prints its seed and
keeps the input, which `--replay` takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import environment
from tests.fuzz.run import HAS_ATHERIS
from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
NUM_RUNS = 120_000 * int(os.environ.get("CACHEWARM_TEST_REPEATS", "1"))
# Everything here is the last to get a turn on a busy machine.
pytestmark = pytest.mark.timeout(1200)


@dataclass(frozen=True)
class Ended:
    """A run's status, its report, and all it printed."""

    status: int
    report: dict[str, Any]
    text: str


def fuzz(target: str, crashes: Path, *flags: str) -> Ended:
    """In a process of its own, which is over when this returns."""
    command = [sys.executable, "-m", "tests.fuzz.run", target, f"--crashes={crashes}", *flags]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True
    )
    text = (done.stderr + done.stdout).decode(errors="replace")
    lines = done.stdout.decode().splitlines()
    is_report = bool(lines) and lines[-1].startswith("{")
    return Ended(done.returncode, json.loads(lines[-1]) if is_report else {}, text)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    """All runs, started at once, as many at a time as there are cores for; the slow ones first."""
    folder = tmp_path_factory.mktemp("inputs")
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {
            name: pool.submit(fuzz, name, folder, f"--runs={NUM_RUNS}")
            for name in sorted(TARGETS, key=lambda name: -TARGETS[name].cost)
        }


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_no_input_is_a_fault(target: str, runs: dict[str, Future[Ended]]) -> None:
    """Only documented errors, right answers, no hang, no memory that grows."""
    ended = runs[target].result()
    print(ended.text)
    assert ended.status == 0
    assert ended.report["runs"] >= NUM_RUNS


@pytest.mark.parametrize("how", ["guided", "at-random"])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_a_planted_bug_is_found(target: str, how: str, tmp_path: Path) -> None:
    """A fuzzer that finds nothing proves nothing. Without the bug the same input is none."""
    if how == "guided" and not HAS_ATHERIS:
        pytest.skip("atheris is not installed")
    flags = ["--at-random"] if how == "at-random" else []
    ended = fuzz(target, tmp_path, "--planted", f"--runs={NUM_RUNS}", *flags)
    print(ended.text)
    assert ended.status == 1
    assert ended.report["fault"]
    (found,) = tmp_path.iterdir()
    assert fuzz(target, tmp_path, f"--replay={found}", "--planted").status == 1
    assert fuzz(target, tmp_path, f"--replay={found}").status == 0
