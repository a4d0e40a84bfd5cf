"""A look at where pool and weights lie. It takes milliseconds, so it is a thread's work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachewarmd import numa
from cachewarmd.numa import Placement
from cachewarmd.v1 import control_pb2 as pb

FRESH_S = 5.0  # who asks more often gets what was seen then

Regions = list[tuple[str, npt.NDArray[np.uint8]]]


@dataclass(frozen=True)
class Survey:
    """What was seen, ready to be sent; `num_misplaced` is None where the kernel does not tell."""

    at: float
    of: list[tuple[str, int]]
    reply: pb.NumaReply
    num_misplaced: int | None


class Surveys:
    """At most one look at a time; the last one is kept for FRESH_S while memory is the same."""

    def __init__(self, placement: Placement, refusal: str, regions: Callable[[], Regions]) -> None:
        self._placement = placement
        self._refusal = refusal
        self._regions = regions
        self._lock = asyncio.Lock()
        self._last: Survey | None = None

    async def fresh(self) -> Survey:
        """The last survey, or a new one."""
        async with self._lock:
            regions = self._regions()
            of = [(name, memory.nbytes) for name, memory in regions]
            last = self._last
            if last is None or last.of != of or time.monotonic() - last.at > FRESH_S:
                last = self._last = await asyncio.to_thread(self._look, regions, of)
            return last

    def _look(self, regions: Regions, of: list[tuple[str, int]]) -> Survey:
        placement = self._placement
        reply = pb.NumaReply(policy=placement.policy, refusal=self._refusal)
        for node in numa.topology():
            reply.nodes.add(
                number=node.number,
                cpus=numa.shown(node.cpus) or "",
                total_bytes=node.total_bytes,
                free_bytes=node.free_bytes,
                is_wanted=placement.policy != "off" and node.number in placement.nodes,
            )
        num_misplaced = 0
        try:
            for name, memory in regions:
                seen = placement.look(memory)
                wrong = placement.num_misplaced(seen)
                num_misplaced += wrong
                reply.regions.add(
                    name=name,
                    num_bytes=memory.nbytes,
                    num_sampled=seen.total(),
                    num_misplaced=wrong,
                    node_bytes={n: memory.nbytes * c // seen.total() for n, c in seen.items()},
                )
        except OSError as exc:
            reply.refusal = "; ".join(filter(None, (reply.refusal, f"move_pages: {exc.strerror}")))
            return Survey(time.monotonic(), of, reply, None)
        return Survey(time.monotonic(), of, reply, num_misplaced)
