"""Workers that dial in: who is taken, who is watched, who is dropped and never heard again.

The pool's socket and frames are real; workers are played in this process, so `kill` is recorded
instead of done, but for one test with a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import errors
from engine.channel import encode
from engine.live_worker import LiveWorker
from engine.request import (
    Finished,
    FromWorker,
    Output,
    Progress,
    SamplingParams,
    Stats,
    StatsRequest,
    Submit,
    ToWorker,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
)
from engine.router import ActiveRequest, Router
from engine.spawn import StartedWorker
from engine.workers import WorkerPool

PATIENCE_S = 10.0


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[LiveWorker]:
    """Those that would have been killed: their pid is that of this process."""
    found: list[LiveWorker] = []
    monkeypatch.setattr(LiveWorker, "kill", lambda worker: found.append(worker))
    return found


def no_start(role: str) -> StartedWorker:
    """Of a pool whose workers are external."""
    raise AssertionError(f"a {role} worker is started")


async def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        await asyncio.sleep(0.002)


def make_ready(role: str = "unified", **fields: Any) -> WorkerReady:
    defaults: dict[str, Any] = {
        "model_version": "v",
        "weights_sha256": "w",
        "stamp": "s",
        "backend": "fake",
        "backend_reason": "a test",
        "dtype": "f32",
        "kv_dtype": "f32",
        "block_size": 4,
        "num_private_blocks": 10,
        "max_num_seqs": 2,
        "cpus": [0],
        "start_phases_s": {},
    }
    return WorkerReady(role=role, **(defaults | fields))


def make_stats(num_private_blocks_free: int = 10) -> Stats:
    return Stats(0, 0, num_private_blocks_free, 0, 0, 0, 0, {}, {}, 0, "private")


class Fake:
    """A worker's end of the socket: answers for its counts, and keeps the rest it is told."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.is_silent = False
        self.stats = make_stats()
        self.heard: list[ToWorker] = []
        self.is_cut = False
        self.listening = asyncio.create_task(self._listen())

    @classmethod
    async def dial(cls, path: Path, *first: FromWorker) -> Fake:
        fake = cls(*await asyncio.open_unix_connection(str(path)))
        for message in first:
            fake.say(message)
        return fake

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToWorker)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (size,) = struct.unpack("<I", await self._reader.readexactly(4))
                message = decoder.decode(await self._reader.readexactly(size))
                if not isinstance(message, StatsRequest):
                    self.heard.append(message)
                elif not self.is_silent:
                    self.say(self.stats)
        self.is_cut = True

    def say(self, *messages: FromWorker) -> None:
        for message in messages:
            self._writer.write(encode(message))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    async def leave(self) -> None:
        self._writer.close()
        self.listening.cancel()
        await asyncio.gather(self.listening, return_exceptions=True)
        self.is_cut = True

    @property
    def submit(self) -> Submit:
        """The last one."""
        return next(m for m in reversed(self.heard) if isinstance(m, Submit))


class Site:
    """A pool that runs, its router, and the workers that dialled in."""

    def __init__(self, path: Path, counts: Mapping[str, int], watchdog_s: float) -> None:
        self.path = path
        self.router = Router(100, has_roles="prefill" in counts)
        self.changes: list[WorkerReady | None] = []
        self.pool = WorkerPool(
            no_start, counts, 0, watchdog_s, path, self.router, self.changes.append,
            is_external=True,
        )  # fmt: skip
        self.running = asyncio.create_task(self.pool.run())
        self.fakes: list[Fake] = []

    async def dial(self, role: str = "unified", **fields: Any) -> Fake:
        """A worker that is ready, once the pool has seen that."""
        fake = await Fake.dial(self.path, WorkerHello(1, role), make_ready(role, **fields))
        self.fakes.append(fake)
        before = len(self.pool.live)
        await until(
            lambda: fake.is_cut or len([w for w in self.pool.live if w.ready]) > before, "ready"
        )
        return fake

    async def submit(self, name: str) -> ActiveRequest:
        submit = Submit(name, 0, [1], [], SamplingParams(), 0, 9, [])
        request = ActiveRequest(submit)
        self.router.submit([request])
        return request


