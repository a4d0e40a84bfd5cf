"""Logging of both services: structlog, readable on a terminal, else one JSON object a line.

Token counts and digests only, never prompt text.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog

LEVELS = ("debug", "info", "warning", "error")


class _Stderr:
    """Where log lines go; one that nobody reads any more must not end a daemon."""

    def write(self, text: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.flush()


def configure(service: str, level: str) -> None:
    """Set up the process's logging; called once, from a `__main__`."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=cast(TextIO, _Stderr())),
    )
    structlog.contextvars.bind_contextvars(service=service)
