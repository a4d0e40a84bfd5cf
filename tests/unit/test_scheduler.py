"""Which tokens run in the next step, and who gets private blocks; a simulator computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_table import BlockTable, PrivateBlock, PrivatePool
from engine.request import SamplingParams, Submit
from engine.scheduler import ScheduledChunk, Scheduler, Status, num_common
from engine.scheduler import Sequence as Request

SIZE = 4  # tokens of a block
BYTES = 8


@dataclass
class Engine:
    """Plays the worker: admits, "computes" what is scheduled, ends what is complete."""

    num_blocks: int = 64
    max_num_seqs: int = 8
    prefill_chunk: int = 16
    steps: list[list[ScheduledChunk]] = field(default_factory=list)
    rows: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    blocks_will_return: bool = False
    num_requests: int = 0

    def __post_init__(self) -> None:
        memory = np.zeros(self.num_blocks * BYTES, dtype=np.uint8)
        self.pool = PrivatePool(memory, BYTES)
        self.preempted: list[str] = []
        self.scheduler = Scheduler(
            self.pool, self.max_num_seqs, self.prefill_chunk, self._on_preempt
        )

    def _on_preempt(self, request: Request) -> None:
        assert request.status is Status.RUNNING
        assert request.table.blocks or not request.num_computed, "called while it has its blocks"
        self.preempted.append(request.submit.request_id)

    def add(self, name: str, num_prompt: int = 10, max_tokens: int = 5, **fields: Any) -> Request:
        """Prompts of different names have nothing in common unless they are given."""
        self.num_requests += 1
        first = 1000 * self.num_requests
        defaults: dict[str, Any] = {
            "attempt": self.num_requests,
            "prompt_ids": list(range(first, first + num_prompt)),
            "output_ids": [],
            "sampling": SamplingParams(),
            "resolved_seed": 0,
            "stop_token_ids": [],
        }
        submit = Submit(name, max_tokens=max_tokens, **(defaults | fields))
        request = Request(submit, BlockTable(self.pool, SIZE))
        self.scheduler.add(request)
        return request

    def admit(self) -> None:
        while (request := self.scheduler.candidate()) is not None:
            request.begin(0)
            if not self.scheduler.admit(request):
                return
            other, common = self.scheduler.best_fork(request)
            if other is not None:
                request.begin(request.table.fork(other.table, common))

    def step(self) -> dict[str, tuple[int, int]]:
        """One turn of the loop; what ran of whom."""
        self.admit()
        self.scheduler.check_invariants()
        chunks = self.scheduler.schedule(self.blocks_will_return)
        self.scheduler.check_invariants()
        for chunk in chunks:
            self._compute(chunk)
        row = {chunk.sequence.submit.request_id: (chunk.start, chunk.end) for chunk in chunks}
        self.steps.append(chunks)
        self.rows.append(row)
        self.scheduler.check_invariants()
        return row

    def _compute(self, chunk: ScheduledChunk) -> None:
        request = chunk.sequence
        assert chunk.start == request.num_computed < chunk.end <= len(request.tokens)
        for index in range(chunk.write_from // SIZE, -(-chunk.end // SIZE)):
            block = request.table.blocks[index]
            assert isinstance(block, PrivateBlock) or index * SIZE >= chunk.end
        assert len(request.table.blocks) * SIZE >= chunk.end
        ends_prefill = chunk.ends_prefill
        request.num_computed = chunk.end
        if chunk.needs_logits:
            request.tokens.append(7)
            if request.num_output == request.submit.max_tokens:
                self.finish(request)
        elif ends_prefill:
            self.finish(request)

    def finish(self, request: Request) -> None:
        self.scheduler.finish(request)
        request.table.clear()

    @property
    def is_idle(self) -> bool:
        return self.scheduler.num_running + self.scheduler.num_waiting == 0

    def run(self, limit: int = 1000) -> Engine:
        """Until all are done; then every block is free again."""
        for _ in range(limit):
            if self.is_idle:
                assert self.pool.num_free == self.num_blocks
                return self
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def names(self, requests: Sequence[Request]) -> list[str]:
        return [request.submit.request_id for request in requests]

    @property
    def running(self) -> list[str]:
        return self.names(self.scheduler.running)


# -- steps --------------------------------------------------------------------------------------


def test_nobody_waits_for_more_than_the_step_that_runs() -> None:
    """Arrivals at 0.2, 0.8, 1.3, 15.7, 15.9 and 16.1 ms, steps of 10 ms: no window, no batch."""
    engine = Engine(prefill_chunk=64)
    arrivals = [0.2, 0.8, 1.3, 15.7, 15.9, 16.1]
    now, begun, due = 0.0, {}, list(arrivals)
    while due or not engine.is_idle:
        if engine.is_idle:
            now = max(now, due[0])
        while due and due[0] <= now:
            engine.add(str(due.pop(0)), max_tokens=6)
        for name in engine.step():
            begun.setdefault(name, now)
        now += 10
    waits = [begun[str(arrival)] - arrival for arrival in arrivals]
    assert waits == pytest.approx([0, 9.4, 8.9, 4.5, 4.3, 4.1])
    assert max(len(row) for row in engine.rows) == 6, "they decode together"


def test_prompts_share_the_budget_of_a_step_oldest_first() -> None:
    """Decoding ones take one token each beside it."""
    engine = Engine(prefill_chunk=16)
    for name, num_prompt in (("a", 20), ("b", 6), ("c", 30)):
        engine.add(name, num_prompt)
    assert engine.step() == {"a": (0, 16)}
    assert engine.step() == {"a": (16, 20), "b": (0, 6), "c": (0, 6)}
    assert engine.step() == {"a": (20, 21), "b": (6, 7), "c": (6, 22)}
    assert engine.step() == {"a": (21, 22), "b": (7, 8), "c": (22, 30)}
    engine.run()


def test_e4_a_long_prompt_stops_no_stream() -> None:
    """While it is prefilled in chunks, a decoding request gets its token in every step."""
    engine = Engine(num_blocks=1000, prefill_chunk=128)
    engine.add("stream", 10, max_tokens=60)
    for _ in range(20):
        engine.step()
    engine.add("long", 3000)
    rows = [engine.step() for _ in range(24)]
    assert all("stream" in row and "long" in row for row in rows)
    assert [row["long"][1] for row in rows][-1] == 3000
    engine.run()


@pytest.mark.parametrize("prefill_chunk", [1, 15, 16, 17, 64, 200])
@pytest.mark.parametrize("num_prompt", [1, 4, 15, 16, 17, 33, 130])
def test_e10_chunks_cover_a_prompt_once(prefill_chunk: int, num_prompt: int) -> None:
    """Without gap; only the last one ends the prefill and asks for logits."""
    engine = Engine(num_blocks=100, prefill_chunk=prefill_chunk)
    engine.add("a", num_prompt, max_tokens=3)
    covered: list[int] = []
    while len(covered) < num_prompt:
        engine.admit()
        (chunk,) = engine.scheduler.schedule(False)
        assert 0 < chunk.end - chunk.start <= prefill_chunk
        assert chunk.is_prefill
        assert chunk.needs_logits == chunk.ends_prefill == (chunk.end == num_prompt)
        covered += range(chunk.start, chunk.end)
        engine._compute(chunk)
    assert covered == list(range(num_prompt))
    assert engine.step() == {"a": (num_prompt, num_prompt + 1)}
    assert not engine.steps[-1][0].is_prefill
    engine.run()


def test_a_continued_request_prefills_what_was_sent_before() -> None:
    """Earlier output is part of the prefill and counts as output."""
    engine = Engine()
    request = engine.add("a", 4, output_ids=[50, 51], max_tokens=5)
    assert (request.num_prompt, request.num_output, request.max_length) == (4, 2, 8)
    engine.admit()
    (chunk,) = engine.scheduler.schedule(False)
    assert (chunk.start, chunk.end, chunk.ends_prefill, chunk.needs_logits) == (0, 6, True, True)


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"hand_off": True}])
def test_a_prefill_draws_nothing(fields: dict[str, Any]) -> None:
    """For max_tokens 0, or for another worker: the last chunk ends it without logits."""
    engine = Engine()
    engine.add("a", **fields)
    engine.step()
    ((chunk,),) = engine.steps
    assert not chunk.needs_logits
    assert engine.is_idle


def test_a_prefill_for_another_worker_grows_by_nothing() -> None:
    """Its output is drawn elsewhere: no block is kept back for it here."""
    engine = Engine(num_blocks=8)
    engine.add("a", 16, max_tokens=1000, hand_off=True)
    engine.add("b", 16, max_tokens=1000, hand_off=True)
    engine.admit()
    assert engine.running == ["a", "b"]


def test_what_was_found_is_not_written_again() -> None:
    """A wholly cached prompt runs its last token and writes nothing."""
    engine = Engine()
    request = engine.add("a", 8)
    assert engine.scheduler.candidate() is request
    other = BlockTable(engine.pool, SIZE)
    other.make_writable(0, 8)
    request.table.fork(other, 8)
    request.begin(8)
    assert engine.scheduler.admit(request)
    (chunk,) = engine.scheduler.schedule(False)
    assert (chunk.start, chunk.end, chunk.write_from) == (7, 8, 8)
    assert len(request.table.blocks) == 2
    other.clear()


# -- seats --------------------------------------------------------------------------------------


def test_urgent_requests_go_first_and_equals_keep_their_order() -> None:
    """By urgency, then priority, then arrival; a seat at a time."""
    engine = Engine(max_num_seqs=1)
    kinds = {"n1": (2, 0), "b1": (3, 0), "i1": (1, 0), "n0": (2, -1), "n2": (2, 0), "i2": (1, 0)}
    engine.add("first", urgency=1)
    engine.step()
    for name, (urgency, priority) in kinds.items():
        engine.add(name, urgency=urgency, priority=priority)
    engine.run()
    order = list(dict.fromkeys(name for row in engine.rows for name in row))
    assert order == ["first", "i1", "i2", "n0", "n1", "n2", "b1"]
    assert engine.preempted == []


def test_e2_equal_requests_never_take_a_seat_from_each_other() -> None:
    """Nor does one with a better priority: that only orders those who wait."""
    engine = Engine(max_num_seqs=2)
    for name, priority in (("a", 0), ("b", 0), ("c", 0), ("d", -5)):
        engine.add(name, max_tokens=30, priority=priority)
        engine.step()
    engine.run()
    assert engine.preempted == []


def test_e2_a_more_urgent_request_takes_the_seat_of_the_youngest() -> None:
    """Its first token comes at once; the one that gave way ends too."""
    engine = Engine(max_num_seqs=2, num_blocks=200)
    for name in ("low1", "low2"):
        engine.add(name, max_tokens=300 - 10, urgency=3)
    for _ in range(5):
        engine.step()
    engine.add("high", urgency=1)
    assert "high" in engine.step()
    assert engine.preempted == ["low2"]
    assert engine.running == ["high", "low1"]


def test_an_abort_finds_a_request_wherever_it_is() -> None:
    """Running or waiting, it leaves; the others keep their places; unknown ones are not found."""
    engine = Engine(max_num_seqs=2)
    requests = [engine.add(name) for name in "abcd"]
    engine.step()
    for index in (2, 0):
        found = engine.scheduler.find(requests[index].submit.attempt)
        assert found is requests[index]
        engine.finish(found)
        assert found.status is Status.FINISHED
        assert engine.scheduler.find(found.submit.attempt) is None
    assert engine.scheduler.find(77) is None
    assert {*engine.step()} == {"b", "d"}


# -- blocks -------------------------------------------------------------------------------------


def test_a_request_is_admitted_when_its_prompt_fits_now() -> None:
    """Growth of those that are not the oldest is nobody's concern yet."""
    engine = Engine(num_blocks=12)
    engine.add("a", 8, max_tokens=9)  # 2 blocks, and 2 more to come
    engine.add("b", 16, max_tokens=17)  # 4, and 4 to come
    engine.add("c", 12, max_tokens=5)  # 3, and 1 to come
    engine.add("d", 8)  # 2: one too many
    engine.admit()
    assert engine.running == ["a", "b", "c"]
    engine.run()


