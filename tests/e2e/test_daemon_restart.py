"""kill -9 for the daemon under a running engine: no request fails, no token changes, still warm."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon, wait_until
from tests.e2e.conftest import Oracle
from tests.engine import Engine, make_prompt

NUM_STREAMS = 16


@pytest.fixture(scope="module")
def model_dir(m_rand_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose weight files a test may take away."""
    return Path(shutil.copytree(m_rand_dir, tmp_path_factory.mktemp("model") / "m"))


@pytest.fixture
def daemon(short_dir: Path) -> Iterator[Daemon]:
    """Under a holder."""
    with Daemon(short_dir / "s", "128MiB", ["--holder"]) as running:
        yield running


@pytest.fixture
def engine(daemon: Daemon, model_dir: Path) -> Iterator[Engine]:
    with Engine(model_dir, daemon.socket) as running:
        yield running
        print(running.log())  # shown when a test fails


def wait_relinked(engine: Engine, epoch: int) -> None:
    """Returns when the worker is connected to the daemon of this epoch."""
    wait_until(lambda: engine.worker().daemon_epoch == epoch, f"a link to epoch {epoch}")


def test_streams_go_on_and_hit_after_each_of_several_kills(
    daemon: Daemon, engine: Engine, oracle: Oracle
) -> None:
    """Sixteen streams, three kills: all answers as alone; what was sealed is hit afterwards."""
    prompts = [make_prompt(70, 60 + salt) for salt in range(NUM_STREAMS)]
    alone = [
        engine.generate(prompt, max_tokens=60, bypass_prefix_cache=True).ids for prompt in prompts
    ]
    assert alone[0][:8] == oracle(prompts[0], 8)
    streams = [engine.stream(prompt, max_tokens=60) for prompt in prompts]
    for kill in range(1, 4):
        streams[0].wait_for_tokens(10 * kill)
        sealed = daemon.status().pool.blocks["sealed"]
        daemon.kill_under_holder()
        after = daemon.status()
        assert after.epoch == kill + 1
        # What was sealed between question and kill comes on top; nothing is evicted here.
        assert after.pool.blocks["sealed"] >= sealed
        wait_relinked(engine, kill + 1)
    assert [stream.result().ids for stream in streams] == alone
    assert all(stream.result().done.num_failovers == 0 for stream in streams)
    for prompt, ids in zip(prompts, alone, strict=True):
        again = engine.generate(prompt, max_tokens=60)
        assert (again.ids, again.done.cached_tokens) == (ids, 69)
    status = daemon.status()
    assert status.counters["integrity_failures"] == 0
    wait_until(lambda: daemon.status().counters["leases"] == 0, "no lease is left")


def test_weights_are_served_without_a_look_at_their_files(
    daemon: Daemon, engine: Engine, model_dir: Path, oracle: Oracle
) -> None:
    """The files are gone, the daemon is killed, another engine starts: shared weights, warm."""
    prompt = make_prompt(70, 31)
    engine.generate(prompt, max_tokens=1)
    engine.wait_idle()
    daemon.kill_under_holder()
    files = model_dir / "model.safetensors"
    away = model_dir / "away"
    files.rename(away)
    try:
        models = daemon.status().models
        assert [model.files_present for model in models] == [False]
        with Engine(model_dir, daemon.socket) as second:
            assert second.worker().weights_source == "shared"
            answer = second.generate(prompt, max_tokens=8)
            assert (answer.ids, answer.done.cached_tokens) == (oracle(prompt, 8), 69)
    finally:
        away.rename(files)
    assert [model.files_present for model in daemon.status().models] == [True]


def test_the_daemon_that_serve_starts_has_a_holder(model_dir: Path, oracle: Oracle) -> None:
    """Killed under a stream it comes back by itself; it ends with the engine all the same."""
    prompt = make_prompt(70, 31)
    with Engine(model_dir, "auto", extra=["--pool-bytes", "64MiB"]) as engine:
        embedded = Daemon(engine.runtime_dir / "cachewarm" / "control.sock")
        engine.generate(prompt, max_tokens=8)
        stream = engine.stream(prompt, max_tokens=100)
        stream.wait_for_tokens(5)
        os.kill(embedded.serving_pid(), signal.SIGKILL)
        assert stream.result().ids[:8] == oracle(prompt, 8)
        wait_relinked(engine, 2)
        answer = engine.generate(prompt, max_tokens=8)
        assert (answer.ids, answer.done.cached_tokens) == (oracle(prompt, 8), 69)
        served_by = embedded.serving_pid()
        engine.terminate()
        assert engine.wait() == 0
        wait_until(lambda: not Path(f"/proc/{served_by}").exists(), "the daemon stops as well")


def test_a_long_prompt_hits_as_soon_as_the_worker_is_back(daemon: Daemon, engine: Engine) -> None:
    """Two thousand tokens come from the pool; the time is printed, the hit is asserted."""
    prompt = make_prompt(2000, 33)
    first = engine.generate(prompt, max_tokens=4)
    started = time.monotonic()
    daemon.kill_under_holder()
    wait_relinked(engine, 2)
    second = engine.generate(prompt, max_tokens=4)
    print(f"hit {time.monotonic() - started:.2f} s after the kill")
    assert (second.ids, second.done.cached_tokens) == (first.ids, 1999)
