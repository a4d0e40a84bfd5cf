"""Whoever shares steps, blocks and seats with a request, in whatever chunks: same tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from engine.client import CallError
from engine.v1 import engine_pb2 as pb
from tests.daemon import Daemon, wait_until
from tests.engine import Engine, Stream, evict_all, make_prompt, together
from tests.jobs import Job
from tests.solo import begin, begin_together, check_all, solo_jobs

BLOCK = 32
BLOCK_BYTES = BLOCK * 1024  # M-rand
# A promise, and what a single one may take where other things keep the machine busy.
LIMIT_S, OUTLIER_S = 1.0, 10.0


@dataclass(frozen=True)
class Kind:
    """An engine of this module; each serves several tests."""

    chunk: int
    num_blocks: int = 200
    num_seats: int = 64
    has_daemon: bool = False

    @property
    def flags(self) -> list[str]:
        return [
            f"--block-size={BLOCK}",
            f"--prefill-chunk={self.chunk}",
            f"--private-pool-bytes={self.num_blocks * BLOCK_BYTES}",
            f"--max-num-seqs={self.num_seats}",
        ]


KINDS: Mapping[str, Kind] = {
    "chunk 1": Kind(1),
    "chunk 15, 5 blocks, daemon": Kind(15, num_blocks=5, has_daemon=True),
    "chunk 16": Kind(16),
    "chunk 17, 5 blocks": Kind(17, num_blocks=5),
    "chunk 32": Kind(32),
    "chunk 64, 10 blocks": Kind(64, num_blocks=10),
    "chunk 256, 2 seats, daemon": Kind(256, num_seats=2, has_daemon=True),
}


@pytest.fixture(scope="module")
def engines(shared_daemon: Daemon, m_rand_dir: Path) -> Iterator[Mapping[str, Engine]]:
    """One of each kind."""
    made = {
        name: Engine(
            m_rand_dir,
            shared_daemon.socket if kind.has_daemon else "off",
            extra=kind.flags,
            step_s=0.0,
        )
        for name, kind in KINDS.items()
    }
    with together(*made.values()):
        yield made


@pytest.fixture(scope="module")
def eight(shared_engine: Engine, m_rand_dir: Path) -> list[Job]:
    """From a part of a block to several, longer than a prefill chunk."""
    return solo_jobs(shared_engine, m_rand_dir, (1, 5, 31, 32, 33, 64, 100, 150), 40, 2000)


# -- together and alone ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["shortest first", "longest first", "shuffled"])
def test_eight_at_once_get_the_tokens_each_has_alone(
    shared_engine: Engine, eight: list[Job], order: str
) -> None:
    """In any order of arrival, and in far fewer steps than one after the other."""
    jobs = list(eight)
    if order == "longest first":
        jobs.reverse()
    elif order == "shuffled":
        random.Random(8).shuffle(jobs)
    before = shared_engine.wait_idle().num_steps
    check_all(jobs, begin_together(shared_engine, jobs, bypass_prefix_cache=True))
    num_steps = shared_engine.wait_idle().num_steps - before
    assert num_steps < 0.75 * sum(len(job.ids) for job in jobs), "they ran one after the other"


def test_who_joins_a_running_batch_changes_no_token(
    shared_engine: Engine, eight: list[Job]
) -> None:
    """Each arrives while those before it are in prefill or decode, or have ended."""
    chance = random.Random(9)
    for _ in range(3):
        jobs = chance.sample(eight, len(eight))
        streams = []
        with shared_engine.slowed(0.02):
            for job in jobs:
                streams += begin(shared_engine, [job], bypass_prefix_cache=True)
                streams[-1].wait_for_tokens(chance.randrange(4))
        check_all(jobs, streams)


def test_a_batch_gets_the_same_tokens_from_the_cache(
    shared_daemon: Daemon, shared_engine: Engine, eight: list[Job]
) -> None:
    """Cold, all eight are computed and published side by side; then all of them are hits."""
    shared_engine.wait_idle()
    evict_all(shared_daemon)
    cold = check_all(eight, begin_together(shared_engine, eight))
    shared_engine.wait_idle()
    warm = check_all(eight, begin_together(shared_engine, eight))
    assert [answer.done.cached_tokens for answer in cold] == [0] * len(eight)
    assert [answer.done.cached_tokens for answer in warm] == [len(job.prompt) - 1 for job in eight]


def test_a_batch_whose_worker_is_killed_goes_on_with_the_same_tokens(
    shared_engine: Engine, eight: list[Job]
) -> None:
    """Those that had begun go on in the next worker, the others begin there."""
    with shared_engine.slowed(0.3):
        streams = begin(shared_engine, eight, bypass_prefix_cache=True)
        for stream in streams[:4]:
            stream.wait_for_tokens(3)
        shared_engine.kill_worker()
        for stream in streams:
            stream.check_running()
    answers = check_all(eight, streams)
    assert max(answer.done.num_failovers for answer in answers) == 1
    shared_engine.wait_idle()


# -- chunks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_each_length(shared_engine: Engine, m_rand_dir: Path) -> list[Job]:
    """Prompts of 1 to 130 tokens. The second token of an answer reads all KV of its prompt."""
    return solo_jobs(shared_engine, m_rand_dir, range(1, 131), 2, 3000)


@pytest.mark.parametrize("name", KINDS)
def test_e10_chunks_of_any_size_give_the_same_tokens(
    engines: Mapping[str, Engine], of_each_length: list[Job], name: str
) -> None:
    """Prompts cut at, before and behind the borders of blocks, or not at all."""
    jobs = of_each_length
    if KINDS[name].chunk == 1:  # a step for each token: only those around borders
        jobs = [job for job in jobs if len(job.prompt) < 20 or (len(job.prompt) + 1) % BLOCK < 3]
    check_all(jobs, begin(engines[name], jobs))


def test_e6_a_message_for_every_token_and_none_for_an_unfinished_prefill(
    engines: Mapping[str, Engine], of_each_length: list[Job], m_rand_dir: Path
) -> None:
    """Eight short prompts and two of many chunks, together: tokens as alone, each told once."""
    engine = engines["chunk 32"]
    jobs = solo_jobs(engine, m_rand_dir, (3, 7, 11, 15, 19, 23, 27, 31, 150, 200), 12, 2100)
    for _ in range(3):
        for answer in check_all(jobs, begin(engine, jobs)):
            assert [piece.num_tokens for piece in answer.pieces if piece.token_ids] == [1] * 12
            assert answer.done.completion_tokens == 12


# -- a long prompt beside a stream ----------------------------------------------------------------


@dataclass(frozen=True)
class Meeting:
    """A long prefill beside a decoding stream: seconds between the stream's tokens, and steps."""

    gaps_meanwhile: Sequence[float]
    gaps_else: Sequence[float]
    chunk_s: float
    num_steps: int

    @property
    def is_smooth(self) -> bool:
        """Within twice a chunk and a step, beside what the machine itself puts between tokens."""
        limit = 2 * (self.chunk_s + statistics.median(self.gaps_else))
        return max(self.gaps_meanwhile) <= limit + max(self.gaps_else)