@pytest.mark.parametrize(("num_blocks", "expected"), [(10, ["a"]), (11, ["a", "b"])])
def test_what_the_oldest_may_still_need_is_kept_back(num_blocks: int, expected: list[str]) -> None:
    """8 blocks in all, whatever it has already; a newcomer needs 3."""
    engine = Engine(num_blocks=num_blocks)
    engine.add("a", 8, max_tokens=25)
    for _ in range(10):
        engine.step()
    engine.add("b", 12, max_tokens=1)
    engine.admit()
    assert engine.running == expected
    engine.run()
    assert engine.preempted == []


def test_the_youngest_gives_way_and_comes_back_before_later_ones() -> None:
    """Preempted, it keeps its order of arrival: one that came after it stays behind it."""
    engine = Engine(num_blocks=14)
    for name in "abc":
        engine.add(name, 12, max_tokens=9)  # 3 blocks, 2 more to come
    engine.step()
    for name in "de":
        engine.add(name, 12, max_tokens=9)
    engine.run()
    assert engine.preempted[0] == "d", "the youngest that had found room"
    assert "a" not in engine.preempted
    ends = {name: max(i for i, row in enumerate(engine.rows) if name in row) for name in "abcde"}
    assert sorted(ends, key=lambda name: ends[name]) == [*"abcde"]


