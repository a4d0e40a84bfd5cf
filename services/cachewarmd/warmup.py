"""Warm-up jobs: weights first, then prompts, computed by engines that serve these weights.

An item waits as `pending (no_engine)` until a provider for the weights' digest is connected. A
provider that leaves puts its items back, but not for ever: a prompt that kills engines would else
kill every new one. Jobs take turns; within a job the most urgent item goes first.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from cachewarmd import job_records, prompt_list
from cachewarmd.errors import CachewarmError, InvalidRequestError, LimitError, NotFoundError
from cachewarmd.failpoints import hit
from cachewarmd.fdstore import FdStore
from cachewarmd.job import BAD, ENDED, Job, Provider, Work
from cachewarmd.job_record import JobRecord
from cachewarmd.log import get_logger
from cachewarmd.plan import MAX_ITEMS
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_store import Model, WeightStore

_log = get_logger()

MAX_JOBS = 256
MAX_ATTEMPTS = 3
MAX_PARALLEL = 64
MAX_KEY = 128  # characters
MAX_TEXT = 1024  # characters of an error that a provider tells
_TICK_S = 0.25
_TOLD_BY_PROVIDERS = ENDED - {pb.ITEM_STATE_TIMED_OUT}


class Warmer:
    """Owner of jobs and providers; `kept` outlives the daemon."""

    def __init__(self, store: WeightStore, kept: FdStore | None = None) -> None:
        self._store = store
        self._kept = kept
        self._next_id = 1
        self._jobs: dict[int, Job] = {}
        self._providers: list[Provider] = []
        self._ticker: asyncio.TimerHandle | None = None

    @property
    def jobs(self) -> list[Job]:
        return list(self._jobs.values())

    def get(self, job_id: int) -> Job:
        """Raises NotFoundError."""
        try:
            return self._jobs[job_id]
        except KeyError:
            raise NotFoundError(f"job {job_id} is not known") from None

    def find_key(self, key: str) -> Job | None:
        """The job that was begun with this key, if it is known."""
        return next((job for job in self._jobs.values() if key and job.request.key == key), None)

    # -- a job's life -----------------------------------------------------------------------------

    def start(
        self,
        dir_fd: int,
        request: pb.Warmup,
        *,
        follow_links: bool,
        close_fd: Callable[[], None],
        plan_fd: int = -1,
    ) -> Job:
        """Begin a job; `close_fd` is called when the descriptors are no longer needed.

        Raises InvalidRequestError, LimitError.
        """
        self._check(dir_fd, request, plan_fd)
        self._forget_old()
        asked = pb.Warmup()
        asked.CopyFrom(request)
        asked.ClearField("prompts")
        job = Job(self._next_id, asked)
        self._next_id += 1
        self._jobs[job.job_id] = job
        if plan_fd < 0:
            job.fill(list(request.prompts))
        job.task = asyncio.create_task(self._begin(job, dir_fd, follow_links, plan_fd))
        job.task.add_done_callback(lambda _: close_fd())
        return job

    def _check(self, dir_fd: int, request: pb.Warmup, plan_fd: int) -> None:
        if len(request.prompts) > MAX_ITEMS:
            raise LimitError(f"{len(request.prompts)} prompts, at most {MAX_ITEMS} are allowed")
        if request.max_parallel > MAX_PARALLEL:
            raise InvalidRequestError(
                f"max_parallel: {request.max_parallel}: at most {MAX_PARALLEL} is allowed"
            )
        if len(request.key) > MAX_KEY:
            raise InvalidRequestError(f"key: at most {MAX_KEY} characters are allowed")
        if plan_fd >= 0:
            if request.prompts:
                raise InvalidRequestError("prompts: in the request or in a memfd, not in both")
            prompt_list.check_sealed(plan_fd)
        if request.if_version:
            info = os.fstat(dir_fd)
            for model in self._store.find("", (info.st_dev, info.st_ino)):
                _check_version(model, request.if_version)

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.is_ended]
        if len(self._jobs) >= MAX_JOBS and not ended:
            raise LimitError(f"{MAX_JOBS} warm-up jobs are active, no more are allowed")
        for job in ended[: max(0, len(self._jobs) - MAX_JOBS + 1)]:
            self._forget_record(job)
            del self._jobs[job.job_id]

    async def _begin(self, job: Job, dir_fd: int, follow_links: bool, plan_fd: int) -> None:
        try:
            if plan_fd >= 0:
                prompts = await asyncio.to_thread(prompt_list.read, plan_fd)
                if not job.is_ended:
                    job.fill(prompts)
            await self._keep(job, dir_fd, follow_links)
        except (CachewarmError, OSError) as exc:
            self._end(job, "failed", str(exc))
        finally:
            job.is_kept.set()
        await self._run(job, dir_fd, follow_links)

    async def _keep(self, job: Job, dir_fd: int, follow_links: bool) -> None:
        """Let a later daemon know of it. That it can't is no error."""
        if self._kept is None or not self._kept.is_enabled or job.is_ended:
            return
        kept = [other for other in self._jobs.values() if other.record is not None]
        if len(kept) >= job_records.MAX_KEPT:
            ended = next((other for other in kept if other.is_ended), None)
            if ended is None:
                _log.warning("job_not_kept", job=job.job_id, allowed=job_records.MAX_KEPT)
                return
            self._forget_record(ended)
        record = await asyncio.to_thread(job_records.create, job, job.prompts, dir_fd, follow_links)
        hit("job.keep.before")
        if not self._kept.keep(job_records.name_of(job), record.fd):
            record.close()
            return
        hit("job.keep.after")
        job.record = record
        self._write_state(job)  # it may have been cancelled meanwhile

    def _forget_record(self, job: Job) -> None:
        if job.record is not None and self._kept is not None:
            self._kept.forget(job_records.name_of(job))
            job.record.close()
            job.record = None

    def restore(self) -> None:
        """Jobs of an earlier daemon: those that have not ended go on."""
        if self._kept is None:
            return
        for record in job_records.adopt(self._kept):
            job = Job(record.told.job_id, record.told.warmup(), record=record)
            job.began = record.told.began
            job.state, job.weights_sha256, job.error = record.read_state()
            job.is_kept.set()
            self._jobs[job.job_id] = job
            self._next_id = max(self._next_id, job.job_id + 1)
            job.weights_done = bool(job.weights_sha256)
            if job.is_ended:
                job.items = [pb.JobItem(index=index) for index in range(record.num_items)]
                job.item_versions = [0] * record.num_items
                record.read_items(job.items)
                for item in job.items:
                    if job.state == "cancelled" and item.state not in ENDED:
                        item.state = pb.ITEM_STATE_CANCELLED
                continue
            job.weights_done = False
            job.task = asyncio.create_task(self._resume(job, record))

    async def _resume(self, job: Job, record: JobRecord) -> None:
        try:
            prompts = await asyncio.to_thread(record.read_prompts)
        except (CachewarmError, OSError) as exc:
            self._end(job, "failed", str(exc))
            return
        if job.is_ended:
            return
        job.fill(prompts)
        job.attempts.update(record.read_items(job.items))
        job.queue_open_items()
        job.touch()
        _log.info("warmup_resumed", job=job.job_id, items=len(job.items), open=job.num_open)
        dir_fd = job_records.reopen_directory(record)
        try:
            await self._run(job, dir_fd, record.told.follow_links)
        finally:
            if dir_fd >= 0:
                os.close(dir_fd)

    async def _run(self, job: Job, dir_fd: int, follow_links: bool) -> None:
        """The weights, and then items until all have ended."""
        if job.is_ended:
            return
        job.state = "running"
        try:
            already = await self._attach(job, dir_fd, follow_links)
        except (CachewarmError, OSError) as exc:
            self._end(job, "failed", str(exc))
            return
        except Exception as exc:
            _log.error("bug", job=job.job_id, exc_info=exc)
            self._end(job, "failed", "internal error; see the daemon's log")
            return
        if job.state != "running":  # cancelled meanwhile
            return
        job.weights_done, job.weights_already_warm = True, already
        self._write_state(job)
        job.touch()
        self._dispatch()
        self._end_if_done(job)

    async def _attach(self, job: Job, dir_fd: int, follow_links: bool) -> bool:
        def notify(phase: str, done: int, total: int) -> None:
            job.weights = pb.AttachProgress(phase=phase, done_bytes=done, total_bytes=total)
            job.touch()

        if dir_fd < 0:  # of an earlier daemon, and gone since
            known = {loaded.weights_sha256 for loaded in self._store.segments}
            if job.weights_sha256 not in known:
                raise NotFoundError("the model's directory is not there any more")
            return True
        request = job.request
        model, segment, already = await self._store.attach(
            dir_fd,
            request.plan,
            request.model_name,
            request.version,
            notify,
            follow_links=follow_links,
        )
        if request.if_version:
            _check_version(model, request.if_version)
        job.weights_sha256 = segment.weights_sha256
        return already

    # -- providers --------------------------------------------------------------------------------

    def add_provider(self, provider: Provider) -> None:
        self._providers.append(provider)
        self._dispatch()

    def remove_provider(self, provider: Provider) -> None:
        """The engine left: what it was computing waits for another."""
        self._providers.remove(provider)
        for work in list(provider.works.values()):
            job, item = work.job, work.item
            job.given.discard(item.index)
            if job.attempts[item.index] >= MAX_ATTEMPTS:
                item.detail = f"{MAX_ATTEMPTS} engines left while they computed it"
                self._end_item(job, item, pb.ITEM_STATE_FAILED)
                continue
            item.state, item.done_tokens = pb.ITEM_STATE_PENDING, 0
            item.detail = job.waiting_detail
            job.put_back(item.index)
            self._write_item(job, item)
            job.touch(item)
        provider.works.clear()
        self._dispatch()

    def update(self, provider: Provider, update: pb.WarmItemUpdate) -> None:
        """What a provider says of an item that it has; anything else is ignored as late."""
        work = provider.works.get((update.job_id, update.index))
        if work is None:
            return
        job, item = work.job, work.item
        has_ended = update.state in _TOLD_BY_PROVIDERS
        if not has_ended and update.state not in (pb.ITEM_STATE_RUNNING, pb.ITEM_STATE_PENDING):
            return
        is_first = item.state != pb.ITEM_STATE_RUNNING
        if (
            update.state == pb.ITEM_STATE_PENDING
            or is_first
            or (update.done_tokens != item.done_tokens)
        ):
            work.touch()
        item.num_tokens, item.done_tokens = update.num_tokens, update.done_tokens
        item.already_warm, item.detail = update.already_warm, update.error[:MAX_TEXT]
        item.first_us, item.last_us = update.first_us, update.last_us
        if has_ended:
            self._take_back(provider, work)
            self._end_item(job, item, update.state)
            self._dispatch()
        else:
            item.state = update.state
            job.touch(item)

    def cancel(self, job: Job) -> None:
        """End a job; engines are told that what they compute of it is not wanted."""
        if job.is_ended:
            return
        self._call_off(job)
        for item in job.items:
            if item.state not in ENDED:
                item.state = pb.ITEM_STATE_CANCELLED
                job.touch(item)
        job.num_open = 0
        self._end(job, "cancelled")
        self._dispatch()

    def _call_off(self, job: Job) -> None:
        for provider in self._providers:
            for work in [work for work in provider.works.values() if work.job is job]:
                self._take_back(provider, work)
                self._send_cancel(provider, work)

    @staticmethod
    def _take_back(provider: Provider, work: Work) -> None:
        del provider.works[work.job.job_id, work.item.index]
        work.job.given.discard(work.item.index)

    @staticmethod
    def _send_cancel(provider: Provider, work: Work) -> None:
        cancel = pb.WarmItemCancel(job_id=work.job.job_id, index=work.item.index)
        provider.send(pb.Envelope(warm_item_cancel=cancel))

    # -- who computes what ------------------------------------------------------------------------

    def _dispatch(self) -> None:
        active = [job for job in self._jobs.values() if job.weights_done and not job.is_ended]
        for late in active:
            self._skip_overdue(late)
        for provider in self._providers:
            mine = [job for job in active if job.weights_sha256 == provider.weights_sha256]
            while (turn := _next_job(provider, mine)) is not None:
                item = turn.next_waiting()
                if item is not None:
                    self._give(provider, turn, item)
        served = {provider.weights_sha256 for provider in self._providers}
        for job in active:
            if job.is_ended:
                continue
            detail = "" if job.weights_sha256 in served else "no_engine"
            if job.waiting_detail != detail:
                job.waiting_detail = detail
                for _, index in job.waiting:
                    job.items[index].detail = detail
                    job.touch(job.items[index])
        if self._ticker is None and any(not job.is_ended for job in active):
            self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        """Time has passed: stalled items are called off, late ones are skipped."""
        self._ticker = None
        for provider in self._providers:
            for work in [work for work in provider.works.values() if work.is_stalled]:
                job, item = work.job, work.item
                _log.warning("warmup_item_stalled", job=job.job_id, item=item.index)
                self._take_back(provider, work)
                self._send_cancel(provider, work)
                item.detail = f"no progress for {job.stall_timeout_s:g} s"
                self._end_item(job, item, pb.ITEM_STATE_TIMED_OUT)
        self._dispatch()

    def _skip_overdue(self, job: Job) -> None:
        for item in job.overdue():
            item.detail = "its deadline was over before an engine had it"
            self._end_item(job, item, pb.ITEM_STATE_SKIPPED)

    def _give(self, provider: Provider, job: Job, item: pb.JobItem) -> None:
        provider.works[job.job_id, item.index] = Work(job, item)
        provider.last_job = job.job_id
        job.given.add(item.index)
        job.attempts[item.index] += 1
        item.state, item.detail = pb.ITEM_STATE_PENDING, ""
        job.touch(item)
        prompt = job.prompts[item.index]
        warm_item = pb.WarmItem(job_id=job.job_id, index=item.index, prompt=prompt)
        provider.send(pb.Envelope(warm_item=warm_item))

    # -- ends -------------------------------------------------------------------------------------

    def _end_item(self, job: Job, item: pb.JobItem, state: pb.ItemState) -> None:
        item.state = state
        job.num_open -= 1
        self._write_item(job, item)
        job.touch(item)
        self._end_if_done(job)

    def _end_if_done(self, job: Job) -> None:
        if job.num_open or not job.weights_done:
            return
        bad = [item for item in job.items if item.state in BAD and not item.is_optional]
        error = f"{len(bad)} of {len(job.items)} items failed" if bad else ""
        if bad and bad[0].detail:
            error += f": {bad[0].detail}"
        self._end(job, "failed" if bad else "done", error)

    def _end(self, job: Job, state: str, error: str = "") -> None:
        """The one place where a job ends; one that was cancelled stays so."""
        if job.is_ended:
            return
        job.state, job.error = state, error
        # A record of the job is kept, its prompts (megabytes) are not.
        job.prompts = []
        job.waiting.clear()
        job.deadlines.clear()
        self._write_end(job)
        _log.info("warmup_ended", job=job.job_id, state=state, items=len(job.items))
        job.touch()

    def _write_item(self, job: Job, item: pb.JobItem) -> None:
        if job.record is not None:
            job.record.write_item(item, job.attempts[item.index])

    def _write_state(self, job: Job) -> None:
        if job.record is not None:
            job.record.write_state(job.state, job.weights_sha256, job.error)

    def _write_end(self, job: Job) -> None:
        if job.record is None:
            return
        hit("job.end.before")
        self._write_state(job)
        job.record.drop_prompts()
        hit("job.end.after")

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


def _next_job(provider: Provider, jobs: list[Job]) -> Job | None:
    """Whose turn it is: the next after the last one that has something for a free place."""
    room = max((job.max_parallel for job in jobs), default=0) - len(provider.works)
    able = [job for job in jobs if job.waiting and provider.num_of(job) < job.max_parallel]
    if room <= 0 or not able:
        return None
    return min(able, key=lambda job: (job.job_id <= provider.last_job, job.job_id))


def _check_version(model: Model, wanted: str) -> None:
    """Raises InvalidRequestError."""
    loaded = model.segment
    if loaded is None or wanted == model.shown_version:
        return
    digest = loaded.weights_sha256.hex()
    if not digest.startswith(wanted):
        raise InvalidRequestError(
            f"if_version: {wanted!r}: the weights are version {model.shown_version!r}, "
            f"SHA-256 {digest}"
        )
