"""The panel layout, against a double loop: shapes, groups, dtypes, chunks, rounding, ties."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cachewarmd import pack, segment, weight_files, weights
from cachewarmd.errors import CachewarmError, InvalidRequestError, ModelFilesError
from cachewarmd.panels import Panels, bfloat16_bits
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import SINGLE_NAME
from tests.fixtures.weight_files import entry, write_file

DTYPES: Mapping[str, Any] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def round_up(size: int) -> int:
    return (size + 31) // 32 * 32


def random_matrix(dtype: str, rows: int, columns: int) -> npt.NDArray[Any]:
    """Any bits at all, so NaN, infinities and subnormals too."""
    rng = np.random.default_rng(rows * 1000 + columns)
    raw = rng.bytes(rows * columns * np.dtype(DTYPES[dtype]).itemsize)
    return np.frombuffer(raw, DTYPES[dtype]).reshape(rows, columns)


def naive_bits(value: Any) -> int:
    """Of one element as bfloat16, by exact comparison of the two neighbours."""
    if isinstance(value, np.uint16):
        return int(value)
    bits = int(np.float32(value).view(np.uint32))
    if np.isnan(value):
        return bits >> 16 | 0x40
    low, rest = bits >> 16, bits & 0xFFFF
    return low + (rest > 0x8000 or (rest == 0x8000 and low % 2 == 1))


def naive_panels(matrix: npt.NDArray[Any], row_group: int, column_group: int) -> bytes:
    """The layout as it is told, element by element."""
    rows, columns = matrix.shape
    row_group, column_group = row_group or rows, column_group or columns
    num_rows = rows // row_group * round_up(row_group)
    num_columns = columns // column_group * round_up(column_group)
    result = np.zeros((num_rows // 32, num_columns // 2, 32, 2), "<u2")
    for n in range(rows):
        for k in range(columns):
            row = n // row_group * round_up(row_group) + n % row_group
            column = k // column_group * round_up(column_group) + k % column_group
            result[row // 32, column // 2, row % 32, column % 2] = naive_bits(matrix[n, k])
    return result.tobytes()


def plan_of(shape: tuple[int, ...], row_group: int, column_group: int) -> pb.PackPlan:
    size = 2
    for dimension, group in zip(shape, (row_group, column_group), strict=False):
        size *= dimension // (group or dimension) * round_up(group or dimension)
    plan = pb.PackPlan(segment_bytes=max(size, 64))
    plan.tensors.add(
        name="a",
        op=pb.PACK_OP_PANELS,
        shape=shape,
        dtype="BF16",
        num_bytes=size,
        row_group=row_group,
        column_group=column_group,
    )
    return plan


def write_matrices(folder: Path, dtype: str, *matrices: npt.NDArray[Any]) -> None:
    """Tensors a, b, … of one dtype."""
    header, data = {}, b""
    for name, matrix in zip("abc", matrices, strict=False):
        end = len(data) + matrix.nbytes
        header[name] = entry(list(matrix.shape), len(data), end, dtype)
        data += matrix.tobytes()
    write_file(folder / SINGLE_NAME, header, data)


def load(folder: Path, plan: pb.PackPlan) -> bytes:
    """The segment's bytes."""
    dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        loaded, _ = weights.load(
            dir_fd, plan, lambda *_: None, lambda fd, size, _: segment.reserve(fd, 0, size),
            follow=False,
        )  # fmt: skip
    finally:
        os.close(dir_fd)
    try:
        return segment.map_memory(loaded.fd, loaded.size).tobytes()
    finally:
        os.close(loaded.fd)


SHAPES = [
    (1, 1, 0, 0), (1, 2, 0, 0), (31, 3, 0, 0), (32, 32, 0, 0), (33, 33, 0, 0), (65, 7, 0, 0),
    (96, 64, 0, 0), (48, 5, 16, 0), (160, 4, 80, 0), (64, 34, 32, 17), (6, 9, 3, 3), (5, 6, 1, 1),
    (40, 160, 0, 80), (80, 48, 80, 16), (128, 66, 64, 33), (7, 96, 7, 32),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk_bytes", [4, 52, 600, 8 << 20])
def test_panels_are_what_a_double_loop_gives(
    dtype: str,
    shape: tuple[int, int, int, int],
    chunk_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Odd sizes, padded groups, rows longer than a chunk, chunks that end in a panel or group."""
    rows, columns, *groups = shape
    matrix = random_matrix(dtype, rows, columns)
    write_matrices(tmp_path, dtype, matrix)
    for module in (pack, weight_files):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    packed = load(tmp_path, plan_of((rows, columns), *groups))
    expected = naive_panels(matrix, *groups)
    assert packed[: len(expected)] == expected


@pytest.mark.parametrize("cut", [(2,), (6, 8), (66, 70, 200), (1000,)])
def test_panels_do_not_depend_on_where_chunks_end(cut: tuple[int, ...]) -> None:
    """Any whole elements in order will do; `chunk_bytes` is only the fastest."""
    matrix = random_matrix("BF16", 70, 33)
    data, panels = memoryview(matrix.tobytes()), Panels("BF16", 70, 33, 35, 11)
    place = np.zeros(panels.num_bytes, np.uint8)
    ends = [*cut, len(data)]
    for start, end in zip([0, *ends], ends, strict=False):
        for panel, index, values in panels.pieces(start, data[start:end], place):
            panel[index] = values
    assert place.tobytes() == naive_panels(matrix, 35, 11)


def test_chunks_are_cut_at_groups_panels_or_rows_where_they_fit() -> None:
    """And at elements where not even a row fits."""
    of_groups = Panels("F32", 800, 10, 80, 10)
    assert of_groups.chunk_bytes(10_000) == 3 * 80 * 40
    assert of_groups.chunk_bytes(3000) == 2 * 32 * 40
    assert of_groups.chunk_bytes(200) == 5 * 40
    assert of_groups.chunk_bytes(39) == 36


def test_every_float16_and_ties_of_float32_are_rounded_right() -> None:
    """To nearest, ties to even; what is too large is infinite, NaN stays NaN."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    assert bfloat16_bits(halves).tolist() == [naive_bits(value) for value in halves]
    given = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0xFFFFFFFF, 0x7F800001, 0x80000000]
    floats = np.array(given, np.uint32).view(np.float32)
    wanted = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0xFFFF, 0x7FC0, 0x8000]
    assert bfloat16_bits(floats).tolist() == wanted


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_matrix_takes_no_place(shape: tuple[int, int], tmp_path: Path) -> None:
    """And is no error."""
    plan = pb.PackPlan(segment_bytes=64)
    plan.tensors.add(name="a", op=pb.PACK_OP_PANELS, shape=shape, dtype="BF16")
    write_matrices(tmp_path, "BF16", np.zeros(shape, np.uint16))
    assert load(tmp_path, plan) == bytes(64)


