"""What came of runs of pytest, from the reports that scripts/lib/tests.sh has it write.

    reports.py is-worth-another-run REPORTS GROUP
    reports.py conclude REPORTS GROUP...

For each group REPORTS holds GROUP.xml (junit) and GROUP.status (exit status), and if what failed
was run again, GROUP.again.xml and GROUP.again.status. A run that broke off may have left no xml.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

# More than this is no accident of a busy machine.
MAX_FAILED = 10
_ENDED, _TESTS_FAILED, _NO_TESTS = 0, 1, 5  # exit statuses of pytest


@dataclass
class Run:
    """One run: `outcomes` has "passed", "failed" or "skipped" by the test's name."""

    status: int | None  # of pytest; None: it was not run, or is not known to have ended
    outcomes: dict[str, str] = field(default_factory=dict)
    last_lines: dict[str, str] = field(default_factory=dict)  # of what failed: the error

    @property
    def has_ended(self) -> bool:
        return self.status in (_ENDED, _TESTS_FAILED, _NO_TESTS)

    @property
    def failed(self) -> list[str]:
        return [name for name, outcome in self.outcomes.items() if outcome == "failed"]


def read_run(reports: Path, name: str) -> Run:
    """GROUP or GROUP.again."""
    try:
        run = Run(int((reports / f"{name}.status").read_text()))
    except (OSError, ValueError):
        run = Run(None)
    try:
        cases = [*ET.parse(reports / f"{name}.xml").iter("testcase")]
    except (OSError, ET.ParseError):
        if run.has_ended:
            run.status = None  # what it says can't be checked
        return run
    for case in cases:
        test = f"{case.get('classname')}::{case.get('name')}"
        faults = [*case.iter("failure"), *case.iter("error")]
        if faults:  # in the test, or when it was set up or taken down
            run.outcomes[test] = "failed"
            run.last_lines.setdefault(test, _error_line(faults[0]))
        elif run.outcomes.get(test) != "failed":
            run.outcomes[test] = "passed" if case.find("skipped") is None else "skipped"
    return run


def _error_line(fault: ET.Element) -> str:
    """The first line of pytest's that tells the error, else the last line of all."""
    lines = [line.strip() for line in (fault.text or fault.get("message") or "").splitlines()]
    told = [line[1:].strip() for line in lines if line.startswith("E ")]
    return next(iter(told or [line for line in reversed(lines) if line]), "")


def is_worth_another_run(first: Run) -> bool:
    """Did a few tests fail, and nothing worse happen?"""
    return first.status == _TESTS_FAILED and 0 < len(first.failed) <= MAX_FAILED


@dataclass
class Conclusion:
    """Of one group or, added up, of all."""

    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    unsteady: dict[str, str] = field(default_factory=dict)  # test: how it failed at first


def conclude(first: Run, again: Run) -> Conclusion:
    """A test that passed when it was run again has passed. A run that broke off has failed."""
    result = Conclusion()
    for test, outcome in first.outcomes.items():
        if outcome == "failed" and again.outcomes.get(test) == "passed":
            result.unsteady[test] = first.last_lines[test]
            outcome = "passed"
        result.num_passed += outcome == "passed"
        result.num_failed += outcome == "failed"
        result.num_skipped += outcome == "skipped"
    result.num_failed += not first.has_ended
    if first.status == _TESTS_FAILED and not first.failed:
        result.num_failed += 1  # whatever it was
    return result


def main(command: str, folder: str, *groups: str) -> int:
    reports = Path(folder)
    if command == "is-worth-another-run":
        return 0 if is_worth_another_run(read_run(reports, groups[0])) else 1
    total = Conclusion()
    for group in dict.fromkeys(groups):
        found = conclude(read_run(reports, group), read_run(reports, f"{group}.again"))
        total.num_passed += found.num_passed
        total.num_failed += found.num_failed
        total.num_skipped += found.num_skipped
        total.unsteady |= found.unsteady
        if found.num_failed:
            print(f"failed: tests/{group}")
    for test, line in total.unsteady.items():
        print(f"UNSTEADY: passed only when run again: {test}\n    {line}")
    print(f"{total.num_passed} passed, {total.num_failed} failed, {total.num_skipped} skipped")
    return 1 if total.num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
