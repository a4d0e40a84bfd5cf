"""A model directory's safetensors: which files count, their headers, their bytes in order.

Without an index the single file counts, with all its tensors. With an index it counts itself, with
the shards it names and in them the tensors that it says are there; other copies are only hashed.

Nothing is mapped, everything is read with pread: a file truncated under us is an error, not a
SIGBUS. Headers are checked before anything is allocated. Identity of a file is (name, dev, ino,
size, mtime_ns, ctime_ns): a change of any is a new read; ctime can't be set back.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cachewarmd.errors import ModelFilesError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 100_000
MAX_INDEX_BYTES = 64 << 20
MAX_FILES = 4096
MAX_NAME_LENGTH = 1000
_MAX_DIMENSIONS = 16
_SHOWN = 200  # characters of a file's own text in an error
CHUNK_BYTES = 2 << 20
_DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip

FileIdentity = tuple[str, int, int, int, int, int]


@dataclass(frozen=True)
class Tensor:
    """A tensor's place in a weight file; `start` and `end` are absolute file offsets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass
class WeightFile:
    """An open file that counts, its identity and the tensors taken from it, in file order.

    The index is one too, without tensors: it decides what is loaded, so it is hashed and watched.
    """

    name: str
    fd: int
    identity: FileIdentity
    tensors: list[Tensor]


def _check_name(name: str) -> None:
    # Neither NUL nor a lone surrogate can reach the kernel: Python raises ValueError for both.
    is_plain = "/" not in name and "\0" not in name and name not in ("", ".", "..")
    if not is_plain or not name.isprintable():
        raise ModelFilesError(f"{name[:_SHOWN]!r} is not a file name of the model directory")


def _open_below(dir_fd: int, name: str, follow: bool) -> int:
    """Open a plain file directly in the directory. Raises ModelFilesError."""
    _check_name(name)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(name, flags, dir_fd=dir_fd)
    except OSError as exc:
        raise ModelFilesError(f"{name}: {exc.strerror}") from exc
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ModelFilesError(f"{name}: not a regular file")
    return fd


def _open_index(dir_fd: int, follow: bool) -> tuple[WeightFile, dict[str, str]] | None:
    """The open index with its map from tensor to shard; None when there is no index."""
    try:
        fd = _open_below(dir_fd, INDEX_NAME, follow)
    except ModelFilesError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):
            return None
        raise
    try:
        info = os.fstat(fd)
        return WeightFile(INDEX_NAME, fd, identity_of(INDEX_NAME, info), []), _parse_index(fd)
    except BaseException:
        os.close(fd)
        raise


def _parse_index(fd: int) -> dict[str, str]:
    raw = os.pread(fd, MAX_INDEX_BYTES + 1, 0)
    try:
        if len(raw) > MAX_INDEX_BYTES:
            raise ValueError(f"over {MAX_INDEX_BYTES} bytes")
        weight_map = json.loads(raw, object_pairs_hook=_unique_names)["weight_map"]
        shards = set(weight_map.values())
        if not 0 < len(shards) <= MAX_FILES or not all(isinstance(n, str) for n in shards):
            raise ValueError(f"weight_map must name 1 to {MAX_FILES} files")
        for shard in shards:
            _check_name(shard)
        if INDEX_NAME in shards:
            raise ValueError("weight_map names the index itself")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ModelFilesError(f"{INDEX_NAME}: malformed: {exc}") from exc
    return weight_map


def file_identities(dir_fd: int, follow: bool) -> list[FileIdentity] | None:
    """Identities, by name, of the files that count now; None when one of them is missing."""
    names = {SINGLE_NAME}
    found = []
    if (index := _open_index(dir_fd, follow)) is not None:
        os.close(index[0].fd)
        found.append(index[0].identity)
        names = set(index[1].values())
    for name in names:
        try:
            found.append(identity_of(name, os.stat(name, dir_fd=dir_fd, follow_symlinks=follow)))
        except OSError:
            return None
    return sorted(found)


