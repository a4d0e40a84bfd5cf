"""Which tokens run in the next step. Pure: no I/O, no clock, no torch.

WAITING -> RUNNING (prefill in chunks, then one token a step) -> FINISHED. One request runs at a
time; the next one is admitted when it is done.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from engine.block_table import BlockTable
from engine.request import Submit


class Status(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One attempt at a request in this worker."""

    submit: Submit
    table: BlockTable
    status: Status = Status.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt and output so far
    num_computed: int = 0  # positions whose KV is there
    num_sealed: int = 0  # positions that came in sealed blocks: never written

    num_prefill: int = 0  # positions to compute before the first new token

    def __post_init__(self) -> None:
        self.tokens = [*self.submit.prompt_ids, *self.submit.output_ids]
        self.num_prefill = len(self.tokens)

    @property
    def num_prompt(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_length(self) -> int:
        """Positions it may come to fill; the last output token's KV is never needed."""
        return self.num_prompt + max(self.submit.max_tokens, 1) - 1


@dataclass(frozen=True)
class ScheduledChunk:
    """Positions start … end-1 of a sequence are computed in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_prefill(self) -> bool:
        return self.start < self.sequence.num_prefill

    @property
    def ends_prefill(self) -> bool:
        return self.is_prefill and self.end == self.sequence.num_prefill

    @property
    def needs_logits(self) -> bool:
        return self.end == len(self.sequence.tokens) and self.sequence.submit.max_tokens > 0


class Scheduler:
    """Owner of the waiting and running sets."""

    def __init__(self, prefill_chunk: int) -> None:
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[Sequence] = deque()
        self._running: Sequence | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return int(self._running is not None)

    @property
    def running(self) -> Sequence | None:
        return self._running

    def add(self, sequence: Sequence) -> None:
        """Queue it behind all that are as urgent or more."""
        urgency = sequence.submit.urgency
        place = len(self._waiting)
        while place and self._waiting[place - 1].submit.urgency > urgency:
            place -= 1
        self._waiting.insert(place, sequence)

    def admit_next(self) -> Sequence | None:
        """The sequence that starts running now, if there is room and one waits."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.popleft()
        self._running.status = Status.RUNNING
        return self._running

    def next_chunk(self) -> ScheduledChunk | None:
        """What to compute next; None when nothing runs."""
        sequence = self._running
        if sequence is None:
            return None
        start = sequence.num_computed
        return ScheduledChunk(
            sequence, start, min(start + self._prefill_chunk, len(sequence.tokens))
        )

    def find(self, request_id: str) -> Sequence | None:
        """The active sequence of that request."""
        active = [*self._waiting, *([self._running] if self._running is not None else [])]
        return next((s for s in active if s.submit.request_id == request_id), None)

    def finish(self, sequence: Sequence) -> None:
        """It leaves, from wherever it is."""
        if sequence is self._running:
            self._running = None
        else:
            self._waiting.remove(sequence)
        sequence.status = Status.FINISHED
