"""Many streams at once: output tokens/s, gaps between tokens, time to the first one."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import uvloop

from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceStub
from scripts.latency_probe import Sample, send
from scripts.lib.bench.asking import Prompts
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.errors import BenchError
from scripts.lib.bench.flags import checked, integers, tokens
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread, percentile

_CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0),)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--concurrency",
        type=checked(integers(1, 1024)),
        default=(4, 16, 64),
        metavar="N,N",
        help="requests at once (default: 4,16,64)",
    )
    parser.add_argument(
        "--prompt-length",
        type=tokens,
        default=128,
        metavar="TOKENS",
        help="of each request (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        type=tokens,
        default=64,
        metavar="N",
        help="new tokens of each request (default: %(default)s)",
    )


@dataclass(frozen=True)
class Burst:
    """So many requests sent at the same moment, until the last one has ended; seconds."""

    samples: Sequence[Sample]
    wall_s: float

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def gaps(self) -> list[float]:
        return [gap for sample in self.samples for gap in sample.gaps]

    @property
    def ttfts(self) -> list[float]:
        return [sample.ttft for sample in self.samples]


async def burst(target: str, prompts: list[list[int]], max_tokens: int, timeout_s: float) -> Burst:
    """Raises BenchError when a request fails: what is left would be another load."""
    requests = [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids),
            stopping=pb.StoppingOptions(max_tokens=max_tokens, ignore_eos=True),
        )
        for ids in prompts
    ]
    async with grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
        await channel.channel_ready()
        stub = EngineServiceStub(channel)
        started = time.monotonic()
        samples = await asyncio.gather(*(send(stub, request, timeout_s) for request in requests))
        wall_s = time.monotonic() - started
    errors = sorted({sample.error for sample in samples if sample.error})
    if errors:
        raise BenchError(f"of {len(prompts)} requests at once some failed: {', '.join(errors)}")
    burst = Burst(samples, wall_s)
    if burst.num_tokens != len(prompts) * max_tokens:
        raise BenchError(f"{len(prompts)} x {max_tokens} tokens wanted, {burst.num_tokens} came")
    return burst


def _measure(
    bench: Bench, target: str, prompts: Prompts, noises: dict[int, NoiseMeter]
) -> dict[int, list[Burst]]:
    """By concurrency. All of them in turn, so that a slow minute touches each."""
    flags = bench.flags
    bursts: dict[int, list[Burst]] = defaultdict(list)
    for repeat in range(flags.repeat):
        for count, noise in noises.items():
            say(f"throughput: {count} at once, repetition {repeat + 1} of {flags.repeat} ...")
            drawn = [prompts.ids(flags.prompt_length, 3, repeat, count, i) for i in range(count)]
            with noise:
                load = burst(target, drawn, flags.tokens, flags.timeout)
                bursts[count].append(uvloop.run(load))
    return bursts


def _case(bursts: Sequence[Burst]) -> dict[str, Spread]:
    """Each repetition's figures, then their spread. Gaps are missing where all have one token."""
    found = {
        "output_tokens_per_s": Spread.of(burst.num_tokens / burst.wall_s for burst in bursts),
        "ttft_p50_s": Spread.of(percentile(burst.ttfts, 50) for burst in bursts),
        "ttft_p99_s": Spread.of(percentile(burst.ttfts, 99) for burst in bursts),
    }
    if all(burst.gaps for burst in bursts):
        found["itl_p50_s"] = Spread.of(percentile(burst.gaps, 50) for burst in bursts)
        found["itl_p99_s"] = Spread.of(percentile(burst.gaps, 99) for burst in bursts)
    return found


def _run(bench: Bench) -> Result:
    flags = bench.flags
    _, engine, prompts = bench.start()
    prompts.check_fits("--prompt-length", flags.prompt_length, flags.tokens)
    noises = {count: NoiseMeter() for count in flags.concurrency}
    bursts = _measure(bench, engine.target, prompts, noises)
    cases: list[dict[str, Any]] = []
    rows = []
    for count, noise in noises.items():
        found = _case(bursts[count])
        cases.append(
            {
                "concurrency": count,
                "num_tokens": sum(burst.num_tokens for burst in bursts[count]),
                **{name: spread.as_json() for name, spread in found.items()},
                "noise": noise.result(),
            }
        )
        milliseconds = [
            found[name].text(1, 1e3) if name in found else "-"
            for name in ("itl_p50_s", "itl_p99_s", "ttft_p50_s", "ttft_p99_s")
        ]
        speed = found["output_tokens_per_s"].text(1)
        rows.append((f"{count} at once", speed, *milliseconds, noise.text()))
    columns = ("", "tokens/s", "ITL p50 ms", "ITL p99 ms", "TTFT p50 ms", "TTFT p99 ms", COLUMN)
    title = f"throughput, {flags.prompt_length} tokens in, {flags.tokens} out: median (min-max)"
    return Result({"concurrency": cases}, [Table(title, columns, rows)])


MODE = Mode("throughput", "many streams at once: tokens/s, ITL, TTFT", _add_flags, _run)
