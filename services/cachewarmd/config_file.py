"""Settings in files: FILE, then FILE's neighbour directory *.d in name order. The last one wins."""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachewarmd.options import OptionError

DEFAULT_DIR = Path("/etc/cachewarm")
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Layer:
    """What one file sets: TOML values by key, of tables by dotted key."""

    path: Path
    values: Mapping[str, object]


def load(names: Sequence[str], explicit: Path | None, default: Path) -> tuple[Layer, ...]:
    """The file and its conf.d, weakest first. `names` are the option names.

    `explicit` must exist; `default` may be missing. Raises OptionError with every file's fault.
    """
    if explicit is None and not os.access(default.parent, os.R_OK | os.X_OK):
        return ()
    main = explicit or default
    layers: list[Layer] = []
    errors: list[str] = []
    try:
        paths = [main, *_conf_d(main)]
    except OptionError as exc:
        paths = [main]
        errors += exc.errors
    for path in paths:
        try:
            table = tomllib.loads(_read(path))
        except FileNotFoundError:
            if path is not main or explicit is not None:
                errors.append(f"{path}: does not exist")
        except OSError as exc:
            errors.append(f"{path}: {exc.strerror}")
        except OptionError as exc:
            errors += exc.errors
        except UnicodeDecodeError as exc:
            errors.append(f"{path}: not UTF-8 at byte {exc.start}")
        except (ValueError, RecursionError) as exc:
            errors.append(f"{path}: not TOML: {exc}")
        else:
            layers.append(Layer(path, dict(_flatten(table, names))))
    if errors:
        raise OptionError(*errors)
    return tuple(layers)


def _conf_d(main: Path) -> list[Path]:
    """The *.toml files beside `main`; hidden ones are editors' and left out."""
    folder = main.parent / f"{main.stem}.d"
    try:
        reason = writable_by_others(folder.stat(), os.getuid())
        if reason:
            raise OptionError(f"{folder}: {reason}")
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise OptionError(f"{folder}: {exc.strerror}") from exc
    return [folder / name for name in names if name.endswith(".toml") and name[0] != "."]


def writable_by_others(info: os.stat_result, uid: int) -> str:
    """Why somebody else than root and `uid` could have written it; empty if nobody could."""
    if info.st_uid not in (0, uid):
        return f"belongs to uid {info.st_uid}; allowed: root or uid {uid}"
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(info.st_mode)
        return f"mode {mode:04o} lets others write; allowed: at most {mode & ~0o022:04o}"
    return ""


def _read(path: Path) -> str:
    """Raises OptionError for a file that is not ours to trust, OSError, UnicodeDecodeError."""
    # Not blocking: opening a FIFO would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OptionError(f"{path}: not a regular file")
        reason = writable_by_others(info, os.getuid())
        if reason:
            raise OptionError(f"{path}: {reason}")
        with open(fd, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_BYTES:
        raise OptionError(f"{path}: more than {MAX_BYTES} bytes")
    return data.decode()


def _flatten(
    table: Mapping[str, Any], names: Sequence[str], prefix: str = ""
) -> Iterator[tuple[str, object]]:
    """Dotted keys and values; a table that no option can lie below stays a value."""
    for key, value in table.items():
        name = prefix + key
        holds_options = any(known.startswith(f"{name}.") for known in names)
        # Within such a table, what is misspelled is looked into too: the nearest name is more apt.
        if isinstance(value, dict) and (holds_options or (prefix and value)):
            yield from _flatten(value, names, f"{name}.")
        else:
            yield name, value