def test_one_that_finds_no_block_sits_out_while_blocks_are_about_to_return() -> None:
    """It keeps its seat and what it has computed; of what the oldest may need it takes nothing."""
    engine = Engine(num_blocks=12, blocks_will_return=True)
    oldest = engine.add("a", 8, max_tokens=25)  # 2 blocks, and 6 more to come
    other = engine.add("b", 12, max_tokens=9)  # 3, and 2 to come: one too many for now
    for _ in range(24):
        engine.step()
    assert (oldest.num_output, other.num_output) == (24, 5)
    assert "b" not in engine.rows[-1]
    engine.run()
    assert engine.preempted == []


# -- what begins alike --------------------------------------------------------------------------

COMMON = list(range(90_000, 90_040))


def test_one_that_begins_like_a_prefill_waits_for_it_and_others_pass() -> None:
    """Then it goes on from what is computed: none of the common tokens is computed twice."""
    engine = Engine(prefill_chunk=10)
    engine.add("leader", prompt_ids=[*COMMON, 1, 2])
    engine.add("alike", prompt_ids=[*COMMON, 3, 4, 5])
    engine.add("other", 6)
    engine.step()
    assert engine.running == ["leader", "other"]
    engine.run()
    assert min(row["alike"][0] for row in engine.rows if "alike" in row) == 40


