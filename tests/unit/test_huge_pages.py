"""Huge pages under shared memory: mapped so that they count, never needed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cachewarmd import huge_pages, segment
from cachewarmd.huge_pages import HUGE_BYTES, Huge, make_huge, map_aligned, rounded
from tests.daemon import pmd_mapped_bytes

SIZE = 4 * HUGE_BYTES


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = segment.create_memfd("test", SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is asked for something that it does not know."""
    monkeypatch.setattr(huge_pages, "_MADV_COLLAPSE", 9999)


def num_mappings() -> int:
    """Of memfds of ours, in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:test")


def allocated_bytes(fd: int) -> int:
    return 512 * os.fstat(fd).st_blocks


def test_mapping_is_aligned_and_goes_with_its_last_view(memfd: int) -> None:
    """Address and file offset are at 2 MiB borders, at any size."""
    before = num_mappings()
    os.pwrite(memfd, b"x", SIZE - 1)
    for offset, size in ((0, SIZE), (0, 100), (HUGE_BYTES, SIZE - HUGE_BYTES), (HUGE_BYTES, 5000)):
        array = map_aligned(memfd, offset, size)
        assert array.ctypes.data % HUGE_BYTES == 0
        assert len(array) == size
        assert array[-1] == (ord("x") if offset + size == SIZE else 0)
        view = array[:10]
        del array
        assert num_mappings() == before + 1
        assert not view.any()
        del view
        assert num_mappings() == before


def test_mapping_is_written_to_only_if_asked_for(memfd: int) -> None:
    """And what is written is in the file."""
    with pytest.raises(ValueError, match="read-only"):
        map_aligned(memfd, 0, SIZE)[0] = 1
    map_aligned(memfd, 0, SIZE, writable=True)[HUGE_BYTES] = 7
    assert os.pread(memfd, 1, HUGE_BYTES) == b"\7"


def test_refused_mapping_is_an_error(memfd: int) -> None:
    """Such as one for writing of a descriptor for reading; nothing stays mapped."""
    before = num_mappings()
    readonly = segment.reopen_readonly(memfd)
    try:
        with pytest.raises(PermissionError):
            map_aligned(readonly, 0, SIZE, writable=True)
    finally:
        os.close(readonly)
    assert num_mappings() == before


def test_sizes_are_rounded_so_that_the_end_can_be_huge_too() -> None:
    """What is smaller than one huge page is not blown up to one."""
    assert [rounded(size) for size in (64, HUGE_BYTES - 1, HUGE_BYTES, HUGE_BYTES + 1)] == [
        64, HUGE_BYTES - 1, HUGE_BYTES, 2 * HUGE_BYTES,
    ]  # fmt: skip


def test_reserved_memory_is_huge_where_the_kernel_says_so(memfd: int) -> None:
    """All of it is allocated, and as much of it is on huge pages as is told, in another map too."""
    huge = segment.reserve(memfd, 0, SIZE)
    assert allocated_bytes(memfd) == SIZE
    assert huge.num_bytes == SIZE or huge.refusal
    array = map_aligned(memfd, 0, SIZE)
    assert not array[:: mmap.PAGESIZE].any()
    assert pmd_mapped_bytes(array.ctypes.data) == huge.num_bytes


@pytest.mark.usefixtures("no_huge_pages")
def test_refused_huge_pages_are_small_ones(memfd: int) -> None:
    """No error, and the reason is told."""
    assert segment.reserve(memfd, 0, SIZE) == Huge(0, "Invalid argument")
    assert allocated_bytes(memfd) == SIZE


def test_what_some_ranges_are_refused_is_counted(
    memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refused does not end it."""
    asked: list[int] = []

    def refuse_every_second(address: int) -> str:
        asked.append(address)
        return "no memory" if len(asked) % 2 else ""

    monkeypatch.setattr(huge_pages, "_collapse", refuse_every_second)
    assert make_huge(memfd, 0, SIZE) == Huge(2 * HUGE_BYTES, "no memory")
    assert np.diff(asked).tolist() == 3 * [HUGE_BYTES]


def test_huge_pages_that_are_slow_to_come_are_given_up(
    memfd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is allocated all the same; whoever has time may ask again."""
    monkeypatch.setattr(huge_pages, "_GRACE_S", -1000.0)
    assert segment.reserve(memfd, 0, SIZE) == Huge(0, "not in time")
    assert allocated_bytes(memfd) == SIZE
    huge = make_huge(memfd, 0, SIZE)
    assert huge.num_bytes == SIZE or huge.refusal


@pytest.mark.parametrize("is_sealed", [False, True])
def test_full_memory_keeps_its_bytes(is_sealed: bool, memfd: int) -> None:
    """Small pages become huge ones under what stands there, sealed or not, for a reader too."""
    values = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    os.pwrite(memfd, values.tobytes(), 0)
    if is_sealed:
        segment.seal_forever(memfd)
    readonly = segment.reopen_readonly(memfd)
    try:
        huge = make_huge(readonly, 0, SIZE)
        assert huge.num_bytes == SIZE or huge.refusal
        assert make_huge(readonly, 0, SIZE).num_bytes >= huge.num_bytes
        assert np.array_equal(map_aligned(readonly, 0, SIZE), values)
    finally:
        os.close(readonly)


def test_ranges_that_hold_no_huge_page_are_left_alone(memfd: int) -> None:
    """Only whole 2 MiB at 2 MiB borders can be one."""
    os.pwrite(memfd, b"x" * SIZE, 0)
    assert make_huge(memfd, 0, HUGE_BYTES - 1) == Huge()
    assert make_huge(memfd, 4096, 2 * HUGE_BYTES - 4096 - 1) == Huge()
    inner = make_huge(memfd, 4096, 2 * HUGE_BYTES)
    assert inner.num_bytes == HUGE_BYTES or inner.refusal
    assert Huge(1, "a").plus(Huge(2)) == Huge(3, "a")
