"""Pack plans, against tensors that are as odd.

An input is one byte for each number of the tensors' shapes and dtypes, and a serialised PackPlan.
A plan that is accepted and small is carried out.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
from google.protobuf.message import DecodeError

from cachewarmd import pack
from cachewarmd.errors import InvalidRequestError, ModelFilesError
from cachewarmd.pack import Placed
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import Tensor
from tests.fuzz.target import Target, replaced

_DTYPES = ("F32", "BF16", "F16", "U8")
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}
_NAMES = ("a.weight", "b.weight", "a.bias")
_HEAD_BYTES = 3 * len(_NAMES)
_MAX_SEGMENT_BYTES = 1 << 16
_GUARD_BYTES = 64
_GUARD = 0xA5


def tensors_of(head: bytes) -> dict[str, Tensor]:
    """Two matrices and a vector, one after the other."""
    found = {}
    start = 0
    for number, name in enumerate(_NAMES):
        kind, rows, columns = head[3 * number : 3 * number + 3]
        dtype = _DTYPES[kind % len(_DTYPES)]
        shape = (rows, columns) if name.endswith("weight") else (rows,)
        size = _ITEM_BYTES[dtype] * int(np.prod(shape))
        found[name] = Tensor(name, dtype, shape, start, start + size)
        start += size
    return found


def check(data: bytes) -> None:
    """Each tensor lies in the segment, at a place of its own or its twin's, and is packed there."""
    head, rest = data[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0"), data[_HEAD_BYTES:]
    try:
        plan = pb.PackPlan.FromString(rest)
    except DecodeError:
        return
    tensors = tensors_of(head)
    try:
        placed = pack.check_plan(plan, tensors)
    except (InvalidRequestError, ModelFilesError) as exc:
        pb.ErrorReply(code=exc.code, message=str(exc))
        return
    end = 0
    for item in sorted(placed.values(), key=lambda item: (item.offset, bool(item.twin))):
        if not item.twin:
            assert item.offset >= end or not item.num_bytes, "an overlap"
            end = max(end, item.offset + item.num_bytes)
    assert end <= plan.segment_bytes, "beyond the segment"
    if plan.segment_bytes <= _MAX_SEGMENT_BYTES:
        _pack_all(placed, tensors, plan.segment_bytes)


def _pack_all(placed: dict[str, Placed], tensors: dict[str, Tensor], size: int) -> None:
    memory = np.full(size + _GUARD_BYTES, _GUARD, np.uint8)
    target = memory[:size]
    for name, item in placed.items():
        tensor = tensors[name]
        element = _ITEM_BYTES[tensor.dtype]
        content = bytes(tensor.end - tensor.start)
        # Not a multiple of rows, so that pieces of them are packed too.
        step = min(item.chunk_bytes, 7 * element * (1 + len(content) // 200))
        for start in range(0, len(content), step):
            item.write(start, memoryview(content)[start : start + step], target)
    assert (memory[size:] == _GUARD).all(), "beyond the segment"


def plant() -> AbstractContextManager[object]:
    """An unchecked length: of the segment."""

    def check_layout(plan: pb.PackPlan) -> None:
        longer = pb.PackPlan()
        longer.CopyFrom(plan)
        longer.segment_bytes = pack.MAX_SEGMENT_BYTES
        real(longer)

    real = pack._check_layout
    return replaced(pack, "_check_layout", check_layout)


def make() -> Target:
    """All ops, groups that divide and tied tensors."""
    head = bytes((0, 8, 6, 1, 4, 80, 2, 8, 0))
    matrix = pb.PackTensor(name="a.weight", op=pb.PACK_OP_PANELS, shape=[8, 6], dtype="BF16")
    matrix.row_group, matrix.column_group = 4, 3
    matrix.num_bytes = 2 * 64 * 64
    other = pb.PackTensor(name="b.weight", op=pb.PACK_OP_CAST, shape=[4, 80], dtype="F32")
    other.offset, other.num_bytes = 8192, 1280
    bias = pb.PackTensor(name="a.bias", op=pb.PACK_OP_COPY, shape=[8], num_bytes=16, offset=9472)
    plan = pb.PackPlan(description="d", tensors=[matrix, other, bias], segment_bytes=9488)
    tied = bytes((0, 4, 4, 0, 4, 4, 0, 0, 0))
    twins = [
        pb.PackTensor(name=name, op=pb.PACK_OP_CAST, shape=[4, 4], dtype="F32", num_bytes=64)
        for name in _NAMES[:2]
    ]
    bias_empty = pb.PackTensor(name="a.bias", op=pb.PACK_OP_COPY, shape=[0])
    tied_plan = pb.PackPlan(tensors=[*twins, bias_empty], segment_bytes=64)
    plans = [(head, plan), (tied, tied_plan)]
    for start, told in plans:
        pack.check_plan(told, tensors_of(start))
    return Target(check, [start + told.SerializeToString() for start, told in plans], plant)
