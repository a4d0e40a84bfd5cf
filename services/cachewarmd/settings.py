"""The values of a table of options: flag > environment > conf.d > file > default."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cachewarmd import config_file, options
from cachewarmd.config_file import DEFAULT_DIR, Layer
from cachewarmd.options import Option, OptionError, env_name

__all__ = ["DEFAULT_DIR", "Setting", "add_to_parser", "resolve", "to_toml"]

_DEFAULT = "default"


@dataclass(frozen=True)
class Setting:
    """A value and its origin: "default", a file, a variable or a flag.

    `where` is how an error names the place.
    """

    value: Any
    origin: str
    where: str

    @property
    def is_default(self) -> bool:
        return self.origin == _DEFAULT


def add_to_parser(parser: argparse.ArgumentParser, default_file: str) -> None:
    """The flags around the table: --config, --check-config, --print-config."""
    path = DEFAULT_DIR / default_file
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"settings in TOML, with FILE's *.d/*.toml beside it (default: {path} if it exists)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check-config", action="store_true", help="check the settings, then exit")
    what.add_argument(
        "--print-config", action="store_true", help="print the settings and their origins, as TOML"
    )


def resolve(
    table: Sequence[Option],
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    prefix: str,
    default_file: Path,
) -> dict[str, Setting]:
    """All options by field name. Raises OptionError with every fault there is.

    A bad value is one even where a stronger source overrides it.
    """
    names = [option.name for option in table]
    explicit = getattr(flags, "config", None)
    explicit = None if explicit is None else _at_flag("--config", options.path, explicit)
    layers = config_file.load(names, explicit, default_file)
    found: dict[str, Setting] = {}
    errors: list[str] = []
    for option in table:
        found[option.field] = Setting(option.default, _DEFAULT, f"--{option.name}")
        for read, origin, where in _sources(option, flags, environ, prefix, layers):
            try:
                found[option.field] = Setting(read(), origin, where)
            except OptionError as exc:
                errors.append(f"{where}: {exc}")
    for layer in layers:
        unknown_keys = [key for key in layer.values if key not in names]
        errors += [f"{layer.path}: {_unknown(key, names)}" for key in unknown_keys]
    known = {env_name(prefix, option) for option in table if not option.is_file_only}
    for name in sorted(environ):
        if name.startswith(prefix) and name not in known:
            errors.append(f"{name}: no such setting; allowed: {', '.join(sorted(known))}")
    if errors:
        raise OptionError(*errors)
    return found


def _at_flag(flag: str, read: Callable[[str], Path], raw: str) -> Path:
    try:
        return read(raw)
    except OptionError as exc:
        raise OptionError(f"{flag}: {exc}") from None


def _sources(
    option: Option,
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    prefix: str,
    layers: Sequence[Layer],
) -> Iterator[tuple[Callable[[], Any], str, str]]:
    """(how to read it, origin, place) wherever the option is given, weakest first."""
    for layer in layers:
        if option.name in layer.values:
            value = layer.values[option.name]
            where = f"{layer.path}: {option.name}"
            yield partial(option.parse.from_toml, value), str(layer.path), where
    if option.is_file_only:
        return
    given = environ.get(env_name(prefix, option)), getattr(flags, option.field, None)
    for raw, origin in zip(given, (env_name(prefix, option), f"--{option.name}"), strict=True):
        if raw is not None:
            yield partial(option.parse, raw), origin, origin


def _unknown(key: str, names: Sequence[str]) -> str:
    import difflib  # only here: most starts have no fault

    dashed = key.replace("_", "-")
    near = [dashed] if dashed in names else difflib.get_close_matches(dashed, names, 1)
    hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(names)}"
    return f"{options.shown(key)}: no such option; {hint}"


def to_toml(
    table: Sequence[Option], found: Mapping[str, Setting], unused: Mapping[str, str] | None = None
) -> str:
    """One line per setting with its origin; a file of these lines gives the same settings.

    `unused` are options without effect and the reason: a comment, as are those not set.
    Raises OptionError for a value that TOML can't hold.
    """
    lines = []
    for option in table:
        setting = found[option.field]
        value = option.parse.show(setting.value)
        comment = _string(setting.origin)[1:-1]
        if value is not None:
            line = f"{option.name} = {_literal(option.name, value)}  # {comment}"
            reason = (unused or {}).get(option.name)
            lines.append(line if reason is None else f"# {line}, without effect: {reason}")
        elif not option.is_file_only:
            lines.append(f"# {option.name} is not set  # {comment}")
    return "\n".join(lines)


def _literal(name: str, value: Any) -> str:
    """A value in TOML, in one line."""
    match value:
        case bool() | int() | float():
            return json.dumps(value)
        case list():
            return f"[{', '.join(_literal(name, item) for item in value)}]"
        case dict():
            pairs = (f"{key} = {_literal(name, item)}" for key, item in value.items())
            return f"{{ {', '.join(pairs)} }}"
    try:
        return _string(value)
    except UnicodeEncodeError:
        raise OptionError(f"{name}: {value!r} is not Unicode, so TOML can't hold it") from None


def _string(value: str) -> str:
    """As JSON has it, except that TOML wants DEL escaped too. Raises UnicodeEncodeError."""
    value.encode()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
