"""The whole engine is lost in mid-stream: the client goes on elsewhere as if nothing had been.

Over the network one sees ids and text; a stream is taken up again from its ids alone, so text that
was held back when it broke, for a stop or an unfinished character, must come all the same.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.client import CallError, Done, EngineClient
from tests.daemon import Daemon
from tests.engine import START_S, Engine, Generation, Stream, make_prompt
from tests.fixtures.models import byte_token, plan_script, write_m_chain, write_m_rand
from tests.jobs import Job, make_jobs

# What M-chain says after an "A". Its tokens begin and end within a character: 1 byte, 3 each, 2.
SPOKEN = "".join(chr(0x4E00 + number) for number in range(230))
CUE = byte_token(ord("A"))


def pieces_of(text: str) -> list[bytes]:
    raw = text.encode()
    return [raw[:1], *(raw[start : start + 3] for start in range(1, len(raw), 3))]


@pytest.fixture(scope="module")
def engine(shared_daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """M-rand; whoever kills it starts it again, on the same port."""
    with Engine(m_rand_dir, shared_daemon.socket, step_s=0.0) as running:
        running.keep_port()
        yield running


@pytest.fixture(scope="module")
def jobs(engine: Engine, m_rand_dir: Path) -> list[Job]:
    """Greedy and seeded."""
    return make_jobs(engine, m_rand_dir, (200, 160), 2000, num_tokens=[100])


@pytest.fixture(scope="module")
def chain_engine(
    shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """M-chain, which says SPOKEN; whoever kills it starts it again, on the same port."""
    script, extra = plan_script(CUE, pieces_of(SPOKEN))
    model_dir = write_m_chain(tmp_path_factory.mktemp("model") / "m-chain", script, extra)
    with Engine(model_dir, shared_daemon.socket, step_s=0.0) as running:
        running.keep_port()
        yield running


@pytest.fixture(scope="module")
def spoken_ids(chain_engine: Engine) -> list[int]:
    """Of SPOKEN and of the end."""
    answer = chain_engine.generate([CUE])
    assert (answer.text, answer.done.finish_reason) == (SPOKEN, "stop")
    return answer.ids


@pytest.fixture
def interrupted() -> Iterator[Callable[..., Stream]]:
    """Begins a stream that survives the engine, on a client of its own."""
    with contextlib.ExitStack() as clients:

        def begin(engine: Engine, prompt: Sequence[int], **options: Any) -> Stream:
            client = clients.enter_context(EngineClient(engine.target))
            options = {"resume_s": START_S, "timeout": 2 * START_S, **options}
            return Stream.begin(client.generate(prompt, **options))

        yield begin


# -- engines that are killed --------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1], ids=["greedy", "seeded"])
def test_a_stream_goes_on_when_the_engine_is_back(
    engine: Engine, jobs: list[Job], interrupted: Callable[..., Stream], number: int
) -> None:
    """After kill -9 of front and worker, then of the front alone: same ids, text and usage."""
    job = jobs[number]
    with engine.slowed(0.3):
        stream = interrupted(engine, job.prompt, **job.options)
        stream.wait_for_tokens(10)
        engine.kill_all()
        stream.check_running()
        engine.start()
        stream.wait_for_tokens(len(stream.pieces) + 10)
        workers = [psutil.Process(pid) for pid in engine.worker_pids(1)]
        engine.signal(signal.SIGKILL)
        engine.wait()
        stream.check_running()
    engine.start()
    answer = stream.result()
    job.check(answer)
    assert answer.done.num_resumed >= 2
    assert answer.done.prompt_tokens == len(job.prompt)
    assert psutil.wait_procs(workers, START_S)[1] == [], "workers leave when their front is gone"


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stop", "no stop"])
def test_a_stop_may_span_the_interruption(
    chain_engine: Engine,
    spoken_ids: list[int],
    interrupted: Callable[..., Stream],
    is_stopped: bool,
) -> None:
    """Text held back when the engine dies is found to be the stop, or comes after all."""
    begin, end = 20, 220
    stop = SPOKEN[begin:end] + ("" if is_stopped else "x")
    prompt = [*make_prompt(100, 2100), CUE]
    with chain_engine.slowed(0.1):
        stream = interrupted(chain_engine, prompt, stop=[stop, "never"])
        stream.wait_for_tokens(begin + 20)
        chain_engine.kill_all()
    assert begin + 10 < len(stream.ids) < end - 10, "the kill came outside of the stop"
    held_at_death = "".join(piece.text for piece in stream.pieces)
    assert held_at_death == SPOKEN[:begin]
    chain_engine.start()
    answer = stream.result()
    assert answer.text == (SPOKEN[:begin] if is_stopped else SPOKEN)
    # The token that completes the stop ends one byte behind it.
    assert answer.ids == (spoken_ids[: end + 1] if is_stopped else spoken_ids)
    assert answer.done.completion_tokens == len(answer.ids)
    assert (answer.done.finish_reason, answer.done.stop_match) == (
        "stop",
        stop if is_stopped else "",
    )
    assert answer.done.num_resumed >= 1


def test_other_weights_are_not_gone_on_with(
    shared_daemon: Daemon,
    m_rand_dir: Path,
    tmp_path: Path,
    jobs: list[Job],
    interrupted: Callable[..., Stream],
) -> None:
    """If what comes back on that port has other weights, the client learns that, and no token."""
    other_dir = write_m_rand(tmp_path / "m-rand", variant=1)
    with Engine(m_rand_dir, shared_daemon.socket, step_s=0.3) as first:
        job = jobs[0]
        stream = interrupted(first, job.prompt, **job.options)
        stream.wait_for_tokens(5)
        first.kill_all()
        stream.check_running()
        port = first.port
    with Engine(other_dir, shared_daemon.socket, port=port):
        with pytest.raises(CallError) as refused:
            stream.result()
        assert refused.value.status == "FAILED_PRECONDITION"
        assert refused.value.reason == "WEIGHTS_CHANGED"
    assert stream.ids == job.ids[: len(stream.ids)]


# -- every point a stream can break at ----------------------------------------------------------


def begin_and_rest(
    engine: Engine, prompt: Sequence[int], whole: Generation, num_given: int, **options: Any
) -> tuple[list[int], str, Done]:
    """Ids, text and end of a stream of which so many tokens came before it broke."""
    given, text = [], ""
    for piece in whole.pieces:
        if len(given) < num_given:
            given += piece.token_ids
            text += piece.text
    rest = engine.generate(
        prompt,
        continue_from=given,
        expected_weights_sha256=whole.accepted.weights_sha256,
        **options,
    )
    for piece in rest.pieces[:1]:
        assert piece.first_output_index == num_given
    return given + rest.ids, text + rest.text, rest.done


def check_all_cuts(engine: Engine, prompt: Sequence[int], **options: Any) -> Generation:
    """Wherever it breaks, what came and what still comes is the whole; returns that."""
    whole = engine.generate(prompt, **options)
    for num_given in range(len(whole.ids) + 1):
        ids, text, done = begin_and_rest(engine, prompt, whole, num_given, **options)
        assert (ids, text) == (whole.ids, whole.text), num_given
        assert (done.finish_reason, done.stop_match) == (
            whole.done.finish_reason,
            whole.done.stop_match,
        )
        assert done.completion_tokens == len(whole.ids)
        assert done.prompt_tokens == len(prompt)
    return whole


@pytest.mark.parametrize("number", [0, 1], ids=["greedy", "seeded"])
def test_a_stream_may_break_at_any_token(engine: Engine, jobs: list[Job], number: int) -> None:
    """Given back its first k ids, for every k up to all of them, it gives the rest."""
    job = jobs[number]
    options = {**job.options, "max_tokens": 20}
    assert check_all_cuts(engine, job.prompt, **options).ids == job.ids[:20]


# The last 10 characters, which come in 11 tokens before the one that ends it.
LAST = SPOKEN[-10:]


@pytest.mark.parametrize(
    ("options", "text", "reason", "num_tokens"),
    [
        ({}, LAST, "stop", 12),
        ({"stop": [LAST[3:7]]}, LAST[:3], "stop", 8),
        ({"stop": [LAST[3:] + "x"]}, LAST, "stop", 12),
        ({"stop": [LAST[6:8] + "x"], "max_tokens": 9}, LAST[:8] + "�", "length", 9),
        ({"stop": [LAST[1:3], LAST[2:9]], "min_tokens": 4}, LAST, "stop", 12),
    ],
    ids=["end of text", "stop", "almost a stop", "length", "min_tokens"],
)
def test_text_may_be_held_back_when_a_stream_breaks(
    chain_engine: Engine,
    spoken_ids: list[int],
    options: dict[str, Any],
    text: str,
    reason: str,
    num_tokens: int,
) -> None:
    """Characters of several tokens and stops that span the break: joined, the text is whole."""
    prompt = [CUE, *spoken_ids[: -len(LAST) - 2]]
    whole = check_all_cuts(chain_engine, prompt, **options)
    assert len(whole.ids) == num_tokens
    assert whole.done.finish_reason == reason
    assert whole.text.endswith(text)


def test_nothing_is_computed_when_all_was_there(engine: Engine, jobs: list[Job]) -> None:
    """A stream that broke behind its last token gets its end at once."""
    job = jobs[0]
    whole = engine.generate(job.prompt, **job.options)
    before = engine.wait_idle().num_computed_tokens
    rest = engine.generate(
        job.prompt,
        continue_from=whole.ids,
        expected_weights_sha256=whole.accepted.weights_sha256,
        **job.options,
    )
    assert (rest.pieces, rest.done.finish_reason) == ([], "length")
    assert engine.wait_idle().num_computed_tokens == before


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 2}, "continue_from: n = 2 is not allowed"),
        ({"expected_weights_sha256": ""}, "expected_weights_sha256: unset is not allowed"),
        ({"continue_from": [5, 512]}, "continue_from: 512 is not allowed: ids below 512"),
        ({"max_tokens": 1}, "continue_from: 2 ids is not allowed: at most"),
        ({"temperature": 1.0}, "sampling.seed: unset is not allowed"),
    ],
    ids=["n", "no digest", "vocabulary", "max_tokens", "no seed"],
)
def test_a_continuation_that_could_not_be_right_is_refused(
    engine: Engine, fields: dict[str, Any], named: str
) -> None:
    """The error names what is missing or wrong."""
    digest = engine.client().model_info().weights_sha256
    options = {"continue_from": [5, 6], "expected_weights_sha256": digest, "max_tokens": 9}
    with pytest.raises(CallError) as refused:
        engine.generate([7, 8], **{**options, **fields})
    assert (refused.value.status, refused.value.reason) == ("INVALID_ARGUMENT", "INVALID_PARAMETER")
    assert named in refused.value.message


def test_a_continuation_of_other_weights_is_refused(engine: Engine) -> None:
    """The digest is what Accepted told, of weights that are not these."""
    with pytest.raises(CallError) as refused:
        engine.generate([7, 8], continue_from=[5], expected_weights_sha256="ab" * 32, max_tokens=3)
    assert refused.value.status == "FAILED_PRECONDITION"
    assert refused.value.reason == "WEIGHTS_CHANGED"
