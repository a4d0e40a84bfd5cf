"""Typed errors of the engine, and what a gRPC client sees of each.

`status` is the name of a gRPC status code: workers raise these too, and they import no grpc.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class EngineError(Exception):
    """Base of all. `reason` travels in google.rpc.ErrorInfo, domain "cachewarm"."""

    status: ClassVar[str] = "INTERNAL"
    reason: ClassVar[str] = "INTERNAL"
    retry_after_s: float | None = None


class InvalidParameterError(EngineError):
    """One or more fields are out of what is allowed: (field, what is allowed) each."""

    status = "INVALID_ARGUMENT"
    reason = "INVALID_PARAMETER"

    def __init__(self, violations: Sequence[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{field}: {text}" for field, text in violations))
        self.violations = list(violations)


class ContextTooLongError(InvalidParameterError):
    """Prompt and wanted output do not fit the context."""

    reason = "CONTEXT_TOO_LONG"


class QueueFullError(EngineError):
    """No more requests are queued."""

    status = "RESOURCE_EXHAUSTED"
    reason = "QUEUE_FULL"
    retry_after_s = 1.0


class RequestTooLargeError(EngineError):
    """It can never fit the block pool."""

    status = "RESOURCE_EXHAUSTED"
    reason = "REQUEST_TOO_LARGE"


class WarmingError(EngineError):
    """The worker is not ready yet."""

    status = "UNAVAILABLE"
    reason = "WARMING"
    retry_after_s = 1.0


class DrainingError(EngineError):
    """The server is stopping."""

    status = "UNAVAILABLE"
    reason = "DRAINING"
    retry_after_s = 2.0


class NoWorkerError(EngineError):
    """Workers died faster than they could be replaced."""

    status = "UNAVAILABLE"
    reason = "NO_WORKER"
    retry_after_s = 5.0


class NoDaemonError(EngineError):
    """Asked for what only cachewarmd can do, and it is not there."""

    status = "UNAVAILABLE"
    reason = "NO_DAEMON"
    retry_after_s = 5.0


class ModelNotFoundError(EngineError):
    """Another model is served here."""

    status = "NOT_FOUND"
    reason = "MODEL_NOT_FOUND"


class DuplicateRequestIdError(EngineError):
    """A request of that id is active."""

    status = "ALREADY_EXISTS"
    reason = "DUPLICATE_REQUEST_ID"


class NoChatTemplateError(EngineError):
    """The model has no chat template (of that name)."""

    status = "FAILED_PRECONDITION"
    reason = "NO_CHAT_TEMPLATE"


class WeightsChangedError(EngineError):
    """A request goes on under other weights than it began with."""

    status = "FAILED_PRECONDITION"
    reason = "WEIGHTS_CHANGED"


class ExpiredInQueueError(EngineError):
    """Its deadline passed before it was begun."""

    status = "DEADLINE_EXCEEDED"
    reason = "EXPIRED_IN_QUEUE"


class InternalError(EngineError):
    """Our bug; the log has the details."""


class ModelError(Exception):
    """A model directory can't be served; the message names file or value and what is allowed."""


class StartError(Exception):
    """The engine can't start; the message says why in one line."""
