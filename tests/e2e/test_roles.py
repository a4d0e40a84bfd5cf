"""Separate workers for prompts and answers, started here or as processes of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cachewarmd.v1 import control_pb2
from engine.models.config import load_config
from engine.models.packing import panel_plan
from tests.daemon import PATIENCE_S, Daemon, wait_until
from tests.engine import Engine, command, make_prompt, serve_fails, wait_started
from tests.jobs import Job, make_jobs

ROLES = ("prefill", "decode")
LENGTHS = (1, 20, 31, 32, 33, 64, 70, 200)
LONG = (1500, 70)
FLAGS = ("--workers", "prefill=1,decode=1", "--prefill-chunk", "16")


@pytest.fixture(scope="module")
def engine(shared_daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """One worker of each role; prefill takes many steps."""
    with Engine(m_rand_dir, shared_daemon.socket, extra=FLAGS, step_s=0.0) as running:
        yield running


@pytest.fixture(scope="module")
def jobs(engine: Engine, m_rand_dir: Path) -> list[Job]:
    return make_jobs(engine, m_rand_dir, LENGTHS, 3000, num_tokens=[10, 11, 40, 12])


@pytest.fixture(scope="module")
def long_jobs(engine: Engine, m_rand_dir: Path) -> list[Job]:
    """One to be met in prefill and one in decode; nobody may use one twice."""
    return make_jobs(engine, m_rand_dir, LONG, 3100, num_tokens=[100])


def num_computed(engine: Engine) -> tuple[int, int]:
    """Positions that the prefill and the decode worker have computed so far."""
    prefill, decode = (engine.wait_idle(role).num_computed_tokens for role in ROLES)
    return prefill, decode


# -- the work of each ---------------------------------------------------------------------------


def test_each_role_does_its_part_and_no_more(engine: Engine, jobs: list[Job]) -> None:
    """One computes the prompt, the other a position for each token; the answer is the solo one."""
    for job in jobs:
        before = num_computed(engine)
        answer = engine.generate(job.prompt, **job.options)
        job.check(answer)
        assert answer.done.cached_tokens == 0, "what the second worker found is no hit of the user"
        after = num_computed(engine)
        assert after[0] - before[0] == len(job.prompt)
        assert after[1] - before[1] == len(job.ids)
    for job in jobs:
        before = num_computed(engine)
        again = engine.generate(job.prompt, **job.options)
        job.check(again)
        assert again.done.cached_tokens == len(job.prompt) - 1
        after = num_computed(engine)
        assert (after[0] - before[0], after[1] - before[1]) == (1, len(job.ids))


def test_only_a_prefill_is_no_work_for_the_other(engine: Engine, shared_daemon: Daemon) -> None:
    """max_tokens = 0 ends where the prompt is computed, and everything is given back."""
    before = num_computed(engine)
    answer = engine.generate(make_prompt(50, 3200), max_tokens=0)
    assert (answer.ids, answer.done.finish_reason) == ([], "length")
    assert num_computed(engine) == (before[0] + 50, before[1])
    wait_until(lambda: shared_daemon.status().counters["leases"] == 0, "no lease is left")


def test_many_at_once_give_the_same(engine: Engine, jobs: list[Job], shared_daemon: Daemon) -> None:
    """Prompts of some are computed while others decode; nothing is left of any."""
    streams = [(engine.stream(job.prompt, **job.options), job) for job in jobs * 3]
    for stream, job in streams:
        job.check(stream.result())
    engine.wait_idle("decode")
    wait_until(lambda: shared_daemon.status().counters["leases"] == 0, "no lease is left")


# -- a role that dies ---------------------------------------------------------------------------


def test_a_prefill_worker_that_dies_is_replaced(engine: Engine, long_jobs: list[Job]) -> None:
    """The prefill that it was at goes on with another, from the blocks that are sealed."""
    job, before = long_jobs[0], num_computed(engine)[0]
    with engine.slowed(0.2):
        stream = engine.stream(job.prompt, **job.options)
        wait_until(
            lambda: engine.worker("prefill").num_computed_tokens > before + 100,
            "a part of the prefill",
        )
        engine.kill_worker("prefill")
        assert not stream.pieces, "the prefill was over before the kill"
    answer = stream.result()
    job.check(answer)
    assert answer.done.num_failovers == 1
    assert answer.done.timings_s["failover"] > 0


def test_a_decode_worker_that_dies_is_replaced(engine: Engine, long_jobs: list[Job]) -> None:
    """Streams go on with another: same bytes, and the prefill worker is not asked again."""
    job = long_jobs[1]
    with engine.slowed(0.2):
        stream = engine.stream(job.prompt, **job.options)
        stream.wait_for_tokens(10)
        before = engine.worker("prefill").num_computed_tokens
        engine.kill_worker("decode")
        stream.check_running()
    answer = stream.result()
    job.check(answer)
    assert answer.done.num_failovers == 1
    assert answer.done.timings_s["failover"] > 0
    assert answer.done.cached_tokens == 0
    assert num_computed(engine)[0] == before


def test_roles_without_a_daemon_are_refused(m_rand_dir: Path) -> None:
    """There is nothing to hand over through: the start says so, and which settings it is about."""
    status, told = serve_fails(
        *("--model", str(m_rand_dir), "--port", "0", "--cachewarmd", "off", *FLAGS)
    )
    assert status == 2
    assert "--workers: prefill and decode hand over through cachewarmd" in told
    assert "--cachewarmd: it is off" in told


# -- workers of their own -----------------------------------------------------------------------


class ExternalWorker:
    """`cachewarm-engine worker`, as a unit would run it; `env` is its environment.

    Its runtime directory is that of all who have this environment.
    """

    def __init__(self, role: str, socket: Path, config: Path, env: Mapping[str, str]) -> None:
        arguments = ("--role", role, "--front", f"unix:{socket}", "--config", str(config))
        self.process = subprocess.Popen(
            command("worker", *arguments),
            env=dict(env),
            stdin=subprocess.DEVNULL,
        )

    def __enter__(self) -> ExternalWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE_S)


def health(engine: Engine) -> int:
    with grpc.insecure_channel(engine.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest()).status)


SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def warm(daemon: Daemon, model_dir: Path, prompt: list[int]) -> control_pb2.JobItem:
    """Ask the daemon to have it computed; returns how that ended."""
    folder = os.open(model_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with daemon.client(control_pb2.ROLE_ADMIN) as client:
            request = control_pb2.Warmup(
                model_name=model_dir.name,
                plan=panel_plan(load_config(model_dir, None)),
                prompts=[control_pb2.WarmPrompt(token_ids=control_pb2.TokenIds(ids=prompt))],
            )
            reply, _ = client.call(control_pb2.Envelope(warmup=request), PATIENCE_S, [folder])
            job_id = reply.warmup_reply.job_id
            told: list[control_pb2.JobProgress] = []

            def has_ended() -> bool:
                jobs, _ = client.call(control_pb2.Envelope(jobs=control_pb2.Jobs()), PATIENCE_S)
                told[:] = [job for job in jobs.jobs_reply.jobs if job.job_id == job_id]
                return told[0].state in ("done", "failed")

            wait_until(has_ended, "the end of the warm-up")
            watch = control_pb2.Envelope(watch_job=control_pb2.WatchJob(job_id=job_id))
            last, _ = client.call(watch, PATIENCE_S)
            (item,) = last.job_progress.items
            return item
    finally:
        os.close(folder)


def test_workers_may_be_processes_of_their_own(
    shared_daemon: Daemon, m_rand_dir: Path, short_dir: Path, jobs: list[Job]
) -> None:
    """It serves and warms when one of each role has come, and not while a role is missing."""
    socket, config = short_dir / "workers", short_dir / "engine.toml"
    config.write_text(
        f"""
        model = "{m_rand_dir}"
        cachewarmd = "{shared_daemon.socket}"
        workers = {{ prefill = 1, decode = 1 }}
        external-workers = true
        """
    )
    config.chmod(0o600)
    engine = Engine(
        m_rand_dir,
        shared_daemon.socket,
        extra=["--external-workers", "--worker-socket", str(socket), *FLAGS],
        env={"XDG_RUNTIME_DIR": str(short_dir)},
        step_s=0.0,
    )
    with ExitStack() as stack:

        def begin(role: str) -> ExternalWorker:
            return stack.enter_context(ExternalWorker(role, socket, config, engine.env))

        engine.launch()
        with engine:
            wait_started(socket.exists, "the worker socket")
            prefill, decode = begin("prefill"), begin("decode")
            engine.wait_ready()
            assert (health(engine), engine.client().load().serving) == (SERVING, True)
            assert {w.pid for w in engine.info().workers} == {
                prefill.process.pid,
                decode.process.pid,
            }
            jobs[0].check(engine.generate(jobs[0].prompt, **jobs[0].options))

            prompt = make_prompt(70, 3300)
            item = warm(shared_daemon, m_rand_dir, prompt)
            assert (item.state, item.num_tokens) == (control_pb2.ITEM_STATE_DONE, 70)
            assert engine.generate(prompt, max_tokens=1).done.cached_tokens == 69

            with engine.slowed(0.05):
                stream = engine.stream(make_prompt(70, 3301), max_tokens=2000)
                stream.wait_for_tokens(10)
                decode.process.kill()
                wait_until(lambda: health(engine) == NOT_SERVING, "NOT_SERVING")
            load = engine.client().load()
            assert (load.serving, load.num_workers) == (False, 1)
            waiting = engine.stream(jobs[2].prompt, **jobs[2].options)
            stream.check_running()
            stream.cancel()
            decode = begin("decode")
            jobs[2].check(waiting.result())
            assert health(engine) == SERVING

            # All three have one runtime directory: who leaves it takes nobody's socket along.
            sockets = {path for path in short_dir.rglob("*") if path.is_socket()}
            assert socket in sockets
            prefill.process.terminate()
            prefill.process.wait(PATIENCE_S)
            assert {path for path in sockets if path.is_socket()} == sockets
            assert decode.process.poll() is None
            prefill = begin("prefill")
            jobs[3].check(engine.generate(jobs[3].prompt, **jobs[3].options))
            assert engine.stop() == 0
        for worker in (prefill, decode):
            assert worker.process.wait(PATIENCE_S) == 0, "a worker leaves when its front has gone"
