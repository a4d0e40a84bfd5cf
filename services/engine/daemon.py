"""The front's side of cachewarmd: mind one that was started here, compute warm-up items."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import time
from pathlib import Path

from cachewarmd.client import Client
from cachewarmd.errors import CachewarmError, InvalidRequestError, NotFoundError, UnreachableError
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from engine import errors
from engine.child import Child
from engine.request import Finished, Output, Progress, SamplingParams, Submit, WorkerReady
from engine.router import ActiveRequest, Router
from engine.tokenizer import Tokenizer

_log = get_logger()

_PROBE_TIMEOUT_S = 1.0
_FLUSH_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 20.0
_ALREADY_SERVED = 75
_RETRY_MAX_S = 2.0
_BACKGROUND = 3


class OurDaemon:
    """The daemon that this engine's start began, if it did; `async with` stops it at the end.

    It is left running if `keep`, and if another engine uses it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes] | None, socket: Path | None, keep: bool
    ) -> None:
        self._process = process
        self._socket = socket
        self._keep = keep
        self._serves: asyncio.Task[bool] | None = None

    async def ready(self) -> None:
        """Returns when it serves, or never will: that is not fatal, it is logged."""
        if self._serves is not None:
            await asyncio.wait({self._serves})

    async def __aenter__(self) -> OurDaemon:
        if self._process is not None:
            self._serves = asyncio.create_task(_does_serve(self._process))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._serves is None or self._socket is None:
            return
        if await self._serves and not self._keep:
            await stop_daemon(self._socket)


async def _does_serve(process: subprocess.Popen[bytes]) -> bool:
    child = Child(process)
    reader = asyncio.StreamReader()
    pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), process.stdout
    )
    line = b""
    with contextlib.suppress(TimeoutError):
        line = await asyncio.wait_for(reader.readline(), _START_TIMEOUT_S)
    pipe.close()
    if line:
        return True
    await child.wait(1.0)
    if child.returncode != _ALREADY_SERVED:
        _log.warning("daemon_not_started_serving_cold", exit_status=child.returncode)
    return False


async def stop_daemon(socket: Path) -> None:
    """Ask the daemon to stop unless another engine uses it."""

    def ask() -> None:
        request = pb.Envelope(shutdown=pb.Shutdown(only_if_unused=True))
        end = time.monotonic() + _PROBE_TIMEOUT_S
        with Client.connect(socket, pb.ROLE_ADMIN, "engine", timeout=_PROBE_TIMEOUT_S) as client:
            while True:
                try:
                    client.call(request, _PROBE_TIMEOUT_S)
                    return
                except InvalidRequestError:  # in use; it may not have seen us leave yet
                    if time.monotonic() > end:
                        raise
                time.sleep(0.05)

    try:
        await asyncio.to_thread(ask)
    except CachewarmError as exc:
        _log.info("daemon_left_running", reason=str(exc))


async def flush(socket: Path, model_name: str) -> pb.EvictReply:
    """Drop the model's blocks that nobody uses. Raises NoDaemonError."""

    def ask() -> pb.EvictReply:
        request = pb.Envelope(evict=pb.Evict(model=model_name))
        with Client.connect(socket, pb.ROLE_ADMIN, "engine", timeout=_PROBE_TIMEOUT_S) as client:
            try:
                return client.call(request, _FLUSH_TIMEOUT_S)[0].evict_reply
            except NotFoundError:
                return pb.EvictReply()  # it never held any of that model

    try:
        return await asyncio.to_thread(ask)
    except CachewarmError as exc:
        raise errors.NoDaemonError(f"cachewarmd: {exc}") from exc


class WarmupProvider:
    """Registers with the daemon and computes its warm-up items: submits with max_tokens = 0."""

    def __init__(
        self, socket: Path, router: Router, tokenizer: Tokenizer, model_name: str, max_context: int
    ) -> None:
        self._socket = socket
        self._router = router
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_context = max_context
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._lost = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def client(self) -> Client | None:
        """The connection, while there is one."""
        return self._client if self._client is not None and not self._client.is_lost else None

    async def run(self, info: WorkerReady) -> None:
        """Stay registered until cancelled; reconnects with jittered back-off."""
        delay = 0.05
        try:
            while True:
                self._lost.clear()
                try:
                    self._client = await asyncio.to_thread(self._register, info)
                    delay = 0.05
                    await self._lost.wait()
                except CachewarmError:
                    await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                    delay = min(2 * delay, _RETRY_MAX_S)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._client is not None:
                self._client.close()

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
            client.call(pb.Envelope(provide=provide), 5.0)
        except BaseException:
            client.close()
            raise
        return client

    def _on_event(self, event: pb.Envelope) -> None:
        if event.WhichOneof("body") == "warm_item":
            task = self._loop.create_task(self._compute(event.warm_item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif event.WhichOneof("body") is None:
            self._lost.set()

    async def _compute(self, item: pb.WarmItem) -> None:
        update = pb.WarmItemUpdate(
            job_id=item.job_id, index=item.index, state=pb.ITEM_STATE_RUNNING
        )
        try:
            await self._run_item(item, update)
        except errors.EngineError as exc:
            update.state, update.error = pb.ITEM_STATE_FAILED, str(exc)
        self._tell(update)

    async def _run_item(self, item: pb.WarmItem, update: pb.WarmItemUpdate) -> None:
        if item.prompt.WhichOneof("prompt") == "text":
            ids = await asyncio.to_thread(self._tokenizer.encode, item.prompt.text)
        else:
            ids = list(item.prompt.token_ids.ids)
        if not 0 < len(ids) <= self._max_context:
            raise errors.ContextTooLongError(
                [("prompt", f"{len(ids)} tokens; 1 to {self._max_context} are allowed")]
            )
        update.num_tokens = len(ids)
        submit = Submit(
            request_id=f"warmup-{item.job_id}-{item.index}",
            attempt=0,
            prompt_ids=ids,
            output_ids=[],
            sampling=SamplingParams(),
            resolved_seed=0,
            max_tokens=0,
            stop_token_ids=[],
            urgency=_BACKGROUND,
        )
        request = ActiveRequest(submit, is_warmup=True)
        self._router.submit([request])
        try:
            while True:
                event = await request.events.get()
                match event:
                    case Progress():
                        update.done_tokens = event.num_computed
                        self._tell(update)
                    case Finished(reason="length"):
                        update.done_tokens = len(ids)
                        update.already_warm = event.num_cached_tokens >= len(ids) - 1
                        update.state = pb.ITEM_STATE_DONE
                        return
                    case Finished():
                        text = event.error[1] if event.error else event.reason
                        raise errors.InternalError(text)
                    case errors.EngineError():
                        raise event
                    case Output():
                        raise errors.InternalError("a prefill gave output")
        finally:
            self._router.forget(request)

    def _tell(self, update: pb.WarmItemUpdate) -> None:
        if self._client is not None:
            with contextlib.suppress(UnreachableError):
                self._client.notify(pb.Envelope(warm_item_update=update))
