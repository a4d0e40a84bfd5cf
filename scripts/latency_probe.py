#!/usr/bin/env python3
"""Closed-loop load on a running engine over gRPC; prints latencies, their spread and throughput.

Each of --concurrency loops sends its next request when its last one has ended. Failed and empty
answers are counted apart and are in no percentile. See docs/latency-probe.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import json
import math
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

try:
    import grpc
    import numpy as np

    from engine.client import call_error
    from engine.v1 import engine_pb2 as pb
    from engine.v1.engine_pb2_grpc import EngineServiceStub
except ImportError as exc:
    sys.exit(f"latency_probe: {exc}: run scripts/quickstart once, or activate .venv")

SCHEMA_VERSION = 1
_DEFAULT_DURATION_S = 30.0
_INFO_TIMEOUT_S = 20.0
_FAILURE_PAUSE_S = 0.05  # a server that refuses at once is not asked in a busy loop
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.enable_http_proxy", 0),  # not the proxy is measured
)


class ProbeError(Exception):
    """Nothing can be measured; `status` is the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


# -- arithmetic ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """Of values in seconds; `sd` is the population's. None = there were no values."""

    count: int
    mean: float | None = None
    sd: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def summarise(values: Sequence[float]) -> Summary:
    """Mean, spread and percentiles (linear between the two nearest ranks)."""
    if not values:
        return Summary(0)
    p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
    return Summary(
        count=len(values),
        mean=float(np.mean(values)),
        sd=float(np.std(values)),
        p50=p50,
        p90=p90,
        p99=p99,
        max=max(values),
    )


# -- one request -----------------------------------------------------------------------------------


@dataclass
class Sample:
    """One request as its client saw it; seconds. `error` is "" for a whole answer with tokens."""

    error: str = ""
    ttft: float = 0.0
    e2e: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between messages with tokens
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.e2e - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None


async def read_stream(
    stream: AsyncIterator[Any], started: float, now: Callable[[], float] = time.monotonic
) -> Sample:
    """Time a Generate stream from `started` to its end. Raises grpc.RpcError.

    The first message with a text or a token is the first token; a message with neither is nothing.
    """
    sample = Sample()
    first = last = None
    is_finished = is_cancelled = False
    async for response in stream:
        output, at = response.output, now()
        num_tokens = output.num_tokens or len(output.token_ids)
        if num_tokens or output.text:
            first = at if first is None else first
        if num_tokens:
            if last is not None:
                sample.gaps.append(at - last)
            last = at
            sample.num_tokens += num_tokens
        if response.HasField("finished"):
            is_finished = True
            is_cancelled = response.finished.finish_reason == pb.FINISH_REASON_CANCELLED
            sample.num_prompt_tokens = response.usage.prompt_tokens
            sample.num_cached_tokens = response.usage.cached_tokens
    sample.e2e = now() - started
    if not is_finished or is_cancelled:
        sample.error = "CANCELLED" if is_cancelled else "TRUNCATED"
    elif first is None:
        sample.error = "EMPTY"
    else:
        sample.ttft = first - started
    return sample


async def send(stub: Any, request: pb.GenerateRequest, timeout_s: float) -> Sample:
    """Send one request; a call that fails is a Sample with the reason in `error`."""
    started = time.monotonic()
    call = stub.Generate(request, timeout=timeout_s)
    try:
        return await read_stream(call, started)
    except grpc.RpcError as exc:
        error = call_error(exc)
        return Sample(error=error.reason or error.status)
    finally:
        call.cancel()


# -- the load --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What is measured, as the flags say it; stands in the report. Durations in seconds."""

    target: str
    allow_remote: bool
    model: str
    context_length: int
    max_tokens: int
    concurrency: int
    duration: float | None
    requests: int | None
    shared_prefix: int
    warmup_requests: int
    seed: int
    timeout: float
    output_format: str


class Prompts:
    """Token ids by seed: the same seed gives the same prompts again.

    Measured prompts begin with the same `shared_prefix` ids; warm-up prompts are unrelated to them,
    so that they warm processes and not the cache of what is measured.
    """

    def __init__(self, settings: Settings, info: pb.GetModelInfoResponse) -> None:
        self._settings = settings
        self._vocabulary = np.setdiff1d(np.arange(info.vocab_size), list(info.eos_token_ids))
        self._prefix = self._draw(settings.shared_prefix, 0)

    def _draw(self, count: int, *name: int) -> list[int]:
        # numpy, because the loop stands still meanwhile and prompts may have 128K tokens.
        generator = np.random.default_rng((self._settings.seed, *name))
        return generator.choice(self._vocabulary, count).tolist()

    def request(self, index: int, *, is_warm_up: bool) -> pb.GenerateRequest:
        """The index-th request of the warm-up, or of what is measured."""
        settings = self._settings
        ids = [] if is_warm_up else list(self._prefix)
        ids += self._draw(settings.context_length - len(ids), 1 + is_warm_up, index)
        return pb.GenerateRequest(
            model=settings.model,
            token_ids=pb.TokenIds(ids=ids),
            # Outputs of the same length, whatever the model would say.
            stopping=pb.StoppingOptions(max_tokens=settings.max_tokens, ignore_eos=True),
        )


