"""Memory of several processes that share much of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

_KINDS = {"Pss": "total", "Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}
_BLOCK_BYTES = 512  # unit of st_blocks, whatever the page size
_MEMFD = "/memfd:"


def parse_rollup(text: str) -> dict[str, int]:
    """Bytes by kind, from the text of /proc/PID/smaps_rollup. Raises ValueError without Pss.

    `total` is the sum; the kinds are missing on kernels before 5.4.
    """
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name in _KINDS:
            number, unit = rest.split()
            if unit != "kB":
                raise ValueError(f"{name} is in {unit}")
            found[_KINDS[name]] = int(number) * 1024
    if "total" not in found:
        raise ValueError("no Pss: the kernel's smaps_rollup is of another form")
    return found


def pss(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[str, int]:
    """Proportional set size of all the processes together: a page that N of them map counts once.

    Raises OSError when one of them is gone.
    """
    total: dict[str, int] = defaultdict(int)
    for pid in pids:
        for kind, num_bytes in parse_rollup((proc / f"{pid}/smaps_rollup").read_text()).items():
            total[kind] += num_bytes
    return dict(total)


def memfds(pids: Iterable[int]) -> Mapping[str, int]:
    """Bytes allocated in the memfds these processes hold, by name: one copy of what is shared.

    Each is counted once, however many hold it, and whether its pages are mapped or not.
    """
    sizes: dict[tuple[str, int, int], int] = {}
    for pid in pids:
        folder = Path(f"/proc/{pid}/fd")
        for fd in folder.iterdir():
            try:
                link = os.readlink(fd)
                if link.startswith(_MEMFD):
                    name = link.removeprefix(_MEMFD).removesuffix(" (deleted)")
                    info = fd.stat()
                    sizes[name, info.st_dev, info.st_ino] = info.st_blocks * _BLOCK_BYTES
            except FileNotFoundError:
                continue  # closed meanwhile
    total: dict[str, int] = defaultdict(int)
    for (name, *_), num_bytes in sizes.items():
        total[name] += num_bytes
    return dict(total)
