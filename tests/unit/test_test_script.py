"""scripts/test: what failed is run once more, and the last line counts what came of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

SCRIPT = """
set -euo pipefail
root=$1 python=$2 reports=$3
source "$root/scripts/lib/tests.sh"
run_pytest unit
run_again unit
conclude unit
"""

STEADY = """
import pytest

def test_good():
    pass

@pytest.mark.skip(reason="not today")
def test_skipped():
    pass
"""

# Each fails when it is run for the first time.
UNSTEADY = """
import pathlib
import pytest

def is_first(name):
    mark = pathlib.Path(__file__).with_name(name)
    if mark.exists():
        return False
    mark.touch()
    return True

def test_unsteady():
    value = 3 if is_first("unsteady") else 4
    assert value == 4, "it was too soon"

@pytest.fixture
def touchy():
    if is_first("setup"):
        raise RuntimeError("not ready")

def test_of_touchy(touchy):
    pass

@pytest.fixture
def untidy():
    yield
    assert not is_first("teardown")

def test_of_untidy(untidy):
    pass
"""

BAD = "def test_bad():\n    assert 1 == 2\n"


def run_script(folder: Path, sources: dict[str, str], **env: str) -> tuple[int, list[str]]:
    """Exit status and output of the script's functions in a tree with these tests."""
    tests, reports = folder / "tests" / "unit", folder / "reports"
    tests.mkdir(parents=True)
    reports.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, source in sources.items():
        (tests / f"test_{name}.py").write_text(source)
    ended = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", str(REPOSITORY), sys.executable, str(reports)],
        cwd=folder,
        env={**os.environ, "CACHEWARM_TEST_STRICT": "", "PYTHONDONTWRITEBYTECODE": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    assert not (folder / ".pytest_cache").exists(), "it wrote into the tree"
    return ended.returncode, ended.stdout.splitlines()


def test_what_passes_when_run_again_has_passed_and_is_named(tmp_path: Path) -> None:
    """In the call, in set-up or take-down: each with its first error; the run is good."""
    status, told = run_script(tmp_path, {"steady": STEADY, "unsteady": UNSTEADY})
    assert (status, told[-1]) == (0, "4 passed, 0 failed, 1 skipped")
    named = [number for number, line in enumerate(told) if line.startswith("UNSTEADY")]
    assert [told[number].rpartition("::")[2] for number in named] == [
        "test_unsteady",
        "test_of_touchy",
        "test_of_untidy",
    ]
    assert told[named[0] + 1].strip() == "AssertionError: it was too soon"
    assert told[named[1] + 1].strip() == "RuntimeError: not ready"


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    """Beside one that does not; only what failed is run again."""
    status, told = run_script(tmp_path, {"bad": BAD, "steady": STEADY, "unsteady": UNSTEADY})
    assert (status, told[-1]) == (1, "4 passed, 1 failed, 1 skipped")
    assert "failed: tests/unit" in told
    assert sum(line.startswith("UNSTEADY") for line in told) == 3
    assert any("1 failed, 3 passed" in line for line in told), "the second run was of others too"


def test_all_good_is_run_once(tmp_path: Path) -> None:
    """Nothing is said of a second run."""
    status, told = run_script(tmp_path, {"steady": STEADY})
    assert (status, told[-1]) == (0, "1 passed, 0 failed, 1 skipped")
    assert not any("again" in line for line in told)


@pytest.mark.parametrize("way", ["strict", "many"])
def test_nothing_is_run_again_when_told_so_or_when_too_much_failed(
    tmp_path: Path, way: str
) -> None:
    """CACHEWARM_TEST_STRICT=1, or eleven failures."""
    if way == "strict":
        sources, counts = {"unsteady": UNSTEADY}, "0 passed, 3 failed, 0 skipped"
    else:
        sources = {"many": "".join(BAD.replace("bad", f"bad_{n}") for n in range(11))}
        counts = "0 passed, 11 failed, 0 skipped"
    env = {"CACHEWARM_TEST_STRICT": "1"} if way == "strict" else {}
    status, told = run_script(tmp_path, sources, **env)
    assert (status, told[-1]) == (1, counts)
    assert not any("again" in line for line in told)


@pytest.mark.parametrize(
    ("source", "counts"),
    [
        ("import os\n\ndef test_dies():\n    os._exit(0)\n", "0 passed, 1 failed, 0 skipped"),
        ("import os\n\ndef test_dies():\n    os._exit(1)\n", "0 passed, 1 failed, 0 skipped"),
        ("raise RuntimeError\n", "0 passed, 2 failed, 0 skipped"),
    ],
    ids=["dies with 0", "dies with 1", "can't be collected"],
)
def test_a_run_that_breaks_off_fails(tmp_path: Path, source: str, counts: str) -> None:
    """Whatever pytest's exit status says; it is not run again."""
    status, told = run_script(tmp_path, {"broken": source})
    assert (status, told[-1]) == (1, counts)
    assert "failed: tests/unit" in told
    assert not any("again" in line for line in told)
