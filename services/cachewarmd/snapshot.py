"""The pool's hot chains in a file, and back: what a reboot would lose.

The daemon's loop only looks at its index and copies single blocks into the pool; files are read and
written by a thread. The thread copies blocks that may be evicted meanwhile: what counts is that the
slot's generation is the same after the copy and that the copy has the digest that was sealed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from cachewarmd import segment, snapshot_format, state_dir
from cachewarmd.block import Block, StampInfo
from cachewarmd.errors import CachewarmError, InvalidRequestError, LimitError, NoSpaceError
from cachewarmd.failpoints import hit, may_fail
from cachewarmd.kv import BlockStore, NewBlock, Source
from cachewarmd.layout import EXTENT_BYTES, MIN_SLOT_BYTES, BlockState
from cachewarmd.pool import Pool
from cachewarmd.snapshot_format import Contents, Header, SavedBlock, SavedStamp

_MAX_NAME_BYTES = 200
# So that progress is what is on disk, and the last fsync is short.
_SYNC_BYTES = 64 << 20
_BATCH_BYTES, _BATCH_BLOCKS = 1 << 20, 16
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

P = ParamSpec("P")
T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes done, bytes in all


class GivenUpError(CachewarmError):
    """Whoever asked for it has gone."""


@dataclass
class Outcome:
    """Of a save or a load. `refused` are blocks by reason."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_known: int = 0
    refused: Counter[str] = field(default_factory=Counter)


# -- saving -----------------------------------------------------------------------------------


def priority(
    blocks: Sequence[Block], max_bytes: int, pinned: Set[Block] = frozenset()
) -> list[Block]:
    """Pinned ones, then the most recently used, each behind its ancestors, up to `max_bytes`."""
    last_used = np.fromiter((block.last_used for block in blocks), np.int64, len(blocks))
    is_pinned = np.fromiter((block in pinned for block in blocks), np.bool_, len(blocks))
    chosen: dict[Block, None] = {}
    for number in np.lexsort((-last_used, ~is_pinned)).tolist():
        chain: list[Block] = []
        node: Block | None = blocks[number]
        while node is not None and node not in chosen:
            chain.append(node)
            node = node.parent
        max_bytes -= sum(block.stamp.block_bytes for block in chain)
        if max_bytes < 0:
            break
        chosen.update(dict.fromkeys(reversed(chain)))
    return list(chosen)


def save(
    pool: Pool,
    blocks: Sequence[Block],
    folder: int,
    name: str,
    max_bytes: int,
    progress: Progress,
    is_cancelled: Callable[[], bool],
    pinned: Set[Block] = frozenset(),
) -> Outcome:
    """Write `blocks` of the pool to a new file `name` in the directory `folder`; for a thread.

    The one that was there is replaced when the new one is on disk, and stays if anything fails.
    Raises NoSpaceError (disk), InvalidRequestError (directory), GivenUpError, OSError.
    """
    hit("snapshot.plan")
    ordered = priority(blocks, max_bytes, pinned)
    hit("snapshot.planned")
    reason = state_dir.refusal(os.fstat(folder), is_secret=False)
    if reason:
        raise InvalidRequestError(f"the snapshot's directory: {reason}")
    _remove_left_behind(folder, name)
    temporary = f".{name}.{secrets.token_hex(4)}.new"
    try:
        fd = _create(folder, temporary)
        try:
            outcome = _write(fd, pool, ordered, progress, is_cancelled)
            os.fsync(fd)
            may_fail("snapshot.synced")
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            os.close(fd)
    except OSError as exc:
        _remove(folder, temporary)
        if exc.errno in _FULL:
            raise NoSpaceError(f"the snapshot can't be written: {exc.strerror}") from exc
        raise
    except BaseException:
        _remove(folder, temporary)
        raise
    hit("snapshot.renamed")
    os.fsync(folder)
    return outcome


