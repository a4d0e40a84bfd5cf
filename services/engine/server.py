"""The front process: one loop that binds the port, keeps a worker, serves, drains.

Start: bind -> find or start cachewarmd -> spawn worker -> READY. Stop: refuse new requests, let
streams finish, stop the worker, stop the daemon if it was started here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Mapping

import grpc
import psutil
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cachewarmd import options
from engine import daemon
from engine.config import ServeConfig, WorkerConfig
from engine.errors import StartError
from engine.models.config import ModelConfig, load_config
from engine.request import WorkerReady
from engine.router import Router
from engine.service import EngineService, FrontState
from engine.tokenizer import Tokenizer
from engine.v1 import engine_pb2
from engine.v1.engine_pb2_grpc import add_EngineServiceServicer_to_server
from engine.workers import WorkerSupervisor, free_port_probe

_log = structlog.get_logger()

SERVICE_NAME = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
_MAX_MESSAGE_BYTES = 16 << 20
_SERVER_OPTIONS = (
    # Without it two servers share a port in silence.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # Clients may ping through a long silent prefill; this is the option that counts.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.max_concurrent_streams", 1024),
)
_GRACE_S = 1.0


def _worker_config(
    config: ServeConfig, model: ModelConfig, environ: Mapping[str, str]
) -> WorkerConfig:
    block_bytes = 4 * model.kv_elements_per_token * config.block_size
    # One request of the longest context, and the copy of a short tail.
    pool_bytes = block_bytes * (-(-model.max_context // config.block_size) + 1)
    if config.private_pool_bytes is not None:
        pool_bytes = config.private_pool_bytes
    return WorkerConfig(
        role="unified",
        backend=config.backend,
        log_level=config.log_level,
        model=config.model,
        model_name=config.model_name,
        model_version=config.model_version,
        cachewarmd=config.daemon_socket(environ),
        cpus=config.worker_cpus,
        private_pool_bytes=pool_bytes,
        block_size=config.block_size,
        prefill_chunk=config.prefill_chunk,
        max_context=config.max_context,
    )


class Front:
    """One engine's front. `await run()` returns when it has stopped in order."""

    def __init__(self, config: ServeConfig, environ: Mapping[str, str]) -> None:
        """Raises ModelError and TokenizerError for a directory that can't be served."""
        model = load_config(config.model, config.max_context)
        self._config = config
        self._environ = environ
        self._tokenizer = Tokenizer(config.model)
        self._socket = config.daemon_socket(environ)
        self._state = FrontState(model, config.model_name, str(self._socket or ""))
        self._router = Router(config.max_queue)
        self._health = health.aio.HealthServicer()
        self._stop = asyncio.Event()
        self._cut = asyncio.Event()
        self._provider: asyncio.Task[None] | None = None
        self._port = 0
        self._health_task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises StartError."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, False)
        loop.add_signal_handler(signal.SIGINT, self._on_signal, True)
        config = self._config
        free_port_probe(config.host, config.port)
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            self._port = server.add_insecure_port(f"{host}:{config.port}")
        except RuntimeError as exc:
            raise StartError(
                f"{config.host}:{config.port} is in use or can't be bound: {exc}"
            ) from exc
        path = options.runtime_dir(self._environ) / f"engine-{self._port}.sock"
        worker_config = _worker_config(config, self._state.model, self._environ)
        workers = WorkerSupervisor(worker_config, path, self._router, self._on_worker)
        add_EngineServiceServicer_to_server(
            EngineService(self._state, self._router, workers, self._tokenizer), server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
        await self._tell_health()
        await server.start()
        started_daemon = False
        try:
            if self._socket is not None:
                started_daemon = await daemon.ensure_daemon(self._socket, config.pool_bytes)
            await self._serve(workers, server)
        finally:
            if started_daemon and not config.keep_daemon and self._socket is not None:
                await daemon.stop_daemon(self._socket)

    async def _serve(self, workers: WorkerSupervisor, server: grpc.aio.Server) -> None:
        """Keep a worker until told to stop, then drain and end both. Raises StartError."""
        running = asyncio.create_task(workers.run())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await self._drain(running)
        finally:
            stopping.cancel()
            if self._provider is not None:
                self._provider.cancel()
            workers.stop()
            shutting_down = asyncio.create_task(self._shut_down(server))
            await asyncio.wait({running, shutting_down})
            running.result()

    async def _drain(self, running: asyncio.Task[None]) -> None:
        """Started streams finish; the health check and new calls say NOT_SERVING at once."""
        self._state.is_draining = True
        await self._tell_health()
        end = time.monotonic() + self._config.drain_timeout
        _log.info("draining", active=self._router.num_active)
        while self._router.num_active and time.monotonic() < end and not self._cut.is_set():
            if running.done():
                return
            await asyncio.sleep(0.02)

    async def _shut_down(self, server: grpc.aio.Server) -> None:
        self._state.is_draining = True
        await self._health.enter_graceful_shutdown()
        # What is left by now (health watchers, streams past the drain time) is cut.
        await server.stop(_GRACE_S)

    def _on_signal(self, is_interrupt: bool) -> None:
        if self._stop.is_set() and is_interrupt:
            self._cut.set()  # a second Ctrl-C does not wait for streams
        self._stop.set()

    # -- what workers say ------------------------------------------------------------------------

    def _on_worker(self, ready: WorkerReady | None) -> None:
        state = self._state
        is_first = state.worker is None and not state.max_positions
        state.worker = ready
        if ready is not None:
            state.max_positions = ready.num_private_blocks * ready.block_size
            if is_first:
                self._announce(ready)
            if self._socket is not None and self._provider is None:
                provider = daemon.WarmupProvider(
                    self._socket,
                    self._router,
                    self._tokenizer,
                    state.model_name,
                    state.model.max_context,
                )
                self._provider = asyncio.create_task(provider.run(ready))
        self._health_task = asyncio.create_task(self._tell_health())

    def _announce(self, ready: WorkerReady) -> None:
        self._state.start_seconds = time.time() - psutil.Process().create_time()
        line = {
            "event": "ready",
            "address": f"{self._config.host}:{self._port}",
            "pid": os.getpid(),
            "model": self._state.model_name,
            "model_version": ready.model_version,
            "start_seconds": round(self._state.start_seconds, 3),
        }
        print(json.dumps(line), flush=True)

    async def _tell_health(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        status = serving if self._state.is_serving else not_serving
        for name in ("", SERVICE_NAME):
            await self._health.set(name, status)
