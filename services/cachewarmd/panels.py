"""Panels: the order in which a packed GEMM reads a weight matrix.

A matrix [N, K] is stored as bfloat16 [Np/32][Kp/2][32][2]: panel p holds rows 32p to 32p + 31, and
in it stand, for each pair of columns, the 32 rows' two values side by side:

                 columns 0, 1                  columns 2, 3
    panel 0   r0 r0 r1 r1 r2 r2 … r31 r31   r0 r0 r1 r1 … r31 r31   …   Kp/2 pairs, 128 bytes each
    panel 1   r32 r32 … r63 r63             …
    …

N and K are taken in groups (a head's rows, say), each padded with zeros to a multiple of 32, so
that no panel and no pair has parts of two groups. Row groups of 80 in panels of 32:

    rows      0–31 | 32–63 | 64–79 + 16 zeros | 80–111 | 112–143 | 144–159 + 16 zeros | …
    panel       0      1           2              3         4             5

F32 and F16 are rounded to nearest even (NaN stays NaN), BF16 is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

PANEL_ROWS = 32
_SOURCES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

# An array to be written, the index of the part that is meant, and its values.
Piece = tuple[npt.NDArray[Any], Any, npt.NDArray[Any]]


def padded(size: int, group: int) -> int:
    """Elements of a dimension with each of its groups padded to a multiple of 32."""
    return size // group * _round_up(group) if size else 0


def _round_up(size: int) -> int:
    return -(-size // PANEL_ROWS) * PANEL_ROWS


@dataclass(frozen=True)
class Panels:
    """A matrix of the file that is laid out in panels; groups divide their dimensions."""

    source_dtype: str  # F32, BF16 or F16
    num_rows: int
    num_columns: int
    row_group: int
    column_group: int

    @property
    def num_bytes(self) -> int:
        """Of the result."""
        rows = padded(self.num_rows, self.row_group)
        return 2 * rows * padded(self.num_columns, self.column_group)

    @property
    def _element_bytes(self) -> int:
        return 4 if self.source_dtype == "F32" else 2

    def chunk_bytes(self, at_most: int) -> int:
        """Bytes of the file to pack at a time: whole row groups, panels, rows, or elements."""
        row = self.num_columns * self._element_bytes
        for unit in (row * self.row_group, row * PANEL_ROWS, row, self._element_bytes):
            if 0 < unit <= at_most:
                return at_most // unit * unit
        return at_most

    def pieces(
        self, start: int, chunk: memoryview, place: npt.NDArray[np.uint8]
    ) -> Iterator[Piece]:
        """What the bytes that stand `start` bytes into the matrix become, and where in `place`.

        `place` is all of the result. Whole rows are fast, so chunks of `chunk_bytes` are.
        """
        values = np.frombuffer(chunk, _SOURCES[self.source_dtype])
        row, column = divmod(start // self._element_bytes, self.num_columns)
        while len(values):
            if column or len(values) < self.num_columns:
                num = min(self.num_columns - column, len(values))
                yield self._part_of_row(row, column, values[:num], place)
                row, column = row + 1, 0  # if it is not the row's end, it is the chunk's
            else:
                num_rows = min(self._rows_left(row), len(values) // self.num_columns)
                num = num_rows * self.num_columns
                yield self._rows_of_panel(row, values[:num].reshape(num_rows, -1), place)
                row += num_rows
            values = values[num:]

    def _padded_row(self, row: int) -> int:
        group, rest = divmod(row, self.row_group)
        return group * _round_up(self.row_group) + rest

    def _rows_left(self, row: int) -> int:
        """From this row to the end of its panel or group."""
        rest = row % self.row_group
        return min(PANEL_ROWS - rest % PANEL_ROWS, self.row_group - rest)

    def _panel(self, row: int, place: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        size = 2 * PANEL_ROWS * padded(self.num_columns, self.column_group)
        number = self._padded_row(row) // PANEL_ROWS
        return place[number * size : (number + 1) * size]

    def _rows_of_panel(
        self, row: int, values: npt.NDArray[Any], place: npt.NDArray[np.uint8]
    ) -> Piece:
        """Whole rows of one panel: a transposed copy of pairs."""
        num_rows, group = len(values), self.column_group
        bits = bfloat16_bits(values).reshape(num_rows, -1, group)
        if group % 2:  # the last column's neighbour is the padding's first zero
            even = np.zeros((*bits.shape[:2], group + 1), np.uint16)
            even[:, :, :group] = bits
            bits = even
        pairs = bits.view("<u4").transpose(1, 2, 0)
        panel = self._panel(row, place).view("<u4")
        first = self._padded_row(row) % PANEL_ROWS
        index = np.s_[:, : pairs.shape[1], first : first + num_rows]
        return panel.reshape(len(pairs), _round_up(group) // 2, PANEL_ROWS), index, pairs

    def _part_of_row(
        self, row: int, column: int, values: npt.NDArray[Any], place: npt.NDArray[np.uint8]
    ) -> Piece:
        """Of a row that does not fit in a chunk."""
        group, rest = np.divmod(np.arange(column, column + len(values)), self.column_group)
        pair, side = np.divmod(group * _round_up(self.column_group) + rest, 2)
        panel = self._panel(row, place).view("<u2").reshape(-1, PANEL_ROWS, 2)
        return panel, (pair, self._padded_row(row) % PANEL_ROWS, side), bfloat16_bits(values)


def bfloat16_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; values are F32, F16, or BF16's own bits."""
    if values.dtype == np.uint16:
        return values
    if values.dtype == np.float16:
        return _of_all_float16().take(values.view(np.uint16))
    bits = values.view(np.uint32)
    # Upper half of a sum whose carry rounds up; a NaN's could run over into the sign.
    rounded = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    result = rounded.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():
        result[is_nan] = (bits[is_nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x40)
    return result


@cache
def _of_all_float16() -> npt.NDArray[np.uint16]:
    """By a float16's bits: numpy converts them one by one, this is four times as fast."""
    return bfloat16_bits(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))
