"""The engine reads sealed blocks where they lie, and copies no more of them than a short tail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cachewarmd import layout
from cachewarmd.layout import BlockState
from tests.daemon import Daemon
from tests.engine import Engine, evict_all, make_prompt

BLOCK = 256  # large, so that a stream stays within one while its counts are looked at
BLOCK_BYTES = BLOCK * 1024  # M-rand


@pytest.fixture(scope="module")
def daemon(module_daemon: Daemon) -> Daemon:
    """The module's daemon, which no test ends."""
    return module_daemon


@pytest.fixture(scope="module")
def engine(daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """An engine with large blocks on that daemon."""
    flags = ["--block-size", str(BLOCK)]
    with Engine(m_rand_dir, daemon.socket, extra=flags, step_s=0.0) as running:
        yield running


@pytest.mark.parametrize("length", [1, 255, 256, 257, 512, 600, 3000])
def test_a_cached_prompt_of_any_length_computes_one_token(engine: Engine, length: int) -> None:
    """Nothing else runs through the model, and no block is copied or taken."""
    prompt = make_prompt(length, 300 + length)
    engine.generate(prompt, max_tokens=1)
    before = engine.wait_idle()
    answer = engine.generate(prompt, max_tokens=1)
    after = engine.wait_idle()
    assert answer.done.cached_tokens == length - 1
    assert after.num_computed_tokens - before.num_computed_tokens == 1
    assert after.num_tail_copies == before.num_tail_copies


@pytest.mark.parametrize(("length", "num_copies"), [(512, 0), (600, 1)])
def test_a_hit_takes_no_private_block_but_the_copy_of_its_tail(
    engine: Engine, length: int, num_copies: int
) -> None:
    """A stream on two full shared blocks holds one private block, for what it adds."""
    prompt = make_prompt(length, 400 + length)
    engine.generate(prompt, max_tokens=0)
    before = engine.wait_idle()
    with engine.slowed(0.1):
        stream = engine.stream(prompt, max_tokens=150)
        stream.wait_for_tokens(3)
        now = engine.worker()
        stream.check_running()
    assert now.num_private_blocks - now.num_private_blocks_free == 1
    assert now.num_shared_blocks_in_use == 2
    assert now.num_tail_copies - before.num_tail_copies == num_copies
    answer = stream.result()
    assert answer.done.cached_tokens == length - 1
    after = engine.wait_idle()
    # The last output token is told, not computed.
    assert after.num_computed_tokens - before.num_computed_tokens == 150
    assert answer.ids == engine.generate(prompt, max_tokens=150, bypass_prefix_cache=True).ids


def test_a_fresh_prompt_hands_its_blocks_over_as_they_fill(engine: Engine) -> None:
    """Published blocks take the places of private ones, which are free again at once."""
    with engine.slowed(0.5):
        stream = engine.stream(make_prompt(1000, 501), max_tokens=20)
        stream.wait_for_tokens(3)
        now = engine.worker()
        stream.check_running()
    # Three full blocks are the daemon's by now; the short one is ours, and its copy on its way.
    assert now.num_shared_blocks_in_use == 3
    assert now.num_private_blocks - now.num_private_blocks_free == 1
    stream.result()
    engine.wait_idle()


@contextmanager
def shared_memory(daemon: Daemon, name: str) -> Iterator[np.memmap]:
    """A memfd of the daemon, opened for writing behind its back (root may)."""
    fds = Path(f"/proc/{daemon.pid}/fd")
    path = next(fd for fd in fds.iterdir() if f"memfd:{name} " in os.readlink(fd))
    mapped = np.memmap(path, dtype=np.uint8, mode="r+")
    yield mapped
    mapped.flush()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: writes to the daemon's memory")
def test_other_bytes_in_a_sealed_block_give_another_answer(engine: Engine, daemon: Daemon) -> None:
    """The proof that shared blocks are read in place: nothing else could have changed it."""
    engine.wait_idle()
    evict_all(daemon)
    prompt = make_prompt(600, 502)
    right = engine.generate(prompt, max_tokens=8).ids
    engine.wait_idle()
    with shared_memory(daemon, "cachewarm-records") as raw:
        records = raw[layout.RECORDS_OFFSET :].view(layout.RECORD)
        sealed = records[records["state"] == BlockState.SEALED]
        full = sealed[sealed["num_tokens"] == BLOCK]
        offsets = [int(offset) for offset in full["offset"]]
        assert len(offsets) == 2
        assert set(full["num_bytes"]) == {BLOCK_BYTES}
        del records, sealed, full
    for offset in offsets:
        with shared_memory(daemon, "cachewarm-pool") as pool:
            block = pool[offset : offset + BLOCK_BYTES]
            kept = block.copy()
            block.view(np.float32)[:] *= -1.0
            wrong = engine.generate(prompt, max_tokens=8)
            block[:] = kept
        assert wrong.done.cached_tokens == 599
        assert wrong.ids != right
        again = engine.generate(prompt, max_tokens=8)
        assert (again.done.cached_tokens, again.ids) == (599, right)
    # The wrong answers' own blocks were sealed too: nobody else shall find them.
    engine.wait_idle()
    evict_all(daemon)
