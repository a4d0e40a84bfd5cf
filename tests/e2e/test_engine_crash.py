"""Engines and workers that are killed: what the daemon keeps, the next one uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon, wait_until
from tests.e2e.conftest import Oracle
from tests.engine import Engine, make_prompt, num_sealed
from tests.fixtures.models import write_m_rand

BLOCK = 32
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 42}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M-rand in a directory that tests may change; its weights are in two files."""
    return write_m_rand(tmp_path_factory.mktemp("model") / "m", shards=2)


@pytest.fixture(scope="module")
def the_engine(shared_daemon: Daemon, model_dir: Path) -> Iterator[Engine]:
    """The module's engine, whose prefill takes many steps; its tests kill and restart it."""
    flags = ["--prefill-chunk", "4"]
    with Engine(model_dir, shared_daemon.socket, extra=flags, step_s=0.0) as engine:
        yield engine


@pytest.fixture
def engine(the_engine: Engine) -> Engine:
    """The engine, running whatever the last test left."""
    if the_engine.process.poll() is not None:
        the_engine.start()
    return the_engine


def test_a_killed_engine_comes_back_warm_without_its_weight_files(
    engine: Engine, shared_daemon: Daemon, model_dir: Path, oracle: Oracle
) -> None:
    """After kill -9 the weights come from the daemon and whole prompts are cached, tokens equal."""
    prompt = make_prompt(100, 21)
    seeded = engine.generate(prompt, max_tokens=8, **SEEDED).ids
    # D1 once more, below: these were only ever seen by the engine that dies.
    lengths = [k * BLOCK + delta for k in (1, 2, 3, 4) for delta in (-1, 0, 1)]
    prompts = {length: make_prompt(length, 200 + length) for length in lengths}
    first = {length: engine.generate(p, max_tokens=4).ids for length, p in prompts.items()}
    with engine.slowed(0.05):
        stream = engine.stream(make_prompt(70, 22), max_tokens=2000)
        stream.wait_for_tokens(5)
        before = shared_daemon.status()
        engine.kill_all()
    assert stream.thread is not None
    stream.thread.join()
    assert stream.error is not None
    assert stream.error.status == "UNAVAILABLE"

    files = sorted(model_dir.glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        file.rename(file.with_suffix(".away"))
    try:
        engine.start()
    finally:
        for file in files:
            file.with_suffix(".away").rename(file)
    after = shared_daemon.status()
    assert (after.pid, after.epoch) == (before.pid, before.epoch)
    assert engine.worker().weights_source == "shared"
    answer = engine.generate(prompt, max_tokens=8)
    assert answer.done.cached_tokens == len(prompt) - 1
    assert answer.ids == oracle(prompt, 8)
    assert engine.generate(prompt, max_tokens=8, **SEEDED).ids == seeded
    for length, p in prompts.items():
        again = engine.generate(p, max_tokens=4)
        assert again.done.cached_tokens == length - 1
        assert again.ids == first[length]
    cut_off = engine.generate(make_prompt(70, 22), max_tokens=5)
    assert cut_off.done.cached_tokens == 69, "its prefill had ended"
    assert cut_off.ids == [t for piece in stream.pieces for t in piece.token_ids][:5]


def test_a_prefill_that_was_cut_off_is_taken_up_again(
    engine: Engine, shared_daemon: Daemon, oracle: Oracle
) -> None:
    """After kill -9 in mid-prefill the blocks that were acknowledged are not computed again."""
    prompt = make_prompt(800, 23)
    already = num_sealed(shared_daemon)
    with engine.slowed(0.1):
        stream = engine.stream(prompt, max_tokens=2)
        wait_until(lambda: num_sealed(shared_daemon) >= already + 5, "blocks of the prompt")
        engine.kill_all()
    assert stream.thread is not None
    stream.thread.join()
    assert not stream.pieces, "the prefill was over before it was cut off"
    acknowledged = num_sealed(shared_daemon) - already
    engine.start()
    answer = engine.generate(prompt, max_tokens=2)
    assert 5 * BLOCK <= answer.done.cached_tokens <= acknowledged * BLOCK
    assert answer.done.cached_tokens % BLOCK == 0
    assert answer.ids == oracle(prompt, 2)
    again = engine.generate(prompt, max_tokens=2)
    assert (again.done.cached_tokens, again.ids) == (799, answer.ids)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 7}], ids=["greedy", "seeded"]
)
def test_a_killed_worker_costs_the_client_nothing(
    engine: Engine, oracle: Oracle, sampling: dict[str, float]
) -> None:
    """After kill -9 of the worker the stream goes on: same tokens, no gap, no repetition."""
    prompt = make_prompt(50, 24)
    whole = engine.generate(prompt, max_tokens=300, bypass_prefix_cache=True, **sampling).ids
    if not sampling:
        assert whole[:8] == oracle(prompt, 8)
    failovers = engine.info().num_failovers
    with engine.slowed(0.05):
        stream = engine.stream(prompt, max_tokens=300, **sampling)
        stream.wait_for_tokens(20)
        waiting = engine.stream(make_prompt(40, 25), max_tokens=3)
        killed = engine.kill_worker()
        stream.check_running()
    answer = stream.result()
    assert answer.ids == whole
    assert answer.done.num_failovers == 1
    assert (answer.done.completion_tokens, answer.done.finish_reason) == (300, "length")
    index = 0
    for piece in answer.pieces:
        assert piece.first_output_index == index
        index += piece.num_tokens
    assert index == 300
    # It may have begun beside the first, finished even, or not.
    others = waiting.result().done.num_failovers
    assert engine.info().num_failovers == failovers + 1 + others
    assert engine.worker().pid not in (0, killed)
    engine.wait_idle()


def test_a_changed_byte_in_the_weights_makes_every_block_cold(
    engine: Engine, model_dir: Path
) -> None:
    """Size and mtime may lie: the bytes decide, and blocks of other bytes are never hit."""
    prompt = make_prompt(100, 29)
    before, old = engine.client().model_info(), engine.generate(prompt, max_tokens=8)
    assert engine.generate(prompt, max_tokens=8).done.cached_tokens == 99
    file = sorted(model_dir.glob("*.safetensors"))[0]
    info = file.stat()
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x20  # high byte of a bfloat16's or float32's exponent and mantissa
    file.write_bytes(data)
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (info.st_size, info.st_mtime_ns)
    engine.restart()
    after, new = engine.client().model_info(), engine.generate(prompt, max_tokens=8)
    assert after.stamp != before.stamp
    assert after.weights_sha256 != before.weights_sha256
    assert after.model_version != before.model_version
    assert new.done.cached_tokens == 0
    assert new.accepted.weights_sha256 == after.weights_sha256
    assert old.accepted.weights_sha256 == before.weights_sha256
    assert engine.generate(prompt, max_tokens=8).done.cached_tokens == 99
