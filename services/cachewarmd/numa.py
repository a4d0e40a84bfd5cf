"""Where shared memory lies on a host with several NUMA nodes.

A policy is set on a memfd's mapping before its first page is allocated: the kernel keeps it with
the memory and obeys it whoever allocates, so small and huge pages alike come from the chosen nodes.
What came of it is looked at, not believed: `look` samples pages and asks where they are.

A node without CPUs (CXL memory, say) is a node too, but never chosen unless it is named.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cachewarmd.errors import InvalidRequestError, MisplacedError
from cachewarmd.layout import PAGE_BYTES
from cachewarmd.options import Kind

DEFAULT_ROOT = Path("/sys/devices/system/node")
POLICIES = ("off", "preferred", "bind", "interleave")
MAX_NODES = 1024  # MAX_NUMNODES of any kernel there is
MAX_SAMPLES = 256
_MODES = {"preferred": 1, "bind": 2, "interleave": 3}  # <linux/mempolicy.h>
_SYSCALLS = {"x86_64": (237, 279), "aarch64": (235, 239)}  # mbind, move_pages
_MASK_WORDS = MAX_NODES // 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


@dataclass(frozen=True)
class Node:
    """A NUMA node; without CPUs it is only memory."""

    number: int
    cpus: tuple[int, ...]
    total_bytes: int = 0
    free_bytes: int = 0


class Kernel(Protocol):
    """The two calls that matter; both raise OSError."""

    def mbind(self, address: int, size: int, mode: int, nodes: Sequence[int]) -> None: ...

    def nodes_of(self, addresses: Sequence[int]) -> list[int]:
        """The node of each page, or a negative errno."""
        ...


class Linux:
    """The kernel that runs us."""

    def mbind(self, address: int, size: int, mode: int, nodes: Sequence[int]) -> None:
        words = [0] * _MASK_WORDS
        for node in nodes:
            words[node // 64] |= 1 << node % 64
        mask = (ctypes.c_uint64 * _MASK_WORDS)(*words)
        # The kernel takes one bit less than it is told.
        _syscall(0, address, size, mode, ctypes.addressof(mask), MAX_NODES + 1, 0)

    def nodes_of(self, addresses: Sequence[int]) -> list[int]:
        pages = (ctypes.c_void_p * len(addresses))(*addresses)
        nodes = (ctypes.c_int * len(addresses))()
        # Without a list of wanted nodes nothing moves.
        _syscall(1, 0, len(addresses), ctypes.addressof(pages), 0, ctypes.addressof(nodes), 0)
        return list(nodes)


def _syscall(which: int, *arguments: int) -> None:
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None:
        raise OSError(38, f"NUMA calls are not known for {platform.machine()}")
    if _libc.syscall(numbers[which], *(ctypes.c_ulong(argument) for argument in arguments)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def parse_list(text: str) -> tuple[int, ...]:
    """Numbers as the kernel lists them: `0-3,8`. Raises ValueError."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < 1 << 16:
            raise ValueError(f"{part!r} is not a range of numbers")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def shown(numbers: tuple[int, ...]) -> str | None:
    """The other way; None for no numbers."""
    return ",".join(map(str, numbers)) or None


NODES = Kind(parse_list, "node numbers, such as 0,2 or 0-1", show=shown)


def topology(root: Path = DEFAULT_ROOT) -> list[Node]:
    """The nodes that are online; empty where the kernel knows none."""
    try:
        numbers = parse_list((root / "online").read_text())
        return [_node(root / f"node{number}", number) for number in numbers]
    except (OSError, ValueError):
        return []


def _node(folder: Path, number: int) -> Node:
    cpus = parse_list((folder / "cpulist").read_text())
    sizes: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / "meminfo").read_text().splitlines():
            _, _, name, size, *_ = line.split()  # Node 0 MemTotal: 16384 kB
            sizes[name] = int(size) << 10
    return Node(number, cpus, sizes.get("MemTotal:", 0), sizes.get("MemFree:", 0))


class Placement:
    """A policy and its nodes. Raises InvalidRequestError for a node that is not there."""

    def __init__(
        self,
        policy: str = "off",
        wanted: Sequence[int] = (),
        *,
        root: Path = DEFAULT_ROOT,
        kernel: Kernel | None = None,
    ) -> None:
        self.policy = policy
        self._kernel = kernel or Linux()
        nodes = topology(root)
        self.nodes = tuple(sorted(set(wanted))) or tuple(n.number for n in nodes if n.cpus)
        if policy == "off":
            return
        online = [node.number for node in nodes]
        if missing := sorted(set(self.nodes) - set(online)):
            raise InvalidRequestError(
                f"numa-nodes {missing[0]} is not allowed: the nodes of this host are {online}"
            )
        if policy == "preferred" and len(self.nodes) != 1 and wanted:
            raise InvalidRequestError("numa-nodes: numa preferred takes one node")

    @property
    def _is_default(self) -> bool:
        """Nothing to ask for: the kernel's own rule, the node of who touches first, is wanted."""
        return self.policy == "off" or (self.policy == "preferred" and len(self.nodes) != 1)

    def apply(self, memory: npt.NDArray[np.uint8]) -> str:
        """Set the policy on mapped memory of which no page is allocated; empty, or why not."""
        if self._is_default:
            return ""
        try:
            mode = _MODES[self.policy]
            self._kernel.mbind(memory.ctypes.data, memory.nbytes, mode, self.nodes)
        except OSError as exc:
            return f"numa {self.policy} on nodes {list(self.nodes)}: mbind: {exc.strerror}"
        return ""

    def look(self, memory: npt.NDArray[np.uint8]) -> Counter[int]:
        """How many of at most MAX_SAMPLES pages of allocated memory lie on which node.

        Raises OSError where the kernel does not tell.
        """
        if not memory.nbytes:
            return Counter()
        num_pages = -(-memory.nbytes // PAGE_BYTES)
        step = -(-num_pages // MAX_SAMPLES) * PAGE_BYTES
        offsets = range(0, memory.nbytes, step)
        for offset in offsets:
            memory[offset]  # the kernel only tells of pages that are in our page table
        first = memory.ctypes.data
        found = self._kernel.nodes_of([first + offset for offset in offsets])
        return Counter(node for node in found if node >= 0)

    def num_misplaced(self, seen: Counter[int]) -> int:
        """Pages of those seen that lie on none of the nodes."""
        if self._is_default:
            return 0
        return sum(count for node, count in seen.items() if node not in self.nodes)

    def check(self, memory: npt.NDArray[np.uint8], what: str) -> None:
        """Raises MisplacedError for memory on other nodes, and where the kernel does not tell."""
        if self._is_default:
            return
        try:
            num_misplaced = self.num_misplaced(self.look(memory))
        except OSError as exc:
            raise MisplacedError(f"numa {self.policy}: move_pages: {exc.strerror}") from exc
        if num_misplaced:
            raise MisplacedError(
                f"numa {self.policy}: {num_misplaced} sampled pages of {what} lie on other nodes "
                f"than {list(self.nodes)}"
            )
