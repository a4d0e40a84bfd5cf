"""Pack plans: where each tensor of a model goes in its segment, and by which op.

Packing knowledge stays with the engine (it writes the plan); the daemon has only these generic ops:

    COPY   the file's bytes
    CAST   element by element to F32, row-major; from F32, BF16 or F16

Both work on any run of whole elements, so a tensor is packed chunk by chunk while it is hashed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachewarmd.errors import InvalidRequestError, ModelFilesError
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import Tensor

ALIGNMENT = 64
MAX_SEGMENT_BYTES = 1 << 44


@dataclass(frozen=True)
class Placed:
    """A tensor of the file with its place in the segment."""

    source_dtype: str
    op: pb.PackOp
    offset: int

    def write(self, start: int, chunk: memoryview, target: npt.NDArray[np.uint8]) -> None:
        """Pack the bytes that stand `start` bytes into the tensor."""
        if self.op == pb.PACK_OP_COPY or self.source_dtype == "F32":
            place = self.offset + start
            target[place : place + len(chunk)] = np.frombuffer(chunk, np.uint8)
            return
        place = self.offset + 2 * start
        result = target[place : place + 2 * len(chunk)]
        if self.source_dtype == "BF16":
            # bfloat16 is the upper half of a float32.
            words = np.frombuffer(chunk, "<u2")
            np.left_shift(words, np.uint32(16), out=result.view("<u4"), dtype=np.uint32)
        else:
            result.view("<f4")[:] = np.frombuffer(chunk, "<f2")


def check_plan(plan: pb.PackPlan, tensors: Mapping[str, Tensor]) -> dict[str, Placed]:
    """Match plan and files before anything is allocated.

    Raises InvalidRequestError for a plan that can't be, ModelFilesError for files that don't have
    what it asks for (both name the tensor).
    """
    if not 0 < plan.segment_bytes <= MAX_SEGMENT_BYTES:
        raise InvalidRequestError(f"segment_bytes: 1 to {MAX_SEGMENT_BYTES} are allowed")
    placed: dict[str, Placed] = {}
    end = 0
    for item in sorted(plan.tensors, key=lambda item: item.offset):
        tensor = tensors.get(item.name)
        if item.name in placed:
            raise InvalidRequestError(f"plan: {item.name}: is placed twice")
        if tensor is None:
            raise ModelFilesError(f"tensor {item.name} is missing in the weight files")
        if tensor.shape != tuple(item.shape):
            raise ModelFilesError(
                f"tensor {item.name} has shape {list(tensor.shape)}, "
                f"the model's config asks for {list(item.shape)}"
            )
        size = _packed_bytes(item, tensor)
        if item.num_bytes != size or item.offset % ALIGNMENT or item.offset < end:
            raise InvalidRequestError(f"plan: {item.name}: bad size, alignment or overlap")
        end = item.offset + size
        placed[item.name] = Placed(tensor.dtype, item.op, item.offset)
    if end > plan.segment_bytes:
        raise InvalidRequestError("plan: segment_bytes is too small for its tensors")
    return placed


def _packed_bytes(item: pb.PackTensor, tensor: Tensor) -> int:
    match item.op:
        case pb.PACK_OP_COPY:
            return tensor.end - tensor.start
        case pb.PACK_OP_CAST if item.dtype == "F32":
            elements = 1
            for dimension in tensor.shape:
                elements *= dimension
            if tensor.dtype not in ("F32", "BF16", "F16"):
                raise ModelFilesError(
                    f"tensor {item.name} is {tensor.dtype}; F32, BF16 and F16 can be read"
                )
            return 4 * elements
    raise InvalidRequestError(f"plan: {item.name}: op or dtype {item.dtype!r} is not known")
