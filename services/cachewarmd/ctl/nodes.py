"""`numa`: on which nodes pool and weights lie."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cachewarmd.ctl import views
from cachewarmd.ctl.arguments import Add
from cachewarmd.ctl.outcome import EXIT_NOT_WARM, EXIT_OK, Output
from cachewarmd.ctl.verbs import CALL_TIMEOUT_S, connect
from cachewarmd.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rich.console import Console


def add_verbs(add: Add) -> None:
    add("numa", numa)


def numa(args: argparse.Namespace, output: Output) -> int:
    """Show on which NUMA nodes pool and weights lie; 3 if not where they should."""
    with connect(args, pb.ROLE_OBSERVER) as client:
        told = client.call(pb.Envelope(numa=pb.Numa()), CALL_TIMEOUT_S)[0].numa_reply
    output.answer(views.plain(told), _draw(told))
    is_wrong = told.refusal or any(region.num_misplaced for region in told.regions)
    return EXIT_NOT_WARM if is_wrong else EXIT_OK


def _draw(told: pb.NumaReply) -> views.Draw:
    size = views.human_bytes
    nodes = [
        (n.number, n.cpus or "none", size(n.total_bytes), size(n.free_bytes), _yes(n.is_wanted))
        for n in told.nodes
    ]
    regions = [
        (
            r.name,
            size(r.num_bytes),
            ", ".join(f"node {n}: {size(r.node_bytes[n])}" for n in sorted(r.node_bytes)),
            f"{r.num_misplaced} of {r.num_sampled}",
        )
        for r in told.regions
    ]

    def draw(console: Console) -> None:
        console.print(f"policy {told.policy}" + (f"; {told.refusal}" if told.refusal else ""))
        views.table("nodes", ("node", "CPUs", "memory", "free", "wanted"), nodes)(console)
        views.table("memory", ("what", "size", "lies on", "misplaced pages"), regions)(console)

    return draw


def _yes(is_so: bool) -> str:
    return "yes" if is_so else ""
