"""Engines beside and after each other on one daemon: one copy of the weights, blocks kept apart."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cachewarmd.v1 import control_pb2
from tests.daemon import Daemon
from tests.engine import Engine, make_prompt
from tests.fixtures.models import Shape, write_m_rand
from tests.jobs import Job
from tests.solo import solo_jobs

MIB = 1 << 20
MAX_GROWTH = 5 * MIB
# A block takes a slot, however short: large ones fill an extent of 64 MiB after few requests.
FLAGS = ["--block-size", "128", "--max-num-seqs", "4"]
BIG = Shape(layers=8, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2560)  # 16 KiB a token
SMALL = Shape(layers=8, heads=4, kv_heads=4, head_dim=64)  # 8 KiB a token
BIG_SLOT, SMALL_SLOT = 2 * MIB, MIB
NUM_BIG_SLOTS, NUM_SMALL_SLOTS = 32, 64


@pytest.fixture(scope="module")
def big_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like M-rand with more than 64 MiB of weights."""
    return write_m_rand(tmp_path_factory.mktemp("models") / "big", dtype="BF16", shape=BIG)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """With one extent for each of two models."""
    with (
        tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder,
        Daemon(Path(folder) / "s", "128MiB") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def big(daemon: Daemon, big_dir: Path) -> Iterator[Engine]:
    """An engine with the big model."""
    with Engine(big_dir, daemon.socket, extra=FLAGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are next to nothing."""
    return write_m_rand(tmp_path_factory.mktemp("models") / "small", shape=SMALL)


@pytest.fixture(scope="module")
def small(daemon: Daemon, small_dir: Path) -> Iterator[Engine]:
    """An engine with the small model."""
    with Engine(small_dir, daemon.socket, extra=FLAGS) as engine:
        yield engine


# -- weights --------------------------------------------------------------------------------------


def memory(pid: int, kind: str, mapping: str) -> int:
    """Bytes of a process in mappings so named: its share (`pss`) or its own (`private_dirty`)."""
    maps = psutil.Process(pid).memory_maps(grouped=False)
    return int(sum(getattr(part, kind) for part in maps if mapping in part.path))


def weights_in_memory(*pids: int) -> int:
    """Bytes of weights that any of these processes maps, each page counted once."""
    return sum(memory(pid, "pss", "memfd:cachewarm-weights") for pid in pids)


def own_memory(engine: Engine) -> int:
    """Bytes of the worker that no file and no memfd is behind: heap and anonymous mappings."""
    return memory(engine.worker().pid, "private_dirty", "[")


def test_a_second_engine_adds_next_to_nothing_to_the_weights_in_memory(
    daemon: Daemon, big: Engine, small: Engine, big_dir: Path
) -> None:
    """Both workers read one segment, and neither has a copy of it in memory of its own."""
    prompt = make_prompt(50, 5000)
    first = big.generate(prompt, max_tokens=4)
    small.generate(prompt, max_tokens=4)
    size = max(model.segment_bytes for model in daemon.status().models)
    assert size >= 64 * MIB
    pids = (daemon.pid, big.worker().pid)
    before = weights_in_memory(*pids)
    assert before > 0.9 * size, "the measure misses the weights"
    with Engine(big_dir, daemon.socket, extra=FLAGS) as second:
        assert second.generate(prompt, max_tokens=4, bypass_prefix_cache=True).ids == first.ids
        hit = second.generate(prompt, max_tokens=4)
        assert (hit.ids, hit.done.cached_tokens) == (first.ids, len(prompt) - 1)
        workers = (big.worker(), second.worker())
        assert [worker.weights_source for worker in workers] == ["shared", "shared"]
        assert weights_in_memory(*pids, second.worker().pid) - before < MAX_GROWTH
        own = [own_memory(engine) for engine in (small, big, second)]
    assert max(own) - own[0] < size / 2, "a copy of the weights"


# -- two models under pressure --------------------------------------------------------------------


def ask_twice(engine: Engine, jobs: Sequence[Job]) -> list[int]:
    """Each job, and at once again; returns what the second ones had cached."""
    cached = []
    for job in jobs:
        job.check(engine.generate(job.prompt, **job.options))
        again = engine.generate(job.prompt, **job.options)
        job.check(again)
        cached.append(again.done.cached_tokens)
    return cached


def pressure(daemon: Daemon) -> tuple[int, int]:
    """Blocks evicted for want of room, and publishes refused for it."""
    counters = daemon.status().counters
    return counters["evicted_pressure"], counters["refused_no_space"]


def test_two_models_fill_a_small_pool_side_by_side_and_both_hit(
    daemon: Daemon, big: Engine, small: Engine, big_dir: Path, small_dir: Path
) -> None:
    """Other slot sizes, more blocks than there is room for: tokens as alone, fresh ones are hit."""
    # Two blocks each, of the prompt and of all: more than the slots of an extent.
    big_jobs = solo_jobs(big, big_dir, [30] * 18, 3, 5100)
    small_jobs = solo_jobs(small, small_dir, [30] * 36, 3, 5200)
    num_evicted, num_refused = pressure(daemon)
    with ThreadPoolExecutor(2) as threads:
        both = threads.map(ask_twice, (big, small), (big_jobs, small_jobs))
        assert list(both) == [[29] * len(big_jobs), [29] * len(small_jobs)]
    for engine in (big, small):
        engine.wait_idle()
    assert pressure(daemon)[0] >= num_evicted + 8
    assert pressure(daemon)[1] == num_refused
    stamps = {e.client().model_info().stamp for e in (big, small)}
    found = {s.stamp: (s.slot_bytes, s.num_blocks) for s in daemon.status().stamps}
    assert sorted(found[stamp] for stamp in stamps) == [
        (SMALL_SLOT, NUM_SMALL_SLOTS),
        (BIG_SLOT, NUM_BIG_SLOTS),
    ]


# -- new weights ----------------------------------------------------------------------------------


def stamp_status(daemon: Daemon, engine: Engine) -> control_pb2.StampStatus:
    """Of what the engine serves."""
    stamp = engine.client().model_info().stamp
    (found,) = (s for s in daemon.status().stamps if s.stamp == stamp)
    return found


def is_superseded(daemon: Daemon, stamp: str) -> bool:
    return next(s.superseded for s in daemon.status().stamps if s.stamp == stamp)


def test_new_weights_in_a_directory_start_cold_and_the_old_ones_blocks_go_first(
    short_dir: Path, tmp_path: Path
) -> None:
    """v1, v2 and v1 again under one name: never a hit across, v2 loses nothing while v1 has any."""
    model = write_m_rand(tmp_path / "m", shape=SMALL)
    with (
        Daemon(short_dir / "s", "64MiB") as daemon,
        Engine(model, daemon.socket, extra=FLAGS) as engine,
    ):
        old_jobs = solo_jobs(engine, model, [40] * 12, 4, 5300)
        for job in old_jobs:
            job.check(engine.generate(job.prompt, **job.options))
        engine.wait_idle()
        old = stamp_status(daemon, engine)
        assert (old.num_blocks, old.superseded) == (2 * len(old_jobs), False)

        engine.stop()
        write_m_rand(model, variant=1, shape=SMALL)
        engine.start()
        new_jobs = solo_jobs(engine, model, [40] * 20, 4, 5400)
        assert is_superseded(daemon, old.stamp)
        new = stamp_status(daemon, engine)
        assert (new.num_blocks, new.superseded) == (0, False)
        for job in old_jobs:
            other = engine.generate(job.prompt, **job.options)
            assert other.done.cached_tokens == 0
            assert other.ids != job.ids
        for job in new_jobs[:16]:
            job.check(engine.generate(job.prompt, **job.options))
        engine.wait_idle()
        counters = daemon.status().counters
        num_over = 2 * (len(old_jobs) + len(old_jobs) + 16) - NUM_SMALL_SLOTS
        assert (counters["evicted_superseded"], counters["evicted_pressure"]) == (num_over, 0)
        for job in new_jobs[:16]:
            again = engine.generate(job.prompt, **job.options)
            job.check(again)
            assert again.done.cached_tokens == len(job.prompt) - 1
        num_left = next(s.num_blocks for s in daemon.status().stamps if s.stamp == old.stamp)
        assert num_left == 2 * len(old_jobs) - num_over

        engine.stop()
        write_m_rand(model, shape=SMALL)
        engine.start()
        back = stamp_status(daemon, engine)
        assert (back.stamp, back.num_blocks, back.superseded) == (old.stamp, num_left, False)
        assert is_superseded(daemon, new.stamp)
        cached = []
        for job in reversed(old_jobs):
            answer = engine.generate(job.prompt, **job.options)
            job.check(answer)
            cached.append(answer.done.cached_tokens)
        num_hits = num_left // 2
        assert cached == [39] * num_hits + [0] * (len(old_jobs) - num_hits)
