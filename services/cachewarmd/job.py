"""A warm-up job and who computes its items; changed by `warmup.Warmer` alone."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from cachewarmd.job_record import JobRecord
from cachewarmd.v1 import control_pb2 as pb

STALL_TIMEOUT_S = 5.0
BACKGROUND = 3
ENDED = frozenset(
    (
        pb.ITEM_STATE_DONE,
        pb.ITEM_STATE_FAILED,
        pb.ITEM_STATE_CANCELLED,
        pb.ITEM_STATE_TIMED_OUT,
        pb.ITEM_STATE_SKIPPED,
    )
)
BAD = (pb.ITEM_STATE_FAILED, pb.ITEM_STATE_TIMED_OUT)


@dataclass(eq=False)
class Work:
    """An item that an engine has."""

    job: Job
    item: pb.JobItem
    # When it was given, last waited in the engine's queue, or got further.
    progress_at: float = field(default_factory=time.monotonic)

    def touch(self) -> None:
        self.progress_at = time.monotonic()

    @property
    def is_stalled(self) -> bool:
        return time.monotonic() - self.progress_at > self.job.stall_timeout_s


@dataclass(eq=False)
class Provider:
    """An engine front that computes prompts for these weights."""

    weights_sha256: bytes
    send: Callable[[pb.Envelope], None]
    works: dict[tuple[int, int], Work] = field(default_factory=dict)  # by job and index
    last_job: int = 0  # whose item it got last

    def num_of(self, job: Job) -> int:
        """How many items of the job it has."""
        return sum(work.job is job for work in self.works.values())


@dataclass(eq=False)
class Job:
    """One `warmup`."""

    job_id: int
    request: pb.Warmup
    prompts: list[pb.WarmPrompt] = field(default_factory=list)
    items: list[pb.JobItem] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)  # the same clock in a later daemon
    state: str = "pending"
    error: str = ""
    weights_sha256: bytes = b""
    weights: pb.AttachProgress = field(default_factory=pb.AttachProgress)
    weights_done: bool = False
    weights_already_warm: bool = False
    version: int = 0  # grows with every change
    item_versions: list[int] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)  # heap of (urgency, index)
    deadlines: list[tuple[float, int]] = field(default_factory=list)  # heap of (when, index)
    waiting_detail: str = ""
    num_open: int = 0  # items that have not ended
    given: set[int] = field(default_factory=set)  # indices of the items that engines have
    attempts: Counter[int] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    record: JobRecord | None = None  # what a later daemon finds of it
    is_kept: asyncio.Event = field(default_factory=asyncio.Event)  # or can't be

    def fill(self, prompts: list[pb.WarmPrompt]) -> None:
        """What it is to compute; all of it waits."""
        self.prompts = prompts
        self.items = [
            pb.JobItem(
                index=index,
                state=pb.ITEM_STATE_PENDING,
                name=prompt.name,
                is_optional=prompt.is_optional,
            )
            for index, prompt in enumerate(prompts)
        ]
        self.version += 1
        self.item_versions = [self.version] * len(prompts)
        self.queue_open_items()

    def queue_open_items(self) -> None:
        """All that have not ended wait."""
        self.waiting.clear()
        self.deadlines.clear()
        for index, item in enumerate(self.items):
            if item.state not in ENDED:
                self.put_back(index)
                if self.prompts[index].deadline_ms:
                    when = self.began + self.prompts[index].deadline_ms / 1000
                    self.deadlines.append((when, index))
        heapq.heapify(self.deadlines)
        self.num_open = len(self.waiting)

    def put_back(self, index: int) -> None:
        heapq.heappush(self.waiting, (self.prompts[index].urgency or BACKGROUND, index))

    def next_waiting(self) -> pb.JobItem | None:
        """The most urgent item that waits, which does so no more."""
        while self.waiting:
            item = self.items[heapq.heappop(self.waiting)[1]]
            if item.state not in ENDED:
                return item
        return None

    def overdue(self) -> Iterator[pb.JobItem]:
        """Items that still wait though their deadline is over; each is told once."""
        while self.deadlines and self.deadlines[0][0] <= time.monotonic():
            item = self.items[heapq.heappop(self.deadlines)[1]]
            if item.state not in ENDED and item.index not in self.given:
                yield item

    @property
    def stall_timeout_s(self) -> float:
        return self.request.stall_timeout_ms / 1000 or STALL_TIMEOUT_S

    @property
    def max_parallel(self) -> int:
        return self.request.max_parallel or 1

    @property
    def is_ended(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    def touch(self, item: pb.JobItem | None = None) -> None:
        """Something changed; whoever watches is told."""
        self.version += 1
        if item is not None:
            self.item_versions[item.index] = self.version
        self.changed.set()
        self.changed = asyncio.Event()

    def progress(self, since: int = -1) -> pb.JobProgress:
        """The job with the items that changed after version `since`."""
        items = [i for i, v in zip(self.items, self.item_versions, strict=True) if v > since]
        return pb.JobProgress(
            job_id=self.job_id,
            state=self.state,
            weights=self.weights,
            weights_done=self.weights_done,
            weights_already_warm=self.weights_already_warm,
            items=items,
            error=self.error,
            model_name=self.request.model_name,
            num_items=len(self.items),
            num_items_done=len(self.items) - self.num_open,
        )
