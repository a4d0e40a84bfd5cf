"""The worker's loop: whatever happens beside a request, its tokens are those it has alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings

from engine.request import Abort, Output, Progress, SamplingParams, Submit
from tests.scripted_worker import BLOCK, STATS, VOCAB, Bench, Script, abort, make_submit, solo
from tests.workloads import Workload, check, workloads

DRAWN = SamplingParams(temperature=1.0)


def together(bench: Bench, submits: Sequence[Submit]) -> Script:
    """All of them at once, to the end; the tokens of each are those it has alone."""
    script = bench.run(Script([(0, submit) for submit in submits], max_turns=20_000))
    check(script, submits)
    bench.check_idle()
    return script


# -- any workload -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(workloads())
def test_neighbours_chunks_preemptions_and_forks_change_no_token(workload: Workload) -> None:
    """Whoever shares a worker of any size: tokens as alone, an end for each, all blocks back."""
    script = workload.bench.run(Script(workload.plan))
    workload.check(script)
    workload.bench.check_idle()


@pytest.mark.parametrize("prefill_chunk", [1, 15, 16, 17, 64, 200])
def test_e10_the_size_of_chunks_changes_no_token(prefill_chunk: int) -> None:
    """Prompts of 1 to 130 tokens, cut anywhere or not at all."""
    submits = [make_submit(n, range(1000 * n, 1001 * n), max_tokens=2) for n in range(1, 131)]
    together(Bench(num_blocks=300, prefill_chunk=prefill_chunk), submits)


# -- one thing each -----------------------------------------------------------------------------


def test_each_token_is_told_once_and_none_before_the_prefill_ends() -> None:
    """E6: short and long prompts together, in chunks; a message with tokens for every token."""
    submits = [make_submit(n, range(100 * n, 100 * n + 5), max_tokens=6) for n in range(1, 9)]
    submits += [make_submit(n, range(100 * n, 100 * n + 75), max_tokens=6) for n in (9, 10)]
    script = together(Bench(max_num_seqs=10, num_blocks=200), submits)
    told = [message for message in script.heard if isinstance(message, Output)]
    assert [len(message.token_ids) for message in told] == [1] * 60
    for submit in submits:
        mine = [m for m in script.heard if getattr(m, "attempt", 0) == submit.attempt]
        progress = [m.num_computed for m in mine if isinstance(m, Progress)]
        assert progress == sorted(progress)
        assert progress[0] == 0, "it is told before anything is done for it"
        assert progress[-1] == len(submit.prompt_ids)
        last = max(i for i, m in enumerate(mine) if isinstance(m, Progress))
        assert isinstance(mine[last + 1], Output), "the first token comes with the last chunk"
        assert not any(isinstance(m, Output) for m in mine[:last])


def test_the_youngest_gives_its_blocks_up_and_ends_all_the_same() -> None:
    """A pool that fits two prompts but not their growth: one is preempted, none differs."""
    submits = [make_submit(n, range(100 * n, 100 * n + 18), max_tokens=17) for n in (1, 2)]
    bench = Bench(num_blocks=14)
    script = together(bench, submits)
    assert [script.finished[n].num_preemptions > 0 for n in (1, 2)] == [False, True]
    assert script.finished[2].preempted_s > 0


def test_samples_of_a_request_share_what_the_first_has_computed() -> None:
    """Of n samples each draws its own tokens; the prompt is computed once."""
    prompt = range(38)
    submits = [
        make_submit(n, prompt, request_id="r", sample_index=n, sampling=DRAWN, max_tokens=9)
        for n in range(1, 5)
    ]
    bench = Bench()
    script = together(bench, submits)
    assert len({tuple(output) for output in script.outputs().values()}) == 4
    first_rows = [chunk for step in bench.model.steps for chunk in step if chunk.start < 37]
    assert sum(len(chunk.token_ids) for chunk in first_rows) == 38
    assert sorted(script.finished[n].num_cached_tokens for n in range(1, 5)) == [0, 37, 37, 37]


def test_a_fork_reads_what_the_other_wrote_and_writes_beside_it() -> None:
    """One that begins like a running request, and like what that has not written yet."""
    first = make_submit(1, range(30), max_tokens=20)
    plan = [(0, first)]
    for number, common in enumerate((5, 8, 11, 29, 30), 2):
        prompt = [*range(common), *range(500 + 10 * number, 500 + 10 * number + 7)]
        plan.append((2 * number, make_submit(number, prompt, max_tokens=20)))
    bench = Bench(prefill_chunk=4)
    script = bench.run(Script([*plan]))
    check(script, [submit for _, submit in plan])
    bench.check_idle()
    cached = [script.finished[number].num_cached_tokens for number in range(2, 7)]
    assert cached == [5, 8, 11, 29, 30]


def test_b7_stop_ids_wait_for_min_tokens() -> None:
    """No stop id is drawn before; the last id of the vocabulary can be, and a prompt counts not."""
    stops = [n for n in range(VOCAB) if n != VOCAB - 1]
    forced = make_submit(
        1, range(40), stop_token_ids=stops, min_tokens=8, max_tokens=12, sampling=DRAWN
    )
    free = make_submit(2, range(40), stop_token_ids=stops, max_tokens=12, sampling=DRAWN)
    script = together(Bench(), [forced, free])
    outputs = script.outputs()
    assert outputs[1][:8] == [VOCAB - 1] * 8
    assert (len(outputs[1]), len(outputs[2])) == (9, 1)
    assert script.finished[1].stop_token_id == outputs[1][-1]


def test_a_stop_id_ends_the_output_and_is_told() -> None:
    """The id itself is part of the output; what would have followed is never computed."""
    expected = solo(make_submit(1, range(9), max_tokens=30))
    place = next(i for i, token in enumerate(expected) if expected.index(token) == i >= 3)
    submit = make_submit(1, range(9), max_tokens=30, stop_token_ids=[expected[place]])
    bench = Bench()
    script = together(bench, [submit])
    assert script.outputs()[1] == expected[: place + 1]
    assert sum(len(c.token_ids) for step in bench.model.steps for c in step) == 9 + place


def test_prefill_only_draws_nothing() -> None:
    """max_tokens = 0 computes the prompt and ends by length, without an output."""
    bench = Bench()
    script = together(bench, [make_submit(1, range(21), max_tokens=0)])
    assert script.outputs() == {}
    assert not any(chunk.needs_logits for step in bench.model.steps for chunk in step)
    assert sum(len(c.token_ids) for step in bench.model.steps for c in step) == 21


@pytest.mark.parametrize("num_known", [4, 5])
def test_output_that_was_complete_is_only_ended(num_known: int) -> None:
    """An earlier attempt died between its last two messages: nothing is computed again."""
    whole = make_submit(1, range(9), max_tokens=5)
    expected = solo(whole)
    stops = [expected[num_known - 1]] if num_known < 5 else []
    submit = msgspec.structs.replace(whole, output_ids=expected[:num_known], stop_token_ids=stops)
    bench = Bench()
    script = together(bench, [submit])
    assert script.outputs() == {}
    assert bench.model.steps == []


# -- aborts and refusals ------------------------------------------------------------------------


def test_an_abort_in_any_phase_gives_everything_back() -> None:
    """Waiting, in prefill, decoding, preempted, ended and unknown: the others don't notice."""
    victim = make_submit(9, range(900, 918), max_tokens=17, urgency=3)
    others = [make_submit(n, range(100 * n, 100 * n + 18), max_tokens=17) for n in (1, 2)]
    seen = set()
    for turn in range(0, 90, 2):
        bench = Bench(num_blocks=14, prefill_chunk=3)
        plan: list[tuple[int, Submit | Abort]] = [(0, victim), (11, others[0]), (17, others[1])]
        script = bench.run(Script([*plan, (turn, Abort(9)), (turn, Abort(77))]))
        check(script, others)
        bench.check_idle()
        end = script.finished[9]
        output = script.outputs().get(9, [])
        assert output == solo(victim)[: len(output)]
        seen.add((end.reason, bool(output), end.num_preemptions > 0))
    assert {("cancelled", False, False), ("cancelled", True, False)} <= seen
    assert ("cancelled", True, True) in seen, "preempted, or after it"
    assert ("length", True, True) in seen, "an abort of what has ended"


