"""The worker's loop over a shared pool: hits, publishes, hand-offs and lost blocks.

`SharedCache` is the real one; the daemon is scripted, so that it can be late, full or gone at any
moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_table import BlockTable
from engine.request import Abort, Finished, ToWorker
from engine.scheduler import Sequence as Request
from engine.shared_cache import SharedCache
from tests.scripted_daemon import ScriptedDaemon, ScriptedLink
from tests.scripted_worker import BLOCK, STATS, Bench, HashModel, Script, make_submit
from tests.workloads import Workload, check, workloads


class Site:
    """A bench with a daemon beside it, which answers every turn unless `on_turn` is given."""

    def __init__(self, bench: Bench, num_slots: int = 32) -> None:
        self.bench = bench
        self.link = ScriptedLink(None)
        self.num_slots = num_slots
        self.lost: list[ScriptedDaemon] = []
        self.connect()
        self.script = Script()
        self.cache = SharedCache(
            self.link,  # type: ignore[arg-type]
            bench.pool,
            BLOCK,
            lambda: self.script.say(None),
        )

    def connect(self) -> None:
        """A daemon that starts empty."""
        self.daemon = self.link.daemon = ScriptedDaemon(
            self.bench.memory, HashModel.block_bytes, self.num_slots
        )

    def come_back(self) -> None:
        """The daemon dies, and another has its memory."""
        self.daemon = self.link.daemon = self.daemon.succeed()

    def run(
        self, plan: Sequence[tuple[int, ToWorker]], on_turn: Callable[[], None] | None = None
    ) -> Script:
        script = Script([*plan], on_turn=on_turn or self.daemon.answer, on_wait=self._wake)
        self.script = script
        self.bench.run(script, self.cache)
        self.cache.poll()
        while self.daemon.num_owed:  # an answer may be followed by a release
            self.daemon.answer()
            self.cache.poll()
        self.bench.check_idle()
        assert not self.daemon.leases, "a lease is left"
        return script

    def _wake(self) -> bool:
        """The worker waits for others: the daemon, if it owes an answer."""
        is_owed = self.daemon.num_owed > 0
        self.daemon.answer()
        return is_owed


def computed(bench: Bench) -> int:
    """Positions that went through the model since the last call."""
    total = sum(len(chunk.token_ids) for step in bench.model.steps for chunk in step)
    bench.model.steps.clear()
    return total


@pytest.mark.parametrize("length", [k * BLOCK + d for k in range(1, 5) for d in (-1, 0, 1)])
def test_d1_a_prompt_that_is_wholly_cached_runs_one_token(length: int) -> None:
    """Whatever its length, the second time only the last token is computed, and nothing written."""
    site = Site(Bench())
    for attempt, cached in ((1, 0), (2, length - 1)):
        submit = make_submit(attempt, range(length), max_tokens=1)
        script = site.run([(0, submit)])
        check(script, [submit])
        assert script.finished[attempt].num_cached_tokens == cached
        assert computed(site.bench) == length - cached
    assert site.bench.pool.num_free == site.bench.num_blocks


@pytest.mark.parametrize("common", range(2 * BLOCK + 2))
def test_d2_prompts_that_part_within_a_block_share_nothing_of_it(common: int) -> None:
    """One after the other: each has its own tokens; at most what both begin with is a hit."""
    site = Site(Bench())
    for attempt in (1, 2):
        prompt = [*range(common), *range(100 * attempt, 100 * attempt + 6)]
        submit = make_submit(attempt, prompt)
        script = site.run([(0, submit)])
        check(script, [submit])
        cached = script.finished[attempt].num_cached_tokens
        assert cached == (0 if attempt == 1 else common // BLOCK * BLOCK)


@st.composite
def troubles(draw: st.DrawFn) -> tuple[int, dict[str, float]]:
    """A seed, and how often in a turn what happens."""
    kinds = ["answer", "answer all", "evict", "slow", "lose", "die", "forget"]
    return draw(st.integers(0, 1 << 16)), {
        kind: draw(st.sampled_from([0.0, 0.1, 0.5])) for kind in kinds
    }


@settings(max_examples=60, deadline=None)
@given(workloads(), st.integers(1, 40), troubles())
def test_a_daemon_in_any_trouble_changes_no_token(
    workload: Workload, num_slots: int, trouble: tuple[int, dict[str, float]]
) -> None:
    """Late, full, evicting, lost and back: tokens as alone, all blocks and leases back."""
    workload.bench.lookup_budget = 0.0
    site = Site(workload.bench, num_slots)
    seed, often = trouble
    chance = random.Random(seed)

    def on_turn() -> None:
        if chance.random() < often["lose"] / 5:
            site.daemon.close()
            site.lost.append(site.daemon)
            site.connect()
        if chance.random() < often["die"] / 3:
            # Whatever it has done of what it was asked for, nobody hears of the rest.
            site.come_back()
        if chance.random() < often["forget"] / 5:
            site.daemon.quarantined.clear()  # its time is over
        if chance.random() < often["answer"]:
            site.daemon.answer(chance.randint(1, 3))
        if chance.random() < often["answer all"]:
            site.daemon.answer()
        for daemon in (site.daemon, *site.lost):
            if chance.random() < often["evict"]:
                daemon.evict(chance, chance.random())
        site.daemon.is_slow = chance.random() < often["slow"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.shared_cache._LOOKUP_PAUSE_S", 0.0)
        # With some, answers come while the others of the worker run on.
        patch.setattr("engine.worker._LOOKUP_BUDGET_SHARE", chance.choice([0.0, 50.0]))
        script = site.run(workload.plan, on_turn)
    workload.check(script)


def test_a_published_block_is_read_in_place_and_its_private_one_is_free() -> None:
    """While a request still decodes, its full blocks move to the pool; its tokens stay the same."""
    site = Site(Bench(num_blocks=16))
    submit = make_submit(1, range(30), max_tokens=20)
    free: list[tuple[int, int]] = []

    def on_turn() -> None:
        site.daemon.answer()
        worker = site.bench.worker
        assert worker is not None
        free.append((worker._stats().num_shared_blocks_in_use, site.bench.pool.num_free))

    check(site.run([(0, submit)], on_turn), [submit])
    most, _ = max(free)
    assert most == (30 + 20 - 1) // BLOCK - 1, "all full ones but the last"
    assert min(free_blocks for shared, free_blocks in free if shared == most) >= 16 - 2


def test_d13_a_preempted_request_reads_back_what_was_published() -> None:
    """The daemon has room for a part only; growth runs out of the worker's own blocks."""
    submits = [make_submit(n, range(100 * n, 100 * n + 40), max_tokens=41) for n in (1, 2)]
    site = Site(Bench(num_blocks=22), num_slots=12)
    script = site.run([(0, submit) for submit in submits])
    check(script, submits)
    assert script.finished[2].num_preemptions > 0
    chunks = [chunk for step in site.bench.model.steps for chunk in step]
    assert [chunk.token_ids[0] for chunk in chunks if chunk.start == 0] == [100, 200]
    assert sum(len(chunk.token_ids) for chunk in chunks) > 2 * 80, "it was computed again behind"


