"""Warm-up jobs: weights first, then prompts, computed by an engine that serves these weights.

An item waits as `pending (no_engine)` until a provider for the weights' digest is connected; each
provider gets one item at a time. A provider that leaves puts its item back, but not for ever: a
prompt that kills engines would else kill every new one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from cachewarmd.errors import CachewarmError, LimitError, NotFoundError
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_store import WeightStore

_log = get_logger()

MAX_JOBS = 256
MAX_ITEMS = 100_000
MAX_ATTEMPTS = 3
MAX_TEXT = 1024  # characters of an error that a provider tells
_ENDED = (pb.ITEM_STATE_DONE, pb.ITEM_STATE_FAILED, pb.ITEM_STATE_CANCELLED)


@dataclass(eq=False)
class Provider:
    """An engine front that computes prompts for these weights."""

    weights_sha256: bytes
    send: Callable[[pb.WarmItem], None]
    busy: tuple[Job, pb.JobItem] | None = None


@dataclass(eq=False)
class Job:
    """One `warmup`; the daemon's loop is its only writer."""

    job_id: int
    model_name: str
    prompts: list[pb.WarmPrompt]
    items: list[pb.JobItem]
    state: str = "pending"
    error: str = ""
    weights_sha256: bytes = b""
    weights: pb.AttachProgress = field(default_factory=pb.AttachProgress)
    weights_done: bool = False
    weights_already_warm: bool = False
    version: int = 0  # grows with every change
    item_versions: list[int] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)  # indices of the items still to be given out
    waiting_detail: str = ""
    num_open: int = 0  # items that have not ended
    attempts: Counter[int] = field(default_factory=Counter)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def is_ended(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

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
            model_name=self.model_name,
            num_items=len(self.items),
            num_items_done=len(self.items) - self.num_open,
        )


