"""The systemd units are clean and stay hardened."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).resolve().parents[2] / "systemd").glob("*.service"))
MAX_EXPOSURE = {"cachewarmd.service": 2.5, "cachewarm-engine.service": 5.0}

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def units(tmp_path: Path) -> list[Path]:
    """Copies whose programs exist: an install location is not what is checked."""
    copies = []
    for unit in UNITS:
        copies.append(tmp_path / unit.name)
        copies[-1].write_text(re.sub(r"/opt/cachewarm/bin/\S+", "/bin/true", unit.read_text()))
    return copies


def test_units_have_no_unknown_or_malformed_setting(units: list[Path]) -> None:
    """systemd-analyze verify finds nothing to say."""
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *map(str, units)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_units_start_the_commands_that_are_installed() -> None:
    """Each ExecStart names one of our console scripts."""
    for unit in UNITS:
        program = re.search(r"^ExecStart=\S*/(\S+)", unit.read_text(), re.M)
        assert program is not None
        assert program[1] in ("cachewarmd", "cachewarm-engine")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: str(unit.name))
def test_units_are_hardened(unit: Path) -> None:
    """The exposure level stays below what the unit has today."""
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
    result = subprocess.run(command, capture_output=True, text=True)
    level = re.search(r"exposure level for \S+: (\d+\.\d)", result.stdout)
    assert level is not None, result.stdout + result.stderr
    assert float(level[1]) <= MAX_EXPOSURE[unit.name]
