"""F6, F7: one engine a port, and an end in order."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.client import CallError
from tests.daemon import Daemon, wait_until
from tests.e2e.conftest import Oracle
from tests.engine import Engine, make_prompt, serve_fails

REPEATS = int(os.environ.get("CACHEWARM_TEST_REPEATS", "5"))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class HealthWatch:
    """A Health.Watch that stays open; what it was told, with the time of each."""

    def __init__(self, target: str) -> None:
        self.told: list[tuple[int, float]] = []
        self._channel = grpc.insecure_channel(target)
        stub = health_pb2_grpc.HealthStub(self._channel)
        self._call = stub.Watch(health_pb2.HealthCheckRequest())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for reply in self._call:
                self.told.append((reply.status, time.monotonic()))
        except grpc.RpcError:
            pass  # the server is gone

    def when(self, status: int) -> float:
        """The time of the first such word; waits for it."""
        wait_until(lambda: any(s == status for s, _ in self.told), f"health {status}: {self.told}")
        return next(at for s, at in self.told if s == status)

    def close(self) -> None:
        self._call.cancel()
        self._thread.join()
        self._channel.close()


@pytest.fixture
def watch(engine: Engine) -> Iterator[HealthWatch]:
    """A watcher of the engine's health, who never leaves by himself."""
    watching = HealthWatch(engine.target)
    yield watching
    watching.close()


@pytest.fixture
def engine(shared_daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """An engine of its own for each test."""
    with Engine(m_rand_dir, shared_daemon.socket, step_s=0.0) as running:
        yield running


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """Of all repeats: they must be one and the same."""
    return []


def shared_memory_names() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.mark.parametrize("repeat", range(REPEATS))
def test_f7_sigterm_lets_streams_finish_and_leaves_nothing(
    engine: Engine,
    watch: HealthWatch,
    shared_daemon: Daemon,
    oracle: Oracle,
    answers: list[list[int]],
    repeat: int,
) -> None:
    """NOT_SERVING and DRAINING while streams run; another SIGTERM changes nothing; then exit 0."""
    names = shared_memory_names()
    family = psutil.Process(engine.pid).children(recursive=True)
    prompt = make_prompt(50, 151)
    watch.when(SERVING)
    with engine.slowed(0.05):
        stream = engine.stream(prompt, max_tokens=500)
        stream.wait_for_tokens(3)
        engine.terminate()
        sent = time.monotonic()
        print(f"told after {watch.when(NOT_SERVING) - sent:.3f} s")
        with pytest.raises(CallError) as refused:
            engine.generate(prompt, max_tokens=1)
        assert (refused.value.status, refused.value.reason) == ("UNAVAILABLE", "DRAINING")
        time.sleep(max(0.0, sent + 0.5 - time.monotonic()))
        engine.terminate()
        before = len(stream.pieces)
        stream.wait_for_tokens(before + 3)
        stream.check_running()
    answer = stream.result()
    ended = time.monotonic()
    assert (len(answer.ids), answer.done.finish_reason) == (500, "length")
    assert answer.ids[:8] == oracle(prompt, 8)
    answers.append(answer.ids)
    assert answer.ids == answers[0]
    assert engine.wait() == 0
    took = time.monotonic() - ended
    print(f"exit {took:.2f} s after the stream's end")
    assert took < 10.0, "two seconds, and the rest for a busy machine"
    with pytest.raises(CallError) as gone:
        engine.generate(prompt, max_tokens=1)
    assert gone.value.status == "UNAVAILABLE"
    assert not [child for child in family if child.is_running()]
    assert shared_memory_names() == names
    assert not list(engine.runtime_dir.glob("cachewarm/*"))
    assert sorted(os.listdir(shared_daemon.socket.parent)) == ["s", "s.lock"]
    wait_until(lambda: shared_daemon.status().counters["leases"] == 0, "no lease left")


def test_neither_an_endless_stream_nor_a_stopped_daemon_holds_up_the_end(
    short_dir: Path, m_rand_dir: Path
) -> None:
    """After --drain-timeout the stream is cut with UNAVAILABLE; the daemon is not waited for."""
    with (
        Daemon(short_dir / "s", "64MiB") as daemon,
        Engine(
            m_rand_dir, daemon.socket, extra=["--drain-timeout", "300ms"], step_s=0.05
        ) as engine,
    ):
        stream = engine.stream(make_prompt(40, 153), max_tokens=4000)
        stream.wait_for_tokens(3)
        daemon.sigstop()
        try:
            engine.terminate()
            sent = time.monotonic()
            assert engine.wait() == 0
            took = time.monotonic() - sent
            print(f"exit after {took:.2f} s")
            assert took < 10.0
        finally:
            daemon.sigcont()
        with pytest.raises(CallError) as cut:
            stream.result()
        assert cut.value.status == "UNAVAILABLE"


def test_f6_a_second_engine_on_the_port_is_refused(engine: Engine, m_rand_dir: Path) -> None:
    """Also under a wildcard address; the first one keeps all traffic."""
    model = ["--model", str(m_rand_dir), "--cachewarmd", "off", "--port", str(engine.port)]
    for host in (["--host", "127.0.0.1"], ["--host", "0.0.0.0", "--insecure"]):
        status, stderr = serve_fails(*model, *host)
        assert status == 1
        assert "in use" in stderr.splitlines()[-1]
    finished = engine.info().num_requests_finished
    for _ in range(20):
        engine.generate(make_prompt(10, 154), max_tokens=1)
    assert engine.info().num_requests_finished == finished + 20
    engine.signal(signal.SIGINT)
    assert engine.wait() == 0
