"""Logging of both services: structlog, readable on a terminal, else one JSON object a line.

Token counts and digests only, never prompt text.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

LEVELS = ("debug", "info", "warning", "error")

_settings = ("", "debug")  # service and level of this process


def configure(service: str, level: str, *, is_lazy: bool = False) -> None:
    """Set up the process's logging; called once, from a `__main__`.

    `is_lazy` imports structlog with the first line that is logged, for a process whose start is
    waited for and logs nothing when all is well.
    """
    global _settings
    _settings = (service, level)
    _structlog.cache_clear()
    if not is_lazy or "structlog" in sys.modules:
        _structlog()


def get_logger() -> FilteringBoundLogger:
    """The logger of a module; how it logs is decided when it does."""
    return cast("FilteringBoundLogger", _Logger())


class _Stderr:
    """Where log lines go; one that nobody reads any more must not end a daemon."""

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.flush()


class _Logger:
    def __getattr__(self, name: str) -> Any:
        return getattr(_structlog().get_logger(), name)


@functools.cache
def _structlog() -> Any:
    """structlog, set up; in a process that configured nothing, as it is."""
    # It imports rich for tracebacks in colour, most of what it costs; ours are plain text.
    is_hidden = "rich" not in sys.modules
    if is_hidden:
        # None is how an import is made to fail; the stubs know modules only.
        sys.modules["rich"] = None  # type: ignore[assignment]
    try:
        import structlog
    finally:
        if is_hidden:
            sys.modules.pop("rich", None)
    import logging

    service, level = _settings
    if not service:
        return structlog

    def add_service(
        logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        event["service"] = service
        return event

    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            add_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, _Stderr())),
    )
    return structlog
