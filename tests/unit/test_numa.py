"""Memory lies on the NUMA nodes that were asked for, and who says so has looked."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from cachewarmd import numa, segment
from cachewarmd.errors import InvalidRequestError, MisplacedError
from cachewarmd.huge_pages import populate
from cachewarmd.numa import Node, Placement
from cachewarmd.options import OptionError

MIB = 1 << 20


class TwoNodes:
    """A kernel with two nodes: what is bound before it is asked lies there, the rest on node 0."""

    def __init__(self, refusal: int = 0) -> None:
        self.refusal = refusal
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.placed: list[int] = [0]

    def mbind(self, address: int, size: int, mode: int, nodes: Sequence[int]) -> None:
        if self.refusal:
            raise OSError(self.refusal, os.strerror(self.refusal))
        self.calls.append((mode, tuple(nodes)))
        self.placed = list(nodes)

    def nodes_of(self, addresses: Sequence[int]) -> list[int]:
        return [self.placed[i % len(self.placed)] for i in range(len(addresses))]


def _memory(size: int) -> npt.NDArray[np.uint8]:
    """No page of it is allocated."""
    fd = segment.create_memfd("test", size)
    try:
        return segment.map_memory(fd, size, writable=True)
    finally:
        os.close(fd)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two nodes with CPUs and one of memory alone."""
    (tmp_path / "online").write_text("0-2\n")
    for number, cpus in enumerate(("0-1,4", "2-3", "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cpus + "\n")
    return tmp_path


def test_nodes_are_read_with_their_cpus(tree: Path) -> None:
    """A node without CPUs is one too."""
    assert numa.topology(tree) == [Node(0, (0, 1, 4)), Node(1, (2, 3)), Node(2, ())]


def test_kernel_without_numa_has_no_nodes(tmp_path: Path) -> None:
    """No tree is no error."""
    assert numa.topology(tmp_path / "none") == []


def test_memory_without_cpus_is_taken_only_by_name(tree: Path) -> None:
    """Far memory is slow: nobody gets it unasked."""
    assert Placement("interleave", root=tree).nodes == (0, 1)
    assert Placement("bind", (2,), root=tree).nodes == (2,)


def test_node_that_is_not_there_is_refused(tree: Path) -> None:
    """The error names it and those that are there; several preferred ones are none."""
    with pytest.raises(InvalidRequestError, match=r"numa-nodes 7 .* are \[0, 1, 2\]"):
        Placement("bind", (0, 7), root=tree)
    with pytest.raises(InvalidRequestError, match="takes one node"):
        Placement("preferred", (0, 1), root=tree)


@pytest.mark.parametrize(
    ("policy", "nodes", "call"),
    [("bind", (1,), (2, (1,))), ("interleave", (), (3, (0, 1))), ("preferred", (1,), (1, (1,)))],
)
def test_policy_reaches_the_kernel(
    tree: Path, policy: str, nodes: tuple[int, ...], call: tuple[int, tuple[int, ...]]
) -> None:
    """Mode and nodes as <linux/mempolicy.h> numbers them; then nothing is misplaced."""
    kernel = TwoNodes()
    placement = Placement(policy, nodes, root=tree, kernel=kernel)
    memory = _memory(MIB)
    assert placement.apply(memory) == ""
    assert kernel.calls == [call]
    seen = placement.look(memory)
    assert (placement.num_misplaced(seen), seen.total()) == (0, MIB // 4096)
    placement.check(memory, "the pool")


def test_pages_on_another_node_are_seen(tree: Path) -> None:
    """What was allocated before the policy was set stays where it is, and counts."""
    placement = Placement("bind", (1,), root=tree, kernel=TwoNodes())
    memory = _memory(MIB)
    assert placement.num_misplaced(placement.look(memory)) == 256
    with pytest.raises(MisplacedError, match=r"256 sampled pages of the pool .* than \[1\]"):
        placement.check(memory, "the pool")


def test_kernel_that_does_not_tell_is_no_proof(tree: Path) -> None:
    """A check that can't look raises, rather than find nothing wrong."""

    class Silent(TwoNodes):
        def nodes_of(self, addresses: Sequence[int]) -> list[int]:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    placement = Placement("bind", (1,), root=tree, kernel=Silent())
    with pytest.raises(MisplacedError, match="move_pages: Operation not permitted"):
        placement.check(_memory(MIB), "the pool")


def test_memory_of_a_node_is_read(tree: Path) -> None:
    """In bytes, where the kernel has them in kB."""
    text = "Node 0 MemTotal:  64 kB\nNode 0 MemFree:  16 kB\n"
    (tree / "node0" / "meminfo").write_text(text)
    assert numa.topology(tree)[0] == Node(0, (0, 1, 4), 64 << 10, 16 << 10)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_refusing_kernel_is_quoted(tree: Path, number: int) -> None:
    """No NUMA in the kernel, or a container that forbids it: policy, nodes and reason are told."""
    placement = Placement("bind", (1,), root=tree, kernel=TwoNodes(number))
    memory = _memory(MIB)
    assert placement.apply(memory) == (f"numa bind on nodes [1]: mbind: {os.strerror(number)}")


def test_off_asks_nothing(tree: Path) -> None:
    """The default leaves everything to the kernel, and so finds nothing wrong."""
    kernel = TwoNodes()
    placement = Placement(root=tree, kernel=kernel)
    memory = _memory(MIB)
    assert placement.apply(memory) == ""
    placement.check(memory, "the pool")
    assert placement.num_misplaced(placement.look(memory)) == 0
    assert kernel.calls == []


@pytest.mark.skipif(not numa.topology(), reason="the kernel knows no NUMA nodes")
@pytest.mark.parametrize("policy", ["bind", "interleave", "preferred"])
def test_this_kernel_obeys(policy: str) -> None:
    """The real calls, on a node of this host: every page that is sampled lies there."""
    node = next(node.number for node in numa.topology() if node.cpus)
    placement = Placement(policy, (node,))
    memory = _memory(4 * MIB)
    assert placement.apply(memory) == ""
    populate(memory)
    assert placement.look(memory) == {node: 256}


def test_real_mbind_refuses_a_node_that_is_not_there() -> None:
    """The mask has the bit that is meant: an impossible node is an error, not taken for none."""
    memory = _memory(MIB)
    with pytest.raises(OSError, match="Invalid argument"):
        numa.Linux().mbind(memory.ctypes.data, memory.nbytes, 2, [numa.MAX_NODES - 1])


def test_node_lists_are_checked() -> None:
    """Ranges as the kernel writes them; else what is allowed is said."""
    assert numa.NODES("0-1,3") == (0, 1, 3)
    for text in ("a", "3-1", "-1", "0-99999999"):
        with pytest.raises(OptionError, match="node numbers, such as"):
            numa.NODES(text)
