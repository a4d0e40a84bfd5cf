"""cachewarmd's settings: read here, frozen, passed on as constructor arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cachewarmd import log, options
from cachewarmd.budget import DEFAULT_CGROUP_ROOT
from cachewarmd.options import Option

ENV_PREFIX = "CACHEWARMD_"

OPTIONS = (
    Option(
        "socket",
        options.path,
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
    Option("log-level", options.choice(*log.LEVELS), "info", "least level logged", "LEVEL"),
)


@dataclass(frozen=True)
class Config:
    """All settings of one daemon."""

    socket: Path
    pool_bytes: int | None
    exit_when_unused: float | None
    cgroup_root: Path
    log_level: str


def load(flags: argparse.Namespace, environ: Mapping[str, str]) -> Config:
    """Raises options.OptionError naming the setting, its value and what is allowed."""
    values = options.resolve(OPTIONS, flags, environ, ENV_PREFIX)
    values["socket"] = values["socket"] or options.default_socket(environ)
    return Config(**values)
