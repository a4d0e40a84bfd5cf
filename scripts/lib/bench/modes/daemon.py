"""Latency of cachewarmd's data plane at its clients: lookup with lease, release, publish."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cachewarmd import options
from cachewarmd.protocol import blocks_of
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.daemon_clients import BlockClient, connect, crowd, small_blocks
from scripts.lib.bench.errors import BenchError
from scripts.lib.bench.flags import checked, token_counts
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread, percentile

_MIB = 1 << 20
_NUM_BUSY = 8
_CHAIN, _FRESH = 0, 1  # names of chains: one that is there, and the first of those that are not yet
_MAX_CALLS = 1_000_000


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keys",
        type=token_counts,
        default=(64, 4096),
        metavar="N,N",
        help="keys of a lookup, all of them hits (default: 64,4096)",
    )
    parser.add_argument(
        "--calls",
        type=checked(options.integer(1, _MAX_CALLS)),
        default=2000,
        metavar="N",
        help="timed calls of each kind; of lookups over 1,000 keys a sixth (default: %(default)s)",
    )
    parser.add_argument(
        "--connections",
        type=checked(options.integer(_NUM_BUSY, 192)),
        default=64,
        metavar="N",
        help="connections of others in the crowded rounds (default: %(default)s)",
    )


@dataclass
class Figure:
    """One kind of call in one setting: a p50 and a p99 for each repetition, seconds."""

    p50: list[float] = field(default_factory=list)
    p99: list[float] = field(default_factory=list)
    num_calls: int = 0
    noise: NoiseMeter = field(default_factory=NoiseMeter)

    def measure(self, count: int, call: Callable[[], float]) -> None:
        """`call` returns how long it took."""
        for _ in range(max(1, count // 20)):
            call()
        with self.noise:
            times = [call() for _ in range(count)]
        self.p50.append(percentile(times, 50))
        self.p99.append(percentile(times, 99))
        self.num_calls += count

    def as_json(self) -> dict[str, Any]:
        return {
            "p50_s": Spread.of(self.p50).as_json(),
            "p99_s": Spread.of(self.p99).as_json(),
            "num_calls": self.num_calls,
            "noise": self.noise.result(),
        }


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


Figures = dict[tuple[str, str], Figure]  # (setting, call)


class _Client:
    """What is measured, on one connection."""

    def __init__(self, small: BlockClient, large: BlockClient, max_keys: int) -> None:
        self._small, self._large = small, large
        self.keys = small.chain(_CHAIN, max_keys)
        self._next_fresh = _FRESH

    def fill(self) -> None:
        """Publish the chain."""
        lease = self._small.lookup(()).lease
        self._small.publish(lease, self.keys)
        self._small.release(lease)

    def lookup(self, count: int) -> tuple[float, float]:
        """Seconds of a lookup that finds all, and of the release after it."""
        keys = self.keys[:count]
        start = time.perf_counter()
        reply = self._small.lookup(keys)
        took = time.perf_counter() - start
        num_found = len(list(blocks_of(reply)))
        if num_found != count:
            raise BenchError(f"{num_found} of {count} blocks were found")
        return took, _timed(lambda: self._small.release(reply.lease))

    def publish(self) -> float:
        """Seconds of the publish of one block that nobody has."""
        keys = self._large.chain(self._next_fresh, 1)
        self._next_fresh += 1
        lease = self._large.lookup(keys).lease
        took = _timed(lambda: self._large.publish(lease, keys))
        self._large.release(lease)
        return took


@contextlib.contextmanager
def _connected(socket: Path, max_keys: int) -> Iterator[_Client]:
    with connect(socket, _MIB) as client:
        yield _Client(small_blocks(client), BlockClient(client, "1 MiB", _MIB), max_keys)


def _round(bench: Bench, client: _Client, setting: str, figures: Figures) -> None:
    calls = bench.flags.calls
    for count in bench.flags.keys:
        num_calls = calls if count <= 1000 else -(-calls // 6)
        measured = figures[setting, f"lookup_{count}"]
        measured.measure(num_calls, lambda n=count: client.lookup(n)[0])  # type: ignore[misc]
    figures[setting, "release"].measure(calls, lambda: client.lookup(1)[1])
    figures[setting, "publish_1mib"].measure(-(-calls // 6), client.publish)


def _run(bench: Bench) -> Result:
    daemon = bench.services.start_daemon(is_held=True)
    num = bench.flags.connections
    settings: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "alone": contextlib.nullcontext,
        "idle": lambda: crowd(daemon.socket, num, 0),
        "busy": lambda: crowd(daemon.socket, num, _NUM_BUSY),
    }
    titles = {
        "alone": "alone",
        "idle": f"{num} others, idle",
        "busy": f"{num} others, {_NUM_BUSY} busy",
    }
    figures: Figures = defaultdict(Figure)
    with _connected(daemon.socket, max(*bench.flags.keys, 64)) as client:
        client.fill()
        for repeat in range(bench.flags.repeat):
            for setting, others in settings.items():
                say(f"daemon: repetition {repeat + 1} of {bench.flags.repeat}, {setting} ...")
                with others():
                    _round(bench, client, setting, figures)
    values: dict[str, Any] = {name: {} for name in settings}
    rows = []
    for (setting, call), figure in figures.items():
        alone = figures["alone", call].p50
        over = Spread.of(own / base for own, base in zip(figure.p50, alone, strict=True))
        values[setting][call] = {**figure.as_json(), "p50_over_alone": over.as_json()}
        p50, p99 = (Spread.of(times).text(0, 1e6) for times in (figure.p50, figure.p99))
        row = (titles[setting], call.replace("_", " "), p50, p99, over.text(2))
        rows.append((*row, figure.noise.text()))
    columns = ("", "call", "p50 µs", "p99 µs", "p50 / alone", COLUMN)
    return Result(values, [Table("cachewarmd at its clients: median (min-max)", columns, rows)])


MODE = Mode("daemon", "latency of cachewarmd's data plane at its clients", _add_flags, _run)
