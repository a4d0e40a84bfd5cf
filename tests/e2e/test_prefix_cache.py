"""Blocks that requests and engines share: who hits what, who must not, and what is given back."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from cachewarmd.v1 import control_pb2
from engine.client import CallError, Done
from tests.daemon import PATIENCE_S, Daemon, wait_until
from tests.engine import Engine, evict_all, make_prompt, serve_fails, together
from tests.fixtures.models import write_m_rand
from tests.jobs import Job, make_jobs
from tests.solo import begin_together, check_all, solo_job, solo_jobs

BLOCK, LARGE_BLOCK = 32, 64
NUM_PRIVATE_BLOCKS = 16  # of the engine whose whole pool one request can take


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M-rand2: the same shape and the same file sizes, other weights."""
    return write_m_rand(tmp_path_factory.mktemp("models") / "m-rand2", variant=1)


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[Daemon]:
    """With an extent for each of the module's slot sizes, so that none drives another out."""
    with (
        tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder,
        Daemon(Path(folder) / "s", "128MiB") as running,
    ):
        yield running


@pytest.fixture(scope="module")
def engines(
    shared_daemon: Daemon, m_rand_dir: Path, other_model_dir: Path
) -> Iterator[Mapping[str, Engine]]:
    """Four on one daemon: one and another of a kind, one of another block size, another model."""
    pool_bytes = NUM_PRIVATE_BLOCKS * BLOCK * 1024  # M-rand has 1 KiB a token
    flags = ["--prefill-chunk", "16", "--private-pool-bytes", str(pool_bytes)]
    socket = shared_daemon.socket
    made = {
        "one": Engine(m_rand_dir, socket, env={"PYTHONHASHSEED": "1"}),
        "another": Engine(m_rand_dir, socket, extra=flags, env={"PYTHONHASHSEED": "2"}, step_s=0.0),
        "large blocks": Engine(
            m_rand_dir, socket, extra=["--block-size", str(LARGE_BLOCK)], step_s=0.0
        ),
        "other model": Engine(other_model_dir, socket),
    }
    with together(*made.values()):
        yield made


@pytest.fixture
def empty_daemon(shared_daemon: Daemon, engines: Mapping[str, Engine]) -> Daemon:
    """The module's daemon without a block, while all engines are idle."""
    for engine in engines.values():
        engine.wait_idle()
    evict_all(shared_daemon)
    return shared_daemon


# -- what two prompts have in common --------------------------------------------------------------


Pair = tuple[Job, Job]


@pytest.fixture(scope="module")
def pairs(engines: Mapping[str, Engine], m_rand_dir: Path) -> dict[int, Pair]:
    """By p: two prompts that share exactly p tokens; other pairs share nothing with them."""
    salts = count(4000)
    return {
        p: _pair(engines["large blocks"], m_rand_dir, p, salts) for p in range(2 * LARGE_BLOCK + 2)
    }


def _pair(engine: Engine, model_dir: Path, num_common: int, salts: Iterator[int]) -> Pair:
    for salt in salts:
        first, second = make_prompt(num_common + 21, salt), make_prompt(19, salt + 250)
        if first[num_common] == second[0]:
            continue
        prompts = (first, [*first[:num_common], *second])
        first_job, second_job = (solo_job(engine, model_dir, prompt, 6) for prompt in prompts)
        return first_job, second_job
    raise AssertionError("salts are endless")