def test_samples_of_a_request_wait_and_fork_whatever_is_common() -> None:
    """Even less than a block; the last token of each is its own to compute."""
    engine = Engine(prefill_chunk=10)
    samples = [engine.add("r", prompt_ids=COMMON[:3], sample_index=index) for index in range(4)]
    engine.step()
    assert engine.scheduler.running == samples[:1]
    engine.run()
    starts = {chunk.sequence: chunk.start for step in reversed(engine.steps) for chunk in step}
    assert [starts[sample] for sample in samples] == [0, 2, 2, 2]


def test_samples_begin_together_once_the_prompt_is_computed() -> None:
    """The last token is computed by each itself: there is nothing more to wait for."""
    engine = Engine()
    for index in range(4):
        engine.add("r", prompt_ids=COMMON, sample_index=index)
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == 1
    engine.run()
    assert max(len(step) for step in engine.steps[3:5]) == 4


@pytest.mark.parametrize("common", [SIZE - 1, SIZE])
def test_less_than_a_block_in_common_is_not_worth_the_wait(common: int) -> None:
    """Requests that only begin with a few same tokens run side by side."""
    engine = Engine()
    engine.add("a", prompt_ids=[*COMMON[:common], 1, 2, 3])
    engine.add("b", prompt_ids=[*COMMON[:common], 4, 5, 6])
    engine.admit()
    assert engine.running == (["a", "b"] if common < SIZE else ["a"])
    engine.run()


@pytest.mark.parametrize("bypasses", [(True, True), (True, False), (False, True)])
def test_a_request_that_bypasses_the_cache_shares_with_its_own_samples_only(
    bypasses: tuple[bool, bool],
) -> None:
    """Whether it is the one that has or the one that wants."""
    engine = Engine()
    for name, bypass in zip("ab", bypasses, strict=True):
        for index in range(2):
            engine.add(name, prompt_ids=COMMON, sample_index=index, bypass_cache=bypass)
    engine.admit()
    assert engine.running == ["a", "b"], "the first sample of each"
    engine.run()
    starts = {chunk.sequence: chunk.start for step in reversed(engine.steps) for chunk in step}
    assert sorted(starts.values()) == [0, 0, 39, 39]


