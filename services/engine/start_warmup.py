"""`serve --warmup PLAN`: what the plan requires is warm before the engine is ready.

The plan becomes a job of the daemon, under a key that follows from its content: an engine that is
started again while the job runs, or after it, asks for the same job.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

from cachewarmd import prompt_list
from cachewarmd.client import Client
from cachewarmd.errors import CachewarmError, TimedOutError, UnreachableError
from cachewarmd.log import get_logger
from cachewarmd.plan import Plan
from cachewarmd.v1 import control_pb2 as pb

_log = get_logger()

_CALL_TIMEOUT_S = 10.0
_RETRY_S = 0.2
_GIVE_UP_S = 30.0  # without a daemon that answers
_ENDED = ("done", "failed", "cancelled")
_OPEN = (pb.ITEM_STATE_PENDING, pb.ITEM_STATE_RUNNING)


class StartWarmup:
    """One plan, and how far it is. All but `run` may be asked at any time."""

    def __init__(
        self, socket: Path, model_dir: Path, model_name: str, version: str, plan: Plan
    ) -> None:
        self._socket = socket
        self._model_dir = model_dir
        self._request = pb.Warmup(model_name=model_name, version=version)
        self._plan = plan
        self._items: dict[int, pb.JobItem] = {}
        self._state = "pending"
        self._error = ""
        self._key = ""
        self._weight_bytes = 0
        self._heard = time.monotonic()  # from a daemon
        self._client: Client | None = None

    @property
    def _required(self) -> list[pb.JobItem]:
        return [item for item in self._items.values() if not item.is_optional]

    @property
    def percent(self) -> int:
        """Of the required tokens; an item that was not begun counts as none of its own yet."""
        required = self._required
        if not required:
            return 100 if self._state in _ENDED else 0
        done = sum(
            1.0 if item.state not in _OPEN else item.done_tokens / max(item.num_tokens, 1)
            for item in required
        )
        return int(100 * done / len(required))

    @property
    def is_over(self) -> bool:
        """Nothing that is required is open any more."""
        if self._state in _ENDED:
            return True
        return bool(self._required) and all(item.state not in _OPEN for item in self._required)

    def failures(self) -> list[str]:
        """Of required items, one line each; or why there is no job."""
        bad = [
            f"{item.name or f'item {item.index}'}: "
            f"{pb.ItemState.Name(item.state).removeprefix('ITEM_STATE_').lower()}"
            + (f": {item.detail}" if item.detail else "")
            for item in self._required
            if item.state != pb.ITEM_STATE_DONE and item.state not in _OPEN
        ]
        if not bad and self._state in ("failed", "cancelled"):
            bad.append(self._error or f"the job is {self._state}")
        return bad

    @property
    def done(self) -> tuple[int, int]:
        """Bytes of weights and tokens of items; grow as long as there is progress."""
        return self._weight_bytes, sum(item.done_tokens for item in self._items.values())

    async def run(self, pack_plan: Callable[[], pb.PackPlan]) -> None:
        """Returns when `is_over`; a daemon that dies meanwhile is waited for a while."""
        try:
            await self._run(pack_plan)
        finally:
            if self._client is not None:
                self._client.close()  # ends the thread that reads

    async def _run(self, pack_plan: Callable[[], pb.PackPlan]) -> None:
        loop = asyncio.get_running_loop()

        def on_progress(told: pb.JobProgress) -> None:
            loop.call_soon_threadsafe(self._take, told)

        await asyncio.to_thread(self._prepare, pack_plan)
        while not self.is_over:
            try:
                await asyncio.to_thread(self._follow, on_progress)
                await asyncio.sleep(0)  # what was told is taken
            except (UnreachableError, TimedOutError) as exc:
                if time.monotonic() - self._heard > _GIVE_UP_S:
                    self._state, self._error = "failed", str(exc)
                await asyncio.sleep(_RETRY_S)
            except (CachewarmError, OSError) as exc:
                self._state, self._error = "failed", str(exc)

    def _prepare(self, pack_plan: Callable[[], pb.PackPlan]) -> None:
        self._request.plan.CopyFrom(pack_plan())
        digest = hashlib.sha256(os.fsencode(self._model_dir))
        for piece in prompt_list.pack(self._plan.prompts):
            digest.update(piece)
        self._key = f"serve-{digest.hexdigest()[:32]}"

    def _follow(self, on_progress: Callable[[pb.JobProgress], None]) -> None:
        """Ask for the job, which may be there already, and hear of it until nothing is open."""
        with Client.connect(self._socket, pb.ROLE_ENGINE, "front") as client:
            self._client = client
            job_id = self._ask(client)

            def on_more(envelope: pb.Envelope) -> None:
                on_progress(envelope.job_progress)
                if self.is_over:
                    raise _OverError

            with contextlib.suppress(_OverError):
                watch = pb.Envelope(watch_job=pb.WatchJob(job_id=job_id))
                on_more(client.stream(watch, on_more, None)[0])

    def _ask(self, client: Client) -> int:
        """The id of a job for this plan that goes on, or begins now: one that is over proves
        nothing, what it made warm may be evicted."""
        for number in itertools.count():
            told = self._start(client, f"{self._key}-{number}")
            jobs = client.call(pb.Envelope(jobs=pb.Jobs()), _CALL_TIMEOUT_S)[0].jobs_reply.jobs
            is_over = any(job.job_id == told.job_id and job.state in _ENDED for job in jobs)
            if not told.is_known or not is_over:
                return told.job_id
        raise AssertionError

    def _start(self, client: Client, key: str) -> pb.WarmupReply:
        request = pb.Warmup()
        request.CopyFrom(self._request)
        request.key = key
        fds = [os.open(self._model_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        try:
            fds += prompt_list.put(request, self._plan.prompts)
            reply, _ = client.call(pb.Envelope(warmup=request), _CALL_TIMEOUT_S, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return reply.warmup_reply

    def _take(self, told: pb.JobProgress) -> None:
        self._heard = time.monotonic()
        self._state, self._error = told.state, told.error
        self._weight_bytes = told.weights.done_bytes
        self._items.update((item.index, item) for item in told.items)


class _OverError(Exception):
    """What was waited for is there; the job may go on without us."""
