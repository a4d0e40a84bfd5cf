"""The reference backend is a service too: it streams, loses workers and engines, and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import Daemon
from tests.engine import Engine, Generation, make_prompt
from tests.fixtures.oracle import MARGIN, leads

pytest.importorskip("torch")

NUM_OUTPUT = 100
PROMPT = make_prompt(70, 801)


@pytest.fixture(scope="module")
def engine(shared_daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """The shared daemon has the weights of two layouts then."""
    flags = ["--backend", "reference"]
    with Engine(m_rand_dir, shared_daemon.socket, extra=flags, step_s=0.0) as running:
        yield running


@pytest.fixture(scope="module")
def alone(engine: Engine, m_rand_dir: Path) -> Generation:
    """Computed cold and without a break: the one answer that a right implementation can give."""
    answer = engine.generate(PROMPT, max_tokens=NUM_OUTPUT, bypass_prefix_cache=True)
    assert leads(m_rand_dir, PROMPT, answer.ids).min() > MARGIN
    assert engine.worker().backend == "reference"
    return answer


def test_a_stream_outlives_its_worker(engine: Engine, alone: Generation) -> None:
    """After kill -9 the next worker goes on with the same tokens, and later requests hit."""
    with engine.slowed(0.2):
        stream = engine.stream(PROMPT, max_tokens=NUM_OUTPUT)
        stream.wait_for_tokens(10)
        killed = engine.kill_worker()
        stream.check_running()
    answer = stream.result()
    assert (answer.ids, answer.text) == (alone.ids, alone.text)
    assert answer.done.num_failovers == 1
    assert engine.worker_pid() != killed
    again = engine.generate(PROMPT, max_tokens=NUM_OUTPUT)
    assert (again.ids, again.done.cached_tokens) == (alone.ids, len(PROMPT) - 1)


def test_a_stream_is_taken_up_by_the_next_engine(engine: Engine, alone: Generation) -> None:
    """After kill -9 of front and worker: the rest of the answer, from the blocks of before."""
    with engine.slowed(0.2):
        stream = engine.stream(PROMPT, max_tokens=NUM_OUTPUT)
        stream.wait_for_tokens(10)
        engine.kill_all()
    stream.join()
    assert stream.done is None, "it was over too soon"
    given = stream.ids
    assert given == alone.ids[: len(given)]
    engine.start()
    rest = engine.generate(
        PROMPT,
        continue_from=given,
        expected_weights_sha256=alone.accepted.weights_sha256,
        max_tokens=NUM_OUTPUT,
    )
    assert given + rest.ids == alone.ids
    assert rest.done.cached_tokens > 0