def _create(folder: int, name: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    os.fchmod(fd, 0o600)  # whatever the umask took
    fcntl.flock(fd, fcntl.LOCK_EX)  # somebody writes it: see below
    return fd


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _remove_left_behind(folder: int, name: str) -> None:
    """Files of writers that were killed: nobody has them locked any more."""
    for entry in os.listdir(folder):
        if not (entry.startswith(f".{name}.") and entry.endswith(".new")):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(folder, entry)
            finally:
                os.close(fd)


def _write(
    fd: int,
    pool: Pool,
    ordered: Sequence[Block],
    progress: Progress,
    is_cancelled: Callable[[], bool],
) -> Outcome:
    stamps = list(dict.fromkeys(block.stamp for block in ordered))
    rows_of = {info: number for number, info in enumerate(stamps)}
    mark = snapshot_format.salt_mark(pool.salt)
    header = Header(len(stamps), len(ordered), 0, 0, int(1000 * time.time()), mark)
    total = sum(block.stamp.block_bytes for block in ordered)
    buffer = np.empty(max((info.block_bytes for info in stamps), default=0), np.uint8)
    outcome = Outcome()
    rows: list[bytes] = []
    written: set[Block] = set()
    end = synced = header.content_offset
    # The table's room first, so that it can be written at the end.
    os.posix_fallocate(fd, 0, max(end, 1))
    for block in ordered:
        if is_cancelled():
            raise GivenUpError("the snapshot was given up")
        size = block.stamp.block_bytes
        row = None
        if block.parent is None or block.parent in written:
            row = _copy_out(pool, block, buffer[:size], rows_of[block.stamp], end)
        if row is None:
            outcome.refused["gone"] += 1
            continue
        may_fail("snapshot.write")
        _pwrite(fd, buffer[:size].data, end)
        rows.append(row.pack())
        written.add(block)
        end += size
        if end - synced >= _SYNC_BYTES:
            os.fdatasync(fd)
            synced = end
        outcome.num_blocks += 1
        outcome.num_bytes += size
        progress(outcome.num_bytes, total)
    header = Header(len(stamps), len(ordered), len(rows), end, header.created_unix_ms, mark)
    _pwrite(fd, memoryview(b"".join(rows)), header.table_offset)
    _pwrite(fd, memoryview(b"".join([header.pack(), *(_saved(info).pack() for info in stamps)])), 0)
    return outcome


def _copy_out(
    pool: Pool, block: Block, buffer: npt.NDArray[np.uint8], stamp: int, offset: int
) -> SavedBlock | None:
    """The block's row; its content is in `buffer` now. None when it is not what it was."""
    record = pool.records[block.slot]
    parent_key, digest = bytes(record["parent_key"]), bytes(record["xxh3"])
    np.copyto(buffer, pool.memory[block.offset : block.offset + len(buffer)])
    if xxhash.xxh3_128_digest(buffer.data) != digest:
        return None
    # Last: all that was read before was of this generation then, which grows before any reuse.
    if record["state"] != BlockState.SEALED or record["generation"] != block.generation:
        return None
    return SavedBlock(
        block.key,
        parent_key,
        block.num_tokens,
        stamp,
        offset,
        len(buffer),
        digest,
        is_root=block.parent is None,
    )


def _saved(info: StampInfo) -> SavedStamp:
    return SavedStamp(
        info.stamp, info.weights_sha256, info.block_bytes, info.block_size, info.description
    )


def _pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


# -- loading ----------------------------------------------------------------------------------


def open_contents(fd: int, max_blocks: int, mark: bytes) -> Contents:
    """What of a file can be believed; for a thread.

    Raises InvalidRequestError: not a snapshot, of another format or salt, or not ours alone.
    """
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise InvalidRequestError("a snapshot must be a regular file")
    reason = state_dir.refusal(info, is_secret=True)
    if reason:
        raise InvalidRequestError(f"the snapshot: {reason}")
    contents = snapshot_format.parse(
        lambda offset, size: os.pread(fd, size, offset), info.st_size, max_blocks
    )
    if contents.header.salt_mark != mark:
        raise InvalidRequestError("the snapshot was taken under another salt: its keys can't hit")
    return contents


async def load(
    fd: int,
    pool: Pool,
    store: BlockStore,
    remember: Callable[[], None],
    progress: Progress,
) -> Outcome:
    """Restore a file's blocks in their order, as far as slots are free.

    A thread reads, the loop takes over a few blocks at a time. `remember` is called for new stamps,
    before any record names them. Raises as `open_contents`, and OSError.
    """
    hit("snapshot.load")
    max_blocks = pool.pool_bytes // MIN_SLOT_BYTES
    mark = snapshot_format.salt_mark(pool.salt)
    contents = await in_thread(open_contents, fd, max_blocks, mark)
    outcome = Outcome(refused=contents.refused)
    stamps = _Stamps(store, contents.stamps, remember)
    done = 0
    with _staging() as (staging, memory):
        for batch in _batches(contents.blocks):
            unknown = [saved for saved in batch if not store.is_known(saved.key)]
            places = await in_thread(_stage, fd, unknown, memory) if unknown else {}
            for saved in batch:
                reason = _admit(store, saved, stamps, staging, places.get(saved.key, "gone"))
                if reason == "known":
                    outcome.num_known += 1
                elif reason:
                    outcome.refused[reason.lower()] += 1
                else:
                    hit("snapshot.block")
                    outcome.num_blocks += 1
                    outcome.num_bytes += saved.num_bytes
                done += saved.num_bytes
            progress(done, contents.num_bytes)
    return outcome


def _batches(blocks: deque[SavedBlock]) -> Iterator[list[SavedBlock]]:
    """What the loop takes over at once: some milliseconds of work, or a single larger block.

    Empties `blocks` on the way: freeing many at once would take as long.
    """
    batch: list[SavedBlock] = []
    room = _BATCH_BYTES
    while blocks:
        saved = blocks.popleft()
        if batch and (saved.num_bytes > room or len(batch) == _BATCH_BLOCKS):
            yield batch
            batch, room = [], _BATCH_BYTES
        batch.append(saved)
        room -= saved.num_bytes
    if batch:
        yield batch


@contextlib.contextmanager
def _staging() -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """A memfd for a batch, and its memory; pages come as they are used."""
    fd = segment.create_memfd("cachewarm-staging", EXTENT_BYTES)
    try:
        yield fd, segment.map_memory(fd, EXTENT_BYTES, writable=True)
    finally:
        os.close(fd)


def _stage(
    fd: int, batch: Sequence[SavedBlock], memory: npt.NDArray[np.uint8]
) -> dict[bytes, int | str]:
    """Read blocks' content from the file; by key where it is in `memory`, or why it is not."""
    places: dict[bytes, int | str] = {}
    end = 0
    for saved in batch:
        reason = _read(fd, saved, memory[end : end + saved.num_bytes])
        places[saved.key] = reason or end
        end += saved.num_bytes
    return places


def _read(fd: int, saved: SavedBlock, memory: npt.NDArray[np.uint8]) -> str:
    done = 0
    try:
        while done < saved.num_bytes:
            got = os.preadv(fd, [memory.data[done:]], saved.offset + done)
            if not got:
                return "truncated"
            done += got
    except OSError:
        return "unreadable"
    return ""


def _admit(
    store: BlockStore, saved: SavedBlock, stamps: _Stamps, staging: int, place: int | str
) -> str:
    """`place` is where in `staging` the content is, or why it is not."""
    if store.is_known(saved.key):
        return "known"
    if isinstance(place, str):
        return place
    info = stamps.info(saved.stamp)
    if info is None:
        return "stamp"
    new = NewBlock(saved.parent_key, saved.key, saved.num_tokens, place)
    source = Source(staging, EXTENT_BYTES, lambda: True)
    return store.admit(new, info, source, saved.xxh3, is_root=saved.is_root)


class _Stamps:
    """Stamps of a file as this store knows them, registered when the first block needs them."""

    def __init__(
        self,
        store: BlockStore,
        saved: Sequence[SavedStamp | None],
        remember: Callable[[], None],
    ) -> None:
        self._store = store
        self._saved = saved
        self._remember = remember
        self._known: dict[int, StampInfo | None] = {}

    def info(self, number: int) -> StampInfo | None:
        """None when it can't be: its blocks have other sizes here."""
        if number not in self._known:
            self._known[number] = self._register(self._saved[number])
        return self._known[number]

    def _register(self, saved: SavedStamp | None) -> StampInfo | None:
        if saved is None:
            return None
        num_known = len(self._store.stamps)
        try:
            info = self._store.register(
                saved.stamp,
                saved.block_bytes,
                saved.block_size,
                saved.description,
                saved.weights_sha256,
            )
        except (InvalidRequestError, LimitError):
            return None
        if info.block_size != saved.block_size:
            return None
        if len(self._store.stamps) > num_known:
            self._remember()
        return info


# -- both -------------------------------------------------------------------------------------


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As asyncio.to_thread, but who is cancelled waits for the thread, which uses its things."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def check_name(name: str) -> None:
    """Of a file in a directory, and nothing else. Raises InvalidRequestError."""
    is_plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    if not is_plain or len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise InvalidRequestError(
            f"snapshot name {name[:80]!r} is not allowed: a file name of at most "
            f"{_MAX_NAME_BYTES} bytes"
        )