def meet(engine: Engine, victim: Job, long_prompt: list[int]) -> Meeting:
    """At the victim's 20th token a prompt of 3,000 tokens arrives."""
    before = engine.wait_idle().num_steps
    with engine.slowed(0.05):
        (stream,) = begin(engine, [victim], bypass_prefix_cache=True)
        stream.wait_for_tokens(20)
        other = engine.stream(long_prompt, max_tokens=1, bypass_prefix_cache=True)
        long_answer = other.result()
        stream.check_running()
        victim.check(stream.result())
    steps = engine.wait_idle().num_steps - before
    end = other.arrivals[0]
    start = end - long_answer.done.timings_s["prefill"]
    during, others = [], []
    for first, second in pairwise(stream.arrivals):
        (during if first < end and second > start else others).append(second - first)
    chunk_s = long_answer.done.timings_s["prefill"] / -(-len(long_prompt) // 128)
    return Meeting(during, others, chunk_s, steps)


def test_e4_a_long_prefill_does_not_hold_up_a_stream(
    shared_engine: Engine, m_rand_dir: Path
) -> None:
    """Every chunk's step has a token of the stream too; no gap is longer than about two chunks.

    The times are of a machine that others use as well: one run of three has to be smooth. A stream
    that is held up waits for the whole prefill in each.
    """
    (victim,) = solo_jobs(shared_engine, m_rand_dir, [40], 200, 2200)
    meetings = []
    for salt in (2210, 2211, 2212):
        meetings.append(meet(shared_engine, victim, make_prompt(3000, salt)))
        # One step for the victim's prompt, then one for each token: 24 chunks cost none extra.
        assert meetings[-1].num_steps == 200
        assert len(meetings[-1].gaps_meanwhile) >= 24
        if meetings[-1].is_smooth:
            return
    pytest.fail(f"held up each time: {meetings}")


# -- a small pool ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(shared_engine: Engine, m_rand_dir: Path) -> list[Job]:
    """Two that begin side by side in nine blocks, and need ten to end side by side."""
    return solo_jobs(shared_engine, m_rand_dir, (40, 40), 40, 2300)


def begin_side_by_side(engine: Engine, jobs: Sequence[Job], **options: object) -> list[Stream]:
    """All begin in the same step: when one ends that needs all nine blocks."""
    with engine.slowed(0.2):
        ahead = engine.stream(make_prompt(40, 2301), max_tokens=104, bypass_prefix_cache=True)
        ahead.wait_for_tokens(1)
        streams = begin(engine, jobs, **options)
        for stream in streams:
            stream.wait_accepted()
        ahead.check_running()
    ahead.result()
    return streams


def test_d13_a_request_that_is_preempted_gets_the_tokens_it_has_alone(
    engines: Mapping[str, Engine], pair: list[Job]
) -> None:
    """Without a daemon: the younger gives its blocks up and is computed anew."""
    engine = engines["chunk 17, 5 blocks"]
    before = engine.wait_idle().num_preemptions
    answers = check_all(pair, begin_side_by_side(engine, pair))
    num_preemptions = engine.wait_idle().num_preemptions - before
    assert num_preemptions > 0
    assert sum(answer.done.num_preemptions for answer in answers) == num_preemptions


def test_d13_with_a_daemon_private_blocks_are_kept_by_those_that_bypass_it(
    engines: Mapping[str, Engine], pair: list[Job]
) -> None:
    """Beside a daemon, preempted or not: the tokens are those of alone.

    What is published leaves the private pool, so two that publish hold one short block each and
    none is ever preempted for want of blocks; two that don't publish are.
    """
    engine = engines["chunk 15, 5 blocks, daemon"]
    for _ in ("cold", "warm"):
        check_all(pair, begin_side_by_side(engine, pair))
    before = engine.wait_idle().num_preemptions
    check_all(pair, begin_side_by_side(engine, pair, bypass_prefix_cache=True))
    assert engine.wait_idle().num_preemptions > before


def test_e1_a_request_that_can_never_fit_is_refused_at_once(
    engines: Mapping[str, Engine], of_each_length: list[Job]
) -> None:
    """The error names what is needed and what there is; who fits is served, to the last block."""
    engine = engines["chunk 64, 10 blocks"]
    assert engine.client().model_info().max_context == 4096
    started = time.monotonic()
    with pytest.raises(CallError, match=r"409 positions are needed.* 320") as refused:
        engine.generate(make_prompt(400, 2400), max_tokens=10)
    assert time.monotonic() - started < OUTLIER_S
    assert (refused.value.status, refused.value.reason) == (
        "RESOURCE_EXHAUSTED",
        "REQUEST_TOO_LARGE",
    )
    check_all(of_each_length[35:40], begin(engine, of_each_length[35:40]))
    with pytest.raises(CallError, match=r"321 positions are needed.* 320"):
        engine.generate(make_prompt(300, 2401), max_tokens=22)
    assert len(engine.generate(make_prompt(300, 2401), max_tokens=21).ids) == 21


def test_e11_a_pool_that_was_full_admits_the_next_request(
    engines: Mapping[str, Engine], of_each_length: list[Job], m_rand_dir: Path
) -> None:
    """Six fill it, three are cancelled somewhere, the rest ends: thirty times, nothing is left."""
    engine = engines["chunk 64, 10 blocks"]
    # Five are admitted with two blocks each, and need a third at their 25th token.
    jobs = solo_jobs(engine, m_rand_dir, [40] * 8, 40, 2500)
    before = engine.wait_idle().num_preemptions
    chance = random.Random(11)
    took, num_cut = [], 0
    for _ in range(30):
        chosen = chance.sample(jobs, 6)
        leaving = set(chance.sample(range(6), 3))
        with engine.slowed(0.01):
            streams = begin_together(engine, chosen)
            for number in leaving:
                streams[number].wait_for_tokens(chance.randrange(36))
                streams[number].cancel()
        check_all(
            [job for number, job in enumerate(chosen) if number not in leaving],
            [stream for number, stream in enumerate(streams) if number not in leaving],
        )
        for number in leaving:
            streams[number].join()
            num_cut += streams[number].done is None
        worker = engine.wait_idle()
        assert (worker.num_running, worker.num_waiting) == (0, 0)
        started = time.monotonic()
        (stream,) = begin(engine, of_each_length[:1])
        check_all(of_each_length[:1], [stream])
        took.append(stream.arrivals[0] - started)
    assert engine.wait_idle().num_preemptions > before, "the pool was never full"
    assert num_cut > 30, "most were over before they left"
    print(f"longest wait for a first token: {max(took):.3f} s")
    assert statistics.median(took) < LIMIT_S
    assert max(took) < OUTLIER_S


# -- urgency --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_jobs(shared_engine: Engine, m_rand_dir: Path) -> list[Job]:
    """Long enough that others come and go meanwhile."""
    return solo_jobs(shared_engine, m_rand_dir, (40, 70), 200, 2600)


def test_e2_an_interactive_request_takes_the_seat_of_a_background_one(
    engines: Mapping[str, Engine], long_jobs: list[Job], eight: list[Job]
) -> None:
    """It has its first token while both run on; the one that made room ends with its own tokens."""
    engine = engines["chunk 256, 2 seats, daemon"]
    before = engine.wait_idle().num_preemptions
    with engine.slowed(0.1):
        background = begin(engine, long_jobs, urgency=pb.URGENCY_BACKGROUND)
        for stream in background:
            stream.wait_for_tokens(5)
        (urgent,) = begin(engine, [eight[4]], urgency=pb.URGENCY_INTERACTIVE)
        urgent.wait_for_tokens(1)
        for stream in background:
            stream.check_running()
    check_all([eight[4]], [urgent])
    victims = check_all(long_jobs, background)
    assert sorted(answer.done.num_preemptions for answer in victims) == [0, 1]
    assert max(answer.done.timings_s["preempted"] for answer in victims) > 0
    assert engine.wait_idle().num_preemptions == before + 1


def test_e2_equal_requests_take_no_seat_from_each_other(
    engines: Mapping[str, Engine], long_jobs: list[Job], eight: list[Job]
) -> None:
    """They wait, those of a lower priority number in front, whatever the urgency they share."""
    engine = engines["chunk 256, 2 seats, daemon"]
    before = engine.wait_idle().num_preemptions
    for urgency in (pb.URGENCY_INTERACTIVE, pb.URGENCY_NORMAL, pb.URGENCY_BACKGROUND):
        with engine.slowed(0.2):
            running = begin(engine, long_jobs, urgency=urgency, priority=5)
            for stream in running:
                stream.wait_for_tokens(1)
            (later,) = begin(engine, eight[2:3], urgency=urgency, priority=1)
            later.wait_accepted()
            (sooner,) = begin(engine, eight[3:4], urgency=urgency, priority=0)
            sooner.wait_accepted()
            for stream in (*running, later, sooner):
                stream.check_running()
            assert not (later.pieces or sooner.pieces), "one took a seat"
            running[0].cancel()
            wait_until(lambda: bool(later.pieces or sooner.pieces), "one has the free seat")  # noqa: B023
            assert sooner.pieces
            assert not later.pieces
            running[1].check_running()
        check_all([long_jobs[1], *eight[2:4]], [running[1], later, sooner])
        running[0].join()
        assert running[0].ids == long_jobs[0].ids[: len(running[0].ids)]
    assert engine.wait_idle().num_preemptions == before
