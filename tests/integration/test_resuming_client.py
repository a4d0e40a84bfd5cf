"""When our client takes a stream up again, when it gives up, and what its caller is told."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from engine.client import Accepted, CallError, Done, EngineClient, Text
from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server


class Scripted(EngineServiceServicer):
    """Answers each call with the next of `answers`; a text breaks it off, as UNAVAILABLE."""

    def __init__(self, answers: Sequence[Sequence[pb.GenerateResponse | str]]) -> None:
        self._answers = list(answers)
        self.requests: list[pb.GenerateRequest] = []

    def Generate(
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        for response in self._answers.pop(0) if self._answers else ["nobody is there"]:
            if isinstance(response, str):
                context.abort(grpc.StatusCode.UNAVAILABLE, response)
            else:
                yield response


@contextlib.contextmanager
def serving(servicer: Scripted) -> Iterator[EngineClient]:
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        add_EngineServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with EngineClient(f"127.0.0.1:{port}") as client:
                yield client
        finally:
            server.stop(None).wait()


def accepted(request_id: str = "r") -> pb.GenerateResponse:
    told = pb.Accepted(num_prompt_tokens=1, resolved_seed=5, weights_sha256="ab")
    return pb.GenerateResponse(request_id=request_id, accepted=told)


def output(index: int, text: str, *ids: int, sample: int = 0) -> pb.GenerateResponse:
    told = pb.TokenOutput(
        sample_index=sample,
        first_output_index=index,
        text=text,
        token_ids=ids,
        num_tokens=len(ids),
    )
    return pb.GenerateResponse(output=told)


FINISHED = pb.GenerateResponse(
    finished=pb.Finished(finish_reason=pb.FINISH_REASON_LENGTH), usage=pb.Usage()
)


def test_a_wrong_address_fails_at_once() -> None:
    """What never was accepted is not waited for."""
    began = time.monotonic()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        client = EngineClient(f"127.0.0.1:{taken.getsockname()[1]}")
        with client, pytest.raises(CallError) as failed:
            list(client.generate([5], max_tokens=1, resume_s=60))
    assert failed.value.status == "UNAVAILABLE"
    assert time.monotonic() - began < 10


def test_the_client_gives_up_with_the_error_that_broke_the_stream() -> None:
    """For so long it tries; then it tells what happened, not that nobody was found any more."""
    servicer = Scripted([[accepted(), output(0, "a", 7), "the first loss"]])
    began = time.monotonic()
    with serving(servicer) as client, pytest.raises(CallError) as failed:
        list(client.generate([5], resume_s=0.5))
    assert 0.5 <= time.monotonic() - began < 10
    assert failed.value.message == "the first loss"
    assert len(servicer.requests) > 2


@pytest.mark.parametrize(
    "options", [{"n": 2, "resume_s": 60}, {"resume_s": 0}], ids=["samples", "not wanted"]
)
def test_some_streams_are_not_taken_up_again(options: dict[str, Any]) -> None:
    """Those of several samples, which can't be, and those where nobody asked for it."""
    servicer = Scripted([[accepted(), output(0, "a", 7), "lost"]])
    with serving(servicer) as client, pytest.raises(CallError) as failed:
        list(client.generate([5], **options))
    assert (failed.value.message, len(servicer.requests)) == ("lost", 1)


def test_what_was_told_before_a_loss_is_not_told_again() -> None:
    """Not Accepted, and not the text that is flushed behind the last token."""
    held = [accepted(), output(0, "a", 7), output(1, "", 8)]
    flushed = output(2, "�")
    servicer = Scripted([[*held, flushed, "lost"], [accepted(), flushed, FINISHED]])
    with serving(servicer) as client:
        events = list(client.generate([5], resume_s=10))
    assert [type(event) for event in events] == [Accepted, Text, Text, Text, Done]
    assert "".join(event.text for event in events if isinstance(event, Text)) == "a�"
    (_, again) = servicer.requests
    assert (list(again.continue_from), again.sampling.seed) == ([7, 8], 5)
    assert (again.request_id, again.expected_weights_sha256) == ("r", "ab")


def test_every_sample_may_flush_text() -> None:
    """What is flushed for one does not stand for what another has still to say."""
    texts = [output(1, "a"), output(1, "b", 7, sample=1), output(2, "c", sample=1)]
    with serving(Scripted([[accepted(), *texts, FINISHED]])) as client:
        events = list(client.generate([5], n=2, resume_s=10))
    assert [event.text for event in events if isinstance(event, Text)] == ["a", "b", "c"]
