"""Fixtures of the end-to-end tests: real daemons and engines, shared where no test ends them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from tests.daemon import Daemon
from tests.engine import Engine
from tests.fixtures.models import greedy_numpy

Oracle = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def module_dir() -> Iterator[Path]:
    """A private directory with a short name, for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="cw-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def shared_daemon(module_dir: Path) -> Iterator[Daemon]:
    """A daemon that no test of the module ends."""
    with Daemon(module_dir / "s", "64MiB") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def shared_engine(shared_daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """An engine with M-rand on that daemon, which no test of the module ends."""
    with Engine(m_rand_dir, shared_daemon.socket) as engine:
        yield engine


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """As `module_dir`, for one test."""
    folder = Path(tempfile.mkdtemp(prefix="cw-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def oracle(m_rand_dir: Path) -> Oracle:
    """Greedy answers of M-rand by numpy in float64, of prompts that no rounding can tip over."""

    @cache
    def compute(prompt: tuple[int, ...], n: int) -> list[int]:
        ids, margins = greedy_numpy(m_rand_dir, prompt, n)
        assert min(margins) > 1e-2, "choose another prompt: this one has a near tie"
        return ids

    return lambda prompt, n: compute(tuple(prompt), n)
