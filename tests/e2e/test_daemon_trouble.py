"""A daemon that is stopped, slow or dead costs warmth, never a request and never a wrong token."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.v1 import engine_pb2 as pb
from tests.daemon import Daemon, wait_until
from tests.e2e.conftest import Oracle
from tests.engine import Engine, Generation, make_prompt

BLOCK = 32


@pytest.fixture(scope="module")
def daemon(module_daemon: Daemon) -> Daemon:
    """The module's daemon; its tests stop, kill and restart it."""
    return module_daemon


@dataclass(frozen=True)
class ColdStart:
    """What an engine was that started beside a stopped daemon."""

    took_s: float
    worker: pb.WorkerInfo
    answer: Generation


@pytest.fixture(scope="module")
def engine(daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """An engine that was started while the daemon was stopped; it runs again now."""
    daemon.sigstop()
    started = time.monotonic()
    with Engine(m_rand_dir, daemon.socket, step_s=0.0) as running:
        took = time.monotonic() - started
        answer = running.generate(make_prompt(70, 31), max_tokens=8)
        running.ready["cold"] = ColdStart(took, running.worker(), answer)
        daemon.sigcont()
        yield running


def wait_connected(engine: Engine, is_connected: bool = True) -> None:
    """Returns when the worker has, or has lost, its link to the daemon."""
    wait_until(
        lambda: engine.worker().daemon_connected is is_connected, f"connected = {is_connected}"
    )


def test_an_engine_starts_beside_a_stopped_daemon(engine: Engine, oracle: Oracle) -> None:
    """It gives up after some seconds, serves with its own weights, and links up later."""
    cold: ColdStart = engine.ready["cold"]
    assert cold.took_s < 45, "about ten seconds of waiting, and the start itself"
    assert (cold.worker.weights_source, cold.worker.daemon_connected) == ("private", False)
    assert cold.answer.done.cached_tokens == 0
    prompt = make_prompt(70, 31)
    assert cold.answer.ids == oracle(prompt, 8)
    wait_connected(engine)
    assert engine.generate(prompt, max_tokens=8).done.cached_tokens == 0
    warm = engine.generate(prompt, max_tokens=8)
    assert (warm.ids, warm.done.cached_tokens) == (cold.answer.ids, 69)


def test_a_daemon_that_stops_between_requests_costs_only_the_hits(
    engine: Engine, daemon: Daemon, oracle: Oracle
) -> None:
    """Each request is served within its lookup budget's delay; hits are back afterwards."""
    wait_connected(engine)
    prompts = [make_prompt(70, salt) for salt in (31, 32, 33)]
    for prompt in prompts:
        engine.generate(prompt, max_tokens=4)
    lookups = []
    daemon.sigstop()
    try:
        for prompt in prompts:
            answer = engine.generate(prompt, max_tokens=8)
            assert (answer.ids, answer.done.cached_tokens) == (oracle(prompt, 8), 0)
            lookups.append(answer.done.timings_s["lookup"])
    finally:
        daemon.sigcont()
    assert min(lookups) < 1.0, "the budget is 250 ms"
    assert max(lookups) < 10.0, "the same, where other things keep the machine busy"
    wait_connected(engine)
    for prompt in prompts:
        wait_until(
            lambda p=prompt: engine.generate(p, max_tokens=1).done.cached_tokens == 69, "a hit"
        )
        assert engine.generate(prompt, max_tokens=8).ids == oracle(prompt, 8)


def test_a_daemon_that_stops_in_mid_stream_changes_no_token(
    engine: Engine, daemon: Daemon, oracle: Oracle
) -> None:
    """The stream goes on, blocks stay private; after SIGCONT requests hit and are right."""
    wait_connected(engine)
    prompt = make_prompt(70, 37)
    whole = engine.generate(prompt, max_tokens=150, bypass_prefix_cache=True).ids
    assert whole[:8] == oracle(prompt, 8)
    with engine.slowed(0.1):
        stream = engine.stream(prompt, max_tokens=150)
        stream.wait_for_tokens(5)
        daemon.sigstop()
        stream.check_running()
    try:
        assert stream.result().ids == whole
        other = make_prompt(70, 35)
        assert engine.generate(other, max_tokens=8).ids == oracle(other, 8)
        # What was published into the stopped daemon's socket is owed for two seconds at most.
        wait_connected(engine, False)
        engine.wait_idle()
    finally:
        daemon.sigcont()
    wait_connected(engine)
    engine.generate(prompt, max_tokens=150)
    warm = engine.generate(prompt, max_tokens=150)
    assert (warm.ids, warm.done.cached_tokens) == (whole, 69)


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_a_killed_daemon_changes_no_token_and_its_successor_is_found(
    engine: Engine, daemon: Daemon, num_tokens: int
) -> None:
    """The stream reads on in place; the worker links up with the new daemon, which fills anew."""
    wait_connected(engine)
    prompt = make_prompt(200, 36)
    whole = engine.generate(prompt, max_tokens=100, bypass_prefix_cache=True).ids
    engine.generate(prompt, max_tokens=1)
    epoch = engine.worker().daemon_epoch
    with engine.slowed(0.2):
        stream = engine.stream(prompt, max_tokens=100)
        stream.wait_for_tokens(num_tokens)
        daemon.kill()
        stream.check_running()
    answer = stream.result()
    assert answer.ids == whole
    assert answer.done.num_failovers == 0
    assert engine.generate(prompt, max_tokens=100).ids == whole
    engine.wait_idle()
    daemon.start()
    wait_connected(engine)  # back-off ends at two seconds
    assert engine.worker().daemon_epoch == epoch + 1
    first = engine.generate(prompt, max_tokens=100)
    assert (first.ids, first.done.cached_tokens) == (whole, 0)
    # On a busy machine a lookup that is late makes a request private: nothing of it is published.
    wait_until(lambda: engine.generate(prompt, max_tokens=1).done.cached_tokens == 199, "a hit")
    assert engine.generate(prompt, max_tokens=100).ids == whole


@pytest.fixture(scope="module")
def small(daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """An engine with ten private blocks, as many as one long request needs."""
    pool_bytes = 10 * BLOCK * 1024  # M-rand has 1 KiB a token
    flags = ["--private-pool-bytes", str(pool_bytes)]
    with Engine(m_rand_dir, daemon.socket, extra=flags, step_s=0.0) as running:
        assert running.worker().num_private_blocks == 10
        yield running


def test_what_a_stopped_daemon_was_sent_never_seals_reused_blocks(
    small: Engine, daemon: Daemon
) -> None:
    """Publishes wait in its socket while their private blocks get other content: none is sealed."""
    prompts = [make_prompt(40, salt) for salt in (41, 42, 43)]
    options = {"max_tokens": 270, "bypass_prefix_cache": True}
    whole = [small.generate(prompt, **options).ids for prompt in prompts]
    refused = daemon.status().counters["refused_peer_gone"]
    wait_connected(small)
    with small.slowed(0.1):
        stream = small.stream(prompts[0], max_tokens=270)
        stream.wait_for_tokens(2)
        daemon.sigstop()
        stream.check_running()
    try:
        # It publishes block after block into the stopped daemon's socket.
        assert stream.result().ids == whole[0]
        wait_connected(small, False)
        small.wait_idle()
        for prompt, answer in zip(prompts[1:], whole[1:], strict=True):
            assert small.generate(prompt, max_tokens=270).ids == answer
    finally:
        daemon.sigcont()
    wait_connected(small)
    # Prompts that end within each of the blocks that were published.
    for _ in range(2):
        for length in (60, 100, 150, 200, 250):
            for prompt, answer in zip(prompts, whole, strict=True):
                longer = [*prompt, *answer[: length - 40]]
                found = small.generate(longer, max_tokens=5)
                assert found.ids == answer[length - 40 : length - 35]
    assert small.generate([*prompts[0], *whole[0][:-1]], max_tokens=1).done.cached_tokens > 200
    # Last, so that wrong tokens are seen before their cause.
    assert daemon.status().counters["refused_peer_gone"] > refused, "nothing was in the socket"


def test_a_pool_full_of_pending_publishes_does_not_refuse_a_request(
    small: Engine, daemon: Daemon
) -> None:
    """A request that fits waits for blocks that a stopped daemon still owes an answer for."""
    first, second = make_prompt(40, 44), make_prompt(200, 45)
    whole = small.generate(second, max_tokens=60, bypass_prefix_cache=True).ids
    num_free = [10]
    # It is owed for two seconds: on a busy machine that may be over before it is looked at.
    for _ in range(5):
        wait_connected(small)
        with small.slowed(0.1):
            stream = small.stream(first, max_tokens=270)
            stream.wait_for_tokens(2)
            daemon.sigstop()
            stream.check_running()
        try:
            stream.result()
            num_free.append(small.worker().num_private_blocks_free)
            assert small.generate(second, max_tokens=60).ids == whole
        finally:
            daemon.sigcont()
        if num_free[-1] < 8:
            break
    assert num_free[-1] < 8, "no publish was under way"
