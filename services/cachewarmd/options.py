"""One table of options drives flags, environment, files, help and documentation of both services.

Here: what an option is, and what values it takes. `settings` finds the values.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")

MAX_SOCKET_PATH_BYTES = 107  # sun_path less its terminator
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SHOWN_CHARACTERS = 80
_TOML_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a float",
    bool: "a boolean",
    list: "an array",
    dict: "a table",
}


class OptionError(ValueError):
    """Settings that are not allowed; each of `errors` names one and what is, in one line."""

    def __init__(self, *errors: str) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


def _plain(value: Any) -> Any:
    return str(value.absolute()) if isinstance(value, Path) else value


def shown(value: object) -> str:
    """A value as messages quote it: in one line, not without end."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


@dataclass(frozen=True)
class Kind(Generic[T]):
    """What values an option takes.

    `read` turns text into the value and raises ValueError. `toml` are the types a file may use.
    `show` turns the value into one of these, or into None when it can only be left out.
    """

    read: Callable[[str], T]
    allowed: str
    toml: tuple[type, ...] = (str,)
    show: Callable[[T], Any] = _plain

    def __call__(self, text: str) -> T:
        """Raises OptionError."""
        try:
            return self.read(text)
        except OptionError:
            raise  # says more than we could
        except (ValueError, OverflowError):
            raise OptionError(f"{shown(text)} is not allowed: {self.allowed}") from None

    def from_toml(self, value: object) -> T:
        """Raises OptionError. Paths must be absolute: a file knows no current directory."""
        if type(value) not in self.toml:
            found = _TOML_NAMES.get(type(value), "a date or time")
            wanted = " or ".join(_TOML_NAMES[kind] for kind in self.toml)
            raise OptionError(f"{shown(value)} is {found}, not {wanted}: {self.allowed}")
        try:
            text = as_text(value)
        except ValueError:
            raise OptionError(f"{shown(value)} is not allowed: {self.allowed}") from None
        result = self(text)
        if isinstance(result, Path) and not result.is_absolute():
            raise OptionError(f"{shown(value)} is not allowed: in a file, a path from / or ~ on")
        return result


def as_text(value: Any) -> str:
    """A TOML value as it is written in a flag: [0, 3] is 0,3 and {a = 1} is a=1.

    Raises ValueError for arrays and tables of anything but whole numbers.
    """
    match value:
        case bool():
            return str(value).lower()
        case list():
            return ",".join(map(_whole, value))
        case dict():
            return ",".join(f"{key}={_whole(number)}" for key, number in value.items())
    return str(value)


def _whole(number: object) -> str:
    if type(number) is not int:  # a bool is one too
        raise ValueError
    return str(number)


def _flag(value: str) -> bool:
    match value.lower():
        case "true" | "1" | "yes" | "on":
            return True
        case "false" | "0" | "no" | "off":
            return False
    raise ValueError


def _size(value: str) -> int:
    match = re.fullmatch(r"(\d+)(\.\d+)?\s*([kmgt]?)(?:i?b)?", value.strip().lower(), re.ASCII)
    if not match:
        raise ValueError
    unit = _UNITS[match[3]]
    # Whole numbers stay exact; a float has 53 bits.
    number = int(float(match[1] + match[2]) * unit) if match[2] else int(match[1]) * unit
    if number >= 1 << 63:
        raise ValueError
    return number


def _seconds(value: str) -> float:
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*(ms|s|m|h|)", value.strip().lower(), re.ASCII)
    if not match:
        raise ValueError
    return float(match[1]) * {"ms": 0.001, "s": 1, "": 1, "m": 60, "h": 3600}[match[2]]


def _path(value: str) -> Path:
    if not value or "\0" in value:
        raise ValueError
    try:
        return Path(value).expanduser()
    except RuntimeError as exc:  # ~ of a user that does not exist
        raise ValueError from exc


def _socket_path(value: str) -> Path:
    path = _path(value)
    check_socket_path(path)
    return path


text = Kind(str, "any text")
flag = Kind(_flag, "true or false", (bool,))
size = Kind(_size, "a number of bytes, or with KiB, MiB, GiB, TiB", (int, str))
seconds = Kind(_seconds, "a number of seconds, or with ms, s, m, h", (int, float, str))
path = Kind(_path, "a path")
socket_path = Kind(_socket_path, f"a path of at most {MAX_SOCKET_PATH_BYTES} bytes")