def test_d2_the_second_of_two_hits_the_full_blocks_they_share(
    empty_daemon: Daemon, engines: Mapping[str, Engine], pairs: Mapping[int, Pair]
) -> None:
    """One after the other, at any place of parting: tokens as alone, never a block too many."""
    engine = engines["large blocks"]
    cached = {}
    for p, (first, second) in pairs.items():
        answers = [engine.generate(job.prompt, **job.options) for job in (first, second)]
        first.check(answers[0])
        second.check(answers[1])
        cached[p] = [answer.done.cached_tokens for answer in answers]
    assert cached == {p: [0, p // LARGE_BLOCK * LARGE_BLOCK] for p in pairs}


def test_d2_two_at_the_same_time_share_no_more_than_they_have_in_common(
    empty_daemon: Daemon, engines: Mapping[str, Engine], pairs: Mapping[int, Pair]
) -> None:
    """All pairs at once: tokens as alone; what one takes from the other is what they share."""
    jobs = [job for pair in pairs.values() for job in pair]
    answers = check_all(jobs, begin_together(engines["large blocks"], jobs))
    cached = [answer.done.cached_tokens for answer in answers]
    both = [max(pair) for pair in zip(cached[::2], cached[1::2], strict=True)]
    assert all(most <= p for p, most in zip(pairs, both, strict=True)), both
    assert max(both) >= LARGE_BLOCK, "none of them shared anything"


# -- engines that share ---------------------------------------------------------------------------


def test_d3_engines_with_other_hash_seeds_hit_each_others_blocks(
    empty_daemon: Daemon, engines: Mapping[str, Engine], m_rand_dir: Path
) -> None:
    """PYTHONHASHSEED and the order of start decide no key: what one computed, the other reads."""
    one, another = engines["one"], engines["another"]
    jobs = solo_jobs(one, m_rand_dir, (20, 64, 70, 100), 6, 4100)
    for first, second in ((one, another), (another, one)):
        for engine in (one, another):
            engine.wait_idle()
        evict_all(empty_daemon)
        for job in jobs:
            cold = first.generate(job.prompt, **job.options)
            warm = second.generate(job.prompt, **job.options)
            job.check(cold)
            job.check(warm)
            assert (cold.done.cached_tokens, warm.done.cached_tokens) == (0, len(job.prompt) - 1)


def test_d12_cold_and_every_kind_of_hit_give_the_same_tokens(
    empty_daemon: Daemon, engines: Mapping[str, Engine], m_rand_dir: Path
) -> None:
    """Greedy and seeded: cold, a hit of one's own, after a restart, of another engine's chunks."""
    one, another = engines["one"], engines["another"]
    jobs = make_jobs(one, m_rand_dir, (20, 64, 70, 100), 4200)
    theirs = make_jobs(one, m_rand_dir, (30, 33, 95, 110), 4300)

    def check(engine: Engine, jobs: Sequence[Job], *, is_cold: bool = False) -> None:
        for job in jobs:
            answer = engine.generate(job.prompt, **job.options)
            job.check(answer)
            assert answer.done.cached_tokens == (0 if is_cold else len(job.prompt) - 1)

    check(one, jobs, is_cold=True)
    check(one, jobs)
    check(another, jobs)
    check(another, theirs, is_cold=True)
    one.restart()
    check(one, jobs)
    check(one, theirs)


# -- requests that must not ----------------------------------------------------------------------


@pytest.mark.parametrize("engine_names", [("one", "one"), ("one", "another")])
def test_d7_only_requests_of_the_same_salt_hit(
    empty_daemon: Daemon,
    engines: Mapping[str, Engine],
    m_rand_dir: Path,
    engine_names: tuple[str, str],
) -> None:
    """Each salt is cold once, whoever computed the others, and warm the second time."""
    first, second = (engines[name] for name in engine_names)
    salts: list[str | None] = [None, "", "A", "B", "AB", "m-rand", "\0", "\N{SNOWMAN}"]
    job = solo_job(first, m_rand_dir, make_prompt(100, 4350), 6)
    for engine, cached in ((first, 0), (second, len(job.prompt) - 1)):
        for salt in salts:
            answer = engine.generate(job.prompt, cache_salt=salt, **job.options)
            job.check(answer)
            assert answer.done.cached_tokens == cached, salt


def test_d7_requests_of_two_salts_share_nothing_at_the_same_time_either(
    empty_daemon: Daemon, engines: Mapping[str, Engine], m_rand_dir: Path
) -> None:
    """Not within one worker, before anything is sealed."""
    engine = engines["one"]
    job = solo_job(engine, m_rand_dir, make_prompt(110, 4360), 40)
    options = {**job.options, "max_tokens": 40}
    streams = [engine.stream(job.prompt, cache_salt=salt, **options) for salt in ("A", "B", None)]
    for stream in streams:
        answer = stream.result()
        job.check(answer)
        assert answer.done.cached_tokens == 0


# -- engines that must not ------------------------------------------------------------------------


def test_d6_other_block_sizes_and_other_models_never_hit_each_others_blocks(
    empty_daemon: Daemon, engines: Mapping[str, Engine], m_rand_dir: Path, other_model_dir: Path
) -> None:
    """The same prompts to all on one daemon: each is cold once, then hits its own, and is right."""
    kinds = [
        (engines["one"], m_rand_dir),
        (engines["large blocks"], m_rand_dir),
        (engines["other model"], other_model_dir),
    ]
    prompts = [make_prompt(length, salt) for length, salt in ((100, 4400), (40, 4402))]
    answers = [[solo_job(e, model, prompt, 8) for prompt in prompts] for e, model in kinds]
    for cached in (lambda job: 0, lambda job: len(job.prompt) - 1):
        for (engine, _), jobs in zip(kinds, answers, strict=True):
            for job in jobs:
                answer = engine.generate(job.prompt, **job.options)
                job.check(answer)
                assert answer.done.cached_tokens == cached(job)
    ids = [[job.ids for job in jobs] for jobs in answers]
    assert ids[0] == ids[1]
    assert all(a != b for a, b in zip(ids[0], ids[2], strict=True))
    stamps = {engine.client().model_info().stamp for engine, _ in kinds}
    assert len(stamps) == 3
    assert all(s.num_blocks for s in empty_daemon.status().stamps if s.stamp in stamps)


def test_d14_a_sliding_window_is_refused_and_never_ignored(tmp_path: Path) -> None:
    """Full attention would give other tokens past the window, so the model is not served."""
    model = write_m_rand(tmp_path / "m", config={"sliding_window": 32})
    status, error = serve_fails("--model", str(model), "--cachewarmd", "off", "--port", "0")
    assert status == 1
    assert "sliding_window = 32" in error
    assert "max-context 4096" in error, "it says what is allowed"


# -- what is given back ---------------------------------------------------------------------------


class Mixture:
    """Short requests that end in every way there is."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self._client = engine.client()
        self._jobs = jobs

    def run(self, number: int) -> str:
        """The number decides the request and its end; returns how it ended."""
        chance = random.Random(number)
        job = chance.choice(self._jobs)
        kind = ("length", "stop id", "stop text", "close", "abort", "too long", "bad", "deadline")[
            number % 8
        ]
        options = {"request_id": f"mix-{number}", "timeout": PATIENCE_S, **job.options}
        match kind:
            case "stop id":
                options["stop_token_ids"] = [job.ids[chance.randrange(8)]]
            case "stop text":
                start = chance.randrange(len(job.text) - 1)
                options["stop"] = [job.text[start : start + 2]]
            case "too long":
                options["max_tokens"] = 5000
            case "bad":
                options["temperature"] = -1.0
            case "deadline":
                options["timeout"] = chance.uniform(0.001, 0.03)
        leave_at = chance.randrange(8) if kind in ("close", "abort") else 1 << 20
        return self._read(job, kind, options, leave_at)

    def _read(self, job: Job, kind: str, options: dict[str, object], leave_at: int) -> str:
        events = self._client.generate(job.prompt, **options)
        try:
            for index, event in enumerate(events):
                if isinstance(event, Done):
                    return event.finish_reason
                if index == leave_at and kind == "abort":
                    self._client.abort(str(options["request_id"]))
                elif index == leave_at:
                    return "closed"
        except CallError as error:
            return error.reason or error.status
        finally:
            events.close()
        raise AssertionError("a stream without an end")


def test_d10_after_400_requests_of_all_kinds_everything_is_back(
    empty_daemon: Daemon, engines: Mapping[str, Engine], m_rand_dir: Path
) -> None:
    """Blocks, leases and pins are those of before, exactly; one that needs all blocks runs."""
    engine = engines["another"]
    jobs = solo_jobs(engine, m_rand_dir, range(10, 70, 3), 8, 4500)
    before = engine.wait_idle()
    empty = dict(empty_daemon.status().pool.blocks)
    assert (before.num_private_blocks_free, empty["sealed"]) == (NUM_PRIVATE_BLOCKS, 0)
    mixture = Mixture(engine, jobs)
    # Slow enough that deadlines pass, and that who leaves is not too late.
    with engine.slowed(0.02), ThreadPoolExecutor(16) as threads:
        ends = Counter(threads.map(mixture.run, range(400)))
    assert ends["length"] >= 50
    assert ends["stop"] > 50
    assert ends["cancelled"] > 20
    assert ends["closed"] > 20
    assert (ends["CONTEXT_TOO_LONG"], ends["INVALID_PARAMETER"]) == (50, 50)
    assert ends["DEADLINE_EXCEEDED"] + ends["EXPIRED_IN_QUEUE"] > 10
    after = engine.wait_idle()
    assert after.num_private_blocks_free == NUM_PRIVATE_BLOCKS
    assert (after.num_shared_blocks_in_use, after.num_running, after.num_waiting) == (0, 0, 0)
    assert after.pid == before.pid
    wait_until(lambda: empty_daemon.status().counters["leases"] == 0, "all leases are back")
    status = empty_daemon.status()
    assert [client.num_leases for client in status.clients] == [0] * len(status.clients)
    assert status.pool.blocks["sealed"] > len(jobs)
    with empty_daemon.client(control_pb2.ROLE_ADMIN) as client:
        reply, _ = client.call(control_pb2.Envelope(evict=control_pb2.Evict()), PATIENCE_S)
    assert reply.evict_reply.num_kept == 0, "something is pinned"
    blocks = empty_daemon.status().pool.blocks
    assert {state: n for state, n in blocks.items() if state != "free"} == {
        state: n for state, n in empty.items() if state != "free"
    }
    num_positions = NUM_PRIVATE_BLOCKS * BLOCK
    for bypass in (True, False):
        whole = engine.generate(
            make_prompt(300, 4600), max_tokens=num_positions - 299, bypass_prefix_cache=bypass
        )
        assert whole.done.completion_tokens == num_positions - 299
    assert engine.wait_idle().num_private_blocks_free == NUM_PRIVATE_BLOCKS
