"""Fixtures of the end-to-end tests: real daemons and engines, shared where no test ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from scripts.lib.native import NativeModel
from tests.daemon import Daemon, module_daemon, short_dir
from tests.engine import Engine
from tests.fixtures.oracle import TOLERANCE, leads

__all__ = ["module_daemon", "short_dir"]

Oracle = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module")
def shared_daemon(module_daemon: Daemon) -> Daemon:
    """A daemon that no test of the module ends."""
    return module_daemon


@pytest.fixture(scope="module")
def shared_engine(shared_daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """An engine with M-rand on that daemon, which no test of the module ends; `slowed` works."""
    with Engine(m_rand_dir, shared_daemon.socket, step_s=0.0) as engine:
        yield engine


@pytest.fixture(scope="session")
def oracle(m_rand_dir: Path) -> Oracle:
    """Greedy answers of M-rand, computed alone in this process."""
    model = NativeModel.load(m_rand_dir)

    @cache
    def compute(prompt: tuple[int, ...], n: int) -> list[int]:
        ids = model.greedy(prompt, n)
        assert leads(m_rand_dir, prompt, ids).min() > -TOLERANCE, "not the greedy answer"
        return ids

    return lambda prompt, n: compute(tuple(prompt), n)
