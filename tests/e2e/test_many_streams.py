"""Sixty-four streams at once: they leave anywhere, the daemon dies under them, seats are few."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from engine.client import CallError, Done, EngineClient, Text
from tests.daemon import PATIENCE_S, Daemon, wait_until
from tests.engine import Engine, make_prompt
from tests.jobs import Job
from tests.loop_front import SlowHashModel, loop_front
from tests.scripted_worker import Bench
from tests.solo import begin, check_all, solo_jobs

NUM_STREAMS = 64
NUM_SEATS = 16
NUM_OUTPUT = 48
# How many times 64 streams run while the daemon is dead.
NUM_WAVES = int(os.environ.get("CACHEWARM_TEST_REPEATS", "1"))
BLOCK = 32
# Holds all prompts at once, and less than half of what 64 streams come to need.
NUM_BLOCKS = 80
# As many seats as streams; a private pool that is too small for all of them.
CROWD_FLAGS = [
    "--block-size", str(BLOCK), "--private-pool-bytes", str(NUM_BLOCKS * BLOCK * 1024),
    "--max-num-seqs", str(NUM_STREAMS),
]  # fmt: skip


# What came in which order, only the worker knows: a line for each chunk, with the number of the
# step, the sequence, and the first token of a chunk that begins a prompt.
NOTES_STEPS = """
import itertools, os
numbers, forward = itertools.count(), Executor.forward

def noting(self, chunks):
    number = next(numbers)
    with open(os.path.join(os.environ["XDG_RUNTIME_DIR"], "steps"), "a") as file:
        for chunk in chunks:
            first = -1 if chunk.start else chunk.token_ids[0]
            print(number, id(chunk.blocks), first, file=file)
    return forward(self, chunks)

