"""How much background work rides along with others' steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine.background import BackgroundShare
from engine.block_table import BlockTable, PrivatePool
from engine.scheduler import Scheduler, Sequence
from tests.scripted_worker import BLOCK, HashModel, make_submit


def settled(step_s: Callable[[int], float], num_steps: int = 2000) -> float:
    """Tokens a step, on average of the last half, where a step of n more takes `step_s(n)`."""
    share = BackgroundShare(128)
    given = []
    for _ in range(num_steps):
        tokens = share.tokens(4)
        share.measured(tokens, step_s(tokens))
        given.append(tokens)
    late = given[num_steps // 2 :]
    return sum(late) / len(late)


@pytest.mark.parametrize("free", [2, 8, 32])
def test_it_takes_what_costs_nothing_and_little_more(free: int) -> None:
    """Steps as long as without up to `free` tokens, and longer in proportion beyond."""
    mean = settled(lambda tokens: 0.01 * max(1.0, tokens / free))
    assert 0.6 * free < mean < 1.2 * free


def test_it_never_takes_all_nor_nothing() -> None:
    """A share for those who wait for it, whatever it costs; no more than a chunk."""
    assert 0.5 < settled(lambda tokens: 0.01 + tokens) <= 1.0
    assert 100 < settled(lambda tokens: 0.01) <= 128


def test_background_prompts_get_what_they_are_given_and_only_what_others_leave() -> None:
    """Beside decodes and prompts of others; alone they get the whole chunk."""
    memory = np.zeros(64 * HashModel.block_bytes, dtype=np.uint8)
    pool = PrivatePool(memory, HashModel.block_bytes)
    scheduler = Scheduler(pool, 8, 16, lambda _: None)

    def run(attempt: int, length: int, urgency: int) -> Sequence:
        submit = make_submit(attempt, range(100 * attempt, 100 * attempt + length), urgency=urgency)
        sequence = Sequence(submit, BlockTable(pool, BLOCK))
        scheduler.add(sequence)
        assert scheduler.candidate() is sequence
        assert scheduler.admit(sequence)
        return sequence

    warm = run(1, 60, 3)
    assert [c.end - c.start for c in scheduler.schedule(False)] == [16]
    assert scheduler.num_urgent == 0
    prompt = run(2, 12, 2)
    assert scheduler.num_urgent == 1
    for given, expected in ((0, [12]), (3, [12, 3]), (None, [12, 4])):
        chunks = scheduler.schedule(False, given)
        assert [c.end - c.start for c in chunks] == expected
        assert chunks[0].sequence is prompt
    warm_only_one = run(4, 30, 3)
    prompt.num_prefill, prompt.num_computed = 30, 0
    prompt.tokens += range(900, 918)
    chunks = scheduler.schedule(False, 1)
    assert [c.end - c.start for c in chunks] == [16, 1], "the prompt takes all, and yet"
    scheduler.finish(warm_only_one)
    prompt.num_prefill, prompt.tokens = 12, prompt.tokens[:12]
    prompt.num_computed = 11
    chunks = scheduler.schedule(False, 5)
    assert [(c.sequence, c.end - c.start) for c in chunks] == [(prompt, 1), (warm, 5)]
