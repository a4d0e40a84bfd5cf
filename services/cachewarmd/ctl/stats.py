"""`stats`: what the pool holds and how fast things go, once or again and again."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import Any

from cachewarmd import options
from cachewarmd.client import Client
from cachewarmd.ctl import views
from cachewarmd.ctl.arguments import Add, argument
from cachewarmd.ctl.outcome import EXIT_OK, Output
from cachewarmd.ctl.verbs import CALL_TIMEOUT_S, connect
from cachewarmd.v1 import control_pb2 as pb

_BAR_CELLS = 40
_MIN_WATCH_S, _MAX_WATCH_S = 0.1, 3600.0


def add_verbs(add: Add) -> None:
    add("stats", stats).add_argument(
        "--watch",
        type=argument(_interval),
        metavar="DURATION",
        help="again after each such time, with rates, until Ctrl-C; JSON is then an object a line",
    )


def _interval(text: str) -> float:
    value = options.seconds(text)
    if not _MIN_WATCH_S <= value <= _MAX_WATCH_S:
        raise options.OptionError(f"allowed is {_MIN_WATCH_S} to {_MAX_WATCH_S:.0f} seconds")
    return value


def stats(args: argparse.Namespace, output: Output) -> int:
    """The pool by state, the hit ratio and, with --watch, rates."""
    with connect(args, pb.ROLE_OBSERVER) as client:
        told, at = _ask(client), time.monotonic()
        _answer(output, sample(told))
        try:
            while args.watch is not None:
                time.sleep(args.watch)
                before, before_at = told, at
                told, at = _ask(client), time.monotonic()
                _answer(output, sample(told) | {"rates": rates(before, told, at - before_at)})
        except KeyboardInterrupt:
            pass  # the only way to end a watch: no error
    return EXIT_OK


def _ask(client: Client) -> pb.StatusReply:
    return client.call(pb.Envelope(status=pb.Status()), CALL_TIMEOUT_S)[0].status_reply


def hit_ratio(counters: Mapping[str, int]) -> float | None:
    """Of lookups, how many found a block; None = there was none."""
    hits, misses = (counters.get(f"lookup_{what}", 0) for what in ("hit", "miss"))
    return hits / (hits + misses) if hits + misses else None


def sample(told: pb.StatusReply) -> dict[str, Any]:
    """What one answer of the daemon says."""
    pool = told.pool
    return {
        "epoch": told.epoch,
        "uptime_s": told.uptime_s,
        "pool_bytes": pool.pool_bytes,
        "committed_bytes": pool.committed_bytes,
        "bytes": views.plain(pool.bytes),
        "blocks": views.plain(pool.blocks),
        "num_leases": told.counters["leases"],
        "num_clients": len(told.clients),
        "hit_ratio": hit_ratio(told.counters),
    }


def rates(before: pb.StatusReply, after: pb.StatusReply, seconds: float) -> dict[str, Any] | None:
    """What happened between two answers, for each second; None = another daemon answers now."""
    if before.epoch != after.epoch or before.pid != after.pid:
        return None
    grown = {name: count - before.counters.get(name, 0) for name, count in after.counters.items()}
    hits, misses = grown.get("lookup_hit", 0), grown.get("lookup_miss", 0)
    evicted = sum(count for name, count in grown.items() if name.startswith("evicted_"))
    return {
        "seconds": round(seconds, 3),
        "lookups_per_s": (hits + misses) / seconds,
        "hits_per_s": hits / seconds,
        "published_per_s": grown.get("published", 0) / seconds,
        "evicted_per_s": evicted / seconds,
        "hit_ratio": hit_ratio(grown),
    }


def _answer(output: Output, data: Mapping[str, Any]) -> None:
    output.answer(data, lambda console: console.print(text(data)))
    sys.stdout.flush()  # who reads a pipe sees each sample when it is taken


def text(data: Mapping[str, Any]) -> str:
    """For people: a bar for each state, and one line of numbers."""
    lines = [f"pool: {views.human_bytes(data['pool_bytes'])}"]
    unallocated = max(0, data["pool_bytes"] - data["committed_bytes"])
    for state, count in ({**data["bytes"], "unallocated": unallocated}).items():
        if count:
            cells = max(1, round(_BAR_CELLS * count / max(1, data["pool_bytes"])))
            bar = "█" * min(cells, _BAR_CELLS)
            lines.append(f"  {state:<12}{bar:<{_BAR_CELLS}} {views.human_bytes(count)}")
    lines.append(
        f"hits {_percent(data['hit_ratio'])} of all lookups, {data['num_leases']} leases, "
        f"{data['num_clients']} clients"
    )
    told = data.get("rates")
    if told:
        lines.append(
            f"per second: {told['lookups_per_s']:.1f} lookups ({_percent(told['hit_ratio'])} "
            f"hits), {told['published_per_s']:.1f} blocks published, "
            f"{told['evicted_per_s']:.1f} evicted"
        )
    elif "rates" in data:
        lines.append("another daemon answers now: no rates")
    return "\n".join(lines)


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{100 * ratio:.1f} %"
