"""`engine.v1.EngineService`: validate, hand to the router, stream what comes back."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import structlog
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from engine import __version__, errors, validate
from engine.models.config import ModelConfig
from engine.request import Finished, Output, Progress, WorkerReady
from engine.router import ActiveRequest, Router
from engine.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError
from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceServicer
from engine.workers import WorkerSupervisor

_log = structlog.get_logger()

Context: TypeAlias = Any  # grpc.aio.ServicerContext; grpcio ships no types

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


@dataclass
class FrontState:
    """What the front knows of itself; written by the server's life cycle, read by calls."""

    model: ModelConfig
    model_name: str
    socket: str
    is_draining: bool = False
    start_seconds: float = 0.0
    worker: WorkerReady | None = None
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    max_positions: int = field(default=0)

    @property
    def is_serving(self) -> bool:
        return self.worker is not None and not self.is_draining


def rich_status(error: errors.EngineError) -> Any:
    """The grpc.Status of an error, with google.rpc details."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain="cachewarm")]
    if isinstance(error, errors.InvalidParameterError):
        violations = [
            error_details_pb2.BadRequest.FieldViolation(field=name, description=text)
            for name, text in error.violations
        ]
        details.append(error_details_pb2.BadRequest(field_violations=violations))
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(1000 * error.retry_after_s))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    code = code_pb2.Code.Value(error.status)
    return rpc_status.to_status(status_pb2.Status(code=code, message=str(error), details=packed))


async def _fail(context: Context, error: Exception) -> None:
    """End the call with the error's status. Our bugs are logged here and told without details."""
    if not isinstance(error, errors.EngineError):
        _log.error("bug", exc_info=error)
        error = errors.InternalError("internal error; see the engine's log")
    await context.abort_with_status(rich_status(error))


Unary = Callable[["EngineService", Any, Context], Awaitable[Any]]


def _unary(handler: Unary) -> Unary:
    """Typed errors of a unary call become its status."""

    @functools.wraps(handler)
    async def wrapped(self: EngineService, request: Any, context: Context) -> Any:
        try:
            return await handler(self, request, context)
        except Exception as exc:  # the boundary: everything else is a status too
            await _fail(context, exc)

    return wrapped