@dataclass
class Run:
    """Samples of requests that ended, and how long the whole took."""

    samples: list[Sample] = field(default_factory=list)
    wall_s: float = 0.0


async def run_load(
    one: Callable[[int], Awaitable[Sample]],
    concurrency: int,
    requests: int | None,
    duration: float | None,
    interrupted: asyncio.Event,
) -> Run:
    """Closed loop of `one(index)` until a limit is reached, or `interrupted` is set.

    No request begins after `duration` seconds; those that run then are waited for. What an
    interruption cuts is not in the samples.
    """
    run, started = Run(), time.monotonic()
    indices = iter(range(sys.maxsize if requests is None else requests))
    end = math.inf if duration is None else started + duration

    async def loop() -> None:
        while time.monotonic() < end and (index := next(indices, None)) is not None:
            sample = await one(index)
            run.samples.append(sample)
            if sample.error:
                await asyncio.sleep(_FAILURE_PAUSE_S)

    async def all_loops() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(loop())

    running = asyncio.create_task(all_loops())
    stopping: asyncio.Task[Any] = asyncio.create_task(interrupted.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    stopping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    run.wall_s = time.monotonic() - started
    return run


# -- the report ------------------------------------------------------------------------------------

Report = dict[str, Any]


def _outcomes(samples: Sequence[Sample]) -> dict[str, Any]:
    errors = Counter(sample.error for sample in samples if sample.error)
    failed = errors.total()
    return {
        "total": len(samples),
        "ok": len(samples) - failed,
        "failed": failed,
        "errors": dict(sorted(errors.items())),
    }


def report(settings: Settings, info: pb.GetModelInfoResponse, warm_up: Run, run: Run) -> Report:
    """The JSON object; keys are stable within a schema version, durations are seconds."""
    good = [sample for sample in run.samples if not sample.error]
    num_tokens = sum(sample.num_tokens for sample in good)
    num_prompt = sum(sample.num_prompt_tokens for sample in good)
    num_cached = sum(sample.num_cached_tokens for sample in good)
    summaries = {
        "ttft_s": [sample.ttft for sample in good],
        "ttft_uncached_s": [s.ttft for s in good if not s.num_cached_tokens],
        "ttft_cached_s": [s.ttft for s in good if s.num_cached_tokens],
        "itl_s": [gap for sample in good for gap in sample.gaps],
        "tpot_s": [sample.tpot for sample in good if sample.tpot is not None],
        "e2e_s": [sample.e2e for sample in good],
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "model": info.model,
        "model_version": info.model_version,
        "weights_sha256": info.weights_sha256,
        "settings": asdict(settings),
        "interrupted": False,
        "warmup": {"wall_s": warm_up.wall_s, "requests": _outcomes(warm_up.samples)},
        "wall_s": run.wall_s,
        "requests": _outcomes(run.samples),
        **{name: asdict(summarise(values)) for name, values in summaries.items()},
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / run.wall_s if run.wall_s else 0.0,
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "cached_ratio": num_cached / num_prompt if num_prompt else None,
    }


def table(result: Report) -> str:
    """The same for people; milliseconds."""
    requests, settings = result["requests"], result["settings"]
    errors = ", ".join(f"{reason} {count}" for reason, count in requests["errors"].items())
    cached = result["cached_ratio"]
    lines = [
        f"model        {result['model']} {result['model_version']}",
        f"load         {settings['concurrency']} at once, {settings['context_length']} tokens in "
        f"({settings['shared_prefix']} shared), {settings['max_tokens']} out",
        f"warm-up      {result['warmup']['requests']['ok']} ok, "
        f"{result['warmup']['requests']['failed']} failed",
        f"requests     {requests['ok']} ok, {requests['failed']} failed"
        + (f" ({errors})" if errors else ""),
        f"output       {result['output_tokens_per_s']:.1f} tokens/s in {result['wall_s']:.1f} s",
        f"cached       {'-' if cached is None else f'{cached:.1%} of prompt tokens'}",
        "",
        "ms           " + "".join(f"{name:>10}" for name in ("count", *_COLUMNS)),
    ]
    for key, title in _ROWS.items():
        summary = result[key]
        cells = [summary[name] for name in _COLUMNS]
        numbers = "".join(f"{'-' if c is None else f'{1e3 * c:.2f}':>10}" for c in cells)
        lines.append(f"{title:<13}{summary['count']:>10}{numbers}")
    if result["interrupted"]:
        lines += ["", "interrupted: requests that were under way are left out"]
    return "\n".join(lines)


_COLUMNS = ("mean", "sd", "p50", "p90", "p99", "max")
_ROWS = {
    "ttft_s": "TTFT",
    "ttft_uncached_s": "  uncached",
    "ttft_cached_s": "  cached",
    "itl_s": "ITL",
    "tpot_s": "TPOT",
    "e2e_s": "E2E",
}


# -- the command -----------------------------------------------------------------------------------


async def probe(settings: Settings, interrupted: asyncio.Event) -> Report:
    """Warm up, measure, report. Raises ProbeError when the engine can't be asked."""
    async with grpc.aio.insecure_channel(settings.target, options=_CHANNEL_OPTIONS) as channel:
        stub = EngineServiceStub(channel)
        try:
            info = await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_INFO_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise ProbeError(f"{settings.target}: {call_error(exc)}") from exc
        if settings.context_length + settings.max_tokens > info.max_context:
            raise ProbeError(
                f"--context-length {settings.context_length} and --max-tokens "
                f"{settings.max_tokens} are over the model's context of {info.max_context}",
                2,
            )
        prompts = Prompts(settings, info)

        async def one(index: int, is_warm_up: bool = False) -> Sample:
            request = prompts.request(index, is_warm_up=is_warm_up)
            return await send(stub, request, settings.timeout)

        load = functools.partial(run_load, concurrency=settings.concurrency)
        warm_up = await load(
            functools.partial(one, is_warm_up=True),
            requests=settings.warmup_requests,
            duration=None,
            interrupted=interrupted,
        )
        run = await load(
            one,
            requests=settings.requests,
            duration=settings.duration,
            interrupted=interrupted,
        )
    return {**report(settings, info, warm_up, run), "interrupted": interrupted.is_set()}


def is_local(target: str) -> bool:
    """A Unix socket, or a loopback address or `localhost` with a port."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    host = target.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed: {low} to {high}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed: seconds, up to 86400")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "latency_probe", description="Measures a running engine with a closed loop of requests."
    )
    add = parser.add_argument
    add("--target", default="127.0.0.1:50051", metavar="HOST:PORT|unix:PATH")
    add("--allow-remote", action="store_true", help="put load on an address that is not local")
    add("--model", default="", help="name to ask for (default: what is served)")
    add("--context-length", type=_integer(1, 1 << 24), default=512, help="tokens of a prompt")
    add("--max-tokens", type=_integer(1, 1 << 20), default=32, help="tokens of an answer")
    add("--concurrency", type=_integer(1, 1024), default=1, help="requests at once")
    add(
        "--duration",
        type=_seconds,
        metavar="SECONDS",
        help=f"begin no request after that (default {_DEFAULT_DURATION_S:g} without --requests)",
    )
    add("--requests", type=_integer(1, 10_000_000), help="send that many and end")
    add(
        "--shared-prefix",
        type=_integer(0, 1 << 24),
        default=0,
        metavar="TOKENS",
        help="how much of the prompts is the same (default 0)",
    )
    add("--warmup-requests", type=_integer(0, 100_000), default=0, help="sent first, not counted")
    add("--seed", type=_integer(0, (1 << 63) - 1), default=0, help="draws the prompts (default 0)")
    add("--timeout", type=_seconds, default=600.0, metavar="SECONDS", help="of each request")
    add("--output-format", choices=["table", "json"], default="table")
    return parser


def settings_from(argv: Sequence[str] | None) -> Settings:
    """The flags; ends the process with status 2 for what is not allowed."""
    parser = _parser()
    flags = parser.parse_args(argv)
    if not is_local(flags.target) and not flags.allow_remote:
        parser.error(
            f"--target: {flags.target!r} is neither a loopback HOST:PORT nor unix:PATH: "
            "add --allow-remote to put load on another machine"
        )
    if flags.shared_prefix > flags.context_length:
        parser.error(
            f"--shared-prefix: {flags.shared_prefix} is not allowed: "
            f"at most --context-length ({flags.context_length})"
        )
    if flags.duration is None and flags.requests is None:
        flags.duration = _DEFAULT_DURATION_S
    return Settings(**vars(flags))


def exit_status(result: Report) -> int:
    """130 interrupted, 1 nothing succeeded, else 0."""
    if result["interrupted"]:
        return 130
    return 0 if result["requests"]["ok"] else 1


async def _run(settings: Settings) -> Report:
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends at once
        interrupted.set()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        return await probe(settings, interrupted)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    settings = settings_from(argv)
    try:
        result = asyncio.run(_run(settings))
    except ProbeError as exc:
        print(f"latency_probe: {exc}", file=sys.stderr)
        return exc.status
    except KeyboardInterrupt:
        return 130
    is_json = settings.output_format == "json"
    print(json.dumps(result, indent=2, allow_nan=False) if is_json else table(result))
    return exit_status(result)


if __name__ == "__main__":
    sys.exit(main())
