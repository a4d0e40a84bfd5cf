"""Plans of what to warm: TOML, or JSON lines. The schema is in docs/warm-up.md."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachewarmd.errors import InvalidRequestError
from cachewarmd.options import OptionError, seconds
from cachewarmd.v1 import control_pb2 as pb

MAX_ITEMS = 100_000
MAX_PLAN_BYTES = 256 << 20
MAX_SHAPE_LENGTH, MAX_ITERATIONS = 1 << 24, 10_000
_MAX_NAME = 128  # characters of names, tenants and salts
_SOURCES = ("text", "messages", "token_ids", "file", "shape")
_OPTIONS = ("name", "urgency", "pin", "ttl", "deadline", "tenant", "cache_salt", "required")
_MORE = ("iterations", "add_generation_prompt")
URGENCIES = {"interactive": 1, "normal": 2, "background": 3}
_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")


@dataclass(frozen=True)
class Plan:
    """What a file asks for, in its order."""

    path: Path
    prompts: list[pb.WarmPrompt]


def load(path: Path, *, roots: Sequence[Path] = ()) -> Plan:
    """Read a plan; `.toml` is TOML, all else JSON lines.

    `file` items lie below one of `roots` (default: the plan's own directory).
    Raises InvalidRequestError naming file, item, value and what is allowed; OSError.
    """
    with path.open("rb") as file:
        content = file.read(MAX_PLAN_BYTES + 1)
    if len(content) > MAX_PLAN_BYTES:
        raise InvalidRequestError(f"{path}: more than the {MAX_PLAN_BYTES} bytes that are allowed")
    reader = _Reader([root.resolve() for root in roots] or [path.resolve().parent])
    prompts: list[pb.WarmPrompt] = []
    num_bytes = 0
    for where, value in reader.items(path, content):
        if len(prompts) == MAX_ITEMS:
            raise InvalidRequestError(f"{where}: at most {MAX_ITEMS} items are allowed")
        try:
            prompt = reader.prompt(value)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequestError(f"{where}: {exc}") from exc
        num_bytes += prompt.ByteSize()
        if num_bytes > MAX_PLAN_BYTES:
            raise InvalidRequestError(f"{where}: at most {MAX_PLAN_BYTES} bytes are allowed in all")
        prompts.append(prompt)
    return Plan(path, prompts)


class _Reader:
    """Items of one plan, with its variables and defaults."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = roots
        self._variables: dict[str, str] = {}
        self._defaults: dict[str, Any] = {}

    def items(self, path: Path, content: bytes) -> Iterator[tuple[str, Any]]:
        """Each item with the words that say where it stands."""
        try:
            text = content.decode()
        except UnicodeDecodeError as exc:
            raise InvalidRequestError(f"{path}: not UTF-8 at byte {exc.start}") from exc
        if path.suffix == ".toml":
            yield from self._toml_items(path, text)
            return
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as exc:
                raise InvalidRequestError(
                    f'{path}:{number}: {exc}; one JSON object a line is allowed, or a "text"'
                ) from exc
            yield f"{path}:{number}", value

    def _toml_items(self, path: Path, text: str) -> Iterator[tuple[str, Any]]:
        try:
            told = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as exc:
            raise InvalidRequestError(f"{path}: {exc}") from exc
        try:
            _check_names(told, ("items", "variables", "defaults"))
            variables, defaults = told.get("variables", {}), told.get("defaults", {})
            if not isinstance(variables, dict) or not all(
                isinstance(value, str) for value in variables.values()
            ):
                raise ValueError("variables: a table of strings is allowed")
            if not isinstance(defaults, dict):
                raise ValueError("defaults: a table is allowed")
            _check_names(defaults, (*_OPTIONS[1:], *_MORE), "defaults.")
            items = told.get("items", [])
            if not isinstance(items, list):
                raise ValueError("items: an array of tables, [[items]], is allowed")
        except ValueError as exc:
            raise InvalidRequestError(f"{path}: {exc}") from exc
        self._variables, self._defaults = variables, defaults
        for number, value in enumerate(items, start=1):
            yield f"{path}: item {number}", value

    def prompt(self, value: Any) -> pb.WarmPrompt:
        """Raises ValueError."""
        if isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, dict):
            raise ValueError("a table (an object) is allowed")
        _check_names(value, (*_SOURCES, *_OPTIONS, *_MORE))
        sources = [name for name in _SOURCES if name in value]
        if len(sources) != 1:
            found = " and ".join(sources) or "none"
            raise ValueError(f"exactly one of {', '.join(_SOURCES)} is allowed, found {found}")
        value = {**self._defaults, **value}
        prompt = pb.WarmPrompt()
        self._take_source(prompt, sources[0], value)
        _take_options(prompt, value)
        return prompt

    def _take_source(self, prompt: pb.WarmPrompt, source: str, value: Mapping[str, Any]) -> None:
        told = value[source]
        match source:
            case "text":
                prompt.text = self._filled(_text("text", told))
            case "file":
                prompt.text = self._filled(_text("file", self._read(_text("file", told))))
            case "messages":
                if not isinstance(told, list) or not told:
                    raise ValueError("messages: a list of messages, not empty, is allowed")
                prompt.chat.messages_json = json.dumps(self._filled_all(told), ensure_ascii=False)
                prompt.chat.add_generation_prompt = _flag(value, "add_generation_prompt", True)
            case "token_ids":
                if not isinstance(told, list) or not told or not all(map(_is_token_id, told)):
                    raise ValueError(
                        "token_ids: a list, not empty, of whole numbers from 0 to 2^32-1 is allowed"
                    )
                prompt.token_ids.ids.extend(told)
            case "shape":
                prompt.shape.length = _number("shape", told, MAX_SHAPE_LENGTH)
                iterations = value.get("iterations", 1)
                prompt.shape.iterations = _number("iterations", iterations, MAX_ITERATIONS)

    def _filled(self, text: str) -> str:
        def value_of(found: re.Match[str]) -> str:
            if found[1] not in self._variables:
                known = ", ".join(sorted(self._variables)) or "none"
                raise ValueError(f"variable {found[1]!r} is not known; known are: {known}")
            return self._variables[found[1]]

        return _VARIABLE.sub(value_of, text)

    def _filled_all(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._filled(value)
        if isinstance(value, list):
            return [self._filled_all(item) for item in value]
        if isinstance(value, dict):
            return {key: self._filled_all(item) for key, item in value.items()}
        return value

    def _read(self, name: str) -> str:
        """A text below one of the roots: no `..`, no link on the way."""
        parts = Path(name).parts
        if Path(name).is_absolute() or ".." in parts or "\0" in name:
            raise ValueError(f"file: {name!r}: a path below the plan's directory is allowed")
        reason: OSError | None = None
        for root in self._roots:
            try:
                content = _read_below(root, parts)
            except OSError as exc:
                reason = exc
                continue
            try:
                return content.decode()
            except UnicodeDecodeError:
                raise ValueError(f"file: {name!r} is not UTF-8") from None
        why = reason.strerror if reason is not None else "no directory is allowed"
        raise ValueError(f"file: {name!r}: {why} (a file, no link, is allowed)")


def _read_below(root: Path, parts: Sequence[str]) -> bytes:
    """Opened step by step without following a link. Raises OSError."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for index, part in enumerate(parts):
            # A FIFO must not hold us up.
            more = os.O_DIRECTORY if index < len(parts) - 1 else os.O_NONBLOCK
            below = os.open(part, flags | more, dir_fd=fd)
            os.close(fd)
            fd = below
        with os.fdopen(os.dup(fd), "rb") as file:
            content = file.read(MAX_PLAN_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MAX_PLAN_BYTES:
        raise OSError(27, f"more than the {MAX_PLAN_BYTES} bytes that are allowed")
    return content


def _take_options(prompt: pb.WarmPrompt, value: Mapping[str, Any]) -> None:
    for name in ("name", "tenant", "cache_salt"):
        if name in value:
            setattr(prompt, name, _short(name, value[name]))
    if "urgency" in value:
        if value["urgency"] not in list(URGENCIES):
            allowed = ", ".join(URGENCIES)
            raise ValueError(f"urgency: {value['urgency']!r}: {allowed} are allowed")
        prompt.urgency = URGENCIES[value["urgency"]]
    prompt.pin = _flag(value, "pin", False)
    prompt.is_optional = not _flag(value, "required", True)
    for name in ("ttl", "deadline"):
        if name in value:
            try:
                told = 1000 * seconds(_text(name, value[name]))
            except OptionError as exc:
                raise ValueError(f"{name}: {exc}") from exc
            setattr(prompt, f"{name}_ms", max(1, round(told)))
    if prompt.ttl_ms and not prompt.pin:
        raise ValueError("ttl: only with pin = true")


def _check_names(value: Mapping[str, Any], allowed: Sequence[str], prefix: str = "") -> None:
    unknown = sorted(value.keys() - set(allowed))
    if unknown:
        raise ValueError(f"{prefix}{unknown[0]} is not known; allowed are {', '.join(allowed)}")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: a string that is not empty is allowed")
    return value


def _short(name: str, value: object) -> str:
    text = _text(name, value)
    if len(text) > _MAX_NAME:
        raise ValueError(f"{name}: {len(text)} characters, at most {_MAX_NAME} are allowed")
    return text


def _flag(value: Mapping[str, Any], name: str, default: bool) -> bool:
    told = value.get(name, default)
    if not isinstance(told, bool):
        raise ValueError(f"{name}: {told!r}: true or false is allowed")
    return told


def _number(name: str, value: object, largest: int) -> int:
    if type(value) is not int or not 1 <= value <= largest:
        raise ValueError(f"{name}: {value!r}: a whole number from 1 to {largest} is allowed")
    return value


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32
