"""What else the machine did while something was measured.

A figure is worth little without it: on two cores a neighbour decides the tail of every latency.
All of it comes from /proc, and reading that takes well under a thousandth of a core.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

_INTERVAL_S = 0.25
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Of /proc/stat's cpu line: what is time at work. Guests' time is in user and nice already; steal
# is told apart, it is somebody else's work on another kernel.
_BUSY = ("user", "nice", "system", "irq", "softirq")
_STAT_COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since boot, over all CPUs."""

    busy: float
    steal: float
    num_cpus: int


def parse_stat(text: str) -> CpuTimes:
    """From the text of /proc/stat. Raises ValueError when it has no line for all CPUs."""
    num_cpus, total = 0, None
    for line in text.splitlines():
        name, *fields = line.split()
        if name == "cpu":
            # Old kernels leave the last columns out: they count as 0.
            total = dict(zip(_STAT_COLUMNS, map(int, fields), strict=False))
        elif name.startswith("cpu"):
            num_cpus += 1
    if total is None:
        raise ValueError("/proc/stat has no line `cpu`")
    busy = sum(total.get(column, 0) for column in _BUSY)
    return CpuTimes(busy / _TICKS_PER_S, total.get("steal", 0) / _TICKS_PER_S, max(num_cpus, 1))


def parse_run_queue(text: str) -> int:
    """Threads that run or want to, from the text of /proc/loadavg; the reader is not counted."""
    running, _, _ = text.split()[3].partition("/")
    return max(0, int(running) - 1)


def own_cpu_seconds() -> float:
    """CPU seconds of this process and of all that it started, the ended ones included.

    What a process used stands with its parent once it is waited for, so nothing is lost or counted
    twice as long as every orphan comes to us (`processes.adopt_orphans`).
    """
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue  # its parent has waited for it just now; that is part of the next reading
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass(frozen=True)
class Reading:
    """All counters at one moment."""

    at: float  # monotonic, seconds
    cpu: CpuTimes
    own_cpu_s: float


def _read_proc(name: str) -> str:
    return Path("/proc", name).read_text()


def read_counters() -> Reading:
    """As they are now."""
    return Reading(time.monotonic(), parse_stat(_read_proc("stat")), own_cpu_seconds())


def read_run_queue() -> int:
    """As it is now."""
    return parse_run_queue(_read_proc("loadavg"))


class NoiseMeter:
    """Adds up what happens inside `with meter:`, which may be entered again and again.

    A thread looks at the run queue four times a second meanwhile, and once at the beginning.
    """

    def __init__(
        self,
        counters: Callable[[], Reading] = read_counters,
        run_queue: Callable[[], int] = read_run_queue,
    ) -> None:
        self._counters = counters
        self._run_queue = run_queue
        self._queue_lengths: list[int] = []
        self._wall_s = self._cpu_s = self._busy_s = self._steal_s = self._own_s = 0.0
        self._num_cpus = 1
        self._begin: Reading | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> NoiseMeter:
        assert self._thread is None, "a meter measures one thing at a time"
        self._begin = self._counters()
        self._queue_lengths.append(self._run_queue())
        self._done.clear()
        self._thread = threading.Thread(target=self._watch, name="noise", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        assert self._begin is not None
        self._done.set()
        self._thread.join()
        self._thread = None
        self._add(self._begin, self._counters())

    def _watch(self) -> None:
        while not self._done.wait(_INTERVAL_S):
            self._queue_lengths.append(self._run_queue())

    def _add(self, begin: Reading, end: Reading) -> None:
        self._num_cpus = end.cpu.num_cpus
        self._wall_s += end.at - begin.at
        self._cpu_s += (end.at - begin.at) * end.cpu.num_cpus
        self._busy_s += end.cpu.busy - begin.cpu.busy
        self._steal_s += end.cpu.steal - begin.cpu.steal
        self._own_s += end.own_cpu_s - begin.own_cpu_s

    def result(self) -> dict[str, Any]:
        """Shares are of all CPUs' time, 0 to 1, and null before anything was measured.

        The kernel counts the whole machine in ticks and processes exactly, so the difference of the
        two may be a little under 0 on a quiet machine: that is 0.
        """

        def share(seconds: float) -> float | None:
            return min(1.0, max(0.0, seconds / self._cpu_s)) if self._cpu_s else None

        lengths = self._queue_lengths
        return {
            "wall_s": self._wall_s,
            "num_cpus": self._num_cpus,
            "foreign_cpu_share": share(self._busy_s - self._own_s),
            "own_cpu_share": share(self._own_s),
            "steal_share": share(self._steal_s),
            "run_queue_mean": fmean(lengths) if lengths else None,
            "run_queue_max": max(lengths, default=None),
        }

    def text(self) -> str:
        """For a table."""
        told = self.result()
        if told["foreign_cpu_share"] is None:
            return "-"
        return (
            f"{told['foreign_cpu_share']:.1%} / {told['steal_share']:.1%} / "
            f"{told['run_queue_mean']:.1f}"
        )


COLUMN = "noise: foreign / steal / queue"
