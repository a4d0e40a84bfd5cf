"""Which tokens run in the next step. Pure: no I/O, no clock, no torch.

    WAITING ----> RUNNING ----> FINISHED
       ^             |
       +- PREEMPTED -+   its blocks are needed by an older one; it is computed anew, or read back

A step takes one token of every running sequence that decodes, and up to `prefill_chunk` tokens of
prompts, the oldest first. Nothing is collected for a batch: who arrives while a step runs takes
part in the next.

Private blocks are handed out optimistically: a sequence is admitted when its prompt fits now. What
the oldest may still come to need is kept back, so it always ends, and then the next oldest does.
Others grow into the rest; when that is used up the youngest gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import Enum

from engine.block_table import BlockTable, PrivatePool, SharedBlock
from engine.request import BACKGROUND, Submit


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waits again
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One attempt at a sample of a request in this worker."""

    submit: Submit
    table: BlockTable
    arrival: int = 0  # order of arrival; kept over preemptions
    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt and output so far
    num_computed: int = 0  # positions whose KV is there
    num_found: int = 0  # positions whose KV was there when it began: never written
    num_prefill: int = 0  # positions to compute before the first new token
    num_preemptions: int = 0
    _common: dict[int, int] = field(default_factory=dict)  # by attempt: prompts don't change

    def __post_init__(self) -> None:
        self.tokens = [*self.submit.prompt_ids, *self.submit.output_ids]
        self.num_prefill = len(self.tokens)

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first: the smaller. "Oldest" and "youngest" are meant in this order."""
        return self.submit.urgency, self.submit.priority, self.arrival

    @property
    def is_background(self) -> bool:
        return self.submit.urgency >= BACKGROUND

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_length(self) -> int:
        """Positions it may come to fill here; the last output token's KV is never needed."""
        num_new = 1 if self.submit.hand_off else max(self.submit.max_tokens, 1)
        return max(self.num_prompt + num_new - 1, len(self.tokens))

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_prefill

    def num_shared_with(self, other: Sequence) -> int:
        """Leading prompt tokens that both have and may share; less than a block is not worth it,
        but for samples of one request."""
        is_sibling = self.submit.request_id == other.submit.request_id
        if not is_sibling and (self.submit.bypass_cache or other.submit.bypass_cache):
            return 0
        if self.submit.domain != other.submit.domain:
            return 0
        if other.submit.attempt not in self._common:
            common = num_common(self.submit.prompt_ids, other.submit.prompt_ids)
            self._common[other.submit.attempt] = common
        common = self._common[other.submit.attempt]
        return common if is_sibling or common >= self.table.block_size else 0

    def begin(self, num_found: int) -> None:
        """KV of the first `num_found` positions is in its table; the last token always runs."""
        self.num_found = num_found
        self.num_computed = min(num_found, len(self.tokens) - 1)
        self.num_prefill = len(self.tokens)


@dataclass(frozen=True)
class ScheduledChunk:
    """Positions start … end-1 of a sequence are computed in this step; its blocks are there.

    `copied` are shared blocks whose bytes were copied for it.
    """

    sequence: Sequence
    start: int
    end: int
    copied: list[SharedBlock]

    @property
    def write_from(self) -> int:
        return max(self.start, self.sequence.num_found)

    @property
    def is_prefill(self) -> bool:
        return self.start < self.sequence.num_prefill

    @property
    def ends_prefill(self) -> bool:
        return self.is_prefill and self.end == self.sequence.num_prefill

    @property
    def needs_logits(self) -> bool:
        submit = self.sequence.submit
        is_last = self.end == len(self.sequence.tokens)
        return is_last and submit.max_tokens > 0 and not submit.hand_off