class Warmer:
    """Owner of jobs and providers."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._ids = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._providers: list[Provider] = []

    @property
    def jobs(self) -> list[Job]:
        return list(self._jobs.values())

    def get(self, job_id: int) -> Job:
        """Raises NotFoundError."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise NotFoundError(f"job {job_id} is not known") from None

    def start(
        self, dir_fd: int, request: pb.Warmup, *, follow_links: bool, close_fd: Callable[[], None]
    ) -> Job:
        """Begin a job; `close_fd` is called when the directory is no longer needed."""
        if len(request.prompts) > MAX_ITEMS:
            raise LimitError(f"{len(request.prompts)} prompts, at most {MAX_ITEMS} are allowed")
        self._forget_old()
        items = [
            pb.JobItem(index=index, state=pb.ITEM_STATE_PENDING)
            for index in range(len(request.prompts))
        ]
        job = Job(next(self._ids), request.model_name, list(request.prompts), items)
        job.item_versions = [0] * len(items)
        job.waiting, job.num_open = deque(range(len(items))), len(items)
        self._jobs[job.job_id] = job
        job.task = asyncio.create_task(self._run_weights(job, dir_fd, request, follow_links))
        job.task.add_done_callback(lambda _: close_fd())
        return job

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.is_ended]
        if len(self._jobs) >= MAX_JOBS and not ended:
            raise LimitError(f"{MAX_JOBS} warm-up jobs are active, no more are allowed")
        for job in ended[: max(0, len(self._jobs) - MAX_JOBS + 1)]:
            del self._jobs[job.job_id]

    async def _run_weights(
        self, job: Job, dir_fd: int, request: pb.Warmup, follow_links: bool
    ) -> None:
        def notify(phase: str, done: int, total: int) -> None:
            job.weights = pb.AttachProgress(phase=phase, done_bytes=done, total_bytes=total)
            self._touch(job)

        if not job.is_ended:
            job.state = "running"
        try:
            _, segment, already = await self._store.attach(
                dir_fd,
                request.plan,
                request.model_name,
                request.version,
                notify,
                follow_links=follow_links,
            )
        except (CachewarmError, OSError) as exc:
            self._end(job, "failed", str(exc))
            return
        except Exception as exc:
            _log.error("bug", job=job.job_id, exc_info=exc)
            self._end(job, "failed", "internal error; see the daemon's log")
            return
        job.weights_sha256 = segment.weights_sha256
        job.weights_done, job.weights_already_warm = True, already
        self._touch(job)
        self._dispatch()
        self._end_if_done(job)

    def add_provider(self, provider: Provider) -> None:
        self._providers.append(provider)
        self._dispatch()

    def remove_provider(self, provider: Provider) -> None:
        """The engine left: what it was computing waits for another."""
        self._providers.remove(provider)
        if provider.busy is not None:
            job, item = provider.busy
            if item.state in _ENDED:
                pass
            elif job.attempts[item.index] >= MAX_ATTEMPTS:
                item.detail = f"{MAX_ATTEMPTS} engines left while they computed it"
                self._end_item(job, item, pb.ITEM_STATE_FAILED)
            else:
                item.state, item.done_tokens = pb.ITEM_STATE_PENDING, 0
                item.detail = job.waiting_detail
                job.waiting.appendleft(item.index)
                self._touch(job, item)
        self._dispatch()

    def update(self, provider: Provider, update: pb.WarmItemUpdate) -> None:
        """What a provider says of its current item; anything else is ignored as late."""
        if provider.busy is None:
            return
        job, item = provider.busy
        if (job.job_id, item.index) != (update.job_id, update.index):
            return
        has_ended = update.state in _ENDED
        if not has_ended and update.state != pb.ITEM_STATE_RUNNING:
            return
        if item.state not in _ENDED:
            item.num_tokens, item.done_tokens = update.num_tokens, update.done_tokens
            item.already_warm, item.detail = update.already_warm, update.error[:MAX_TEXT]
            if has_ended:
                self._end_item(job, item, update.state)
            else:
                self._touch(job, item)
        if has_ended:
            provider.busy = None
            self._dispatch()

    def cancel(self, job: Job) -> None:
        """End a job; an item that an engine computes now is let finish, its result is dropped."""
        if job.is_ended:
            return
        for item in job.items:
            if item.state not in _ENDED:
                item.state = pb.ITEM_STATE_CANCELLED
                self._touch(job, item)
        self._end(job, "cancelled")

    def _dispatch(self) -> None:
        for job in self._jobs.values():
            if not job.weights_done or job.is_ended:
                continue
            serving = [p for p in self._providers if p.weights_sha256 == job.weights_sha256]
            for provider in serving:
                if provider.busy is None and job.waiting:
                    self._give(provider, job, job.items[job.waiting.popleft()])
            detail = "" if serving else "no_engine"
            if job.waiting_detail != detail:
                job.waiting_detail = detail
                for index in job.waiting:
                    job.items[index].detail = detail
                    self._touch(job, job.items[index])

    def _give(self, provider: Provider, job: Job, item: pb.JobItem) -> None:
        provider.busy = (job, item)
        job.attempts[item.index] += 1
        item.state, item.detail = pb.ITEM_STATE_RUNNING, ""
        self._touch(job, item)
        prompt = job.prompts[item.index]
        provider.send(pb.WarmItem(job_id=job.job_id, index=item.index, prompt=prompt))

    def _end_item(self, job: Job, item: pb.JobItem, state: pb.ItemState) -> None:
        item.state = state
        job.num_open -= 1
        self._touch(job, item)
        self._end_if_done(job)

    def _end_if_done(self, job: Job) -> None:
        if job.num_open:
            return
        failed = [item for item in job.items if item.state == pb.ITEM_STATE_FAILED]
        error = f"{len(failed)} of {len(job.items)} items failed" if failed else ""
        if failed and failed[0].detail:
            error += f": {failed[0].detail}"
        self._end(job, "failed" if failed else "done", error)

    def _end(self, job: Job, state: str, error: str = "") -> None:
        """The one place where a job ends; one that was cancelled stays so."""
        if job.is_ended:
            return
        job.state, job.error = state, error
        # A record of the job is kept, its prompts (megabytes) are not.
        job.prompts.clear()
        job.waiting.clear()
        _log.info("warmup_ended", job=job.job_id, state=state, items=len(job.items))
        self._touch(job)

    @staticmethod
    def _touch(job: Job, item: pb.JobItem | None = None) -> None:
        job.version += 1
        if item is not None:
            job.item_versions[item.index] = job.version
        job.changed.set()
        job.changed = asyncio.Event()

    @staticmethod
    async def watch(job: Job) -> AsyncIterator[pb.JobProgress]:
        """The job at once, then what changed, at most ten times a second, until it has ended."""
        seen = -1
        while True:
            ended, version, changed = job.is_ended, job.version, job.changed
            yield job.progress(since=seen)
            if ended:
                return
            seen = version
            if job.version == version:
                await changed.wait()
            await asyncio.sleep(0.1)
