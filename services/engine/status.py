"""Typed errors as gRPC statuses with google.rpc details; the boundary where calls end."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from cachewarmd.log import get_logger
from engine import errors

_log = get_logger()

Context: TypeAlias = Any  # grpc.aio.ServicerContext; grpcio ships no types


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


def as_engine_error(error: Exception) -> errors.EngineError:
    """Itself, or for a bug of ours, which is logged here, what may be told of it."""
    if isinstance(error, errors.EngineError):
        return error
    _log.error("bug", exc_info=error)
    return errors.InternalError("internal error; see the engine's log")


async def end_with(context: Context, error: Exception) -> None:
    """End the call with the error's status; raises what gRPC raises to leave the handler."""
    await context.abort_with_status(rich_status(as_engine_error(error)))


Unary = Callable[[Any, Any, Context], Awaitable[Any]]


def unary(handler: Unary) -> Unary:
    """Typed errors of a unary call become its status."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> Any:
        try:
            return await handler(self, request, context)
        except Exception as exc:  # the boundary: everything else is a status too
            return await end_with(context, exc)

    return wrapped