BAD: Mapping[str, tuple[pb.PackPlan, type[CachewarmError], str]] = {
    "row group": (plan_of((40, 6), 16, 0), InvalidRequestError, "a: row_group 16 .* of 40"),
    "column group": (plan_of((40, 6), 0, 4), InvalidRequestError, "a: column_group 4 .* of 6"),
    "group larger than all": (plan_of((40, 6), 80, 0), InvalidRequestError, "row_group 80"),
    "other shape": (plan_of((40, 5), 0, 0), ModelFilesError, r"tensor a has shape \[40, 6\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_panels_that_can_not_be_are_refused_by_name(case: str, tmp_path: Path) -> None:
    """Before anything is allocated."""
    write_matrices(tmp_path, "BF16", np.zeros((40, 6), np.uint16))
    plan, error, reason = BAD[case]
    with pytest.raises(error, match=reason):
        load(tmp_path, plan)


def test_groups_dtypes_and_shapes_that_are_no_panels_are_refused(tmp_path: Path) -> None:
    """Groups for another op, another result than bfloat16, a size that is not theirs, a vector."""
    write_matrices(tmp_path, "F32", np.zeros((2, 2), np.float32), np.zeros(4, np.float32))
    cast = plan_of((2, 2), 0, 0)
    cast.tensors[0].op, cast.tensors[0].dtype, cast.tensors[0].num_bytes = (
        pb.PACK_OP_CAST,
        "F32",
        16,
    )
    load(tmp_path, cast)
    cast.tensors[0].row_group = 2
    with pytest.raises(InvalidRequestError, match="a: only panels have"):
        load(tmp_path, cast)
    for field, value, reason in (("dtype", "F32", "dtype 'F32'"), ("num_bytes", 2, "bad size")):
        plan = plan_of((2, 2), 0, 0)
        setattr(plan.tensors[0], field, value)
        with pytest.raises(InvalidRequestError, match=f"a: .*{reason}"):
            load(tmp_path, plan)
    vector = plan_of((4, 1), 0, 0)
    vector.tensors[0].name, vector.tensors[0].shape[:] = "b", [4]
    with pytest.raises(InvalidRequestError, match="b: only a matrix"):
        load(tmp_path, vector)


def test_integers_can_not_be_laid_out_in_panels(tmp_path: Path) -> None:
    """Nothing is guessed about another dtype."""
    write_matrices(tmp_path, "I16", np.zeros((2, 2), np.int16))
    with pytest.raises(ModelFilesError, match="tensor a is I16"):
        load(tmp_path, plan_of((2, 2), 0, 0))


def tied(shape: tuple[int, int], row_group: int, column_group: int) -> pb.PackPlan:
    plan = plan_of(shape, row_group, column_group)
    plan.tensors.add().CopyFrom(plan.tensors[0])
    plan.tensors[1].name = "b"
    return plan


@pytest.mark.parametrize("chunk_bytes", [6, 8 << 20])
def test_h1_tied_panels_are_compared(
    chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal ones share their place, padding and all; one other value anywhere is an error."""
    for module in (pack, weight_files):
        monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    matrix = random_matrix("BF16", 48, 9)
    plan = tied((48, 9), 16, 3)
    write_matrices(tmp_path, "BF16", matrix, matrix)
    assert load(tmp_path, plan) == naive_panels(matrix, 16, 3)
    for row, column in ((0, 0), (17, 4), (47, 8)):
        other = matrix.copy()
        other[row, column] ^= 1
        write_matrices(tmp_path, "BF16", matrix, other)
        with pytest.raises(ModelFilesError, match="tensors a and b differ"):
            load(tmp_path, plan)


def test_tied_panels_must_have_the_same_groups(tmp_path: Path) -> None:
    """One place can't be laid out in two ways, even of equal size."""
    matrix = np.zeros((64, 64), np.uint16)
    write_matrices(tmp_path, "BF16", matrix, matrix)
    plan = tied((64, 64), 0, 0)
    plan.tensors[1].row_group = 32
    with pytest.raises(InvalidRequestError, match="tied to another"):
        load(tmp_path, plan)
