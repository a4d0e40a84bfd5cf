"""Background prompts under live traffic: what they cost it, and what they get of the machine."""

from __future__ import annotations

import argparse
import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from cachewarmd import options
from engine.client import Done, EngineClient
from engine.v1 import engine_pb2 as pb
from scripts.lib.bench.asking import Prompts
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.flags import checked, tokens
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.modes.throughput import Burst, burst
from scripts.lib.bench.noise import NoiseMeter
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread, percentile

_TRAFFIC, _JOB = 4, 5  # names of prompts
_ALONE_S = 6.0


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--streams",
        type=checked(options.integer(1, 256)),
        default=4,
        metavar="N",
        help="of traffic at once (default: %(default)s)",
    )
    add(
        "--prompt-length",
        type=tokens,
        default=128,
        metavar="TOKENS",
        help="of each stream (default: %(default)s)",
    )
    add(
        "--tokens",
        type=tokens,
        default=512,
        metavar="N",
        help="new tokens of each stream (default: %(default)s)",
    )
    add(
        "--item-length",
        type=tokens,
        default=512,
        metavar="TOKENS",
        help="of each background prompt (default: %(default)s)",
    )


class _Job:
    """One background prompt after the other, as a warm-up job gives them to an engine."""

    def __init__(
        self, client: EngineClient, prompts: Iterator[list[int]], timeout_s: float
    ) -> None:
        self._client, self._prompts, self._timeout_s = client, prompts, timeout_s
        self._is_over = threading.Event()
        self.num_tokens = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            ids = next(self._prompts)
            events = self._client.generate(
                ids, max_tokens=0, urgency=pb.URGENCY_BACKGROUND, timeout=self._timeout_s
            )
            for event in events:
                # One that is cut short at the end counts as far as it had come, which is unknown.
                if isinstance(event, Done) and not self._is_over.is_set():
                    self.num_tokens += len(ids)


def _traffic(bench: Bench, target: str, prompts: Prompts, *name: int) -> Burst:
    flags = bench.flags
    drawn = [prompts.ids(flags.prompt_length, _TRAFFIC, *name, i) for i in range(flags.streams)]
    return uvloop.run(burst(target, drawn, flags.tokens, flags.timeout))


def _run(bench: Bench) -> Result:
    flags = bench.flags
    _, engine, prompts = bench.start()
    prompts.check_fits("--prompt-length", flags.prompt_length, flags.tokens)
    prompts.check_fits("--item-length", flags.item_length, 0)
    items = (prompts.ids(flags.item_length, _JOB, number) for number in itertools.count())
    alone: list[float] = []
    beside: list[float] = []
    without: list[Burst] = []
    with_job: list[Burst] = []
    noise = NoiseMeter()
    with engine.client() as client, noise:
        for repeat in range(flags.repeat):
            say(f"warmup-load: repetition {repeat + 1} of {flags.repeat} ...")
            job = _Job(client, items, flags.timeout)
            began = time.monotonic()
            with job.running():
                time.sleep(_ALONE_S)
                alone.append(job.num_tokens / (time.monotonic() - began))
            without.append(_traffic(bench, engine.target, prompts, repeat, 0))
            job = _Job(client, items, flags.timeout)
            with job.running():
                with_job.append(_traffic(bench, engine.target, prompts, repeat, 1))
                beside.append(job.num_tokens / with_job[-1].wall_s)
            engine.settle()
    values: dict[str, Spread] = {
        "job_alone_tokens_per_s": Spread.of(alone),
        "job_beside_traffic_tokens_per_s": Spread.of(beside),
        "job_share": Spread.of(b / a for a, b in zip(alone, beside, strict=True)),
    }
    for percent in (50, 99):
        pairs = [
            [percentile(found.gaps, percent) for found in pair]
            for pair in zip(without, with_job, strict=True)
        ]
        values[f"itl_p{percent}_without_s"] = Spread.of(before for before, _ in pairs)
        values[f"itl_p{percent}_with_s"] = Spread.of(after for _, after in pairs)
        values[f"itl_p{percent}_ratio"] = Spread.of(after / before for before, after in pairs)
    rows = [
        ("background tokens/s, alone", values["job_alone_tokens_per_s"].text(0)),
        ("background tokens/s, beside traffic", values["job_beside_traffic_tokens_per_s"].text(0)),
        ("share of its rate alone", values["job_share"].text(2)),
        ("ITL p50 ms without", values["itl_p50_without_s"].text(1, 1e3)),
        ("ITL p50, with / without", values["itl_p50_ratio"].text(2)),
        ("ITL p99 ms without", values["itl_p99_without_s"].text(1, 1e3)),
        ("ITL p99, with / without", values["itl_p99_ratio"].text(2)),
        ("noise: foreign / steal / queue", noise.text()),
    ]
    title = f"background prompts beside {flags.streams} streams: median (min-max)"
    return Result(
        {**{name: spread.as_json() for name, spread in values.items()}, "noise": noise.result()},
        [Table(title, ("", "of each repetition"), rows)],
    )


MODE = Mode("warmup-load", "background prompts under live traffic", _add_flags, _run)
