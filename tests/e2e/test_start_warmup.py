"""`serve --warmup PLAN`: ready means warm."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.client import CallError, EngineClient
from tests.daemon import PATIENCE_S, Daemon, children_of, wait_until
from tests.engine import Engine, command, http_get

PROMPT = list(range(1, 200))
pytestmark = pytest.mark.slow


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.jsonl"
    items = [
        {"token_ids": PROMPT, "name": "system"},
        {"token_ids": list(range(300, 340)), "name": "other"},
    ]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.fixture
def own_daemon(short_dir: Path) -> Iterator[Daemon]:
    with Daemon(short_dir / "s", "256MiB") as daemon:
        yield daemon


def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_requests_are_refused_until_the_plan_is_warm_and_the_first_one_hits(
    own_daemon: Daemon, m_rand_dir: Path, plan: Path
) -> None:
    """Health, /ready and Generate say that it warms, with a percentage; then all is there."""
    port, http_port = free_port(), free_port()
    extra = ["--warmup", str(plan), "--http-port", str(http_port), "--prefill-chunk", "8"]
    engine = Engine(m_rand_dir, own_daemon.socket, port=port, extra=extra, step_s=0.15)
    engine.launch()
    try:
        target = f"127.0.0.1:{port}"

        def told() -> dict[str, object]:
            try:
                found: dict[str, object] = json.loads(
                    http_get(f"http://127.0.0.1:{http_port}/ready")[2]
                )
            except OSError:
                return {}
            return found

        wait_until(lambda: int(str(told().get("percent", 0))) > 0, "a percentage")
        with grpc.insecure_channel(target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", "engine.v1.EngineService"):
                request = health_pb2.HealthCheckRequest(service=name)
                status = health.Check(request, timeout=PATIENCE_S).status
                assert status == health_pb2.HealthCheckResponse.NOT_SERVING
        with EngineClient(target) as client, pytest.raises(CallError) as refused:
            list(client.generate([5, 6], max_tokens=1, timeout=PATIENCE_S))
        assert refused.value.reason == "WARMING"
        assert "%" in str(refused.value)
        assert told()["reason"] == "warming"
        engine.wait_ready()
        assert engine.http("/ready")[0] == 200
        answer = engine.generate([*PROMPT, 7], max_tokens=1)
        assert answer.done.cached_tokens == len(PROMPT)
    finally:
        engine.stop()


@pytest.mark.parametrize("is_required", [True, False])
def test_an_item_that_cant_be_warmed_ends_the_start_only_where_that_is_asked_for(
    own_daemon: Daemon, m_rand_dir: Path, tmp_path: Path, is_required: bool
) -> None:
    """Too long for the context; the item's name is told."""
    plan = tmp_path / "plan.jsonl"
    plan.write_text(json.dumps({"token_ids": [1] * 100, "name": "too-long"}) + "\n")
    extra = ["--warmup", str(plan), "--max-context", "64"]
    if is_required:
        extra.append("--warmup-required")
    engine = Engine(m_rand_dir, own_daemon.socket, extra=extra)
    try:
        if is_required:
            engine.launch()
            assert engine.wait(2 * PATIENCE_S) == 1
            assert "too-long" in engine.log().splitlines()[-1]
        else:
            engine.start()
            assert engine.generate([5, 6], max_tokens=1).ids
        assert "too-long" in engine.log()
    finally:
        engine.stop()


def test_f8_a_signal_during_the_warmup_is_a_clean_end(
    own_daemon: Daemon, m_rand_dir: Path, plan: Path
) -> None:
    """Exit status 0, soon, and no worker is left; the job waits for the next engine."""
    extra = ["--warmup", str(plan), "--prefill-chunk", "1"]
    engine = Engine(m_rand_dir, own_daemon.socket, extra=extra, step_s=0.5)
    engine.launch()
    try:
        wait_until(lambda: own_daemon.status().num_jobs_active == 1, "the job")
        workers = children_of(engine.pid)
        began = time.monotonic()
        engine.signal(signal.SIGTERM)
        assert engine.wait() == 0
        assert time.monotonic() - began < 5
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), "its end")
        assert own_daemon.status().num_jobs_active == 1
    finally:
        engine.stop()


def test_a_daemon_killed_during_the_warmup_only_delays_it(
    short_dir: Path, m_rand_dir: Path, plan: Path
) -> None:
    """Its holder starts it again; what was warm by then is not computed again."""
    extra = ["--warmup", str(plan), "--prefill-chunk", "8"]
    with Daemon(short_dir / "s", "256MiB", ["--holder"]) as daemon:
        engine = Engine(m_rand_dir, daemon.socket, extra=extra, step_s=0.1)
        engine.launch()
        try:
            wait_until(lambda: daemon.status().counters["published"] > 0, "a block")
            daemon.kill_under_holder()
            engine.wait_ready()
            answer = engine.generate([*PROMPT, 7], max_tokens=1)
            assert answer.done.cached_tokens == len(PROMPT)
        finally:
            engine.stop()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--cachewarmd", "off", "--warmup", "plan.jsonl"], "cachewarmd off"),
        (["--warmup-required"], "without warmup"),
        (["--warmup", "/nowhere/plan.toml"], "/nowhere/plan.toml"),
    ],
)
def test_settings_that_cant_warm_are_refused(
    m_rand_dir: Path, flags: list[str], named: str
) -> None:
    """--check-config names what does not go together."""
    import subprocess

    found = subprocess.run(
        command("serve", "--model", str(m_rand_dir), "--check-config", *flags),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert found.returncode == 2
    assert named in found.stderr
