"""What the samples of a request say becomes the messages of its stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.generation import Generation
from engine.output_text import OutputText
from engine.request import Finished, Output, SamplingParams, Submit
from engine.router import ActiveRequest
from engine.tokenizer import Tokenizer
from engine.v1 import engine_pb2 as pb
from tests.fixtures.models import byte_token, write_tokenizer

PROMPT = [10, 11, 12]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def ids(text: str) -> list[int]:
    """One token for each byte."""
    return [byte_token(value) for value in text.encode()]


class Stream:
    """A generation, what its workers say and what its client sees."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        num_samples: int = 1,
        *,
        stop: list[str] | None = None,
        min_tokens: int = 0,
        known: str = "",
        with_ids: bool = False,
    ) -> None:
        self.active = [
            ActiveRequest(Submit("r", 0, PROMPT, ids(known), SamplingParams(), 0, 100, [], index))
            for index in range(num_samples)
        ]
        texts = [
            OutputText(tokenizer, PROMPT, stop=stop or [], min_tokens=min_tokens)
            for _ in self.active
        ]
        self.generation = Generation(self.active, texts, with_ids)
        self.num_said = [len(ids(known))] * num_samples
        self.seen: list[pb.GenerateResponse] = []

    def say(self, text: str, index: int = 0, *, at_once: bool = False) -> None:
        """A worker's tokens, one message each unless they come at once."""
        tokens = ids(text)
        for part in [tokens] if at_once else [[token] for token in tokens]:
            event = Output("r", 1, index, self.num_said[index], part)
            self.num_said[index] += len(part)
            self.seen += self.generation.output(event)

    def end(self, reason: str = "length", index: int = 0, **fields: Any) -> pb.GenerateResponse:
        """A worker's last word; returns the client's."""
        self.seen += self.generation.finish(Finished("r", 1, index, reason, **fields))
        assert self.seen[-1].HasField("finished")
        return self.seen[-1]

    def outputs(self, index: int = 0) -> list[pb.TokenOutput]:
        found = [message.output for message in self.seen if message.HasField("output")]
        return [output for output in found if output.sample_index == index]

    def text(self, index: int = 0) -> str:
        return "".join(output.text for output in self.outputs(index))


def test_each_message_of_a_worker_is_one_of_the_stream(tokenizer: Tokenizer) -> None:
    """Text, how many tokens it stands for, where they stand; the end carries the usage."""
    stream = Stream(tokenizer)
    stream.say("ab")
    stream.say("cd", at_once=True)
    end = stream.end(num_cached_tokens=2)
    assert [(o.first_output_index, o.num_tokens, o.text) for o in stream.outputs()] == [
        (0, 1, "a"),
        (1, 1, "b"),
        (2, 2, "cd"),
    ]
    assert all(message.request_id == "r" for message in stream.seen)
    assert not any(message.HasField("usage") for message in stream.seen[:-1])
    assert end.finished.finish_reason == pb.FINISH_REASON_LENGTH
    usage = end.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 4, 2)


def test_ids_come_when_they_are_asked_for(tokenizer: Tokenizer) -> None:
    """Else only their number."""
    for with_ids in (True, False):
        stream = Stream(tokenizer, with_ids=with_ids)
        stream.say("xy", at_once=True)
        (output,) = stream.outputs()
        assert list(output.token_ids) == (ids("xy") if with_ids else [])


def test_a1_text_waits_for_whole_characters_and_comes_at_the_end(tokenizer: Tokenizer) -> None:
    """Tokens are counted as they come; what is unfinished is set free by the end."""
    stream = Stream(tokenizer)
    stream.say("é")
    assert [(o.text, o.num_tokens) for o in stream.outputs()] == [("", 1), ("é", 1)]
    stream.say("a")
    event = Output("r", 1, 0, 3, [ids("é")[0]])
    stream.seen += stream.generation.output(event)
    end = stream.end()
    last = stream.outputs()[-1]
    assert (last.text, last.num_tokens, last.first_output_index) == ("\ufffd", 0, 4)
    assert end.usage.completion_tokens == 4 == sum(o.num_tokens for o in stream.outputs())


@pytest.mark.parametrize("reason", ["cancelled", "length", "stop"])
def test_b16_a_stop_text_ends_a_sample_however_its_worker_ended(
    tokenizer: Tokenizer, reason: str
) -> None:
    """The worker is told to stop, and may have drawn more or ended by itself meanwhile."""
    stream = Stream(tokenizer, stop=["END"], with_ids=True)
    stream.say("one EN")
    assert stream.generation.samples_to_stop == []
    stream.say("D")
    assert stream.generation.samples_to_stop == stream.active
    stream.say("never seen")
    end = stream.end(reason, stop_token_id=44 if reason == "stop" else None)
    assert stream.text() == "one "
    assert all(output.num_tokens for output in stream.outputs()), "a message about nothing"
    assert end.finished.finish_reason == pb.FINISH_REASON_STOP
    assert end.finished.stop_match == "END"
    assert not end.finished.HasField("stop_token_id"), "the text was there first"
    assert end.usage.completion_tokens == len("one END")
    assert [token for o in stream.outputs() for token in o.token_ids] == ids("one END")
    assert stream.generation.samples_to_stop == []
    assert stream.generation.reason_of(0) == "stop"