@contextlib.asynccontextmanager
async def site(
    folder: Path, counts: Mapping[str, int] | None = None, watchdog_s: float = 60.0
) -> AsyncIterator[Site]:
    """Stopped at the end; no task, connection or socket is left then."""
    before = asyncio.all_tasks()
    made = Site(folder / "w.sock", counts or {"unified": 1}, watchdog_s)
    await until(lambda: made.pool._server is not None or made.running.done(), "listening")
    try:
        yield made
    finally:
        made.pool.stop()
        with contextlib.suppress(errors.StartError):
            await asyncio.wait_for(made.running, PATIENCE_S)
        await until(lambda: all(fake.is_cut for fake in made.fakes), "connections are closed")
        for fake in made.fakes:
            await fake.leave()
        await until(lambda: asyncio.all_tasks() <= before, "no task is left")
        assert not made.path.exists()
        assert made.pool.live == []


# -- places and spares --------------------------------------------------------------------------


async def test_a_spare_takes_the_place_of_a_lost_worker(short_dir: Path) -> None:
    """It was ready and idle; requests of the lost one are on it at once."""
    async with site(short_dir, {"unified": 2}) as s:
        fakes = [await s.dial() for _ in range(3)]
        assert (len(s.pool.active), len(s.pool.spares)) == (2, 1)
        requests = [await s.submit(name) for name in "ab"]
        await until(lambda: all(fake.heard for fake in fakes[:2]), "each has one")
        assert fakes[2].heard == []
        lost = fakes[0]
        name = lost.submit.request_id
        lost.say(Output(name, lost.submit.attempt, 0, 0, [5]))
        await until(lambda: any(r.output_ids for r in requests), "a token")
        await lost.leave()
        await until(lambda: bool(fakes[2].heard), "the spare has it")
        assert (fakes[2].submit.request_id, fakes[2].submit.output_ids) == (name, [5])
        assert (len(s.pool.active), len(s.pool.spares)) == (2, 0)
        assert None not in s.changes, "requests were served all the time"


async def test_the_front_serves_while_there_is_a_worker_of_every_role(short_dir: Path) -> None:
    """It is told with the first complete set, and when one is not complete any more."""
    async with site(short_dir, {"prefill": 1, "decode": 1}) as s:
        prefill = await s.dial("prefill")
        assert (s.changes, s.pool.can_serve) == ([], False)
        await s.dial("decode", num_private_blocks=7)
        assert [change and change.role for change in s.changes] == ["decode"]
        assert s.pool.max_positions == 7 * 4, "what fits on each of them"
        await prefill.leave()
        await until(lambda: len(s.changes) == 2, "told")
        assert (s.changes[1], s.pool.can_serve) == (None, False)
        await s.dial("prefill")
        assert s.pool.can_serve
        assert s.changes[2] is not None


# -- who is taken -------------------------------------------------------------------------------


async def test_a_worker_of_another_stamp_is_refused(short_dir: Path) -> None:
    """It would compute something else; the first one is not touched."""
    async with site(short_dir, {"unified": 2}) as s:
        first = await s.dial()
        other = await s.dial(stamp="t")
        await until(lambda: other.is_cut, "refused")
        assert not first.is_cut
        assert [worker.ready and worker.ready.stamp for worker in s.pool.live] == ["s"]


async def test_a_stream_does_not_go_on_under_another_stamp(short_dir: Path) -> None:
    """The weights were replaced, then the only worker died: its successor computes other tokens."""
    async with site(short_dir) as s:
        first = await s.dial()
        request = await s.submit("a")
        await until(lambda: bool(first.heard), "it has the request")
        first.say(Output("a", first.submit.attempt, 0, 0, [5]))
        await until(lambda: bool(request.output_ids), "a token")
        await first.leave()
        await until(lambda: not s.pool.live, "forgotten")
        second = await s.dial(stamp="t")
        await until(lambda: second.is_cut or s.router.num_active == 0 or bool(second.heard), "told")
        assert second.heard == []


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


STRANGERS = {
    "no message": frame(b"hello?"),
    "no hello": encode(Progress("a", 1, 0, 1)),
    "too large": struct.pack("<I", (8 << 20) + 1),
    "unknown role": encode(WorkerHello(1, "cook")),
    "hello twice": encode(WorkerHello(1, "unified")) * 2,
}