def identity_of(name: str, info: os.stat_result) -> FileIdentity:
    """What tells this file from any other, and from itself after a change."""
    return (name, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


@contextmanager
def open_weight_files(dir_fd: int, *, follow: bool) -> Iterator[list[WeightFile]]:
    """All files that count, by name, headers checked, closed at the end.

    Raises ModelFilesError naming file and tensor.
    """
    files: list[WeightFile] = []
    try:
        index = _open_index(dir_fd, follow)
        if index is None:
            files.append(_open_weight_file(dir_fd, SINGLE_NAME, follow))
        else:
            files.append(index[0])
            # No comprehension: on an error the files opened so far must be known, to be closed.
            for name in set(index[1].values()):
                files.append(_open_weight_file(dir_fd, name, follow))
                _keep_indexed(files[-1], index[1])
        files.sort(key=lambda file: file.name)
        yield files
    finally:
        for file in files:
            os.close(file.fd)


def _keep_indexed(file: WeightFile, weight_map: Mapping[str, str]) -> None:
    """Leave the shard only the tensors that the index maps to it; all of those must be there."""
    file.tensors = [tensor for tensor in file.tensors if weight_map.get(tensor.name) == file.name]
    wanted = {tensor for tensor, shard in weight_map.items() if shard == file.name}
    for name in sorted(wanted - {tensor.name for tensor in file.tensors}):
        raise ModelFilesError(
            f"{file.name}: {name[:_SHOWN]}: is missing, though {INDEX_NAME} names this file for it"
        )


def _open_weight_file(dir_fd: int, name: str, follow: bool) -> WeightFile:
    fd = _open_below(dir_fd, name, follow)
    try:
        info = os.fstat(fd)
        tensors = _parse_header(name, fd, info.st_size)
    except BaseException:
        os.close(fd)
        raise
    return WeightFile(name, fd, identity_of(name, info), tensors)


def _parse_header(name: str, fd: int, file_size: int) -> list[Tensor]:
    raw = os.pread(fd, 8, 0)
    length = int.from_bytes(raw, "little")
    if len(raw) < 8 or length > MAX_HEADER_BYTES or 8 + length > file_size:
        raise ModelFilesError(
            f"{name}: header of {length} bytes in a file of {file_size}: truncated, malformed or "
            f"over {MAX_HEADER_BYTES} bytes"
        )
    try:
        header = json.loads(os.pread(fd, length, 8), object_pairs_hook=_unique_names)
        if not isinstance(header, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as exc:
        raise ModelFilesError(f"{name}: malformed header: {exc}") from exc
    header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise ModelFilesError(f"{name}: {len(header)} tensors, at most {MAX_TENSORS} are allowed")
    tensors = [_parse_tensor(name, key, entry, 8 + length) for key, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    ends = [8 + length, *(tensor.end for tensor in tensors)]
    for end, tensor in zip(ends, tensors, strict=False):
        if tensor.start != end:
            raise ModelFilesError(f"{name}: {tensor.name}: hole or overlap before its data")
    if ends[-1] != file_size:
        last = tensors[-1].name if tensors else "header"
        raise ModelFilesError(
            f"{name}: {last}: ends at byte {ends[-1]}, the file at {file_size}: truncated or padded"
        )
    return tensors


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"duplicate name {name[:_SHOWN]!r}")
        name.encode()  # a lone surrogate could be told to nobody; its error is a ValueError
        result[name] = value
    return result


def _parse_tensor(file: str, name: str, entry: Any, base: int) -> Tensor:
    try:
        if len(name) > MAX_NAME_LENGTH:
            raise ValueError(f"a name of {len(name)} characters, at most {MAX_NAME_LENGTH}")
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        size = _DTYPE_BYTES[dtype]
        for number in (*shape, start, end):
            if type(number) is not int or number < 0:
                raise ValueError(f"{number!r} is not a size")
        if len(shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{len(shape)} dimensions")
        for dimension in shape:
            size *= dimension
        if end - start != size:
            raise ValueError(f"{end - start} bytes for shape {shape} of {dtype}")
    except (KeyError, TypeError, ValueError) as exc:
        reason = str(exc)[:_SHOWN]
        raise ModelFilesError(f"{file}: {name[:_SHOWN]}: malformed: {reason}") from exc
    return Tensor(name, dtype, tuple(shape), base + start, base + end)


def tensors_by_name(files: Sequence[WeightFile]) -> dict[str, Tensor]:
    """All tensors that count, in the order in which `chunks` reads them file after file.

    A name stands in one file only: there is but one, or the index has chosen.
    """
    return {tensor.name: tensor for file in files for tensor in file.tensors}


def chunks(
    file: WeightFile, chunk_bytes: Mapping[str, int], take_buffer: Callable[[], memoryview]
) -> Iterator[tuple[int, memoryview, Tensor | None]]:
    """All bytes of the file in order: (offset, bytes, tensor or None for what is only hashed).

    Each chunk is the first part of a buffer of CHUNK_BYTES. None crosses a tensor's border;
    `chunk_bytes` (at most CHUNK_BYTES) tells by name where a tensor is best cut.
    """
    for start, end, tensor in _spans(file):
        step = CHUNK_BYTES if tensor is None else chunk_bytes.get(tensor.name, CHUNK_BYTES)
        for offset in range(start, end, step):
            wanted = min(step, end - offset)
            view = take_buffer()[:wanted]
            filled = 0
            while filled < wanted:
                got = os.preadv(file.fd, [view[filled:]], offset + filled)
                if got == 0:
                    raise ModelFilesError(f"{file.name}: truncated while it was read")
                filled += got
            yield offset, view, tensor


def _spans(file: WeightFile) -> Iterator[tuple[int, int, Tensor | None]]:
    """The tensors' byte ranges and what lies between them."""
    position = 0
    for tensor in file.tensors:
        yield position, tensor.start, None
        yield tensor.start, tensor.end, tensor
        position = tensor.end
    yield position, file.identity[3], None
