"""An engine in the test's own loop: real gRPC server, service, router and worker loop, hash model.

    async with loop_front(model_dir, bench) as target:
        ...  # asyncio.all_tasks() are those of the front

The worker's loop runs in a thread; `bench` checks what it has left behind. No daemon, no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

from engine.channel import BrokenChannelError
from engine.chat import ChatEncoder, ChatTemplates
from engine.executor.base import Chunk
from engine.metrics import EngineMetrics
from engine.models.config import load_config
from engine.request import Finished, FromWorker, Output, Progress, ToWorker, WorkerReady
from engine.router import Router
from engine.service import EngineService, FrontState
from engine.spawn import StartedWorker
from engine.tokenizer import Tokenizer
from engine.v1.engine_pb2_grpc import add_EngineServiceServicer_to_server
from engine.workers import WorkerPool
from tests.scripted_worker import BLOCK, Bench, HashModel, Script

_MAX_ACTIVE = 1000
_STEP_S = 0.02


class SlowHashModel(HashModel):
    """Takes as long as a real model, so that a stream can be met in any phase."""

    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32] | None]:
        """See `executor.base.Executor`."""
        time.sleep(_STEP_S)
        self.steps.clear()
        return super().forward(chunks)


class _Wire(Script):
    """A script that the router writes while it is played."""

    def __init__(self, tell: Callable[[FromWorker], None]) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._tell = tell
        self._messages: queue.SimpleQueue[ToWorker | BrokenChannelError | None]
        self._messages = queue.SimpleQueue()

    def say(self, message: ToWorker | None) -> None:
        self._messages.put(message)

    def hang_up(self) -> None:
        self._messages.put(BrokenChannelError("the front is gone"))

    def hear(self, message: FromWorker) -> None:
        self._loop.call_soon_threadsafe(self._tell, message)

    def get(self, block: bool, timeout: float | None) -> ToWorker | BrokenChannelError | None:
        self.on_turn()
        return self._messages.get(block, timeout)

    def get_nowait(self) -> ToWorker | None:
        message = self._messages.get_nowait()
        if isinstance(message, BrokenChannelError):
            raise message
        return message


def _no_start(role: str) -> StartedWorker:
    raise AssertionError(f"a {role} worker is started")


def _service(model_dir: Path, router: Router, bench: Bench, chat: ChatEncoder) -> EngineService:
    ready = WorkerReady(
        role="unified",
        model_version="v",
        weights_sha256="0" * 64,
        stamp="0" * 64,
        backend=bench.model.name,
        backend_reason=bench.model.why,
        dtype="f32",
        kv_dtype="f32",
        block_size=BLOCK,
        num_private_blocks=bench.num_blocks,
        max_num_seqs=bench.max_num_seqs,
        cpus=[],
        start_phases_s={},
    )
    state = FrontState(
        load_config(model_dir, None),
        model_dir.name,
        None,
        _MAX_ACTIVE,
        worker=ready,
        max_positions=bench.num_blocks * BLOCK,
        has_workers=True,
    )
    metrics = EngineMetrics(
        num_running=lambda: router.num_running,
        num_waiting=lambda: router.num_waiting,
        kv_usage=lambda: 0.0,
        num_failovers=lambda: router.num_failovers,
    )
    # Only asked for counts, of which it has none: the worker here is no process.
    workers = WorkerPool(
        _no_start, {"unified": 1}, 0, 30.0, Path("unused"), router, lambda ready: None
    )
    tokenizer = Tokenizer(model_dir)
    return EngineService(state, router, workers, tokenizer, chat, metrics, lambda: None)


@contextlib.asynccontextmanager
async def loop_front(model_dir: Path, bench: Bench) -> AsyncIterator[str]:
    """Yields the address it serves at."""
    router = Router(_MAX_ACTIVE)

    def tell(message: FromWorker) -> None:
        assert isinstance(message, Output | Finished | Progress)
        assert router.on_message(message)

    chat = ChatEncoder(Tokenizer(model_dir), ChatTemplates.load(model_dir), max_output_chars=1000)
    server = grpc.aio.server()
    add_EngineServiceServicer_to_server(_service(model_dir, router, bench, chat), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    wire = _Wire(tell)
    router.worker_ready("unified", wire.say)
    with ThreadPoolExecutor(1) as thread:
        loop = asyncio.get_running_loop()
        playing = loop.run_in_executor(thread, bench.run, wire)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            wire.hang_up()
            await playing
            await server.stop(None)
            await chat.close()