Executor.forward = noting
"""


def noted_steps(engine: Engine) -> dict[int, tuple[int, int]]:
    """First and last step of the latest sequence by the first token of its prompt."""
    spans: dict[int, tuple[int, int]] = {}
    begun: dict[int, int] = {}  # by sequence: the first token of its prompt
    for line in (engine.runtime_dir / "steps").read_text().splitlines():
        number, sequence, first = map(int, line.split())
        if first >= 0:
            begun[sequence], spans[first] = first, (number, number)
        elif sequence in begun:
            spans[begun[sequence]] = (spans[begun[sequence]][0], number)
    return spans


# -- leaving --------------------------------------------------------------------------------------


def leave(client: EngineClient, number: int) -> tuple[str, str]:
    """Begin a stream and leave it; the number decides how and where. Returns both."""
    chance = random.Random(number)
    way = ("close", "abort", "deadline")[number % 3]
    last = chance.choice((0, 0, 1, 5, 20))  # of the messages it waits for; the first is Accepted
    limit_s = chance.uniform(0.01, 1.0) if way == "deadline" else PATIENCE_S
    name, length = f"leave-{number}", chance.choice((5, 40, 400))
    prompt = make_prompt(length, 6000 + number)
    # Steps take 20 ms: nobody gets to the end before it leaves.
    events = client.generate(
        prompt, request_id=name, max_tokens=1500, ignore_eos=True, timeout=limit_s
    )
    num_tokens = 0
    try:
        for index, event in enumerate(events):
            if isinstance(event, Text):
                num_tokens += event.num_tokens
            if isinstance(event, Done):
                assert (way, event.finish_reason) == ("abort", "cancelled")
                break
            if index == last and way == "close":
                break
            if index == last and way == "abort":
                assert client.abort(name)
    except CallError as error:
        assert (way, error.status) == ("deadline", "DEADLINE_EXCEEDED"), error
    finally:
        events.close()
    return way, "decode" if num_tokens else "before"


def leave_all(client: EngineClient, number: int) -> Counter[tuple[str, str]]:
    """A round of 64; in every round each of them leaves in the same way as in any other."""
    first = 1000 * number
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        numbers = range(first, first + NUM_STREAMS)
        return Counter(threads.map(partial(leave, client), numbers))


def check_mixture(ways: Counter[tuple[str, str]]) -> None:
    """All ways were taken, and both before and behind the first token."""
    assert sum(ways.values()) == NUM_STREAMS
    assert {way for way, _ in ways} == {"close", "abort", "deadline"}
    assert {phase for _, phase in ways} == {"before", "decode"}


@pytest.fixture(scope="module")
def few_seats(shared_daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """Most of 64 streams have to queue, and a prefill takes several steps; it notes them."""
    flags = ["--max-num-seqs", str(NUM_SEATS), "--prefill-chunk", "64"]
    with Engine(
        m_rand_dir, shared_daemon.socket, extra=flags, step_s=0.0, patch=NOTES_STEPS
    ) as engine:
        yield engine


def footprint(engine: Engine, daemon: Daemon) -> dict[str, object]:
    """All that a stream could leave behind, in the front, its worker and the daemon."""
    worker = engine.worker()
    processes = {"front": psutil.Process(engine.pid), "worker": psutil.Process(worker.pid)}
    status = daemon.status()
    return {
        "requests": engine.client().load().num_running + engine.client().load().num_waiting,
        "sequences": worker.num_running + worker.num_waiting,
        "free blocks": worker.num_private_blocks_free,
        "shared blocks in use": worker.num_shared_blocks_in_use,
        "leases": status.counters["leases"],
        "leases by client": sorted(client.num_leases for client in status.clients),
        "engine connections": sum(client.role == "engine" for client in status.clients),
        "worker": worker.pid,
        **{f"descriptors of the {name}": p.num_fds() for name, p in processes.items()},
        **{f"threads of the {name}": p.num_threads() for name, p in processes.items()},
    }


def test_64_streams_that_leave_anywhere_leave_nothing_behind(
    few_seats: Engine, shared_daemon: Daemon
) -> None:
    """In queue, prefill, decode; by closing, Abort, deadline: each round ends as the first."""
    client = few_seats.client()
    ends: list[dict[str, object]] = []
    for number in range(3):
        with ThreadPoolExecutor(1) as thread, few_seats.slowed(0.02):
            leaving = thread.submit(leave_all, client, number)
            wait_until(lambda: client.load().num_waiting > 0, "a queue")
            check_mixture(leaving.result())
        worker = few_seats.wait_idle()
        assert worker.num_private_blocks_free == worker.num_private_blocks
        wait_until(lambda: shared_daemon.status().counters["leases"] == 0, "all leases are back")
        ends.append(footprint(few_seats, shared_daemon))
        with contextlib.suppress(AssertionError):  # a descriptor may be closed a moment later
            wait_until(lambda: footprint(few_seats, shared_daemon) == ends[0], "the same")
        assert footprint(few_seats, shared_daemon) == ends[0]


def tasks() -> Counter[str]:
    """Of this loop, by what they run; without those in which gRPC waits for the next calls."""
    coroutines = (getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    return Counter(name for name in coroutines if not name.startswith("AioServer._request_"))


async def test_64_streams_that_leave_anywhere_leave_no_task(m_rand_dir: Path) -> None:
    """The same with the front in this loop: it has the tasks of before again, after each round."""
    bench = Bench(num_blocks=1000, max_num_seqs=NUM_SEATS, model=SlowHashModel())
    loop = asyncio.get_running_loop()
    async with loop_front(m_rand_dir, bench) as target:
        before = tasks()
        with ThreadPoolExecutor(1) as thread, EngineClient(target) as client:
            for number in range(3):
                leaving = loop.run_in_executor(thread, leave_all, client, number)
                most = 0
                while not leaving.done():
                    most = max(most, tasks().total())
                    await asyncio.sleep(0.01)
                check_mixture(await leaving)
                assert most > before.total() + NUM_SEATS, "tasks of streams are not counted"
                end = time.monotonic() + PATIENCE_S
                while tasks() != before or bench.pool.num_free != bench.num_blocks:
                    assert time.monotonic() < end, f"{tasks()} instead of {before}"
                    await asyncio.sleep(0.01)
                bench.check_idle()


# -- a dead daemon --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal_daemon() -> Iterator[Daemon]:
    """A daemon that tests kill and stop."""
    with (
        tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder,
        Daemon(Path(folder) / "s", "64MiB") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def crowded(mortal_daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """A seat for everybody, private blocks for less than half of them."""
    with Engine(m_rand_dir, mortal_daemon.socket, extra=CROWD_FLAGS, step_s=0.0) as engine:
        yield engine


@pytest.fixture(scope="module")
def jobs(crowded: Engine, m_rand_dir: Path) -> list[Job]:
    """One for each of 64 streams."""
    lengths = [5 + number % 16 for number in range(NUM_STREAMS)]
    return solo_jobs(crowded, m_rand_dir, lengths, NUM_OUTPUT, 6500)


def ride_out(engine: Engine, jobs: list[Job], strike: Callable[[], None]) -> None:
    """All run when the daemon dies, and more come while it is dead: each has its own tokens."""
    wait_until(lambda: engine.worker().daemon_connected, "a link")
    before = engine.wait_idle()
    # Slow enough that the daemon is gone before the first of them needs a second block.
    with engine.slowed(0.5):
        streams = begin(engine, jobs)
        for stream in streams:
            stream.wait_for_tokens(1)
        assert engine.worker().num_running == NUM_STREAMS
        strike()
        for stream in streams:
            stream.check_running()
    for wave in range(NUM_WAVES):
        if wave:
            streams = begin(engine, jobs)
        answers = check_all(jobs, streams)
        assert [answer.done.num_failovers for answer in answers] == [0] * NUM_STREAMS
    after = engine.wait_idle()
    assert (after.daemon_connected, after.pid) == (False, before.pid)
    assert after.num_preemptions > before.num_preemptions, "the pool was large enough for all"


def wait_warm(engine: Engine, job: Job) -> None:
    """Returns when the engine hits what it published."""
    wait_until(lambda: engine.worker().daemon_connected, "a link")
    wait_until(lambda: engine.generate(job.prompt, max_tokens=1).done.cached_tokens > 0, "a hit")


def test_64_streams_outlive_a_killed_daemon(
    crowded: Engine, mortal_daemon: Daemon, jobs: list[Job]
) -> None:
    """SIGKILL under all of them: blocks run out, some are preempted, no token differs."""
    ride_out(crowded, jobs, mortal_daemon.kill)
    mortal_daemon.start()
    wait_warm(crowded, jobs[0])
    check_all(jobs[:8], begin(crowded, jobs[:8]))


def test_64_streams_outlive_a_stopped_daemon(
    crowded: Engine, mortal_daemon: Daemon, jobs: list[Job]
) -> None:
    """SIGSTOP for the whole run: blocks it owes an answer for come back, no token differs."""
    try:
        ride_out(crowded, jobs, mortal_daemon.sigstop)
    finally:
        mortal_daemon.sigcont()
    wait_warm(crowded, jobs[0])
    check_all(jobs[:8], begin(crowded, jobs[:8]))


# -- few seats ------------------------------------------------------------------------------------


def test_64_streams_on_16_seats_take_their_turns(few_seats: Engine, jobs: list[Job]) -> None:
    """All end with their own tokens, and nobody is served after one that came a batch later."""
    streams = []
    with few_seats.slowed(0.5):
        for job in jobs:
            streams += begin(few_seats, [job])
            streams[-1].wait_accepted()
        assert few_seats.worker().num_running == NUM_SEATS
        for stream in streams:
            stream.check_running()
    check_all(jobs, streams)
    steps = noted_steps(few_seats)
    spans = [steps[job.prompt[0]] for job in jobs]
    firsts = sorted(range(NUM_STREAMS), key=lambda number: spans[number][0])
    late = {number: place - number for place, number in enumerate(firsts)}
    assert max(map(abs, late.values())) < NUM_SEATS, late
    for number, (began, _) in enumerate(spans):
        num_ended = sum(ended < began for _, ended in spans)
        assert num_ended <= number, "others that came later had ended before it began"