def _percent(value: str) -> int:
    match = re.fullmatch(r"(\d{1,3})\s*%?", value.strip(), re.ASCII)
    if not match or not 1 <= int(match[1]) <= 100:
        raise ValueError
    return int(match[1])


percent = Kind(_percent, "a percentage from 1 to 100", (int, str))


def integer(low: int, high: int) -> Kind[int]:
    """A whole number within [low, high]."""

    def read(value: str) -> int:
        number = int(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return Kind(read, f"a whole number from {low} to {high}", (int,))


def choice(*allowed: str) -> Kind[str]:
    """One of the given words."""

    def read(value: str) -> str:
        if value not in allowed:
            raise ValueError
        return value

    return Kind(read, ", ".join(allowed))


@dataclass(frozen=True)
class Option:
    """One setting. `group` is its heading in help and documentation."""

    name: str
    parse: Kind[Any]
    default: Any
    help: str
    metavar: str = "VALUE"
    group: str = ""
    is_file_only: bool = False

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def default_text(self) -> str:
        """As a flag would give it; empty when there is none to show."""
        default = self.parse.show(self.default)
        return "" if default is None else as_text(default)


def grouped(group: str, *options: Option) -> tuple[Option, ...]:
    """These options, under one heading."""
    return tuple(replace(option, group=group) for option in options)


def add_to_parser(parser: argparse.ArgumentParser, options: Sequence[Option], prefix: str) -> None:
    """Declare every option as a flag; values stay text until `settings.resolve`."""
    groups: dict[str, Any] = {"": parser}
    for option in options:
        if option.is_file_only:
            continue
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        default = f" (default: {option.default_text})" if option.default_text else ""
        extra: dict[str, Any] = {"metavar": option.metavar}
        if option.parse is flag:
            extra = {"nargs": "?", "const": "true", "metavar": "true|false"}
        groups[option.group].add_argument(
            f"--{option.name}",
            dest=option.field,
            default=None,
            help=f"{option.help}{default} [{env_name(prefix, option)}]".replace("%", "%%"),
            **extra,
        )


def env_name(prefix: str, option: Option) -> str:
    return prefix + option.name.upper().replace("-", "_")


def runtime_dir(environ: Mapping[str, str]) -> Path:
    """Where this user's sockets are: $XDG_RUNTIME_DIR/cachewarm, else one below the temp dir."""
    if environ.get("XDG_RUNTIME_DIR"):
        return Path(environ["XDG_RUNTIME_DIR"]) / "cachewarm"
    return Path(tempfile.gettempdir()) / f"cachewarm-{os.getuid()}"


def check_socket_path(path: Path) -> None:
    """Raises OptionError for one that is too long for the kernel."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH_BYTES:
        raise OptionError(
            f"socket path of {length} bytes: at most {MAX_SOCKET_PATH_BYTES} are allowed: {path}"
        )


def check_private_dir(folder: Path) -> None:
    """A directory for sockets may be missing; one that others can write is refused.

    They could swap a socket there. Raises OptionError.
    """
    try:
        info = folder.stat()
    except FileNotFoundError:
        return
    except OSError as exc:
        raise OptionError(f"{folder}: {exc.strerror}") from exc
    if not stat.S_ISDIR(info.st_mode):
        raise OptionError(f"{folder}: not a directory")
    others_write = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not info.st_mode & stat.S_ISVTX
    if info.st_uid not in (os.getuid(), 0) or others_write:
        raise OptionError(f"{folder}: must belong to this user and be writable by nobody else")


def ensure_private_dir(folder: Path) -> None:
    """Make a directory for sockets, or check the one that is there. Raises OptionError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise OptionError(f"{folder}: {exc.strerror}") from exc
    check_private_dir(folder)


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


def report(program: str, errors: Sequence[str]) -> int:
    """Each error in a line on stderr, or "ok" on stdout; returns the exit status."""
    for error in errors:
        print(f"{program}: error: {error}", file=sys.stderr)
    if not errors:
        print("ok")
    return 2 if errors else 0
