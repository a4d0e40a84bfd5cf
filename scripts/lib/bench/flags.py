"""Flags that all modes have, and kinds of values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from cachewarmd import options
from cachewarmd.options import Kind, OptionError
from engine.option_table import SERVE_OPTIONS

T = TypeVar("T")

DEFAULT_REPEAT = 3
_DEFAULT_TIMEOUT_S = 600.0
_DEFAULT_LIMIT_S = 3600.0
_MAX_TOKENS = 1 << 24
# What of `serve` may be given here and is passed on, where the engine has such an option.
_PASSED = (
    *("backend", "cpu-isa", "threads", "worker-cpus", "block-size", "prefill-chunk"),
    *("max-num-seqs", "private-pool-bytes", "lookup-budget", "pool-bytes"),
)
PASSED_OPTIONS = tuple(option for option in SERVE_OPTIONS if option.name in _PASSED)


class Parser(argparse.ArgumentParser):
    """One line for a bad flag, not the usage of all."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: error: {message} (--help lists modes and flags)\n")


def checked(kind: Kind[T]) -> Callable[[str], T]:
    """A type of argparse whose message says what is allowed."""

    def parse(text: str) -> T:
        try:
            return kind(text)
        except OptionError as exc:
            raise argparse.ArgumentTypeError(str(exc)) from None

    return parse


def integers(low: int, high: int) -> Kind[tuple[int, ...]]:
    """Whole numbers with commas between them, none of them twice."""
    one = options.integer(low, high)

    def read(value: str) -> tuple[int, ...]:
        numbers = tuple(one.read(part) for part in value.split(","))
        if len(set(numbers)) < len(numbers):
            raise ValueError
        return numbers

    return Kind(read, f"different whole numbers from {low} to {high}, as 4,16")


tokens = checked(options.integer(1, _MAX_TOKENS))
token_counts = checked(integers(1, _MAX_TOKENS))


def _duration(text: str) -> float:
    seconds = checked(options.seconds)(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: above 0")
    return seconds


def add_common(parser: argparse.ArgumentParser) -> None:
    """Declare what every mode understands."""
    add = parser.add_argument
    add(
        "--model",
        type=checked(options.path),
        metavar="DIR",
        help="model directory (default: the demo model, written once)",
    )
    add(
        "--repeat",
        type=checked(options.integer(1, 1000)),
        default=DEFAULT_REPEAT,
        metavar="N",
        help="repetitions; the median of them is told (default: %(default)s)",
    )
    add(
        "--seed",
        type=checked(options.integer(0, (1 << 63) - 1)),
        default=0,
        help="draws the prompts (default: %(default)s)",
    )
    add("--json", action="store_true", help="one JSON object as the last line")
    add(
        "--timeout",
        type=_duration,
        default=_DEFAULT_TIMEOUT_S,
        metavar="DURATION",
        help="of each request (default: %(default)g s)",
    )
    add(
        "--limit",
        type=_duration,
        default=_DEFAULT_LIMIT_S,
        metavar="DURATION",
        help="of the whole run, which fails then (default: %(default)g s)",
    )
    group = parser.add_argument_group("passed on to the programs")
    for option in PASSED_OPTIONS:
        group.add_argument(
            f"--{option.name}",
            dest=option.field,
            type=_as_given(option.parse),
            metavar=option.metavar,
            help=option.help.replace("%", "%%"),
        )


def _as_given(kind: Kind[Any]) -> Callable[[str], str]:
    """Checks a value here, where a fault is told at once, and leaves it as text."""

    def parse(text: str) -> str:
        checked(kind)(text)
        return text

    return parse


def serve_flags(flags: argparse.Namespace) -> list[str]:
    """Those for the engine, as its command line has them."""
    given = []
    for option in PASSED_OPTIONS:
        if (value := getattr(flags, option.field)) is not None:
            given += [f"--{option.name}", value]
    return given
