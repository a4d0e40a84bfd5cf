"""Draws that depend on nothing but the request; what ends an answer, and when it may."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.v1 import engine_pb2 as pb
from tests.e2e.conftest import Oracle
from tests.engine import Engine, Generation, Stream, make_prompt
from tests.fixtures.models import FIRST_BYTE, VOCAB, write_m_chain

PROMPT = make_prompt(40, 401)
MATES = [make_prompt(30 + number, 402 + number) for number in range(3)]


@pytest.fixture(scope="module")
def engine(m_rand_dir: Path) -> Iterator[Engine]:
    """M-rand without a cache: every answer is computed, the longest ones in forty seconds."""
    with Engine(m_rand_dir, "off", step_s=0.01) as running:
        yield running


@pytest.mark.parametrize("seeds", [(None, None, None), (1, 2, 3)], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("place", [0, 1, 3], ids=["first", "second", "last"])
def test_b1_a_seed_decides_whoever_is_in_the_batch(
    engine: Engine, seeds: Sequence[int | None], place: int
) -> None:
    """Alone or with mates, seeded or not, in any order of arrival: the same tokens every time."""
    sampled = {"temperature": 0.8, "ignore_eos": True}
    alone = engine.generate(PROMPT, seed=42, max_tokens=24, **sampled).ids
    assert len(alone) == 24
    for _ in range(5):
        streams: list[Stream] = []
        # Mates go on for longer than the one under test, so that they share its steps.
        mates = [(prompt, seed) for prompt, seed in zip(MATES, seeds, strict=True)]
        for prompt, seed in mates[:place]:
            streams.append(engine.stream(prompt, seed=seed, max_tokens=4000, **sampled))
            streams[-1].wait_for_tokens(1)
        own = engine.stream(PROMPT, seed=42, max_tokens=24, **sampled)
        for prompt, seed in mates[place:]:
            streams.append(engine.stream(prompt, seed=seed, max_tokens=4000, **sampled))
        assert own.result().ids == alone
        for stream in streams:
            stream.check_running()
            stream.cancel()
        for stream in streams:
            stream.join()


def test_b4_samples_of_one_seed_differ_and_come_again(engine: Engine) -> None:
    """n = 4: four different answers, and the same four in the next call."""

    def ask() -> list[list[int]]:
        options = {"n": 4, "seed": 1, "temperature": 1.0, "max_tokens": 24}
        return ids_by_sample(engine.generate(PROMPT, **options), 4)

    answers = ask()
    assert len({tuple(ids) for ids in answers}) == 4
    assert ask() == answers
    # The first of several is the one that would come alone.
    alone = engine.generate(PROMPT, seed=1, temperature=1.0, max_tokens=24)
    assert alone.ids == answers[0]


def ids_by_sample(said: Generation, count: int) -> list[list[int]]:
    """Token ids of each sample; their indices must be contiguous."""
    ids: list[list[int]] = [[] for _ in range(count)]
    for piece in said.pieces:
        assert piece.first_output_index == len(ids[piece.sample_index])
        ids[piece.sample_index].extend(piece.token_ids)
    return ids


def test_samples_share_their_prefill_and_usage_sums(engine: Engine) -> None:
    """The prompt is computed and counted once, the output of every sample counts."""
    prompt = make_prompt(1000, 410)
    before = engine.worker().num_computed_tokens
    said = engine.generate(prompt, n=4, seed=3, temperature=1.0, max_tokens=8)
    computed = engine.worker().num_computed_tokens - before
    assert [len(ids) for ids in ids_by_sample(said, 4)] == [8] * 4
    assert (said.done.prompt_tokens, said.done.completion_tokens) == (1000, 32)
    # Seven more positions of each; the last prompt token of the other three may run again.
    assert 1000 + 4 * 7 <= computed <= 1000 + 4 * 8


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1e-10},
        {"temperature": 1e-4},
        {"temperature": 1.0, "top_p": 1e-4},
        {"temperature": 1e-10, "top_p": 1e-4, "min_p": 1.0, "top_k": 1},
    ],
    ids=str,
)
def test_b5_a_tiny_temperature_or_nucleus_is_greedy(
    engine: Engine, oracle: Oracle, options: dict[str, Any]
) -> None:
    """No overflow, no empty answer, and the mate that samples in the same steps is as alone."""
    hot = {"temperature": 1.0, "seed": 5, "ignore_eos": True}
    alone = engine.generate(MATES[0], max_tokens=30, **hot).ids
    mate = engine.stream(MATES[0], max_tokens=4000, **hot)
    mate.wait_for_tokens(1)
    cold = engine.generate(PROMPT, max_tokens=24, **options)
    mate.check_running()
    assert cold.ids == oracle(PROMPT, 24)
    mate.wait_for_tokens(30)
    mate.cancel()
    assert mate.ids[:30] == alone


# -- what ends an answer --------------------------------------------------------------------------

LAST = VOCAB - 1
ENDS = [2, 5]
# "A" is followed by the last id of the vocabulary, "y", and the second of the model's end ids.
A, Y = FIRST_BYTE + ord("A"), FIRST_BYTE + ord("y")
# "a" is followed by "b", "c", ...
LETTERS = range(FIRST_BYTE + ord("a"), FIRST_BYTE + ord("p"))


@pytest.fixture(scope="module")
def ending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """M-chain with two end ids, of which only generation_config.json knows."""
    script = {A: LAST, LAST: Y, Y: ENDS[1], **{token: token + 1 for token in LETTERS}}
    model = write_m_chain(tmp_path_factory.mktemp("m") / "ending", script)
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ENDS}))
    with Engine(model, "off") as running:
        yield running


def finished(
    engine: Engine, ids: Sequence[int], **stopping: Any
) -> tuple[list[int], str, pb.Finished]:
    """Ids, text, and the end as the server sent it."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    request.stopping.CopyFrom(pb.StoppingOptions(**stopping))
    request.response.return_token_ids = True
    responses = engine.call(request)
    said = [token for response in responses for token in response.output.token_ids]
    text = "".join(response.output.text for response in responses)
    assert responses[-1].usage.completion_tokens == len(said)
    return said, text, responses[-1].finished


