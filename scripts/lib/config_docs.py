"""Puts the tables of options between the marks in docs/configuration.md."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from cachewarmd import config as daemon
from cachewarmd.options import Option
from engine.option_table import SERVE_OPTIONS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
TABLES = {"engine": SERVE_OPTIONS, "cachewarmd": daemon.OPTIONS}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def markdown(table: Sequence[Option]) -> str:
    """One table for each group."""
    parts = []
    for group, options in groupby(table, key=lambda option: option.group):
        lines = [f"### {group}\n"] if group else []
        lines += ["| option | default | allowed | meaning |", "|---|---|---|---|"]
        for option in options:
            default = f"`{option.default_text}`" if option.default_text else ""
            cells = (f"`{option.name}`", default, option.parse.allowed, option.help)
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def fill_in(document: str) -> str:
    """The document with today's tables. Raises ValueError when it lacks a mark."""
    for name, table in TABLES.items():
        begin, end = f"<!-- options of {name} -->", f"<!-- end of {name} -->"
        marked = re.compile(f"(?<={re.escape(begin)}\n).*(?={re.escape(end)})", re.DOTALL)
        if not marked.search(document):
            raise ValueError(f"{DOCUMENT} has no {begin} before an {end}")
        document = marked.sub(f"\n{markdown(table)}\n\n".replace("\\", r"\\"), document)
    return document


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser("gen-config-docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the tables are not current")
    is_check = parser.parse_args().check
    before = DOCUMENT.read_text()
    after = fill_in(before)
    if is_check and after != before:
        print("gen-config-docs: the tables are stale, run scripts/gen-config-docs", file=sys.stderr)
        return 1
    if not is_check:
        DOCUMENT.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
