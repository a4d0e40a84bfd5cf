"""How long each part of a process's start takes, from its exec on."""

from __future__ import annotations

import os
import time
from pathlib import Path

_START_FIELD = 19  # of /proc/PID/stat behind the name: starttime, in ticks since boot (proc(5))


def process_age() -> float:
    """Seconds since this process began, to a clock tick (10 ms)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)


class Phases:
    """`seconds` by phase; "process" is what came before: exec, the interpreter, the command."""

    def __init__(self) -> None:
        self.seconds = {"process": process_age()}
        self._last = time.monotonic()

    def end(self, name: str) -> None:
        """That phase ends now, the next begins."""
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now

    @property
    def total(self) -> float:
        """Seconds from the exec to the end of the last phase."""
        return sum(self.seconds.values())