def test_blocks_that_were_reused_after_the_connection_was_lost_are_computed_anew() -> None:
    """A step that read them counts for nothing: no token of it is told."""
    site = Site(Bench(), num_slots=16)
    submit = make_submit(1, range(30), max_tokens=30)
    outputs: list[int] = []

    def on_turn() -> None:
        site.daemon.answer()
        outputs.append(len(site.script.outputs().get(1, [])))
        if outputs[-1] == 10 and outputs[-2] == 9:
            site.daemon.close()
            site.daemon.evict(random.Random(1))
            assert site.daemon.num_evicted > 6

    script = site.run([(0, submit)], on_turn)
    check(script, [submit])
    assert computed(site.bench) > 30 + 29 + 30


# -- a slow daemon -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_aborted", [False, True])
def test_others_run_on_while_a_long_prompt_waits_for_its_lookup(
    monkeypatch: pytest.MonkeyPatch, is_aborted: bool
) -> None:
    """It may wait as long as that is little beside computing it; then it hits, or is gone."""
    monkeypatch.setattr("engine.worker._LOOKUP_BUDGET_SHARE", 1e9)
    site = Site(Bench(lookup_budget=0.0))
    warm, other, asker = (
        make_submit(1, range(30), max_tokens=1),
        make_submit(2, range(100, 110), max_tokens=60),
        make_submit(3, range(30), max_tokens=1),
    )
    check(site.run([(0, warm)]), [warm])
    lengths: list[int] = []

    def on_turn() -> None:
        site.daemon.is_slow = 8 < site.script.turn < 40
        if site.daemon.is_slow:
            lengths.append(len(site.script.outputs()[2]))
        else:
            site.daemon.answer()

    plan: list[tuple[int, ToWorker]] = [(0, other), (10, asker)]
    if is_aborted:
        plan.append((25, Abort(3)))
    script = site.run(plan, on_turn)
    assert lengths[-1] > lengths[0] + 20, "the other stream stood still"
    if is_aborted:
        assert script.finished[3].reason == "cancelled"
        check(script, [other])
    else:
        check(script, [other, asker])
        assert script.finished[3].num_cached_tokens == 29


