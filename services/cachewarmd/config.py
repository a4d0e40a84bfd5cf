"""cachewarmd's settings: read here, frozen, passed on as constructor arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cachewarmd import log, numa, options, settings
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
        "state-dir",
        options.path,
        None,
        "where the salt of block keys is kept once a snapshot is taken (default: $STATE_DIRECTORY, "
        "else $XDG_STATE_HOME/cachewarm, else ~/.local/state/cachewarm)",
        "DIR",
    ),
    Option(
        "snapshot-path",
        options.path,
        None,
        "what snapshot-on-stop writes and snapshot-at-boot reads (default: blocks.snapshot in "
        "state-dir)",
        "PATH",
    ),
    Option(
        "snapshot-on-stop",
        options.flag,
        False,
        "write a snapshot of the hot KV blocks at a clean stop: data made from prompts, on disk",
    ),
    Option(
        "snapshot-at-boot",
        options.flag,
        False,
        "restore the snapshot's blocks into free memory after a start",
    ),
    Option(
        "snapshot-max-bytes",
        options.size,
        4 << 30,
        "at most so much content in a snapshot, the most recently used chains first",
        "SIZE",
    ),
    Option(
        "scrub-bytes-per-second",
        options.size,
        16 << 20,
        "hash sealed blocks again in the background at this rate (0 = never)",
        "SIZE",
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
        "prefault-bytes-per-second",
        options.size,
        0,
        "allocate the pool at this rate while serving, so that it does not starve who is served "
        "(0 = as fast as it can); a snapshot-at-boot waits for it",
        "SIZE",
    ),
    Option(
        "numa",
        options.choice(*numa.POLICIES),
        "off",
        "on which NUMA nodes new pool memory and weights are to lie: on one if it has room, on "
        "some and no others, on some in turn; or wherever the kernel takes them",
        "POLICY",
    ),
    Option(
        "numa-nodes",
        numa.NODES,
        (),
        "the nodes that numa means (default: all that have CPUs)",
        "LIST",
    ),
    Option(
        "strict",
        options.flag,
        False,
        "refuse to start, instead of a warning, where the pool gets no huge pages, can't be locked "
        "(unless lock is off), does not lie on its NUMA nodes, or can't be kept for the next "
        "daemon by who starts us",
    ),
    Option(
        "learn",
        options.choice("off", "digests", "ids"),
        "digests",
        "what lookups are counted by, for `cachewarmd-ctl plan`: digests of prefixes, or also "
        "their token ids, which are data made from prompts and all that a plan can be made of",
        "WHAT",
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
    state_dir: Path | None  # None: no home, no place
    snapshot_path: Path | None
    snapshot_on_stop: bool
    snapshot_at_boot: bool
    snapshot_max_bytes: int
    scrub_bytes_per_second: int
    max_client_slots: int  # percent
    on_change: str
    lock: str
    prefault_bytes_per_second: int
    numa: str
    numa_nodes: tuple[int, ...]
    strict: bool
    learn: str
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
    values["state_dir"] = values["state_dir"] or _default_state_dir(environ)
    if values["snapshot_path"] is None and values["state_dir"] is not None:
        values["snapshot_path"] = values["state_dir"] / "blocks.snapshot"
    for name in ("snapshot-on-stop", "snapshot-at-boot"):
        if values[name.replace("-", "_")] and values["state_dir"] is None:
            raise OptionError(f"{name} true is not allowed: without a state-dir")
    return Config(**values)


def _default_state_dir(environ: Mapping[str, str]) -> Path | None:
    if environ.get("STATE_DIRECTORY"):
        return Path(environ["STATE_DIRECTORY"].partition(":")[0])
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "cachewarm"
    home = environ.get("HOME")
    return Path(home) / ".local/state/cachewarm" if home else None


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
