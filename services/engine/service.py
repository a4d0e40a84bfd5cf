"""`engine.v1.EngineService`: validate, hand to the router, stream what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine import __version__, daemon, errors, validate
from engine.chat import ChatEncoder
from engine.generation import Generation
from engine.live_worker import LiveWorker
from engine.metrics import EngineMetrics, RequestClock
from engine.models.config import ModelConfig
from engine.output_text import OutputText
from engine.request import Finished, Output, WorkerReady
from engine.router import ActiveRequest, Event, Router
from engine.status import Context, as_engine_error, end_with, unary
from engine.tokenizer import Tokenizer, TokenizerError
from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceServicer
from engine.workers import WorkerPool

if TYPE_CHECKING:
    from engine.start_warmup import StartWarmup

# A text this long is tokenised beside the loop, which has streams to serve.
_LONG_TEXT = 16 << 10
# So that our status, which has a reason, is there before the client's own timer ends the call.
_DEADLINE_MARGIN_S = 0.02
_DRAIN_POLL_S = 0.1


@dataclass
class FrontState:
    """What the front knows of itself; written by the server's life cycle, read by calls."""

    model: ModelConfig
    model_name: str
    socket: Path | None
    max_queue: int
    has_chat_template: bool = False
    is_draining: bool = False
    start_seconds: float = 0.0
    worker: WorkerReady | None = None  # what is served, once it is known
    max_positions: int = 0
    has_workers: bool = False
    warmup: StartWarmup | None = None  # what the start still waits for

    @property
    def is_serving(self) -> bool:
        return self.has_workers and not self.is_draining and self.warmup is None

    def check_admits(self) -> WorkerReady:
        """What is served now. Raises DrainingError, WarmingError.

        Between two workers requests are admitted: they wait for the next one.
        """
        if self.is_draining:
            raise errors.DrainingError("the server is stopping")
        if self.worker is None:
            raise errors.WarmingError("the worker is not ready yet")
        if self.warmup is not None:
            raise errors.WarmingError(f"{self.warmup.percent} % of the warm-up is done")
        return self.worker


