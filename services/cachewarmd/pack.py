"""Pack plans: where each tensor of a model goes in its segment, and by which op.

Packing knowledge stays with the engine (it writes the plan); the daemon has only these generic ops:

    COPY     the file's bytes
    CAST     element by element to F32, row-major; from F32, BF16 or F16
    PANELS   a matrix to BF16 in panels of 32 rows (see `panels`); from F32, BF16 or F16

All work on any run of whole elements, so a tensor is packed chunk by chunk while it is hashed.

Two tensors with one place are *tied*: the files have one of them, or both with equal values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachewarmd.errors import InvalidRequestError, ModelFilesError
from cachewarmd.panels import Panels
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import CHUNK_BYTES, Tensor

ALIGNMENT = 64
MAX_SEGMENT_BYTES = 1 << 44


@dataclass(frozen=True)
class Placed:
    """A tensor of the file with its place in the segment."""

    name: str
    source_dtype: str
    op: pb.PackOp
    offset: int
    num_bytes: int
    panels: Panels | None = None  # for PANELS
    twin: str = ""  # tied to this one, and read before

    @property
    def chunk_bytes(self) -> int:
        """Of chunks that are packed fastest."""
        return CHUNK_BYTES if self.panels is None else self.panels.chunk_bytes(CHUNK_BYTES)

    def write(self, start: int, chunk: memoryview, target: npt.NDArray[np.uint8]) -> None:
        """Pack the bytes that stand `start` bytes into the tensor.

        A tensor whose twin stands there already is compared instead. Raises ModelFilesError when
        they differ.
        """
        if self.panels is not None:
            self._write_panels(self.panels, start, chunk, target)
            return
        widening = 1 if self.op == pb.PACK_OP_COPY or self.source_dtype == "F32" else 2
        begin = self.offset + widening * start
        place = target[begin : begin + widening * len(chunk)]
        if not self.twin:
            self._pack(chunk, place)
            return
        packed = np.empty_like(place)
        self._pack(chunk, packed)
        self._check_equal(packed, place)

    def _write_panels(
        self, panels: Panels, start: int, chunk: memoryview, target: npt.NDArray[np.uint8]
    ) -> None:
        place = target[self.offset : self.offset + self.num_bytes]
        for panel, index, values in panels.pieces(start, chunk, place):
            if self.twin:
                self._check_equal(values, panel[index])
            else:
                panel[index] = values

    def _check_equal(self, packed: npt.NDArray[Any], there: npt.NDArray[Any]) -> None:
        if not np.array_equal(packed, there):
            raise ModelFilesError(
                f"tensors {self.twin} and {self.name} differ, but the model's config ties them"
            )

    def _pack(self, chunk: memoryview, result: npt.NDArray[np.uint8]) -> None:
        if len(result) == len(chunk):
            result[:] = np.frombuffer(chunk, np.uint8)
        elif self.source_dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            words = np.frombuffer(chunk, "<u2")
            np.left_shift(words, np.uint32(16), out=result.view("<u4"), dtype=np.uint32)
        else:
            result.view("<f4")[:] = np.frombuffer(chunk, "<f2")


def check_plan(plan: pb.PackPlan, tensors: Mapping[str, Tensor]) -> dict[str, Placed]:
    """Match plan and files before anything is allocated; `tensors` are in reading order.

    Raises InvalidRequestError for a plan that can't be, ModelFilesError for files that don't have
    what it asks for or have more of it than it asks for (all name the tensor).
    """
    _check_layout(plan)
    items = {item.name: item for item in plan.tensors}
    _check_modules(items, tensors)
    placed: dict[str, Placed] = {}
    first_at: dict[object, str] = {}
    for name, tensor in tensors.items():
        if (item := items.get(name)) is None:
            continue
        _check_tensor(item, tensor)
        first = first_at.setdefault(_place(item), name)
        twin = "" if first == name else first
        panels = _panels(item, tensor) if item.op == pb.PACK_OP_PANELS else None
        placed[name] = Placed(
            name, tensor.dtype, item.op, item.offset, item.num_bytes, panels, twin
        )
    for item in plan.tensors:
        if _place(item) not in first_at:
            raise ModelFilesError(f"tensor {item.name} is missing in the weight files")
    return placed


def _place(item: pb.PackTensor) -> object:
    """Equal for tied tensors only: what is empty takes no place and has no twin."""
    return (item.offset, item.num_bytes) if item.num_bytes else item.name


def _form(item: pb.PackTensor) -> object:
    """What tied tensors must have in common besides their place."""
    return item.op, item.dtype, tuple(item.shape), item.row_group, item.column_group


def _check_layout(plan: pb.PackPlan) -> None:
    if not 0 < plan.segment_bytes <= MAX_SEGMENT_BYTES:
        raise InvalidRequestError(f"segment_bytes: 1 to {MAX_SEGMENT_BYTES} are allowed")
    names: set[str] = set()
    last = pb.PackTensor()
    end = 0
    for item in sorted(plan.tensors, key=lambda item: (item.offset, item.num_bytes)):
        if item.name in names:
            raise InvalidRequestError(f"plan: {item.name}: is placed twice")
        names.add(item.name)
        if _place(item) == _place(last):
            if _form(item) != _form(last):
                raise InvalidRequestError(f"plan: {item.name}: is tied to another shape or op")
        elif item.offset % ALIGNMENT or item.offset < end:
            raise InvalidRequestError(f"plan: {item.name}: bad alignment or overlap")
        end = item.offset + item.num_bytes
        last = item
    if end > plan.segment_bytes:
        raise InvalidRequestError("plan: segment_bytes is too small for its tensors")


def _check_modules(items: Mapping[str, pb.PackTensor], tensors: Mapping[str, Tensor]) -> None:
    """A module's tensors are placed all or not at all.

    A bias or a scale left out beside a weight that is used would be a wrong answer in silence.
    Tensors of modules that the plan does not use, such as `rotary_emb.inv_freq`, do no harm.
    """
    modules = {name.rpartition(".")[0] for name in items} - {""}
    for name in tensors:
        if name not in items and name.rpartition(".")[0] in modules:
            raise ModelFilesError(
                f"tensor {name} is in the weight files, but the model's config has no use for it"
            )


def _check_tensor(item: pb.PackTensor, tensor: Tensor) -> None:
    if tensor.shape != tuple(item.shape):
        raise ModelFilesError(
            f"tensor {item.name} has shape {list(tensor.shape)}, "
            f"the model's config asks for {list(item.shape)}"
        )
    if item.num_bytes != _packed_bytes(item, tensor):
        raise InvalidRequestError(f"plan: {item.name}: bad size")


def _packed_bytes(item: pb.PackTensor, tensor: Tensor) -> int:
    if item.op != pb.PACK_OP_PANELS and (item.row_group or item.column_group):
        raise InvalidRequestError(f"plan: {item.name}: only panels have row and column groups")
    match item.op:
        case pb.PACK_OP_COPY:
            return tensor.end - tensor.start
        case pb.PACK_OP_CAST if item.dtype == "F32":
            _check_float(item, tensor)
            elements = 1
            for dimension in tensor.shape:
                elements *= dimension
            return 4 * elements
        case pb.PACK_OP_PANELS if item.dtype == "BF16":
            _check_float(item, tensor)
            return _panels(item, tensor).num_bytes
    raise InvalidRequestError(f"plan: {item.name}: op or dtype {item.dtype!r} is not known")


def _check_float(item: pb.PackTensor, tensor: Tensor) -> None:
    if tensor.dtype not in ("F32", "BF16", "F16"):
        raise ModelFilesError(
            f"tensor {item.name} is {tensor.dtype}; F32, BF16 and F16 can be read"
        )


def _panels(item: pb.PackTensor, tensor: Tensor) -> Panels:
    if len(tensor.shape) != 2:
        raise InvalidRequestError(f"plan: {item.name}: only a matrix can be laid out in panels")
    rows, columns = tensor.shape
    for what, size, group in (
        ("row_group", rows, item.row_group),
        ("column_group", columns, item.column_group),
    ):
        if group and size % group:
            raise InvalidRequestError(
                f"plan: {item.name}: {what} {group} does not divide the dimension of {size}"
            )
    return Panels(tensor.dtype, rows, columns, item.row_group or rows, item.column_group or columns)