def test_tokens_behind_a_stop_in_one_message_are_dropped(tokenizer: Tokenizer) -> None:
    """Neither counted nor told."""
    stream = Stream(tokenizer, stop=["b"], with_ids=True)
    stream.say("abc", at_once=True)
    (output,) = stream.outputs()
    assert (output.text, output.num_tokens, list(output.token_ids)) == ("a", 2, ids("ab"))
    assert stream.end("cancelled").usage.completion_tokens == 2


def test_a4_what_might_become_a_stop_is_held_until_it_did_not(tokenizer: Tokenizer) -> None:
    """At the end it is part of the text."""
    stream = Stream(tokenizer, stop=["own fox"])
    stream.say("brown f")
    assert stream.text() == "br"
    end = stream.end()
    assert stream.text() == "brown f"
    assert (end.finished.finish_reason, end.finished.stop_match) == (pb.FINISH_REASON_LENGTH, "")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stop", pb.FINISH_REASON_STOP),
        ("length", pb.FINISH_REASON_LENGTH),
        ("cancelled", pb.FINISH_REASON_CANCELLED),
    ],
)
def test_a_worker_says_why_it_ended(
    tokenizer: Tokenizer, reason: str, expected: pb.FinishReason
) -> None:
    """With the id that stopped it, 0 included, if one did."""
    stream = Stream(tokenizer)
    end = stream.end(reason, stop_token_id=0 if reason == "stop" else None)
    assert end.finished.finish_reason == expected
    assert end.finished.HasField("stop_token_id") == (reason == "stop")


def test_samples_end_one_by_one_and_the_usage_comes_last(tokenizer: Tokenizer) -> None:
    """It sums their tokens; each is stopped by its own text."""
    stream = Stream(tokenizer, 3, stop=["!"])
    stream.say("ab!", 1)
    assert stream.generation.samples_to_stop == [stream.active[1]]
    stream.say("abcd", 0)
    stream.say("x", 2)
    first = stream.end("cancelled", 1, num_cached_tokens=7)
    assert not stream.generation.is_done
    stream.say("e", 0)
    second = stream.end("length", 0, num_cached_tokens=3)
    assert (first.HasField("usage"), second.HasField("usage")) == (False, False)
    last = stream.end("stop", 2, stop_token_id=1)
    assert stream.generation.is_done
    assert (last.usage.completion_tokens, last.usage.prompt_tokens) == (3 + 5 + 1, 3)
    assert last.usage.cached_tokens == 3, "of the first sample"
    reasons = [stream.generation.reason_of(index) for index in range(3)]
    assert reasons == ["length", "stop", "stop"]
    assert [stream.text(index) for index in range(3)] == ["abcde", "ab", "x"]


# -- interrupted streams ------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(len("a é own fox".encode())))
def test_a_stream_that_goes_on_sends_what_is_left(tokenizer: Tokenizer, cut: int) -> None:
    """Text that was held back at the cut still comes, and nothing twice; all tokens count."""
    whole, text = Stream(tokenizer, stop=["own cat"]), "a é own fox"
    whole.say(text)
    whole.end()
    first = Stream(tokenizer, stop=["own cat"])
    second = Stream(tokenizer, stop=["own cat"])
    tokens = ids(text)
    for index, token in enumerate(tokens[:cut]):
        first.seen += first.generation.output(Output("r", 1, 0, index, [token]))
    active = ActiveRequest(Submit("r", 0, PROMPT, tokens[:cut], SamplingParams(), 0, 100, []))
    texts = [OutputText(tokenizer, PROMPT, stop=["own cat"])]
    second.generation = Generation([active], texts, False)
    for index, token in enumerate(tokens[cut:], cut):
        second.seen += second.generation.output(Output("r", 1, 0, index, [token]))
    end = second.end()
    assert first.text() + second.text() == whole.text() == text
    assert end.usage.completion_tokens == len(tokens)


def test_a_stop_that_had_come_before_the_cut_ends_it_at_once(tokenizer: Tokenizer) -> None:
    """The client lost the end only: nothing more is drawn for it."""
    stream = Stream(tokenizer, stop=["END"], known="the END")
    assert stream.generation.samples_to_stop == stream.active
    stream.say("more")
    end = stream.end("cancelled")
    assert (stream.text(), end.finished.stop_match) == ("", "END")
    assert end.usage.completion_tokens == len("the END")


def test_min_tokens_count_what_had_come_before_the_cut(tokenizer: Tokenizer) -> None:
    """A stop text within them stops nothing, in the replay as little as in the stream."""
    stream = Stream(tokenizer, stop=["ab"], min_tokens=4, known="ab")
    assert stream.generation.samples_to_stop == []
    stream.say("abxab")
    assert stream.text() == "abx"
    assert stream.generation.samples_to_stop == stream.active


# -- timings ------------------------------------------------------------------------------------


def test_timings_are_told_of_each_sample(tokenizer: Tokenizer) -> None:
    """The worker's, and what the front knows of failovers."""
    stream = Stream(tokenizer)
    stream.active[0].num_failovers, stream.active[0].failover_s = 2, 1.5
    end = stream.end(
        queued_s=0.25,
        lookup_s=0.5,
        prefill_s=2.0,
        decode_s=3.0,
        preempted_s=0.125,
        num_preemptions=4,
    )
    timings = end.finished.timings
    names = ("queued", "lookup", "prefill", "decode", "preempted", "failover")
    seconds = [getattr(timings, name).ToNanoseconds() / 1e9 for name in names]
    assert seconds == [0.25, 0.5, 2.0, 3.0, 0.125, 1.5]
    assert (timings.num_failovers, timings.num_preemptions) == (2, 4)
