"""Which tokens run in the next step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.block_table import BlockTable, PrivatePool
from engine.request import SamplingParams, Submit
from engine.scheduler import Scheduler, Sequence, Status

POOL = PrivatePool(np.zeros(64, dtype=np.uint8), 8)


def make(request_id: str = "a", num_prompt: int = 10, **fields: Any) -> Sequence:
    submit = Submit(
        request_id=request_id,
        attempt=1,
        prompt_ids=list(range(num_prompt)),
        output_ids=fields.pop("output_ids", []),
        sampling=SamplingParams(),
        resolved_seed=0,
        max_tokens=fields.pop("max_tokens", 5),
        stop_token_ids=[],
        **fields,
    )
    return Sequence(submit, BlockTable(POOL, 4))


def test_requests_start_in_order_of_arrival_one_at_a_time() -> None:
    """The next one is admitted when the running one has left."""
    scheduler = Scheduler(4)
    first, second = make("a"), make("b")
    scheduler.add(first)
    scheduler.add(second)
    assert (scheduler.num_waiting, scheduler.num_running) == (2, 0)
    assert scheduler.next_chunk() is None, "nothing runs before it is admitted"
    assert scheduler.admit_next() is first
    assert scheduler.admit_next() is None
    assert (scheduler.running, first.status) == (first, Status.RUNNING)
    scheduler.finish(first)
    assert first.status is Status.FINISHED
    assert scheduler.admit_next() is second
    assert (scheduler.num_waiting, scheduler.num_running) == (0, 1)


def test_urgent_requests_go_first_and_equals_keep_their_order() -> None:
    """Interactive before normal before background, first come first served within each."""
    scheduler = Scheduler(4)
    for name, urgency in (("b1", 3), ("n1", 2), ("i1", 1), ("n2", 2), ("b2", 3), ("i2", 1)):
        scheduler.add(make(name, urgency=urgency))
    order = []
    while (sequence := scheduler.admit_next()) is not None:
        order.append(sequence.submit.request_id)
        scheduler.finish(sequence)
    assert order == ["i1", "i2", "n1", "n2", "b1", "b2"]


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 9, 10, 11])
def test_a_prompt_is_prefilled_in_chunks_without_gap(chunk_size: int) -> None:
    """Chunks cover every position once; only the last one asks for logits and ends the prefill."""
    scheduler = Scheduler(chunk_size)
    sequence = make(num_prompt=10)
    scheduler.add(sequence)
    scheduler.admit_next()
    covered: list[int] = []
    while sequence.num_computed < 10:
        chunk = scheduler.next_chunk()
        assert chunk is not None
        assert chunk.is_prefill
        assert 0 < chunk.end - chunk.start <= chunk_size
        assert chunk.needs_logits == chunk.ends_prefill == (chunk.end == 10)
        covered += range(chunk.start, chunk.end)
        sequence.num_computed = chunk.end
    assert covered == list(range(10))


def test_decode_runs_one_token_a_step() -> None:
    """After the prefill each step computes the token that was drawn last."""
    scheduler = Scheduler(4)
    sequence = make(num_prompt=3)
    scheduler.add(sequence)
    scheduler.admit_next()
    sequence.num_computed = 3
    for position in (3, 4):
        sequence.tokens.append(7)
        chunk = scheduler.next_chunk()
        assert chunk is not None
        assert (chunk.start, chunk.end) == (position, position + 1)
        assert (chunk.is_prefill, chunk.ends_prefill, chunk.needs_logits) == (False, False, True)
        sequence.num_computed = chunk.end


def test_a_continued_request_prefills_what_was_sent_before() -> None:
    """Earlier output is part of the prefill and counts as output."""
    scheduler = Scheduler(100)
    sequence = make(num_prompt=4, output_ids=[50, 51], max_tokens=5)
    assert (sequence.num_prompt, sequence.num_output, sequence.max_length) == (4, 2, 8)
    scheduler.add(sequence)
    scheduler.admit_next()
    chunk = scheduler.next_chunk()
    assert chunk is not None
    assert (chunk.start, chunk.end, chunk.ends_prefill) == (0, 6, True)
    assert sequence.tokens == [0, 1, 2, 3, 50, 51]


def test_a_prefill_only_request_needs_no_logits() -> None:
    """With max_tokens 0 the last chunk ends the prefill and nothing is drawn."""
    scheduler = Scheduler(100)
    sequence = make(max_tokens=0)
    scheduler.add(sequence)
    scheduler.admit_next()
    chunk = scheduler.next_chunk()
    assert chunk is not None
    assert (chunk.ends_prefill, chunk.needs_logits, sequence.max_length) == (True, False, 10)


def test_an_abort_finds_a_request_wherever_it_is() -> None:
    """Running or waiting, it leaves and the others keep their places; unknown ids are not found."""
    scheduler = Scheduler(4)
    sequences = [make(name) for name in "abcd"]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.admit_next()
    for name in ("c", "a"):
        found = scheduler.find(name)
        assert found is not None
        assert found.submit.request_id == name
        scheduler.finish(found)
        assert scheduler.find(name) is None
    assert scheduler.find("x") is None
    assert scheduler.admit_next() is sequences[1]
    scheduler.finish(sequences[1])
    assert scheduler.admit_next() is sequences[3]