# -- hand-off -----------------------------------------------------------------------------------


def test_prefilled_is_said_when_all_is_sealed_and_the_lease_stays_until_the_abort() -> None:
    """So that whoever goes on finds every block but the last token's logits."""
    site = Site(Bench())
    prefill = make_submit(1, range(30), hand_off=True)
    decode = make_submit(2, range(30), max_tokens=6)
    said: list[int] = []

    def on_turn() -> None:
        if site.script.turn > 20:
            site.daemon.answer()
            site.daemon.evict(random.Random(1))
        else:
            said.append(len(site.script.finished))

    plan = [(0, prefill), (15, STATS), (25, STATS), (40, decode), (80, Abort(1)), (90, STATS)]
    script = site.run(plan, on_turn)
    assert max(said) == 0, "said before the daemon has acknowledged"
    assert script.finished[1].reason == "prefilled"
    check(script, [decode])
    assert script.finished[2].num_cached_tokens == 29
    assert computed(site.bench) == 30 + 6


def test_an_abort_before_prefilled_is_said_ends_as_cancelled() -> None:
    """The front waits for a last word; there is exactly one."""
    site = Site(Bench())
    plan: list[tuple[int, ToWorker]] = [
        (0, make_submit(1, range(30), hand_off=True)),
        (10, Abort(1)),
    ]
    script = site.run(plan, lambda: site.daemon.answer() if site.script.turn > 20 else None)
    ends = [message.reason for message in script.heard if isinstance(message, Finished)]
    assert ends == ["cancelled"]


# -- late acknowledgements ----------------------------------------------------------------------


def test_an_acknowledgement_under_a_released_lease_swaps_nothing() -> None:
    """Preempted, missed at the next lookup, and forked back: the same private block, unleased."""
    site = Site(Bench())
    cache, pool = site.cache, site.bench.pool
    first, second = (Request(make_submit(n, range(8)), BlockTable(pool, BLOCK)) for n in (1, 2))
    asked = cache.ask(first.tokens, 0.0, 0.0)
    assert asked is not None
    prefix, _ = cache.answer(asked, is_waiting=True) or (None, [])
    assert prefix is not None
    first.table.make_writable(0, 8)
    first.begin(8)
    cache.publish(first, prefix, with_tail=True)
    second.table.fork(first.table, 8)
    first.table.clear()  # preempted
    cache.release(prefix)  # its next lookup was a miss
    first.table.fork(second.table, 8)
    site.daemon.answer()
    site.daemon.evict(random.Random(1))
    cache.poll()
    assert not first.table.shared_blocks, "no lease keeps what it reads"
    first.table.clear()
    second.table.clear()
    pool.check_invariants()
    assert pool.num_free == pool.num_blocks


def test_a_daemon_that_comes_back_with_the_pool_is_told_every_lease() -> None:
    """What is read stays leased, the chain grows on, and nothing is computed again."""
    site = Site(Bench(), num_slots=16)
    submit = make_submit(1, range(30), max_tokens=30)
    turns = 0

    def on_turn() -> None:
        nonlocal turns
        turns += 1
        if turns % 8 == 0:
            site.come_back()
        site.daemon.answer()
        site.daemon.evict(random.Random(0))

    script = site.run([(0, submit)], on_turn)
    check(script, [submit])
    assert site.daemon.link.epoch > 2
    assert not site.daemon.quarantined
    assert computed(site.bench) == 30 + 30 - 1, "nothing was lost"
