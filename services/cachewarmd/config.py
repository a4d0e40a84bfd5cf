"""cachewarmd's settings: read here, frozen, passed on as constructor arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cachewarmd import log, options, settings
from cachewarmd.budget import DEFAULT_CGROUP_ROOT
from cachewarmd.layout import EXTENT_BYTES
from cachewarmd.options import Option, OptionError
from cachewarmd.settings import Setting

ENV_PREFIX = "CACHEWARMD_"
DEFAULT_FILE = "cachewarmd.toml"

OPTIONS = (
    Option(
        "socket",
        options.socket_path,
        None,
        "control socket (default: $XDG_RUNTIME_DIR/cachewarm/control.sock, "
        "else a per-user directory below the temp dir)",
        "PATH",
    ),
    Option(
        "pool-bytes",
        options.size,
        None,
        "size of the KV block pool (default: a quarter of the available memory)",
        "SIZE",
    ),
    Option(
        "exit-when-unused",
        options.seconds,
        None,
        "stop by itself when no engine was connected for this long (default: never)",
        "DURATION",
    ),
    Option(
        "cgroup-root",
        options.path,
        DEFAULT_CGROUP_ROOT,
        "where the cgroup2 tree is mounted; its memory limits bound the budget",
        "DIR",
    ),
    Option(
        "max-client-slots",
        options.percent,
        75,
        "share of the pool that one client's leases may keep from eviction once another client is "
        "connected; what is beyond it is a miss for that client",
        "PERCENT",
    ),
    Option(
        "on-change",
        options.choice("keep", "clear"),
        "keep",
        "what happens to cached blocks when their weights change on disk: they stay for engines "
        "that serve the old weights, or leave the index at once",
        "WHAT",
    ),
    Option(
        "lock",
        options.choice("auto", "require", "off"),
        "auto",
        "keep the pool from being swapped out: where the limit on locked memory allows it, or "
        "refuse to start where it does not",
        "WHEN",
    ),
    Option(
        "strict",
        options.flag,
        False,
        "refuse to start, instead of a warning, where the pool gets no huge pages, can't be locked "
        "(unless lock is off), or can't be kept for the next daemon by who starts us",
    ),
    Option("log-level", options.choice(*log.LEVELS), "info", "least level logged", "LEVEL"),
)


@dataclass(frozen=True)
class Config:
    """All settings of one daemon."""

    socket: Path
    pool_bytes: int | None
    exit_when_unused: float | None
    cgroup_root: Path
    max_client_slots: int  # percent
    on_change: str
    lock: str
    strict: bool
    log_level: str


def resolve(
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    config_dir: Path = settings.DEFAULT_DIR,
) -> dict[str, Setting]:
    """Every setting and where it comes from. Raises options.OptionError."""
    return settings.resolve(OPTIONS, flags, environ, ENV_PREFIX, config_dir / DEFAULT_FILE)


def make(found: Mapping[str, Setting], environ: Mapping[str, str]) -> Config:
    """The settings of a daemon. Raises options.OptionError naming what does not go together."""
    values = {name: setting.value for name, setting in found.items()}
    values["socket"] = values["socket"] or options.default_socket(environ)
    return Config(**values)


def faults(config: Config) -> list[str]:
    """What would keep a daemon from starting here. Looks only, changes nothing."""
    errors = []
    if config.pool_bytes is not None and config.pool_bytes < EXTENT_BYTES:
        errors.append(
            f"pool-bytes {config.pool_bytes} is not allowed: at least {EXTENT_BYTES} (one extent)"
        )
    for check, path in (
        (options.check_socket_path, config.socket),
        (options.check_private_dir, config.socket.parent),
    ):
        try:
            check(path)
        except OptionError as exc:
            errors += exc.errors
    return errors