def test_e1_what_can_never_fit_fails_at_once_and_alone() -> None:
    """It says what is needed and what there is; five short ones behind it complete."""
    large = make_submit(1, range(400))
    small = [make_submit(n, range(1000 * n, 1000 * n + 6)) for n in range(2, 7)]
    bench = Bench(num_blocks=20)
    script = bench.run(Script([(0, submit) for submit in [large, *small]]))
    name, text = script.finished[1].error or ("", "")
    assert (script.finished[1].reason, name) == ("error", "RequestTooLargeError")
    assert "404" in text
    assert str(20 * BLOCK) in text
    check(script, small)
    bench.check_idle()


def test_the_largest_that_fits_takes_the_whole_pool() -> None:
    """The KV of the last token is never needed."""
    together(Bench(num_blocks=10), [make_submit(1, range(30), max_tokens=11)])


def test_e11_rounds_of_filling_and_cancelling_lose_nothing() -> None:
    """Thirty rounds of six requests, three of them cancelled at random moments."""
    chance = random.Random(11)
    bench = Bench(num_blocks=24, max_num_seqs=4, prefill_chunk=5)
    plan: list[tuple[int, Submit | Abort]] = []
    alone: list[Submit] = []
    for number in range(30):
        made = [
            make_submit(7 * number + i, range(100 * i, 100 * i + 19), max_tokens=12)
            for i in range(1, 7)
        ]
        plan += [(1000 * number, submit) for submit in made]
        for submit in chance.sample(made, 3):
            plan.append((1000 * number + chance.randrange(60), abort(submit)))
        after = make_submit(7 * number + 7, range(700, 719), max_tokens=60)
        plan.append((1000 * number + 900, after))
        alone.append(after)
    script = bench.run(Script([*plan], max_turns=20_000))
    check(script, alone)
    assert len(script.finished) == 30 * 7
    bench.check_idle()