class EngineService(EngineServiceServicer):
    """The RPCs. Owns nothing: requests are the router's, counts the metrics'."""

    def __init__(
        self,
        state: FrontState,
        router: Router,
        workers: WorkerPool,
        tokenizer: Tokenizer,
        chat: ChatEncoder,
        metrics: EngineMetrics,
        begin_drain: Callable[[], None],
    ) -> None:
        self._state = state
        self._router = router
        self._workers = workers
        self._tokenizer = tokenizer
        self._chat = chat
        self._metrics = metrics
        self._begin_drain = begin_drain

    # -- Generate -------------------------------------------------------------------------------

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams the samples of one prompt."""
        arrived_at = self._metrics.now()
        try:
            samples = await self._accept(request)
        except Exception as exc:
            error = as_engine_error(exc)
            self._metrics.rejected(error.reason)
            await end_with(context, error)
            return
        clock = self._metrics.request(
            len(samples[0].submit.prompt_ids),
            num_samples=len(samples),
            arrived_at=arrived_at,
            bypasses_cache=request.cache.bypass_prefix_cache,
        )
        with clock, self._owned(samples, context):
            yield self._accepted(samples)
            try:
                generation = self._generation(samples, request)
                while not generation.is_done:
                    for sample in generation.samples_to_stop:
                        self._router.stop_sample(sample)
                    event = await samples[0].events.get()
                    for message in self._messages(event, generation, clock):
                        yield message
            except Exception as exc:  # the boundary: everything ends with a status
                clock.finished("error")
                await end_with(context, exc)

    def _generation(self, samples: list[ActiveRequest], request: pb.GenerateRequest) -> Generation:
        texts = [
            OutputText(
                self._tokenizer,
                sample.submit.prompt_ids,
                stop=request.stopping.stop,
                min_tokens=request.stopping.min_tokens,
            )
            for sample in samples
        ]
        return Generation(samples, texts, request.response.return_token_ids)

    @staticmethod
    def _messages(
        event: Event, generation: Generation, clock: RequestClock
    ) -> Iterator[pb.GenerateResponse]:
        """What the client is told of an event. Raises the EngineError that ends the request."""
        match event:
            case Output():
                for message in generation.output(event):
                    clock.tokens(message.output.num_tokens, event.sample_index)
                    yield message
            case Finished(error=None):
                yield from generation.finish(event)
                reason = generation.reason_of(event.sample_index)
                clock.sample_finished(msgspec.structs.replace(event, reason=reason))
            case Finished():
                name, text = event.error or ("InternalError", "")
                raise getattr(errors, name, errors.InternalError)(text)
            case errors.EngineError():
                raise event

    @contextlib.contextmanager
    def _owned(self, samples: list[ActiveRequest], context: Context) -> Iterator[None]:
        """Whatever ends the stream, the client's leaving too, ends the work for it."""
        events = samples[0].events
        expired = errors.ExpiredInQueueError("the deadline passed before the request was begun")

        def expire() -> None:
            if not any(sample.is_started or sample.output_ids for sample in samples):
                events.put_nowait(expired)

        remaining = context.time_remaining()
        loop = asyncio.get_running_loop()
        timer = None
        if remaining is not None:
            timer = loop.call_later(max(0.0, remaining - _DEADLINE_MARGIN_S), expire)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            for sample in samples:
                self._router.forget(sample)

    async def _accept(self, request: pb.GenerateRequest) -> list[ActiveRequest]:
        limits = self._limits(self._state.check_admits())
        sampling = validate.check_options(request, limits)
        ids = await self._prompt_ids(request)
        self._state.check_admits()  # tokenising a long text takes a while
        events: asyncio.Queue[Event] = asyncio.Queue()
        samples = [
            ActiveRequest(submit, events=events)
            for submit in validate.make_submits(request, ids, sampling, limits)
        ]
        self._router.submit(samples)
        return samples

    def _limits(self, worker: WorkerReady) -> validate.Limits:
        model = self._state.model
        return validate.Limits(
            model_name=self._state.model_name,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            eos_token_ids=model.eos_token_ids,
            max_positions=self._state.max_positions,
            weights_sha256=worker.weights_sha256,
        )

    async def _prompt_ids(self, request: pb.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "token_ids":
                return list(request.token_ids.ids)
            case "chat":
                chat = request.chat
                return await self._chat.encode(
                    [(message.role, message.content) for message in chat.messages],
                    template=chat.template,
                    add_generation_prompt=not chat.HasField("add_generation_prompt")
                    or chat.add_generation_prompt,
                )
            case _:
                return await self._encode(request.text)

    async def _encode(self, text: str) -> list[int]:
        try:
            if len(text) < _LONG_TEXT:
                return self._tokenizer.encode(text)
            return await asyncio.to_thread(self._tokenizer.encode, text)
        except TokenizerError as exc:
            raise errors.InvalidParameterError([("text", str(exc))]) from exc

    def _accepted(self, samples: list[ActiveRequest]) -> pb.GenerateResponse:
        worker, first = self._state.worker, samples[0].submit
        return pb.GenerateResponse(
            request_id=first.request_id,
            accepted=pb.Accepted(
                queue_position=max(0, self._router.num_active - len(samples)),
                num_prompt_tokens=len(first.prompt_ids),
                resolved_seed=first.resolved_seed,
                model_version=worker.model_version if worker else "",
                weights_sha256=worker.weights_sha256 if worker else "",
            ),
        )

    # -- text -----------------------------------------------------------------------------------

    @unary
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids of a text, as Generate would see them."""
        return pb.TokenizeResponse(token_ids=await self._encode(request.text))

    @unary
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        """Text of token ids."""
        vocab_size = self._state.model.vocab_size
        worst = max(request.token_ids, default=0)
        if worst >= vocab_size:
            text = f"{worst} is not allowed: ids below {vocab_size}"
            raise errors.InvalidParameterError([("token_ids", text)])
        skips = not request.HasField("skip_special_tokens") or request.skip_special_tokens
        ids = list(request.token_ids)
        return pb.DetokenizeResponse(
            text=await asyncio.to_thread(self._tokenizer.decode, ids, skips)
        )

    # -- control --------------------------------------------------------------------------------

    @unary
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Stops a request; unknown ids are no-ops."""
        return pb.AbortResponse(aborted=self._router.abort(request.request_id))

    async def Drain(
        self, request: pb.DrainRequest, context: Context
    ) -> AsyncIterator[pb.DrainResponse]:
        """Stops admitting and tells how many requests are left, until none is."""
        self._begin_drain()
        last = -1
        while last != 0:
            if self._router.num_active != last:
                last = self._router.num_active
                yield pb.DrainResponse(num_active=last)
            else:
                await asyncio.sleep(_DRAIN_POLL_S)

    @unary
    async def FlushCache(
        self, request: pb.FlushCacheRequest, context: Context
    ) -> pb.FlushCacheResponse:
        """Drops the model's shared blocks that nobody uses."""
        if self._state.socket is None:
            raise errors.NoDaemonError("the engine runs with --cachewarmd off")
        reply = await daemon.flush(self._state.socket, self._state.model_name)
        return pb.FlushCacheResponse(
            num_blocks=reply.num_blocks, num_bytes=reply.num_bytes, num_kept=reply.num_kept
        )

    # -- views ----------------------------------------------------------------------------------

    @unary
    async def GetModelInfo(
        self, request: pb.GetModelInfoRequest, context: Context
    ) -> pb.GetModelInfoResponse:
        """What is served."""
        worker, model = self._state.worker, self._state.model
        if worker is None:
            raise errors.WarmingError("the worker is not ready yet")
        return pb.GetModelInfoResponse(
            model=self._state.model_name,
            model_version=worker.model_version,
            weights_sha256=worker.weights_sha256,
            stamp=worker.stamp,
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            max_context=model.max_context,
            block_size=worker.block_size,
            dtype=worker.dtype,
            kv_dtype=worker.kv_dtype,
            eos_token_ids=model.eos_token_ids,
            has_chat_template=self._state.has_chat_template,
        )

    @unary
    async def GetLoad(self, request: pb.GetLoadRequest, context: Context) -> pb.GetLoadResponse:
        """How busy it is."""
        active = [worker.ready for worker in self._workers.active if worker.ready is not None]
        return pb.GetLoadResponse(
            num_running=self._router.num_running,
            num_waiting=self._router.num_waiting,
            max_running=sum(ready.max_num_seqs for ready in active),
            max_queue=self._state.max_queue,
            kv_usage_ratio=self._workers.kv_usage,
            serving=self._state.is_serving,
            num_workers=len(active),
            num_spare_workers=len(self._workers.spares),
        )

    @unary
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """What the processes do right now."""
        state, metrics = self._state, self._metrics
        workers = await self._workers.fresh_stats()
        return pb.GetServerInfoResponse(
            version=__version__,
            pid=os.getpid(),
            start_seconds=state.start_seconds,
            serving=state.is_serving,
            num_requests_running=self._router.num_running,
            num_requests_waiting=self._router.num_waiting,
            num_requests_finished=sum(metrics.num_finished.values()),
            num_prompt_tokens=metrics.num_prompt_tokens,
            num_generated_tokens=metrics.num_generated_tokens,
            num_cached_tokens=metrics.num_hit_tokens,
            num_failovers=self._router.num_failovers,
            cachewarmd_socket=str(state.socket or ""),
            workers=[info for worker in workers if (info := _worker_info(worker)) is not None],
        )


def _worker_info(worker: LiveWorker) -> pb.WorkerInfo | None:
    """None = it has told no counts yet."""
    ready, stats = worker.ready, worker.stats
    if ready is None or stats is None:
        return None
    return pb.WorkerInfo(
        pid=worker.pid,
        role=worker.role,
        backend=ready.backend,
        cpus=ready.cpus,
        is_spare=worker.routed is None,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_private_blocks=ready.num_private_blocks,
        num_private_blocks_free=stats.num_private_blocks_free,
        num_shared_blocks_in_use=stats.num_shared_blocks_in_use,
        daemon_connected=stats.daemon_epoch > 0,
        daemon_epoch=stats.daemon_epoch,
        weights_source=stats.weights_source,
        num_computed_tokens=stats.num_computed_tokens,
        num_tail_copies=stats.num_tail_copies,
        num_preemptions=stats.num_preemptions,
        num_steps=sum(stats.num_steps.values()),
    )
