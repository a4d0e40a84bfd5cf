"""Any workload for one worker, for hypothesis; and what must come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from engine.request import Abort, SamplingParams, Submit, ToWorker
from tests.scripted_worker import BLOCK, VOCAB, Bench, Script, make_submit, solo

DRAWN = SamplingParams(temperature=1.0)


def check(script: Script, submits: Sequence[Submit]) -> None:
    outputs, finished = script.outputs(), script.finished
    for submit in submits:
        expected = solo(submit)
        assert submit.output_ids + outputs.get(submit.attempt, []) == expected
        end = finished[submit.attempt]
        stops = submit.stop_token_ids
        is_stop = bool(expected) and expected[-1] in stops and len(expected) > submit.min_tokens
        assert (end.reason, end.error) == ("stop" if is_stop else "length", None)
        assert end.stop_token_id == (expected[-1] if is_stop else None)


@dataclass
class Workload:
    """Requests with their arrivals, aborts, and a worker that may be much too small for all."""

    bench: Bench
    submits: list[Submit]
    arrivals: dict[int, int]
    aborts: dict[int, int] = field(default_factory=dict)

    @property
    def plan(self) -> list[tuple[int, ToWorker]]:
        """For a Script."""
        return [
            *((self.arrivals[submit.attempt], submit) for submit in self.submits),
            *((turn, Abort(attempt)) for attempt, turn in self.aborts.items()),
        ]

    def check(self, script: Script) -> None:
        """Every request has ended, with the tokens that it has alone; aborted ones with a part."""
        outputs, finished = script.outputs(), script.finished
        assert finished.keys() == {submit.attempt for submit in self.submits}
        cut = [s for s in self.submits if finished[s.attempt].reason == "cancelled"]
        assert {submit.attempt for submit in cut} <= self.aborts.keys()
        for submit in cut:
            output = submit.output_ids + outputs.get(submit.attempt, [])
            assert output == solo(submit)[: len(output)]
        check(script, [submit for submit in self.submits if submit not in cut])


FAMILIES = [[100 * family + i for i in range(40)] for family in (1, 2)]


@st.composite
def some_submits(draw: st.DrawFn) -> list[Submit]:
    """Requests that begin like others, samples of one, some that go on from earlier output."""
    submits: list[Submit] = []
    for number in range(draw(st.integers(1, 6))):
        family = FAMILIES[draw(st.integers(0, 1))]
        common, own = draw(st.integers(0, 40)), draw(st.integers(0, 12))
        prompt = family[:common] + [1000 * number + i for i in range(own + (not common))]
        max_tokens = draw(st.integers(0, 12))
        base = make_submit(
            0,
            prompt,
            request_id=f"r{number}",
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            stop_token_ids=sorted(draw(st.sets(st.integers(0, VOCAB - 1), max_size=6))),
            sampling=draw(st.sampled_from([SamplingParams(), DRAWN])),
            bypass_cache=draw(st.booleans()),
            urgency=draw(st.integers(1, 3)),
            priority=draw(st.integers(-1, 1)),
        )
        for index in range(draw(st.sampled_from([1, 1, 2, 3]))):
            made = msgspec.structs.replace(base, attempt=len(submits) + 1, sample_index=index)
            known = draw(st.integers(0, max_tokens)) if draw(st.booleans()) else 0
            output_ids = solo(made)[:known]
            submits.append(msgspec.structs.replace(made, output_ids=output_ids))
    return submits


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    submits = draw(some_submits())
    longest = max(
        max(len(s.prompt_ids) + max(s.max_tokens, 1) - 1, len(s.prompt_ids) + len(s.output_ids))
        for s in submits
    )
    least = -(-longest // BLOCK)
    bench = Bench(
        num_blocks=draw(st.one_of(st.just(least), st.integers(least, least + 20), st.just(200))),
        max_num_seqs=draw(st.integers(1, 6)),
        prefill_chunk=draw(st.sampled_from([1, 3, 4, 5, 16, 200])),
    )
    arrivals = {s.attempt: draw(st.integers(0, 15)) for s in submits}
    chosen = draw(st.sets(st.sampled_from(submits).map(lambda s: s.attempt), max_size=2))
    aborts = {attempt: arrivals[attempt] + draw(st.integers(0, 25)) for attempt in chosen}
    return Workload(bench, submits, arrivals, aborts)