# -- counts -------------------------------------------------------------------------------------


def test_counts_are_told_between_steps() -> None:
    """A prompt in chunks does not keep the front waiting for an answer."""
    submits = [make_submit(n, range(100 * n, 100 * n + 30), max_tokens=4) for n in (1, 2, 3)]
    bench = Bench(max_num_seqs=2, prefill_chunk=4, num_blocks=40)
    plan = [(0, submit) for submit in submits]
    asks = [*((turn, STATS) for turn in range(1, 12)), (1000, STATS)]
    script = bench.run(Script([*plan, *asks]))
    *during, last = script.stats
    during = during[3:9]
    assert [(s.num_running, s.num_waiting) for s in during] == [(2, 1)] * 6
    computed = [stats.num_computed_tokens for stats in during]
    assert [b - a for a, b in pairwise(computed)] == [4] * 5
    assert during[0].num_steps == {"prefill": 3}
    bench.check_idle()
    total = sum(len(c.token_ids) for step in bench.model.steps for c in step)
    assert last.num_computed_tokens == total
    assert (last.num_private_blocks_free, last.num_running, last.num_waiting) == (40, 0, 0)
    assert sum(last.num_steps.values()) == len(bench.model.steps)


# -- hand-off -----------------------------------------------------------------------------------


def test_a_prefill_for_another_worker_draws_nothing_and_keeps_no_seat() -> None:
    """It says "prefilled" once; seat and blocks are free at once, the Abort ends the rest."""
    submits = [make_submit(n, range(30 * n, 30 * n + 30), hand_off=True) for n in (1, 2)]
    bench = Bench(max_num_seqs=1, num_blocks=9)
    held: list[tuple[int, int]] = []

    def look() -> None:
        assert bench.worker is not None
        held.append((bench.worker._hand_offs.num_open, bench.pool.num_free))

    plan: list[tuple[int, Submit | Abort]] = [(0, submit) for submit in submits]
    script = Script([*plan, (100, Abort(1)), (101, Abort(2)), (101, Abort(2))], on_turn=look)
    bench.run(script)
    assert script.outputs() == {}
    assert [end.reason for end in script.finished.values()] == ["prefilled"] * 2
    assert (2, 9) in held
    bench.check_idle()


def test_a_prefill_that_nobody_takes_over_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the front never tell of another worker's lease, the claim ends by itself."""
    monkeypatch.setattr("engine.hand_off._TIMEOUT_S", 0.0)
    bench = Bench()
    bench.run(Script([(0, make_submit(1, range(9), hand_off=True))], on_wait=lambda: True))
    bench.check_idle()