def test_b7_any_end_id_stops_and_is_told(ending: Engine) -> None:
    """Also the second one of the list."""
    ids, _, end = finished(ending, [A], max_tokens=20)
    assert ids == [LAST, Y, ENDS[1]]
    assert end.finish_reason == pb.FINISH_REASON_STOP
    assert end.stop_token_id == ENDS[1]


def test_b7_min_tokens_holds_back_every_end_id_and_no_other(ending: Engine) -> None:
    """Only output counts, the last id of the vocabulary is no end, and the rest goes its way."""
    prompt = [*make_prompt(39, 420), A]
    ids, _, end = finished(ending, prompt, max_tokens=20, min_tokens=8)
    assert ids[:2] == [LAST, Y], "the last id of the vocabulary was suppressed"
    assert not set(ids[:8]) & set(ENDS)
    assert len(ids) > 8
    assert end.HasField("stop_token_id") == (ids[-1] in ENDS)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_b7_min_tokens_holds_back_the_users_stop_ids(ending: Engine, ignore_eos: bool) -> None:
    """Beside the model's own, and also when those are ignored."""
    stop = LETTERS[2]
    free, _, end = finished(
        ending, [LETTERS[0]], max_tokens=12, stop_token_ids=[stop], ignore_eos=ignore_eos
    )
    assert free == [LETTERS[1], stop]
    assert (end.finish_reason, end.stop_token_id) == (pb.FINISH_REASON_STOP, stop)
    held, _, _ = finished(
        ending,
        [LETTERS[0]],
        max_tokens=12,
        min_tokens=8,
        stop_token_ids=[stop],
        ignore_eos=ignore_eos,
    )
    assert len(held) >= 8
    assert held[0] == LETTERS[1]
    assert stop not in held[:8]


def test_min_tokens_holds_back_stop_texts(ending: Engine) -> None:
    """Text of the first tokens is not searched; the first stop behind them ends the answer."""
    free, text, end = finished(ending, [LETTERS[0]], max_tokens=14, stop=["d", "h"])
    assert (len(free), text, end.stop_match) == (3, "bc", "d")
    held, text, end = finished(ending, [LETTERS[0]], max_tokens=14, min_tokens=5, stop=["d", "h"])
    assert (len(held), text, end.stop_match) == (7, "bcdefg", "h")
    assert end.finish_reason == pb.FINISH_REASON_STOP
    assert not end.HasField("stop_token_id")


def test_b8_ignored_end_ids_do_not_stop_but_the_users_do(ending: Engine) -> None:
    """`ignore_eos` is about the model's list only, also for an id that stands in both."""
    ids, _, end = finished(ending, [A], max_tokens=9, ignore_eos=True)
    assert ids[:3] == [LAST, Y, ENDS[1]]
    assert (len(ids), end.finish_reason) == (9, pb.FINISH_REASON_LENGTH)
    assert not end.HasField("stop_token_id")
    both = finished(ending, [A], max_tokens=9, ignore_eos=True, stop_token_ids=[ENDS[1]])
    assert both[0] == [LAST, Y, ENDS[1]]
    assert both[2].stop_token_id == ENDS[1]


def test_a_stop_id_ends_the_answer_beside_the_models_own(ending: Engine) -> None:
    """Whichever of them comes first is told; it counts as output, and its text is part of it."""
    ids, text, end = finished(ending, [LETTERS[0]], max_tokens=14, stop_token_ids=[LETTERS[4]])
    assert ids == list(LETTERS[1:5])
    assert text == "bcde"
    assert end.stop_token_id == LETTERS[4]
    ids, _, end = finished(ending, [A], max_tokens=14, stop_token_ids=[LETTERS[4]])
    assert (ids[-1], end.stop_token_id) == (ENDS[1], ENDS[1])