@pytest.mark.parametrize("data", STRANGERS.values(), ids=STRANGERS)
async def test_a_stranger_is_cut_off(short_dir: Path, data: bytes) -> None:
    """Whatever it says; the pool goes on for others."""
    async with site(short_dir) as s:
        stranger = await Fake.dial(s.path)
        s.fakes.append(stranger)
        stranger.write(data)
        await until(lambda: stranger.is_cut, "cut off")
        assert s.pool.live == []
        await s.dial()
        assert s.pool.can_serve


async def test_one_that_says_nothing_is_cut_off(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without a hello does not stay open for ever."""
    monkeypatch.setattr("engine.workers._DIALLED_TIMEOUT_S", 0.05)
    async with site(short_dir) as s:
        stranger = await Fake.dial(s.path)
        s.fakes.append(stranger)
        await until(lambda: stranger.is_cut, "cut off")


async def test_nobody_can_dial_a_front_that_starts_its_own_workers(short_dir: Path) -> None:
    """Its workers have their sockets from it; there is none in the file system."""
    pool = WorkerPool(no_start, {}, 0, 60.0, short_dir / "w", Router(10), lambda ready: None)
    running = asyncio.create_task(pool.run())
    await until(lambda: bool(pool._tasks), "running")
    assert os.listdir(short_dir) == []
    pool.stop()
    await asyncio.wait_for(running, PATIENCE_S)


async def test_the_socket_is_ours_alone(short_dir: Path) -> None:
    """Mode 0600; one that a dead front left is taken over."""
    async with site(short_dir):
        pass
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(short_dir / "w.sock"))
    async with site(short_dir) as s:
        assert stat.S_IMODE(s.path.stat().st_mode) == 0o600
        await s.dial()


async def test_a_file_at_the_sockets_path_is_left_alone(short_dir: Path) -> None:
    """It is no socket of an engine: the start fails and names it."""
    path = short_dir / "w.sock"
    path.write_text("mine")
    pool = WorkerPool(no_start, {}, 0, 60.0, path, Router(1), lambda ready: None, is_external=True)
    with pytest.raises(errors.StartError, match=r"w\.sock"):
        await pool.run()
    assert path.read_text() == "mine"


# -- who is dropped -----------------------------------------------------------------------------


async def test_a_worker_that_answers_no_more_is_dropped_and_not_heard_again(
    short_dir: Path, killed: list[LiveWorker]
) -> None:
    """Within the watchdog's time; what it says later is too late, another one has the request."""
    async with site(short_dir, watchdog_s=0.4) as s:
        hung, spare = await s.dial(), await s.dial()
        request = await s.submit("a")
        await until(lambda: bool(hung.heard), "it has the request")
        old = hung.submit
        hung.say(Output("a", old.attempt, 0, 0, [5]))
        hung.is_silent, began = True, time.monotonic()
        await until(lambda: bool(spare.heard), "the spare has it")
        assert 0.3 < time.monotonic() - began < 5
        assert [worker.channel for worker in killed]
        hung.say(Output("a", old.attempt, 0, 1, [6]), Finished("a", old.attempt, 0, "length"))
        spare.say(Output("a", spare.submit.attempt, 0, 1, [7]))
        await until(lambda: len(request.output_ids) == 2, "the next token")
        assert request.output_ids == [5, 7]
        assert not spare.is_cut


async def test_a_worker_that_says_something_is_not_hung(short_dir: Path) -> None:
    """Its counts come late in a long step; its tokens show that it lives."""
    async with site(short_dir, watchdog_s=0.3) as s:
        busy = await s.dial()
        request = await s.submit("a")
        await until(lambda: bool(busy.heard), "it has the request")
        busy.is_silent, end = True, time.monotonic() + 1.0
        while time.monotonic() < end:
            busy.say(Output("a", busy.submit.attempt, 0, len(request.output_ids), [5]))
            await asyncio.sleep(0.05)
        assert not busy.is_cut
        assert request.num_failovers == 0


async def test_output_that_is_not_contiguous_costs_a_worker_its_place(
    short_dir: Path, killed: list[LiveWorker]
) -> None:
    """It broke the contract: what else it says can't be believed either."""
    async with site(short_dir) as s:
        wrong, spare = await s.dial(), await s.dial()
        request = await s.submit("a")
        await until(lambda: bool(wrong.heard), "it has the request")
        wrong.say(Output("a", wrong.submit.attempt, 0, 3, [5]))
        await until(lambda: bool(spare.heard), "the spare has it")
        assert (request.output_ids, len(killed)) == ([], 1)


async def test_a_hung_process_is_killed(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: SIGKILL reaches it though it reads nothing any more."""
    monkeypatch.undo()
    code = (
        "import socket, sys, time\n"
        "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
        "s.sendall(bytes.fromhex(sys.argv[2])); time.sleep(600)"
    )
    hello = encode(WorkerHello(0, "unified")) + encode(make_ready())
    async with site(short_dir, watchdog_s=0.4) as s:
        command = [sys.executable, "-S", "-E", "-c", code, str(s.path), hello.hex()]
        process = await asyncio.create_subprocess_exec(*command)
        await until(lambda: bool(s.pool.active), "ready")
        assert s.pool.active[0].pid == process.pid
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == -signal.SIGKILL
        await until(lambda: not s.pool.live, "forgotten")


# -- starts that fail ---------------------------------------------------------------------------


async def test_a_worker_that_names_its_reason_ends_the_start(short_dir: Path) -> None:
    """No other would do better; the reason is what the front says."""
    async with site(short_dir) as s:
        fake = await Fake.dial(s.path, WorkerHello(1, "unified"), WorkerFailed("no such model"))
        s.fakes.append(fake)
        with pytest.raises(errors.StartError, match="no such model"):
            await asyncio.wait_for(s.running, PATIENCE_S)


async def test_beside_others_a_failed_worker_ends_only_itself(short_dir: Path) -> None:
    """A replacement that can't start leaves those that run in service."""
    async with site(short_dir) as s:
        first = await s.dial()
        fake = await Fake.dial(s.path, WorkerHello(1, "unified"), WorkerFailed("out of memory"))
        s.fakes.append(fake)
        await until(lambda: fake.is_cut, "dropped")
        assert not first.is_cut
        assert not s.running.done()


async def test_a_stop_ends_everything(short_dir: Path) -> None:
    """Requests, connections and tasks (`site` looks for what is left); no worker is killed."""
    async with site(short_dir, {"unified": 1}) as s:
        fakes = [await s.dial(), await s.dial()]
        request = await s.submit("a")
        s.pool.stop()
        await asyncio.wait_for(s.running, PATIENCE_S)
        await until(lambda: all(fake.is_cut for fake in fakes), "told by the closed channel")
        assert isinstance(request.events.get_nowait(), errors.DrainingError)


# -- counts -------------------------------------------------------------------------------------


async def test_counts_are_asked_for_and_passed_on(short_dir: Path) -> None:
    """Fresh ones on demand; those of active workers say how full their blocks are."""
    async with site(short_dir) as s:
        told: list[Stats] = []
        s.pool.on_stats = lambda pid, stats: told.append(stats)
        active, spare = await s.dial(), await s.dial()
        active.stats, spare.stats = make_stats(4), make_stats(9)
        workers = await s.pool.fresh_stats()
        assert [w.stats and w.stats.num_private_blocks_free for w in workers] == [4, 9]
        assert s.pool.kv_usage == pytest.approx(0.6)
        assert len(told) >= 2


async def test_counts_of_a_worker_that_is_silent_or_lost_are_not_waited_for(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' are fresh all the same."""
    monkeypatch.setattr("engine.workers._STATS_TIMEOUT_S", 0.2)
    async with site(short_dir) as s:
        first, second, third = [await s.dial() for _ in range(3)]
        first.stats, second.is_silent, third.is_silent = make_stats(3), True, True
        asking = asyncio.create_task(s.pool.fresh_stats())
        await asyncio.sleep(0)
        await third.leave()
        workers = await asking
        assert workers[0].stats == make_stats(3)
        assert not second.is_cut