@pytest.mark.parametrize("field", ["cache_salt", "tenant"])
def test_d7_requests_of_two_domains_share_no_private_block(field: str) -> None:
    """Within one worker too; those of one domain do share, and unset is not empty."""
    texts = ["A", "A", "B", ""] if field == "tenant" else ["A", "A", "B", "", None]
    engine = Engine()
    for number, text in enumerate(texts):
        engine.add(f"r{number}", prompt_ids=[*COMMON, number], **{field: text})
    engine.admit()
    assert engine.running == [f"r{n}" for n in range(len(texts)) if n != 1], "r1 waits for r0"
    engine.run()
    starts = {chunk.sequence: chunk.start for step in reversed(engine.steps) for chunk in step}
    assert [bool(start) for start in starts.values()].count(True) == 1


def test_an_urgent_request_does_not_wait_for_a_less_urgent_prefill() -> None:
    """That one may itself be waiting for the budget that others use up."""
    engine = Engine(num_blocks=200, prefill_chunk=8)
    engine.add("background", prompt_ids=[*COMMON, 1], urgency=3)
    engine.step()
    engine.add("long", 400)
    engine.add("urgent", prompt_ids=[*COMMON, 2], urgency=1)
    for _ in range(8):
        engine.step()
    assert any("urgent" in row for row in engine.rows)


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12))
def test_the_common_start_of_two_lists(left: list[int], right: list[int]) -> None:
    """As comparing token by token finds it."""
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert num_common(left, right) == expected


# -- any workload -------------------------------------------------------------------------------

arrivals = st.tuples(
    st.integers(0, 40),  # at which step
    st.integers(1, 40),  # prompt tokens that others may share
    st.integers(0, 9),  # prompt tokens of its own
    st.integers(0, 20),  # max_tokens
    st.integers(1, 3),  # urgency
    st.booleans(),  # bypasses the cache
    st.one_of(st.none(), st.none(), st.integers(0, 60)),  # cancelled at which step
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(arrivals, min_size=1, max_size=10),
    st.integers(0, 12),
    st.integers(1, 5),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 10)), max_size=4),
)
def test_everybody_ends_whatever_the_room(
    requests: list[tuple[int, int, int, int, int, bool, int | None]],
    num_spare_blocks: int,
    max_num_seqs: int,
    prefill_chunk: int,
    waits: list[tuple[int, int]],
) -> None:
    """Bounded steps, all invariants after each, all blocks back; no more than the largest fits.

    In phases of `waits` some blocks of running requests are held as by a publish under way.
    """
    largest = max(-(-(common + own + max(n, 1) - 1) // SIZE) for _, common, own, n, *_ in requests)
    engine = Engine(largest + num_spare_blocks, max_num_seqs, prefill_chunk)
    due = sorted(enumerate(requests), key=lambda entry: entry[1][0])
    cancels: list[tuple[int, Request]] = []
    held: list[PrivateBlock] = []
    total = sum(common + own + n for _, common, own, n, *_ in requests)
    limit = 120 + 2 * total + sum(length for _, length in waits)
    for now in range(limit):
        if engine.is_idle and not due and not cancels and not held:
            break
        while due and due[0][1][0] <= now:
            number, (_, common, own, max_tokens, urgency, bypass, cancel) = due.pop(0)
            prompt = [*COMMON[:common], *range(100 * number, 100 * number + own)]
            request = engine.add(
                str(number), prompt_ids=prompt, max_tokens=max_tokens, urgency=urgency,
                bypass_cache=bypass,
            )  # fmt: skip
            if cancel is not None:
                cancels.append((cancel, request))
        for entry in [entry for entry in cancels if entry[0] <= now]:
            cancels.remove(entry)
            if entry[1].status is not Status.FINISHED:
                engine.finish(entry[1])
        engine.blocks_will_return = any(start <= now < start + length for start, length in waits)
        if engine.blocks_will_return:
            held += _hold(engine)
        while held and not engine.blocks_will_return:
            engine.pool.drop(held.pop())
        engine.step()
    assert engine.is_idle, f"not done after {limit} steps"
    assert engine.pool.num_free == engine.num_blocks


def _hold(engine: Engine) -> list[PrivateBlock]:
    """One block of each running request."""
    found = []
    for request in engine.scheduler.running:
        private = [block for block in request.table.blocks if isinstance(block, PrivateBlock)]
        if private:
            engine.pool.hold(private[0])
            found.append(private[0])
    return found