class Scheduler:
    """Owner of the waiting and running sets, and of who gets private blocks.

    `on_preempt(sequence)` is called while the sequence still has its blocks.
    """

    def __init__(
        self,
        pool: PrivatePool,
        max_num_seqs: int,
        prefill_chunk: int,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._prefill_chunk = prefill_chunk
        self._on_preempt = on_preempt
        self._num_arrived = 0
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """Oldest first."""
        return list(self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue it behind all that are as urgent or more."""
        sequence.arrival = self._num_arrived = self._num_arrived + 1
        _insert(self._waiting, sequence)

    def find(self, attempt: int) -> Sequence | None:
        """The active sequence of that attempt."""
        active = [*self._waiting, *self._running]
        return next((s for s in active if s.submit.attempt == attempt), None)

    def finish(self, sequence: Sequence) -> None:
        """It leaves, from wherever it is."""
        (self._running if sequence.status is Status.RUNNING else self._waiting).remove(sequence)
        sequence.status = Status.FINISHED

    # -- admission ------------------------------------------------------------------------------

    def candidate(self, passed: Set[Sequence] = frozenset()) -> Sequence | None:
        """The waiting sequence that comes next; None = none waits, or there is no seat for it.

        Those of `passed` don't come now.

        One that begins like a sequence in prefill waits until that has computed what both need,
        and lets others pass meanwhile. For a more urgent one the youngest leaves its seat.
        """
        able = (s for s in self._waiting if s not in passed and not self._can_follow(s))
        found = next(able, None)
        if found is None or len(self._running) < self._max_num_seqs:
            return found
        return found if self._give_way(found) else None

    def _can_follow(self, sequence: Sequence) -> bool:
        """Will a running sequence soon have computed at least a block of what this one needs?"""
        # Its last token it computes itself. Nobody waits for one that others may go before.
        most = len(sequence.tokens) - 1
        _, there = self.best_fork(sequence)
        return any(
            leader.is_prefilling
            and leader.order < sequence.order
            and min(sequence.num_shared_with(leader), most) > there
            for leader in self._running
        )

    def best_fork(self, sequence: Sequence) -> tuple[Sequence | None, int]:
        """The running sequence that has the most of what `sequence` still needs, and how much."""
        best, most = None, sequence.num_found
        for other in self._running:
            common = min(sequence.num_shared_with(other), other.num_computed)
            if common > most:
                best, most = other, common
        return best, most

    def admit(self, sequence: Sequence) -> bool:
        """Give it a seat, if the blocks that its prefill needs can be had now."""
        table = sequence.table
        needed = table.num_needed(sequence.num_found, len(sequence.tokens))
        while self._pool.num_free < needed + self._promised(sequence):
            if not self._give_way(sequence):
                return False
        self._waiting.remove(sequence)
        sequence.status = Status.RUNNING
        _insert(self._running, sequence)
        return True

    def _promised(self, newcomer: Sequence) -> int:
        """Blocks that running sequences will come to need: what is left of their prefill; of the
        oldest, all that it may still grow."""
        total = 0
        for number, sequence in enumerate(self._running):
            is_oldest = number == 0 and sequence.order < newcomer.order
            end = sequence.max_length if is_oldest else sequence.num_prefill
            total += self._growth(sequence, end)
        return total

    @staticmethod
    def _growth(sequence: Sequence, end: int) -> int:
        start = max(sequence.num_computed, sequence.num_found)
        return sequence.table.num_needed(start, end)

    def _give_way(self, sequence: Sequence) -> bool:
        """Preempt the youngest running sequence if it is less urgent than this one."""
        if not self._running or self._running[-1].submit.urgency <= sequence.submit.urgency:
            return False
        self._preempt(self._running[-1])
        return True

    # -- steps ----------------------------------------------------------------------------------

    @property
    def num_urgent(self) -> int:
        """How many run that are more than background work."""
        return sum(1 for sequence in self._running if not sequence.is_background)

    def schedule(
        self, blocks_will_return: bool, background_tokens: int | None = None
    ) -> list[ScheduledChunk]:
        """What to compute next, oldest first; its private blocks are allocated.

        Background prompts get what others leave of the chunk, but at least a token, and at most
        `background_tokens`.
        `blocks_will_return`: some blocks are on their way to the daemon and free again soon, so
        that a sequence that finds none sits out rather than loses its seat.
        """
        chunks: list[ScheduledChunk] = []
        budget = self._prefill_chunk
        background = budget if background_tokens is None else background_tokens
        for sequence in self.running:
            if sequence.status is not Status.RUNNING:
                continue  # an older one of this step needed its blocks
            start = sequence.num_computed
            wanted = budget if sequence.is_prefilling else 1
            if sequence.is_background:
                # Also where prompts of others take all: it must not look as if it were stuck.
                wanted = min(max(wanted, 1), background)
            end = min(start + wanted, len(sequence.tokens))
            if end == start or not self._make_room(sequence, end, blocks_will_return):
                continue
            if sequence.is_prefilling:
                budget -= end - start
            if sequence.is_background:
                background -= end - start
            copied = sequence.table.make_writable(max(start, sequence.num_found), end)
            chunks.append(ScheduledChunk(sequence, start, end, copied))
        return chunks

    def _make_room(self, sequence: Sequence, end: int, blocks_will_return: bool) -> bool:
        """Can it write up to `end` now? The youngest make room; it may be the youngest itself."""
        needed = self._growth(sequence, end)
        while needed:
            oldest = self._running[0]
            kept = 0 if sequence is oldest else self._growth(oldest, oldest.max_length)
            if self._pool.num_free >= needed + kept:
                break
            if blocks_will_return:
                return False
            victim = self._running[-1]
            if victim is oldest:
                return False  # alone, and all blocks are its own or will come back
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._on_preempt(sequence)
        sequence.table.clear()
        sequence.begin(0)
        sequence.status = Status.PREEMPTED
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._running.remove(sequence)
        _insert(self._waiting, sequence)

    def check_invariants(self) -> None:
        """Raises AssertionError."""
        self._pool.check_invariants()
        assert self._running == sorted(self._running, key=lambda s: s.order), "running: order"
        assert self._waiting == sorted(self._waiting, key=lambda s: s.order), "waiting: order"
        assert all(s.status is Status.RUNNING for s in self._running), "running: status"
        waits = (Status.WAITING, Status.PREEMPTED)
        assert all(s.status in waits for s in self._waiting), "waiting: status"
        assert len(self._running) <= self._max_num_seqs, "more running than seats"
        for sequence in self._running:
            assert sequence.num_computed < len(sequence.tokens), "nothing left to compute"
            assert len(sequence.table.blocks) * sequence.table.block_size >= sequence.num_computed


def num_common(left: list[int], right: list[int]) -> int:
    """Number of tokens two lists share at their start; compares slices, not elements."""
    low, high = 0, min(len(left), len(right))
    if left[:1] != right[:1]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _insert(sequences: list[Sequence], sequence: Sequence) -> None:
    place = len(sequences)
    while place and sequences[place - 1].order > sequence.order:
        place -= 1
    sequences.insert(place, sequence)
