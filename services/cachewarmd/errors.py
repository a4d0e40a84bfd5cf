"""Typed errors of cachewarmd, the same on both sides of the socket.

Every error carries a wire code; `from_wire` gives the client back what the daemon raised.
"""

from __future__ import annotations

from typing import ClassVar

from cachewarmd.v1 import control_pb2 as pb


class CachewarmError(Exception):
    """Base of all; `code` is what travels in an ErrorReply."""

    code: ClassVar[pb.ErrorCode] = pb.ERROR_CODE_INTERNAL


class ProtocolError(CachewarmError):
    """The peer sent something that is no valid frame here; the connection is closed."""

    code = pb.ERROR_CODE_PROTOCOL


class VersionMismatchError(CachewarmError):
    """The peer speaks another protocol version."""

    code = pb.ERROR_CODE_VERSION


class NotPermittedError(CachewarmError):
    """The peer's uid or role may not do this."""

    code = pb.ERROR_CODE_NOT_PERMITTED


class InvalidRequestError(CachewarmError):
    """A field's value is out of what is allowed; the message names both."""

    code = pb.ERROR_CODE_INVALID


class ModelFilesError(CachewarmError):
    """A model directory's files are missing, malformed or changed while they were read."""

    code = pb.ERROR_CODE_MODEL_FILES


class NoSpaceError(CachewarmError):
    """Memory would go over the budget; the message gives needed and available bytes."""

    code = pb.ERROR_CODE_NO_SPACE


class MisplacedError(NoSpaceError):
    """Memory is not on the NUMA nodes that were asked for, or nobody knows; more is no help."""


class NotFoundError(CachewarmError):
    """No such model, job, lease or client."""

    code = pb.ERROR_CODE_NOT_FOUND


class LimitError(CachewarmError):
    """A hard limit (connections, leases, frame size, jobs) is reached."""

    code = pb.ERROR_CODE_LIMIT


class InternalError(CachewarmError):
    """A bug in the daemon; the daemon's log has the details."""

    code = pb.ERROR_CODE_INTERNAL


class ShuttingDownError(CachewarmError):
    """The daemon is stopping."""

    code = pb.ERROR_CODE_SHUTTING_DOWN


class UnreachableError(CachewarmError):
    """No daemon answers on the socket, or the connection to it was lost."""


class TimedOutError(CachewarmError):
    """No answer within the budget the caller gave."""


_BY_CODE: dict[int, type[CachewarmError]] = {
    cls.code: cls
    for cls in (
        ProtocolError,
        VersionMismatchError,
        NotPermittedError,
        InvalidRequestError,
        ModelFilesError,
        NoSpaceError,
        NotFoundError,
        LimitError,
        InternalError,
        ShuttingDownError,
    )
}


def from_wire(reply: pb.ErrorReply) -> CachewarmError:
    """The exception an ErrorReply stands for."""
    return error_of(reply.code, reply.message)


def error_of(code: int, message: str) -> CachewarmError:
    """The exception a wire code stands for; of one that is not known, an InternalError."""
    return _BY_CODE.get(code, InternalError)(message)
