"""A worker that was taken for dead comes back: whatever it still says and writes does no harm.

Router and pool of this process, real workers. Killing is disabled here, so that a worker which was
stopped for a while outlives its replacement.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from engine.channel import AsyncChannel, BrokenChannelError, encode
from engine.config import WorkerConfig
from engine.live_worker import LiveWorker
from engine.request import (
    Finished,
    FromWorker,
    Output,
    Progress,
    SamplingParams,
    Submit,
    ToWorker,
)
from engine.router import ActiveRequest, Router
from engine.spawn import StartedWorker
from engine.workers import WorkerPool
from tests.daemon import PATIENCE_S, Daemon, environment
from tests.engine import START_S, command, make_prompt

WATCHDOG_S = 1.0
BLOCK = 32
LENGTH = 32 * BLOCK  # of prompts: long, so that a worker is met at its work
NUM_OUTPUT = 200
# Into the first block behind the prompt: nothing is being published then.
NUM_BEFORE = 10
GREEDY, DRAWN = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)


async def until(condition: Callable[[], bool], what: str, limit_s: float = PATIENCE_S) -> None:
    """As `tests.daemon.wait_until`, on a loop that has work to do meanwhile."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        await asyncio.sleep(0.005)


@dataclass
class Relay:
    """Stands between a worker and the front, and keeps the worker's end open when the front goes.

    `late` is what the worker says from then on; what it says of requests before is forwarded.
    """

    path: Path
    front: Path
    late: list[FromWorker] = field(default_factory=list)
    on_late: Callable[[FromWorker], None] = lambda message: None
    is_cut: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_unix_server(self._on_dial, str(self.path))
        return self

    async def _on_dial(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        front_reader, front_writer = await asyncio.open_unix_connection(str(self.front))
        self._writers += [writer, front_writer]
        self._tasks.append(asyncio.create_task(self._to_worker(front_reader, writer)))
        channel = AsyncChannel(reader, writer)
        with contextlib.suppress(BrokenChannelError):
            while True:
                message = await channel.receive()
                if not self.is_cut:
                    front_writer.write(encode(message))
                else:
                    self.late.append(message)
                    self.on_late(message)

    async def _to_worker(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        self.is_cut = True

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@dataclass
class Site:
    """A front without gRPC: router, pool, and the workers that dial it."""

    model_dir: Path
    daemon: Daemon
    socket: Path
    router: Router
    pool: WorkerPool
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def spawn(self, dial: Path | None = None) -> subprocess.Popen[bytes]:
        """A real worker, that dials the front or whoever stands before it."""
        config = WorkerConfig(
            role="unified",
            backend="auto",
            cpu_isa="auto",
            log_level="warning",
            model=self.model_dir,
            model_name="m-rand",
            model_version="",
            cachewarmd=self.daemon.socket,
            cpus=(),
            private_pool_bytes=32 << 20,
            block_size=BLOCK,
            prefill_chunk=128,
            max_num_seqs=8,
            max_context=None,
            lookup_budget=0.25,
        )
        arguments = ("--front", f"unix:{dial or self.socket}", "--config-json", config.to_json())
        process = subprocess.Popen(
            command("worker", "--role", "unified", *arguments),
            env=environment(),
            stdin=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    async def ready(self, num_workers: int) -> None:
        """Returns when so many are; one is active, the others are spares."""
        pool = self.pool
        await until(
            lambda: len(pool.active) + len(pool.spares) == num_workers, "ready workers", START_S
        )

    async def stop_in_midst(
        self, process: subprocess.Popen[bytes], requests: Sequence[ActiveRequest]
    ) -> None:
        """SIGSTOP a worker while they run; returns when another has gone on with all of them."""
        await until(lambda: all(len(r.output_ids) >= NUM_BEFORE for r in requests), "tokens")
        process.send_signal(signal.SIGSTOP)
        await until(lambda: all(r.num_failovers for r in requests), "the watchdog's word")
        had = [len(request.output_ids) for request in requests]
        assert max(had) < NUM_OUTPUT, "make it longer: it was over before the stop"
        await until(
            lambda: all(len(r.output_ids) > n for r, n in zip(requests, had, strict=True)),
            "tokens of the other worker",
        )

    def begin(self, submit: Submit) -> ActiveRequest:
        request = ActiveRequest(submit)
        self.router.submit([request])
        return request

    async def end_of(self, request: ActiveRequest) -> Finished:
        """Reads its events to the last; fails when an index is missing or comes twice."""
        index = len(request.submit.output_ids)
        while True:
            event = await asyncio.wait_for(request.events.get(), START_S)
            match event:
                case Output():
                    assert event.first_output_index == index
                    index += len(event.token_ids)
                case Finished():
                    assert event.error is None
                    return event
                case Progress():
                    pass
                case _:
                    raise event

    def submit_of(self, name: str, sampling: SamplingParams, salt: int) -> Submit:
        """A request; `solo` gives its answer."""
        return Submit(
            request_id=name,
            attempt=0,
            prompt_ids=make_prompt(LENGTH, salt),
            output_ids=[],
            sampling=sampling,
            resolved_seed=5,
            max_tokens=NUM_OUTPUT,
            stop_token_ids=[],
        )

    async def solo(self, submit: Submit) -> list[int]:
        """Its answer, computed alone and cold."""
        alone = msgspec.structs.replace(submit, request_id="solo", bypass_cache=True)
        request = self.begin(alone)
        await self.end_of(request)
        return request.output_ids


def _no_start(role: str) -> StartedWorker:
    raise AssertionError(f"a {role} worker is started")


@pytest.fixture
async def site(
    module_daemon: Daemon, m_rand_dir: Path, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    """Takes external workers; one that it takes for dead only loses its channel."""
    monkeypatch.setattr(LiveWorker, "kill", lambda worker: None)
    router, path = Router(16), short_dir / "front"
    counts = {"unified": 1}
    pool = WorkerPool(
        _no_start, counts, 0, WATCHDOG_S, path, router, lambda ready: None, is_external=True
    )
    running = asyncio.create_task(pool.run())
    made = Site(m_rand_dir, module_daemon, path, router, pool)
    try:
        await until(path.exists, "the worker socket")
        yield made
    finally:
        pool.stop()
        await running
        for process in made.processes:
            if process.poll() is None:
                process.kill()
            process.wait(PATIENCE_S)


async def has_ended(process: subprocess.Popen[bytes]) -> int:
    """Its exit status."""
    await until(lambda: process.poll() is not None, "a worker's end")
    return int(process.returncode)


async def test_a_worker_that_comes_back_leaves(site: Site) -> None:
    """Stopped, replaced, continued: it ends by itself, and the streams are the solo ones."""
    for _ in range(2):
        site.spawn()
    await site.ready(2)
    submits = [
        site.submit_of("greedy", GREEDY, 5000),
        site.submit_of("drawn", DRAWN, 5100),
    ]
    expected = [await site.solo(submit) for submit in submits]
    requests = [site.begin(submit) for submit in submits]
    pid = site.pool.active[0].pid
    (first,) = [process for process in site.processes if process.pid == pid]
    await site.stop_in_midst(first, requests)
    assert first.poll() is None, "it was killed after all"
    first.send_signal(signal.SIGCONT)
    for request, ids in zip(requests, expected, strict=True):
        await site.end_of(request)
        assert request.output_ids == ids
    assert await has_ended(first) == 0


async def test_what_a_replaced_worker_says_and_writes_does_no_harm(site: Site) -> None:
    """Its late messages change no stream, its late blocks are the right ones."""
    async with Relay(site.socket.with_name("relay"), site.socket) as relay:
        old = site.spawn(relay.path)
        await site.ready(1)
        site.spawn()
        stays = site.submit_of("stays", DRAWN, 5200)
        leaves = site.submit_of("leaves", GREEDY, 5300)
        solo_stays, solo_leaves = await site.solo(stays), await site.solo(leaves)
        await site.ready(2)

        staying, leaving = site.begin(stays), site.begin(leaves)
        heard: list[tuple[Output, int]] = []  # that might have been taken, with the tokens of then

        def deliver(message: FromWorker) -> None:
            if isinstance(message, Output | Finished | Progress):
                if isinstance(message, Output) and message.request_id == "stays":
                    heard.append((message, len(staying.output_ids)))
                accepted.append(site.router.on_message(message))

        accepted: list[bool] = []
        relay.on_late = deliver
        await site.stop_in_midst(old, [staying, leaving])
        # Its client is gone: from here on only the old worker computes it, and publishes.
        site.router.forget(leaving)
        assert len(leaving.output_ids) < 2 * BLOCK
        old.send_signal(signal.SIGCONT)
        await site.end_of(staying)
        assert staying.output_ids == solo_stays
        assert staying.num_failovers == 1
        ends = {"stays", "leaves"}
        await until(
            lambda: {m.request_id for m in relay.late if isinstance(m, Finished)} == ends,
            "late ends",
        )
        assert all(accepted), "a message of the old worker was taken for one of the new"
        num_in_time = sum(num_then < NUM_OUTPUT for _, num_then in heard)
        assert num_in_time > 10, "make it longer: the stream was over before the old worker spoke"
        check_only_the_attempt_protects(stays, solo_stays, heard)

        follower = msgspec.structs.replace(
            leaves, request_id="follower", prompt_ids=[*leaves.prompt_ids, *solo_leaves[:100]]
        )
        request = site.begin(msgspec.structs.replace(follower, max_tokens=50))
        end = await site.end_of(request)
        assert request.output_ids == solo_leaves[100:150]
        assert end.num_cached_tokens >= LENGTH + 3 * BLOCK, "the old worker's late blocks"
    assert await has_ended(old) == 0


def check_only_the_attempt_protects(
    submit: Submit, ids: list[int], heard: Sequence[tuple[Output, int]]
) -> None:
    """The same messages, had they come under the new attempt, would have broken the stream."""
    broken = 0
    for late, num_then in heard:
        if num_then >= NUM_OUTPUT:
            continue
        router, inbox = Router(1), list[ToWorker]()
        request = ActiveRequest(submit)
        router.worker_ready("unified", inbox.append)
        router.submit([request])
        before = Output(submit.request_id, request.attempt, 0, 0, ids[:num_then])
        assert router.on_message(before)
        forged = msgspec.structs.replace(late, attempt=request.attempt)
        broken += not router.on_message(forged)
    assert broken > 0
