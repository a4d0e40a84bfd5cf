"""Computes the daemon's warm-up items: submits with max_tokens = 0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cachewarmd.client import Client
from cachewarmd.errors import CachewarmError, UnreachableError
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from engine import errors
from engine.request import (
    BACKGROUND,
    Finished,
    Output,
    Progress,
    SamplingParams,
    Submit,
    WorkerReady,
)
from engine.router import ActiveRequest, Router

_log = get_logger()

_PROVIDE_TIMEOUT_S = 5.0
_RETRY_FIRST_S, _RETRY_MAX_S = 0.05, 2.0
_TELL_EVERY_S = 1.0  # also when nothing changed: the daemon hears that it is not forgotten
_FULL_PAUSE_S = 0.5

Encode = Callable[[pb.WarmPrompt], Awaitable[list[int]]]


@dataclass
class _Work:
    """An item that was given to us."""

    update: pb.WarmItemUpdate  # what is told of it
    request: ActiveRequest | None = None


class WarmupProvider:
    """Registered with the daemon until cancelled; reconnects with jittered back-off."""

    def __init__(
        self, socket: Path, router: Router, encode: Encode, model_name: str, max_context: int
    ) -> None:
        """`encode` gives a prompt's token ids; it raises EngineError."""
        self._socket = socket
        self._router = router
        self._encode = encode
        self._model_name = model_name
        self._max_context = max_context
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._lost = asyncio.Event()
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}  # by job and index

    @property
    def client(self) -> Client | None:
        """The connection, while there is one."""
        return self._client if self._client is not None and not self._client.is_lost else None

    async def run(self, info: WorkerReady) -> None:
        """What these workers serve is computed for whoever asks the daemon."""
        delay = _RETRY_FIRST_S
        try:
            while True:
                self._lost.clear()
                try:
                    self._client = await asyncio.to_thread(self._register, info)
                    delay = _RETRY_FIRST_S
                    await self._lost.wait()
                    # Whoever comes next gives them out again.
                    await self._drop_all()
                except CachewarmError:
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                    delay = min(2 * delay, _RETRY_MAX_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._client is not None:
                self._client.close()

    async def _drop_all(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _register(self, info: WorkerReady) -> Client:
        def on_event(event: pb.Envelope) -> None:
            self._loop.call_soon_threadsafe(self._on_event, event)

        client = Client.connect(self._socket, pb.ROLE_ENGINE, "front", on_event=on_event)
        provide = pb.Provide(
            weights_sha256=bytes.fromhex(info.weights_sha256),
            model_name=self._model_name,
            stamp=info.stamp,
        )
        try:
            client.call(pb.Envelope(provide=provide), _PROVIDE_TIMEOUT_S)
        except BaseException:
            client.close()
            raise
        return client

    def _on_event(self, event: pb.Envelope) -> None:
        match event.WhichOneof("body"):
            case "warm_item":
                item = event.warm_item
                key = item.job_id, item.index
                task = self._loop.create_task(self._compute(item))
                self._tasks[key] = task
                task.add_done_callback(lambda done: self._forget(key, done))
            case "warm_item_cancel":
                cancel = event.warm_item_cancel
                unwanted = self._tasks.get((cancel.job_id, cancel.index))
                if unwanted is not None:
                    unwanted.cancel()
            case None:
                self._lost.set()

    def _forget(self, key: tuple[int, int], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if not task.cancelled() and (exc := task.exception()) is not None:
            _log.error("bug", job=key[0], item=key[1], exc_info=exc)

    async def _compute(self, item: pb.WarmItem) -> None:
        work = _Work(
            pb.WarmItemUpdate(job_id=item.job_id, index=item.index, state=pb.ITEM_STATE_PENDING)
        )
        update = work.update
        telling = self._loop.create_task(self._keep_telling(work))
        try:
            await self._run_item(item.prompt, work)
        except errors.ContextTooLongError as exc:
            update.state, update.error = pb.ITEM_STATE_SKIPPED, str(exc)
        except errors.EngineError as exc:
            update.state, update.error = pb.ITEM_STATE_FAILED, str(exc)
        finally:
            telling.cancel()
        self._tell(update)

    async def _keep_telling(self, work: _Work) -> None:
        while True:
            if work.request is not None and not work.request.is_started:
                work.update.state = pb.ITEM_STATE_PENDING  # also again: its worker has died
            self._tell(work.update)
            await asyncio.sleep(_TELL_EVERY_S)

    async def _run_item(self, prompt: pb.WarmPrompt, work: _Work) -> None:
        """Fills in the update up to the end. Raises EngineError."""
        update = work.update
        if prompt.HasField("shape"):
            await self._run_shape(prompt.shape, work)
            return
        ids = await self._encode(prompt)
        if not 0 < len(ids) <= self._max_context:
            raise errors.ContextTooLongError(
                [("prompt", f"{len(ids)} tokens; 1 to {self._max_context} are allowed")]
            )
        update.num_tokens = len(ids)
        submit = msgspec.structs.replace(
            _submit(update, ids),
            tenant=prompt.tenant,
            cache_salt=prompt.cache_salt if prompt.HasField("cache_salt") else None,
            urgency=prompt.urgency or BACKGROUND,
            pin_ttl_ms=prompt.ttl_ms if prompt.pin else None,
        )
        await self._follow(submit, work)

    async def _run_shape(self, shape: pb.Shape, work: _Work) -> None:
        """As `_run_item`."""
        update, length = work.update, shape.length
        if not 0 < length <= self._max_context:
            raise errors.ContextTooLongError(
                [("shape", f"{length} tokens; 1 to {self._max_context} are allowed")]
            )
        update.num_tokens = max(1, shape.iterations)
        submit = msgspec.structs.replace(
            _submit(update, []), scratch_length=length, scratch_iterations=update.num_tokens
        )
        await self._follow(submit, work)

    async def _follow(self, submit: Submit, work: _Work) -> None:
        """Up to the end of what is computed."""
        update = work.update
        work.request = request = ActiveRequest(submit, is_warmup=True)
        await self._submit(request)
        try:
            while update.state != pb.ITEM_STATE_DONE:
                self._take(await request.events.get(), update)
        finally:
            self._router.forget(request)

    async def _submit(self, request: ActiveRequest) -> None:
        """Clients go first: where all places are taken it waits."""
        while True:
            try:
                self._router.submit([request])
                return
            except errors.QueueFullError:
                await asyncio.sleep(_FULL_PAUSE_S)

    def _take(
        self, event: Output | Finished | Progress | errors.EngineError, update: pb.WarmItemUpdate
    ) -> None:
        match event:
            case Progress():
                update.state, update.done_tokens = pb.ITEM_STATE_RUNNING, event.num_computed
                self._tell(update)
            case Finished(reason="length", scratch_us=(first, last)):
                update.done_tokens, update.state = update.num_tokens, pb.ITEM_STATE_DONE
                update.first_us, update.last_us = first, last
            case Finished(reason="length", pin_error=why) if why:
                raise errors.InternalError(f"warm, but not pinned: {why}")
            case Finished(reason="length"):
                update.num_cached = event.num_cached_tokens
                update.done_tokens = update.num_tokens
                update.already_warm = event.num_cached_tokens >= update.num_tokens - 1
                update.state = pb.ITEM_STATE_DONE
            case Finished():
                raise errors.InternalError(event.error[1] if event.error else event.reason)
            case errors.EngineError():
                raise event
            case Output():
                raise errors.InternalError("a prefill gave output")

    def _tell(self, update: pb.WarmItemUpdate) -> None:
        if self._client is not None:
            with contextlib.suppress(UnreachableError):
                self._client.notify(pb.Envelope(warm_item_update=update))


def _submit(update: pb.WarmItemUpdate, ids: list[int]) -> Submit:
    return Submit(
        request_id=f"warmup-{update.job_id}-{update.index}",
        attempt=0,
        prompt_ids=ids,
        output_ids=[],
        sampling=SamplingParams(),
        resolved_seed=0,
        max_tokens=0,
        stop_token_ids=[],
        urgency=BACKGROUND,
    )


def messages_of(prompt: pb.ChatPrompt) -> list[tuple[str, str]]:
    """(role, content) pairs. Raises InvalidParameterError."""
    try:
        told = json.loads(prompt.messages_json)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, list) or not told:
        raise errors.InvalidParameterError([("messages", "a list of objects is allowed")])
    pairs = []
    for place, message in enumerate(told):
        parts = [message.get(n) for n in ("role", "content")] if isinstance(message, dict) else []
        if not parts or not all(isinstance(part, str) for part in parts):
            allowed = "an object with role and content, both texts, is allowed"
            raise errors.InvalidParameterError([(f"messages[{place}]", allowed)])
        pairs.append((str(parts[0]), str(parts[1])))
    return pairs
