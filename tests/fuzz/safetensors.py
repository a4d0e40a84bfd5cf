"""A model directory's weight file, and its index.

An input is the index, a NUL byte, and the file; the index is not there when it is empty.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cachewarmd import weight_files
from cachewarmd.errors import ModelFilesError
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import INDEX_NAME, SINGLE_NAME, Tensor, WeightFile
from tests.fixtures.weight_files import entry
from tests.fuzz.target import Target, replaced

# In memory, where there is such a place.
_PLACE = Path("/dev/shm")
_FOLDER = Path(tempfile.mkdtemp(dir=_PLACE if os.access(_PLACE, os.W_OK) else None))
_DIR_FD = os.open(_FOLDER, os.O_RDONLY | os.O_DIRECTORY)
_ITEM_BYTES = {"F32": 4, "BF16": 2, "U8": 1}
_BUFFER = memoryview(bytearray(weight_files.CHUNK_BYTES))


def check(data: bytes) -> None:
    """What is accepted covers the file without a hole; what is refused can be told."""
    index, _, content = data.partition(b"\0")
    (_FOLDER / SINGLE_NAME).write_bytes(content)
    if index:
        (_FOLDER / INDEX_NAME).write_bytes(index)
    else:
        (_FOLDER / INDEX_NAME).unlink(missing_ok=True)
    try:
        with weight_files.open_weight_files(_DIR_FD, follow=False) as files:
            weight_files.tensors_by_name(files)
            for file in files:
                _check_file(file)
    except ModelFilesError as exc:
        pb.ErrorReply(code=exc.code, message=str(exc))
        assert len(str(exc)) < 2000, "a long error"


def _check_file(file: WeightFile) -> None:
    read = 0
    for offset, view, tensor in weight_files.chunks(file, {}, lambda: _BUFFER):
        assert offset == read, "a hole"
        read += len(view)
        assert tensor is None or tensor.start <= offset < tensor.end, "another tensor's bytes"
    assert read == os.fstat(file.fd).st_size, "not all of it"
    for tensor in file.tensors:
        pb.PackTensor(name=tensor.name)
        size = _ITEM_BYTES.get(tensor.dtype, 0)
        for dimension in tensor.shape:
            size *= dimension
        assert not size or tensor.end - tensor.start == size, "a shape that its bytes don't fill"


def _parse_without_sizes(file: str, name: str, told: Any, base: int) -> Tensor:
    """As the parser's own, but a shape is believed to fill its bytes."""
    try:
        start, end = told["data_offsets"]
        if type(start) is not int or type(end) is not int or not 0 <= start <= end:
            raise ValueError("no offsets")
        shape = tuple(int(number) for number in told["shape"])
        return Tensor(name, str(told["dtype"]), shape, base + start, base + end)
    except (KeyError, TypeError, ValueError, OverflowError) as exc:
        raise ModelFilesError(f"{file}: malformed") from exc


def plant() -> AbstractContextManager[object]:
    """An unchecked length."""
    return replaced(weight_files, "_parse_tensor", _parse_without_sizes)


def _file(header: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _seeds() -> Sequence[bytes]:
    one = _file({"a.weight": entry([2, 2], 0, 16)}, bytes(16))
    header = {
        "__metadata__": {"format": "pt"},
        "a.weight": entry([3, 2], 0, 12, "BF16"),
        "a.bias": entry([2], 12, 20),
        "b": entry([], 20, 21, "U8"),
        "none": entry([0, 7], 21, 21),
    }
    many = _file(header, bytes(21))
    names = {name: SINGLE_NAME for name in header if name != "__metadata__"}
    index = json.dumps({"weight_map": names}).encode()
    strange = _file({"\ud800": entry([1], 0, 4)}, bytes(4))
    return [b"\0" + one, b"\0" + many, index + b"\0" + many, b"\0" + strange]


def make() -> Target:
    """Single files with tensors of all sorts, with and without an index."""
    atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
    return Target(check, _seeds(), plant)
