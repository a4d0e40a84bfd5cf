"""The front process: one loop that binds its addresses, keeps workers, serves, drains.

Start: bind -> wait for a cachewarmd that was started -> workers -> READY; processes were begun
before (`head_start`). Stop: refuse new requests, let streams finish, stop the workers, stop the
daemon if it was started here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, MutableMapping
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cachewarmd import options
from cachewarmd.client import Client
from cachewarmd.log import get_logger
from cachewarmd.notify import Notifier, keep_telling
from cachewarmd.v1 import control_pb2 as pb
from engine import __version__, daemon
from engine.address import GrpcAddress, bind_http
from engine.chat import ChatEncoder, ChatTemplates
from engine.config import ServeConfig
from engine.errors import DrainingError, InvalidParameterError, StartError, WarmingError
from engine.executor.backends import backend_named
from engine.head_start import HeadStart
from engine.metrics import EngineMetrics
from engine.request import WorkerReady
from engine.router import Router
from engine.service import EngineService, FrontState
from engine.shared_prompts import DaemonPrompts
from engine.tokenizer import TokenizerError
from engine.v1 import engine_pb2
from engine.v1.engine_pb2_grpc import add_EngineServiceServicer_to_server
from engine.warmup_provider import WarmupProvider, messages_of
from engine.workers import WorkerPool

if TYPE_CHECKING:
    from engine.http import HttpServer, NotReady, VersionInfo
    from engine.start_warmup import StartWarmup

_log = get_logger()

SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
_MAX_MESSAGE_BYTES = 16 << 20
SERVER_OPTIONS = (
    # Without it two servers share a port in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    # Clients may ping every 10 s through a long silent prefill; this is the option that counts.
    # Half of that, because a ping that comes a moment early is held against them.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),  # also on a channel that has no call
    # A peer that is gone without a word is noticed by these.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_concurrent_streams", 1024),
)
_GRACE_S = 1.0
_START_EXTENSION_S = 60.0
_MAX_PROMPT_CHARS_PER_TOKEN = 64  # of a rendered chat; more can't be within the context


async def serve(
    config: ServeConfig,
    environ: MutableMapping[str, str],
    begun: HeadStart,
    is_interrupted: Callable[[], bool],
) -> None:
    """A front from beginning to end; `is_interrupted` tells of a signal before the loop had them.

    Raises StartError, NotifyError, and TokenizerError for a directory that can't be served.
    """
    path = config.daemon_socket(environ)
    async with daemon.OurDaemon(begun.daemon, path, config.keep_daemon) as ours:
        if not is_interrupted():
            await Front(config, environ, begun, ours).run(is_interrupted)


class Front:
    """One engine's front. `await run()` returns when it has stopped in order."""

    def __init__(
        self,
        config: ServeConfig,
        environ: MutableMapping[str, str],
        begun: HeadStart,
        ours: daemon.OurDaemon,
    ) -> None:
        """Raises NotifyError, TokenizerError."""
        model = begun.model
        self._begun = begun
        self._daemon = ours
        self._config = config
        self._environ = environ
        self._notifier = Notifier.from_environ(environ)
        self._tokenizer = begun.tokenizer.result()
        self._front_client: Callable[[], Client | None] = lambda: None
        self._tokenizer.keep_prompts(config.prompt_cache_bytes)
        if self._tokenizer.prompt_cache is not None:
            self._tokenizer.prompt_cache.shared = DaemonPrompts(
                lambda: self._front_client(), self._tokenizer.identity
            )
        templates = ChatTemplates.load(config.model)
        self._chat = ChatEncoder(
            self._tokenizer,
            templates,
            max_output_chars=_MAX_PROMPT_CHARS_PER_TOKEN * model.max_context,
        )
        self._socket = config.daemon_socket(environ)
        self._state = FrontState(model, config.model_name, self._socket, config.max_queue)
        self._state.has_chat_template = bool(templates.names)
        self._state.warmup = self._planned_warmup()
        self._router = Router(config.max_queue, has_roles="unified" not in dict(config.workers))
        self._address = GrpcAddress(config.host, config.port, config.listen)
        self._health = health.aio.HealthServicer()
        self._stop = asyncio.Event()
        self._cut = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._provider: asyncio.Task[None] | None = None
        self._failure: StartError | None = None
        self._http: socket.socket | None = None

    async def run(self, is_interrupted: Callable[[], bool]) -> None:
        """Serve until SIGTERM or SIGINT. Raises StartError."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, False)
        loop.add_signal_handler(signal.SIGINT, self._on_signal, True)
        if is_interrupted():
            self._stop.set()
        self._begun.phases.end("tokenizer")
        try:
            async with self._bound() as server:
                self._begun.phases.end("bind")
                await self._daemon.ready()
                await self._serve(server)
        finally:
            await self._chat.close()

    def _planned_warmup(self) -> StartWarmup | None:
        """What to wait for before the engine is ready. Raises StartError."""
        config = self._config
        if config.warmup is None:
            return None
        if self._socket is None:
            raise StartError("warmup is not allowed: with cachewarmd off nothing is kept warm")
        from cachewarmd import plan
        from cachewarmd.errors import InvalidRequestError
        from engine.start_warmup import StartWarmup

        try:
            found = plan.load(config.warmup)
        except (InvalidRequestError, OSError) as exc:
            raise StartError(f"warmup: {exc}") from exc
        return StartWarmup(
            self._socket, config.model, config.model_name, config.model_version, found
        )

    @contextlib.asynccontextmanager
    async def _bound(self) -> AsyncIterator[grpc.aio.Server]:
        """All addresses are ours, before anything that takes long is begun. Raises StartError."""
        config = self._config
        server = grpc.aio.server(options=SERVER_OPTIONS)
        with self._address.bind(server), contextlib.ExitStack() as stack:
            self._workers = self._make_workers()
            self._metrics = self._make_metrics(self._workers)
            if config.http_port is not None:
                self._http = stack.enter_context(bind_http(config.host, config.http_port))
            self._add_services(server)
            await self._tell_health()  # before anybody can ask
            await server.start()
            self._address.publish()
            if self._http is not None:
                self._begin(self._serve_http(self._http))
            try:
                yield server
            finally:
                for task in (tasks := list(self._tasks)):
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await server.stop(None)

    async def _serve_http(self, sock: socket.socket) -> None:
        """Connections wait in the socket's queue for what takes long to import."""

        def make() -> HttpServer:
            from engine.http import HttpServer, make_app

            app = make_app(
                registry=self._metrics.registry,
                not_ready=self._why_not_ready,
                is_stopping=self._stop.is_set,
                version=self._version,
            )
            return HttpServer(app, sock)

        server = await asyncio.to_thread(make)
        await server.run()

    def _make_workers(self) -> WorkerPool:
        config = self._config
        path = config.worker_socket
        if path is None:
            path = self._address.worker_socket(options.runtime_dir(self._environ))
        return WorkerPool(
            self._begun.start_worker,
            dict(config.workers),
            config.spare_workers,
            config.watchdog,
            path,
            self._router,
            self._on_worker,
            is_external=config.external_workers,
        )

    def _make_metrics(self, workers: WorkerPool) -> EngineMetrics:
        metrics = EngineMetrics(
            num_running=lambda: self._router.num_running,
            num_waiting=lambda: self._router.num_waiting,
            kv_usage=lambda: workers.kv_usage,
            num_failovers=lambda: self._router.num_failovers,
            prompt_tokens=self._count_prompt_tokens,
        )
        workers.on_stats = lambda pid, stats: metrics.worker_stats(
            pid,
            num_steps=stats.num_steps,
            step_seconds=stats.step_seconds,
            num_preemptions=stats.num_preemptions,
        )
        workers.on_gone = metrics.worker_gone
        return metrics

    def _count_prompt_tokens(self) -> tuple[int, int, int]:
        cache = self._tokenizer.prompt_cache
        if cache is None:
            return 0, 0, 0
        return cache.num_tokens, cache.num_hit_tokens, cache.num_shared_tokens

    def _add_services(self, server: grpc.aio.Server) -> None:
        service = EngineService(
            self._state,
            self._router,
            self._workers,
            self._tokenizer,
            self._chat,
            self._metrics,
            self._begin_drain,
        )
        add_EngineServiceServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it beside; it is cancelled and awaited at the end."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- life -----------------------------------------------------------------------------------

    async def _serve(self, server: grpc.aio.Server) -> None:
        """Keep workers until told to stop, then drain and end both. Raises StartError."""
        running = asyncio.create_task(self._workers.run())
        stopping = asyncio.create_task(self._stop.wait())
        self._begin(keep_telling(self._notifier, self._status_line))
        self._begin(self._ask_for_time())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self._notifier.stopping()
            if not running.done():
                await self._drain(running)
        finally:
            stopping.cancel()
            self._begin_drain()
            self._workers.stop()
            await asyncio.wait({running, asyncio.create_task(self._shut_down(server))})
            running.result()
        if self._failure is not None:
            raise self._failure

    async def _ask_for_time(self) -> None:
        """A start goes on: weights of hundreds of gigabytes take longer than any start timeout.

        And so does a warm-up, as long as it gets further.
        """
        before = None
        while (warmup := self._state.warmup) is not None or self._state.worker is None:
            done = None if warmup is None or self._state.worker is None else warmup.done
            if done is None or done != before:
                self._notifier.extend_timeout(_START_EXTENSION_S)
            before = done
            await asyncio.sleep(_START_EXTENSION_S / 3)

    def _begin_drain(self) -> None:
        if not self._state.is_draining:
            self._state.is_draining = True
            if self._provider is not None:
                self._provider.cancel()  # nobody waits for warm-up; the daemon gives it to others
            self._begin(self._tell_health())

    async def _drain(self, running: asyncio.Task[None]) -> None:
        """Started streams finish; the health check and new calls say NOT_SERVING at once."""
        self._begin_drain()
        end = time.monotonic() + self._config.drain_timeout
        _log.info("draining", active=self._router.num_active)
        while self._router.num_active and time.monotonic() < end and not self._cut.is_set():
            if running.done():
                return
            await asyncio.sleep(0.02)

    async def _shut_down(self, server: grpc.aio.Server) -> None:
        await self._health.enter_graceful_shutdown()
        # What is left by now (health watchers, streams past the drain time) is cut.
        await server.stop(_GRACE_S)

    def _on_signal(self, is_interrupt: bool) -> None:
        if self._stop.is_set() and is_interrupt:
            self._cut.set()  # a second Ctrl-C does not wait for streams
        self._stop.set()

    # -- what workers say -----------------------------------------------------------------------

    def _on_worker(self, ready: WorkerReady | None) -> None:
        """The workers can serve now, or (None) can't any more."""
        state = self._state
        state.has_workers = ready is not None
        if ready is not None:
            before, state.worker = state.worker, ready
            state.max_positions = self._workers.max_positions
            if before is None or before.stamp != ready.stamp:
                self._provide(ready)
            if before is None:
                self._begun.phases.end("workers")
                self._begin(self._finish_start(ready))
        self._begin(self._tell_health())

    def _provide(self, ready: WorkerReady) -> None:
        """Compute warm-up items for what is served now."""
        if self._provider is not None:
            self._provider.cancel()
        if self._socket is not None:
            state = self._state
            provider = WarmupProvider(
                self._socket,
                self._router,
                self._encode,
                state.model_name,
                state.model.max_context,
            )
            self._provider = self._begin(provider.run(ready))
            self._front_client = lambda: provider.client

    async def _encode(self, prompt: pb.WarmPrompt) -> list[int]:
        """Token ids of a warm-up item, as a request has them. Raises EngineError."""
        match prompt.WhichOneof("prompt"):
            case "text":
                try:
                    return await asyncio.to_thread(self._tokenizer.encode, prompt.text)
                except TokenizerError as exc:
                    raise InvalidParameterError([("text", str(exc))]) from exc
            case "token_ids":
                ids, size = list(prompt.token_ids.ids), self._state.model.vocab_size
                if (worst := max(ids, default=0)) >= size:
                    raise InvalidParameterError(
                        [("token_ids", f"{worst} is not allowed: ids below {size}")]
                    )
                return ids
            case "chat":
                return await self._chat.encode(
                    messages_of(prompt.chat),
                    add_generation_prompt=prompt.chat.add_generation_prompt,
                )
        raise InvalidParameterError([("prompt", "text, token_ids or messages are allowed")])

    async def _finish_start(self, ready: WorkerReady) -> None:
        """Warm what the plan requires; then it is ready."""
        warmup = self._state.warmup
        if warmup is not None:
            backend = backend_named(self._config.backend)
            await warmup.run(lambda: backend.pack_plan(self._state.model))
            failures = warmup.failures()
            for failure in failures:
                _log.error("not_warmed", item=failure)
            if failures and self._config.warmup_required:
                more = f" (and {len(failures) - 1} more)" if failures[1:] else ""
                self._failure = StartError(f"warmup: {failures[0]}{more}")
                self._stop.set()
                return
            self._state.warmup = None
            self._begun.phases.end("warmup")
        self._announce(ready)
        await self._tell_health()

    def _announce(self, ready: WorkerReady) -> None:
        state = self._state
        state.start_seconds = self._begun.phases.total
        front = {f"front_{name}": spent for name, spent in self._begun.phases.seconds.items()}
        phases = {**front, **ready.start_phases_s, "total": state.start_seconds}
        self._metrics.start_seconds(phases)
        self._metrics.backend(ready.backend, ready.backend_reason)
        line = {
            "event": "ready",
            "address": self._address.target,
            "http_address": f"{self._config.host}:{self._http.getsockname()[1]}"
            if self._http
            else None,
            "pid": os.getpid(),
            "model": state.model_name,
            "model_version": ready.model_version,
            "start_seconds": round(state.start_seconds, 3),
            "start_phases": {name: round(spent, 3) for name, spent in phases.items()},
        }
        print(json.dumps(line), flush=True)
        self._notifier.ready()
        if self._tokenizer.prompt_cache is not None:
            self._begin(self._chat.prefill())

    @property
    def _http_address(self) -> str | None:
        if self._http is None:
            return None
        return f"{self._config.host}:{self._http.getsockname()[1]}"

    async def _tell_health(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        status = serving if self._state.is_serving else not_serving
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)

    # -- views ----------------------------------------------------------------------------------

    def _status_line(self) -> str:
        router = self._router
        what = "draining" if self._state.is_draining else "serving"
        if not self._state.is_draining and not self._state.has_workers:
            what = "waiting for workers"
        elif not self._state.is_draining and (warmup := self._state.warmup) is not None:
            what = f"warming, {warmup.percent} %"
        return f"{what}: {router.num_running} running, {router.num_waiting} waiting"

    def _why_not_ready(self) -> NotReady | None:
        from engine.http import NotReady

        if self._state.is_draining:
            return NotReady("draining", DrainingError.retry_after_s or 1.0)
        if not self._state.has_workers:
            return NotReady("warming", WarmingError.retry_after_s or 1.0)
        if (warmup := self._state.warmup) is not None:
            return NotReady("warming", WarmingError.retry_after_s or 1.0, warmup.percent)
        return None

    def _version(self) -> VersionInfo:
        from engine.http import VersionInfo

        worker = self._state.worker
        return VersionInfo(
            version=__version__,
            model=self._state.model_name,
            model_version=worker.model_version if worker else None,
            weights_sha256=worker.weights_sha256 if worker else None,
            backend=worker.backend if worker else None,
        )
