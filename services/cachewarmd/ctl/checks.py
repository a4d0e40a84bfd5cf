"""What `doctor` looks at: each check takes what is known and gives findings. No I/O but reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cachewarmd import __version__
from cachewarmd.ctl.views import human_bytes
from cachewarmd.v1 import control_pb2 as pb

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`; `fix` is empty where there is nothing to do."""

    level: Level
    check: str
    text: str
    fix: str = ""


def socket_file(path: Path) -> Finding:
    """Who may connect: the directory's permissions decide first."""
    try:
        mode = path.stat().st_mode
        folder = path.parent.stat().st_mode
    except OSError as exc:
        return Finding("fail", "socket", f"{path}: {exc.strerror}", "start cachewarmd")
    if folder & 0o002 and not folder & 0o1000:
        return Finding(
            "fail", "socket", f"{path.parent} is writable for everybody", "chmod 0755 its directory"
        )
    return Finding("ok", "socket", f"{path}, mode {mode & 0o777:04o}")


def version(told: pb.StatusReply) -> Finding:
    """An upgrade that has replaced the files and not the process."""
    if told.version == __version__:
        return Finding("ok", "version", told.version)
    text = f"the daemon is {told.version}, this program {__version__}"
    return Finding("warn", "version", text, "restart cachewarmd (under a holder it stays warm)")


def pool(told: pb.PoolStatus) -> Iterator[Finding]:
    """Allocated, on huge pages, and locked?"""
    committed, size = told.committed_bytes, told.pool_bytes
    text = f"{human_bytes(committed)} of {human_bytes(size)} allocated"
    if committed < size:
        fix = "wait if it has just started; else free memory or lower pool-bytes"
        yield Finding("warn", "pool", text, fix)
    else:
        yield Finding("ok", "pool", text)
    if told.huge_bytes < committed:
        text = f"{human_bytes(told.huge_bytes)} of {human_bytes(committed)} on huge pages"
        if told.small_pages_because:
            text += f" ({told.small_pages_because})"
        yield Finding("warn", "huge_pages", text, "Linux 6.1 or newer, and memory that is unbroken")
    else:
        yield Finding("ok", "huge_pages", f"all {human_bytes(committed)}")
    if told.locked:
        yield Finding("ok", "locked", "the pool can't be swapped out")
    else:
        fix = "raise RLIMIT_MEMLOCK (LimitMEMLOCK= of the unit) or turn swap off"
        yield Finding("warn", "locked", "the pool is not locked in memory", fix)


def durability(told: pb.StatusReply) -> Finding:
    """Does somebody keep the daemon's descriptors when it dies?"""
    if not told.counters.get("fds_stored", 0):
        text = "nobody keeps the descriptors: a restart of the daemon loses blocks and weights"
        return Finding("warn", "fd_store", text, "run it with --holder or as the systemd unit")
    lost = told.counters.get("fds_not_stored", 0)
    if lost:
        text = f"{lost} descriptors were not stored: a restart loses what they stand for"
        return Finding("warn", "fd_store", text, "raise FileDescriptorStoreMax=, restart it")
    return Finding("ok", "fd_store", "a restart of the daemon keeps blocks and weights")


def integrity(told: pb.StatusReply) -> Finding:
    """Bytes that were not what was sealed: memory or a program does harm."""
    count = told.counters.get("integrity_failures", 0) + told.counters.get("broken_invariants", 0)
    if count:
        fix = "run `verify`; test the memory; look who runs as the daemon's user"
        return Finding("fail", "integrity", f"{count} failures since the start", fix)
    return Finding("ok", "integrity", "no failure since the start")


def engines(told: pb.StatusReply) -> Finding:
    """Somebody uses it."""
    count = sum(1 for client in told.clients if client.role == "engine")
    if not count:
        return Finding("warn", "engines", "none is connected", "see its --cachewarmd and socket")
    return Finding("ok", "engines", f"{count} connections")


def models(told: pb.StatusReply) -> Iterator[Finding]:
    """Weights whose files are other ones now, or gone."""
    for model in told.models:
        name = f"{model.model_name} {model.version}"
        if not model.files_present:
            yield Finding("warn", "weights", f"{name}: files are missing", "put them back")
        elif model.files_changed:
            fix = "`warmup` loads the new ones; engines take them at their next start"
            yield Finding("warn", "weights", f"{name}: files have changed since", fix)
        elif model.superseded:
            fix = "restart engines that still use them"
            yield Finding(
                "warn", "weights", f"{name}: superseded", fix if model.num_clients else ""
            )
        else:
            yield Finding("ok", "weights", f"{name}: in memory, files unchanged")


def host(root: Path, available: int, reserve: int) -> Iterator[Finding]:
    """What the kernel is set to; `root` stands for `/`. What can't be read is left out."""
    if available < reserve:
        text = f"{human_bytes(available)} can still be allocated (host and cgroup)"
        yield Finding("warn", "memory", text, "lower pool-bytes or raise the cgroup's limit")
    else:
        yield Finding("ok", "memory", f"{human_bytes(available)} can still be allocated")
    swaps = _read(root / "proc/swaps")
    if swaps is not None:
        if len(swaps.splitlines()) > 1:
            fix = "turn it off, or see that the pool is locked"
            yield Finding("warn", "swap", "in use on this host", fix)
        else:
            yield Finding("ok", "swap", "off")
    balancing = _read(root / "proc/sys/kernel/numa_balancing")
    nodes = _read(root / "sys/devices/system/node/online")
    if balancing is not None and nodes is not None and nodes.strip() != "0":
        if balancing.strip() != "0":
            fix = "sysctl kernel.numa_balancing=0"
            yield Finding("warn", "numa_balancing", "the kernel moves pages by itself", fix)
        else:
            yield Finding("ok", "numa_balancing", "off")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
