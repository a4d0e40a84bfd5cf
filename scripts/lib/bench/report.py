"""What a mode hands back, and how it is printed: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """Cells are text; the first column is a name."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __str__(self) -> str:
        """Aligned with spaces, so that it can be read in a log and cut by columns."""
        lines = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [self.title]
        for name, *cells in lines:
            padded = [name.ljust(widths[0])]
            padded += [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            text.append("  ".join(padded).rstrip())
        return "\n".join(text)


@dataclass(frozen=True)
class Result:
    """`values` go into the JSON object as they are; durations are seconds, memory is bytes."""

    values: dict[str, Any] = field(default_factory=dict)
    tables: Sequence[Table] = ()


def as_json(values: dict[str, Any]) -> str:
    """One line. NaN and infinity are bugs of a mode, not numbers: ValueError."""
    return json.dumps(values, allow_nan=False)
