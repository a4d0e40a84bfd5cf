"""One table of options drives flags, environment and help of both services.

Flag > environment > default. A bad value names the option, the value and what is allowed.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class OptionError(ValueError):
    """A value that is not allowed; the message names it and what is."""


@dataclass(frozen=True)
class Option:
    """One setting. `parse` turns text into the value and raises OptionError."""

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    metavar: str = "VALUE"

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


def text(value: str) -> str:
    """Any text."""
    return value


def flag(value: str) -> bool:
    """true / false."""
    match value.lower():
        case "true" | "1" | "yes" | "on":
            return True
        case "false" | "0" | "no" | "off":
            return False
    raise OptionError(f"{value!r} is not allowed: true or false")


def size(value: str) -> int:
    """Bytes: a number with an optional unit, as 512MiB or 2G."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", value.strip().lower())
    if not match:
        raise OptionError(f"{value!r} is not a size: a number of bytes, or with KiB, MiB, GiB, TiB")
    return int(float(match[1]) * _UNITS[match[2]])


def seconds(value: str) -> float:
    """A duration: a number with an optional unit ms, s, m, h."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", value.strip().lower())
    if not match:
        raise OptionError(f"{value!r} is not a duration: a number of seconds, or with ms, s, m, h")
    return float(match[1]) * {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600}[match[2]]


def integer(low: int, high: int) -> Callable[[str], int]:
    """A whole number within [low, high]."""

    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            number = low - 1
        if not low <= number <= high:
            raise OptionError(
                f"{value!r} is not allowed: a whole number from {low} to {high}"
            ) from None
        return number

    return parse


def choice(*allowed: str) -> Callable[[str], str]:
    """One of the given words."""

    def parse(value: str) -> str:
        if value not in allowed:
            raise OptionError(f"{value!r} is not allowed: {', '.join(allowed)}")
        return value

    return parse


def path(value: str) -> Path:
    """A file system path; `~` is expanded."""
    return Path(value).expanduser()


def add_to_parser(parser: argparse.ArgumentParser, options: Sequence[Option], prefix: str) -> None:
    """Declare every option as a flag; values stay text until `resolve`."""
    for option in options:
        shown = "" if option.default is None else f" (default: {option.default})"
        extra: dict[str, Any] = {"metavar": option.metavar}
        if option.parse is flag:
            extra = {"nargs": "?", "const": "true", "metavar": "true|false"}
        parser.add_argument(
            f"--{option.name}",
            dest=option.field,
            default=None,
            help=f"{option.help}{shown} [{env_name(prefix, option)}]".replace("%", "%%"),
            **extra,
        )


def env_name(prefix: str, option: Option) -> str:
    return prefix + option.name.upper().replace("-", "_")


def resolve(
    options: Sequence[Option], flags: argparse.Namespace, environ: Mapping[str, str], prefix: str
) -> dict[str, Any]:
    """Values of all options by field name. Raises OptionError naming where the value stood."""
    values: dict[str, Any] = {}
    for option in options:
        raw, origin = getattr(flags, option.field, None), f"--{option.name}"
        if raw is None:
            raw, origin = environ.get(env_name(prefix, option)), env_name(prefix, option)
        try:
            values[option.field] = option.default if raw is None else option.parse(raw)
        except OptionError as exc:
            raise OptionError(f"{origin}: {exc}") from None
    known = {env_name(prefix, option) for option in options}
    unknown = sorted(name for name in environ if name.startswith(prefix) and name not in known)
    if unknown:
        raise OptionError(f"{unknown[0]}: no such setting; allowed: {', '.join(sorted(known))}")
    return values


def runtime_dir(environ: Mapping[str, str]) -> Path:
    """Where this user's sockets are: $XDG_RUNTIME_DIR/cachewarm, else one below the temp dir."""
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "cachewarm"
    return Path(tempfile.gettempdir()) / f"cachewarm-{os.getuid()}"


def ensure_private_dir(folder: Path) -> None:
    """Make a directory for sockets, or check the one that is there.

    One that others can write is one where they can swap a socket. Raises OptionError.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError as exc:
        raise OptionError(f"{folder}: {exc.strerror}") from exc
    others_write = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX
    if info.st_uid not in (os.getuid(), 0) or others_write:
        raise OptionError(f"{folder}: must belong to this user and be writable by nobody else")


def default_socket(environ: Mapping[str, str] | None = None) -> Path:
    """$CACHEWARMD_SOCKET, else control.sock in the runtime directory."""
    environ = os.environ if environ is None else environ
    if environ.get("CACHEWARMD_SOCKET"):
        return Path(environ["CACHEWARMD_SOCKET"])
    return runtime_dir(environ) / "control.sock"


def die(program: str, message: str, status: int) -> NoReturn:
    """One line on stderr, then exit."""
    print(f"{program}: error: {message}", file=sys.stderr)
    raise SystemExit(status)
