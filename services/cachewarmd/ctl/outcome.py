"""How a verb ends: exit codes, and what is printed where.

stdout has the answer (a table, or one JSON object), stderr has progress and the one error line.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cachewarmd.errors import (
    CachewarmError,
    NotFoundError,
    NotPermittedError,
    ShuttingDownError,
    TimedOutError,
    UnreachableError,
)

if TYPE_CHECKING:
    from rich.console import Console

PROGRAM = "cachewarmd-ctl"
SCHEMA_VERSION = 1
# Wide enough for a digest and its neighbours, where no terminal tells its own width.
_PIPED_WIDTH = 240

EXIT_OK, EXIT_FAILED, EXIT_NOT_WARM = 0, 1, 3


class UsageError(CachewarmError):
    """The command line, or a file it names, is not what is allowed."""


class JobFailedError(CachewarmError):
    """A warm-up job ended without having warmed everything."""


class InterruptedByUserError(CachewarmError):
    """Ctrl-C."""


# The nearest base class decides; anything else is EXIT_FAILED.
EXIT_CODES: dict[type[BaseException], int] = {
    UsageError: 2,
    NotFoundError: 4,
    UnreachableError: 5,
    ShuttingDownError: 5,
    TimedOutError: 6,
    NotPermittedError: 7,
    PermissionError: 7,
    InterruptedByUserError: 130,
}


def exit_code(exc: BaseException) -> int:
    """The exit status that an error stands for."""
    return next((EXIT_CODES[c] for c in type(exc).__mro__ if c in EXIT_CODES), EXIT_FAILED)


def error_object(exc: BaseException) -> dict[str, str]:
    """`{"code", "message"}`; the code is the error's class in snake case."""
    words = re.findall("[A-Z][a-z]*", type(exc).__name__.removesuffix("Error"))
    code = "_".join(words).lower() if isinstance(exc, CachewarmError) else "failed"
    return {"code": code, "message": error_text(exc)}


def error_text(exc: BaseException) -> str:
    """One line."""
    if isinstance(exc, OSError) and exc.strerror:
        text = f"{exc.filename}: {exc.strerror}" if exc.filename else exc.strerror
    else:
        text = str(exc) or type(exc).__name__
    return shown(text)


def shown(value: object) -> str:
    """For people's eyes: what a client gave as a name must not steer their terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


@dataclass(frozen=True)
class Output:
    """Where answers go; `is_json` is `-o json`."""

    is_json: bool

    def answer(self, data: Mapping[str, Any], draw: Callable[[Console], None]) -> None:
        """Print `data` as the JSON object, or let `draw` print it for people."""
        if self.is_json:
            print(json.dumps({"schema_version": SCHEMA_VERSION, **data}))
        else:
            draw(console())

    def error(self, exc: BaseException) -> None:
        """The error line, and the error object where JSON is asked for."""
        self.complain(exc)
        if self.is_json:
            self.answer({"error": error_object(exc)}, lambda _: None)

    @staticmethod
    def complain(exc: BaseException) -> None:
        """Only the error line, for when the answer has been given already."""
        print(f"{PROGRAM}: error: {error_text(exc)}", file=sys.stderr)


def console(*, stderr: bool = False) -> Console:
    """A rich console that colours only a terminal; imported here because JSON never needs it."""
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(
        stderr=stderr,
        force_terminal=is_terminal,
        no_color=None if is_terminal else True,
        width=None if is_terminal else _PIPED_WIDTH,
        markup=False,
        highlight=False,
        emoji=False,
    )