class EngineService(EngineServiceServicer):
    """The RPCs. Owns nothing: requests are the router's, counts the state's."""

    def __init__(
        self, state: FrontState, router: Router, workers: WorkerSupervisor, tokenizer: Tokenizer
    ) -> None:
        self._state = state
        self._router = router
        self._workers = workers
        self._tokenizer = tokenizer

    # -- Generate -------------------------------------------------------------------------------

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Streams one completion."""
        try:
            active = self._accept(request)
        except Exception as exc:
            await _fail(context, exc)
            return
        try:
            yield self._accepted(active)
            stream = _Stream(active, self._tokenizer, request.response.return_token_ids)
            while True:
                event = await active.events.get()
                match event:
                    case Output():
                        self._state.num_generated_tokens += len(event.token_ids)
                        yield stream.output(event)
                    case Finished(error=None):
                        self._count(active, event)
                        if (rest := stream.flush()) is not None:
                            yield rest
                        yield stream.finished(event)
                        return
                    case Finished():
                        name, text = event.error or ("InternalError", "")
                        await _fail(context, getattr(errors, name, errors.InternalError)(text))
                        return
                    case errors.EngineError():
                        await _fail(context, event)
                        return
                    case Progress():
                        pass
        finally:
            # Also when the client went away: whatever the worker still does for it stops.
            self._router.forget(active)

    def _accept(self, request: pb.GenerateRequest) -> ActiveRequest:
        state = self._state
        if state.is_draining:
            raise errors.DrainingError("the server is stopping")
        if state.worker is None and not state.max_positions:
            raise errors.WarmingError("the worker is not ready yet")
        limits = validate.Limits(
            model_name=state.model_name,
            vocab_size=state.model.vocab_size,
            max_context=state.model.max_context,
            eos_token_ids=state.model.eos_token_ids,
            max_positions=state.max_positions,
        )
        active = ActiveRequest(validate.make_submit(request, self._tokenizer, limits))
        self._router.submit(active)
        return active

    def _accepted(self, active: ActiveRequest) -> pb.GenerateResponse:
        worker = self._state.worker
        return pb.GenerateResponse(
            request_id=active.submit.request_id,
            accepted=pb.Accepted(
                queue_position=self._router.num_active - 1,
                num_prompt_tokens=len(active.submit.prompt_ids),
                resolved_seed=active.submit.resolved_seed,
                model_version=worker.model_version if worker else "",
                weights_sha256=worker.weights_sha256 if worker else "",
            ),
        )

    def _count(self, active: ActiveRequest, event: Finished) -> None:
        self._state.num_finished += 1
        self._state.num_prompt_tokens += len(active.submit.prompt_ids)
        self._state.num_cached_tokens += event.num_cached_tokens

    # -- the rest -------------------------------------------------------------------------------

    @_unary
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Stops a request; unknown ids are no-ops."""
        return pb.AbortResponse(aborted=self._router.abort(request.request_id))

    @_unary
    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Token ids of a text, as Generate would see them."""
        try:
            return pb.TokenizeResponse(token_ids=self._tokenizer.encode(request.text))
        except TokenizerError as exc:
            raise errors.InvalidParameterError([("text", str(exc))]) from exc

    @_unary
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
        )

    @_unary
    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        """What the processes do right now."""
        state, ready = self._state, self._state.worker
        stats = await self._workers.stats()
        response = pb.GetServerInfoResponse(
            version=__version__,
            pid=os.getpid(),
            start_seconds=state.start_seconds,
            serving=state.is_serving,
            num_requests_running=self._router.num_running,
            num_requests_waiting=self._router.num_waiting,
            num_requests_finished=state.num_finished,
            num_prompt_tokens=state.num_prompt_tokens,
            num_generated_tokens=state.num_generated_tokens,
            num_cached_tokens=state.num_cached_tokens,
            num_failovers=self._router.num_failovers,
            cachewarmd_socket=state.socket,
        )
        if ready is not None and stats is not None:
            response.workers.add(
                pid=self._workers.pid,
                role="unified",
                backend=ready.backend,
                cpus=ready.cpus,
                num_private_blocks=ready.num_private_blocks,
                num_private_blocks_free=stats.num_private_blocks_free,
                num_shared_blocks_in_use=stats.num_shared_blocks_in_use,
                daemon_connected=stats.daemon_epoch > 0,
                daemon_epoch=stats.daemon_epoch,
                weights_source=stats.weights_source,
                num_computed_tokens=stats.num_computed_tokens,
                num_tail_copies=stats.num_tail_copies,
            )
        return response


class _Stream:
    """Turns a request's events into messages; holds back text until it is whole characters."""

    def __init__(self, active: ActiveRequest, tokenizer: Tokenizer, return_token_ids: bool) -> None:
        self._active = active
        self._return_token_ids = return_token_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, active.submit.prompt_ids)

    def _message(self, **event: Any) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=self._active.submit.request_id, **event)

    def output(self, event: Output) -> pb.GenerateResponse:
        """New tokens; the text may be empty while a character is unfinished."""
        return self._message(
            output=pb.TokenOutput(
                sample_index=event.sample_index,
                first_output_index=event.first_output_index,
                text=self._detokenizer.feed(event.token_ids),
                token_ids=event.token_ids if self._return_token_ids else (),
                num_tokens=len(event.token_ids),
            )
        )

    def flush(self) -> pb.GenerateResponse | None:
        """Text that was held back to the end."""
        text = self._detokenizer.flush()
        if not text:
            return None
        index = len(self._active.output_ids)
        return self._message(output=pb.TokenOutput(first_output_index=index, text=text))

    def finished(self, event: Finished) -> pb.GenerateResponse:
        """The last message."""
        timings = pb.Timings(num_failovers=self._active.num_failovers)
        for name in ("queued", "lookup", "prefill", "decode"):
            getattr(timings, name).FromNanoseconds(int(1e9 * getattr(event, f"{name}_s")))
        return self._message(
            finished=pb.Finished(finish_reason=_REASONS[event.reason], timings=timings),
            usage=pb.Usage(
                prompt_tokens=len(self._active.submit.prompt_ids),
                completion_tokens=len(self._active.output_ids),
                cached_tokens=event.num_cached_tokens,
            ),
        )
