"""kill -9 of cachewarmd, which its holder starts again, under streams that run."""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cachewarmd import options
from cachewarmd.client import Client, SharedPool
from cachewarmd.errors import CachewarmError
from cachewarmd.layout import BlockState
from engine.client import CallError, EngineClient, Text
from scripts.lib.bench.asking import Answer, ask
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.daemon_clients import NUM_KEYS, connect, small_blocks
from scripts.lib.bench.errors import BenchError
from scripts.lib.bench.flags import checked, tokens
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.processes import Daemon, Engine
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread

_POLL_S = 0.005
_ASK_AFTER_S = 1.0  # since the kill, or as soon as lookups are served if that is later
_NEW_TOKENS = 1
_CHAIN = 0
_STREAM, _LONG = 1, 2  # names of prompts


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--streams",
        type=checked(options.integer(1, 256)),
        default=16,
        metavar="N",
        help="that run meanwhile (default: %(default)s)",
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
        default=384,
        metavar="N",
        help="new tokens of each stream (default: %(default)s)",
    )
    add(
        "--length",
        type=tokens,
        default=7000,
        metavar="TOKENS",
        help="of the long prompt that is asked again after the kill (default: %(default)s)",
    )


def _answer(
    client: EngineClient, prompt: Sequence[int], count: int, timeout: float, begun: threading.Event
) -> list[int]:
    """Token ids of a greedy answer; `begun` is set at its first. Raises CallError."""
    found: list[int] = []
    events = client.generate(
        prompt, max_tokens=count, temperature=0.0, ignore_eos=True, timeout=timeout
    )
    for event in events:
        if isinstance(event, Text):
            found += event.token_ids
            begun.set()
    return found


@dataclass
class Kills:
    """What was seen, an element for each kill."""

    served_again_s: list[float] = field(default_factory=list)  # since the kill
    found_again: list[float] = field(default_factory=list)  # share of sealed blocks
    num_sealed: list[int] = field(default_factory=list)  # before
    num_running: list[int] = field(default_factory=list)  # streams, when lookups were served again
    asked_after_s: list[float] = field(default_factory=list)  # since the kill
    again: list[Answer] = field(default_factory=list)
    num_failed: int = 0
    num_different: int = 0
    noise: NoiseMeter = field(default_factory=NoiseMeter)


def _fill(client: Client) -> None:
    """The chain that the probe looks up."""
    blocks = small_blocks(client)
    lease = blocks.lookup(()).lease
    blocks.publish(lease, blocks.chain(_CHAIN, NUM_KEYS))
    blocks.release(lease)


def _sealed(pool: SharedPool) -> set[tuple[bytes, int]]:
    """(key, generation) of all blocks that are sealed now."""
    places = np.flatnonzero(pool.records["state"] == BlockState.SEALED)
    records = pool.records[places]
    keys = records["key"].tolist()
    return set(zip(keys, records["generation"].tolist(), strict=True))


def _wait_served(socket: Path, limit_s: float) -> float:
    """The moment at which a new client's lookup found its chain."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            with connect(socket) as client:
                blocks = small_blocks(client)
                if blocks.lookup(blocks.chain(_CHAIN, NUM_KEYS)).blocks:
                    return time.monotonic()
        except CachewarmError:
            pass  # it is dead, or not yet there
        time.sleep(_POLL_S)
    raise BenchError(f"no lookup was served within {limit_s:g} s of a kill")


def _round(
    bench: Bench,
    daemon: Daemon,
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    solo: Sequence[Sequence[int]],
    long_prompt: Sequence[int],
    kills: Kills,
) -> None:
    flags = bench.flags
    clients = [engine.client() for _ in prompts]
    begun = [threading.Event() for _ in prompts]
    with (
        ThreadPoolExecutor(len(prompts)) as threads,
        connect(daemon.socket) as observer,
        kills.noise,
    ):
        _fill(observer)
        assert observer.pool is not None
        futures: list[Future[list[int]]] = [
            threads.submit(_answer, client, prompt, flags.tokens, flags.timeout, event)
            for client, prompt, event in zip(clients, prompts, begun, strict=True)
        ]
        for event in begun:
            if not event.wait(flags.timeout):
                raise BenchError("a stream did not begin")
        pid = daemon.status().pid
        before = _sealed(observer.pool)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        kills.served_again_s.append(_wait_served(daemon.socket, flags.timeout) - killed)
        kills.num_running.append(sum(not future.done() for future in futures))
        after = _sealed(observer.pool)
        kills.num_sealed.append(len(before))
        kills.found_again.append(len(before & after) / len(before))
        time.sleep(max(0.0, killed + _ASK_AFTER_S - time.monotonic()))
        kills.asked_after_s.append(time.monotonic() - killed)
        with engine.client() as client:
            kills.again.append(ask(client, long_prompt, _NEW_TOKENS, flags.timeout))
        for future, expected in zip(futures, solo, strict=True):
            try:
                kills.num_different += future.result() != expected
            except CallError:
                kills.num_failed += 1
    for client in clients:
        client.close()
    engine.settle()


def _run(bench: Bench) -> Result:
    flags = bench.flags
    daemon = bench.services.start_daemon(is_held=True)
    engine = bench.services.start_engine(daemon)
    drawn = bench.learn(engine)
    drawn.check_fits("--length", flags.length, _NEW_TOKENS)
    drawn.check_fits("--prompt-length", flags.prompt_length, flags.tokens)
    prompts = [drawn.ids(flags.prompt_length, _STREAM, at) for at in range(flags.streams)]
    long_prompt = drawn.ids(flags.length, _LONG)
    say("daemon-kill: answers without a kill ...")
    with engine.client() as client:
        cold = ask(client, long_prompt, _NEW_TOKENS, flags.timeout)
        solo = [
            _answer(client, prompt, flags.tokens, flags.timeout, threading.Event())
            for prompt in prompts
        ]
    engine.settle()
    kills = Kills()
    for repeat in range(flags.repeat):
        say(f"daemon-kill: repetition {repeat + 1} of {flags.repeat} ...")
        _round(bench, daemon, engine, prompts, solo, long_prompt, kills)
    counters = daemon.status().counters
    spreads = {
        "served_again_s": Spread.of(kills.served_again_s),
        "found_again_share": Spread.of(kills.found_again),
        "num_sealed": Spread.of(kills.num_sealed),
        "num_running": Spread.of(kills.num_running),
        "asked_after_s": Spread.of(kills.asked_after_s),
        "cached_tokens": Spread.of(answer.num_cached_tokens for answer in kills.again),
        "ttft_s": Spread.of(answer.ttft_s for answer in kills.again),
    }
    values = {
        **{name: spread.as_json() for name, spread in spreads.items()},
        "cold_ttft_s": cold.ttft_s,
        "prompt_tokens": cold.num_prompt_tokens,
        "num_requests": flags.repeat * flags.streams,
        "num_failed": kills.num_failed,
        "num_different": kills.num_different,
        "integrity_failures": counters["integrity_failures"],
        "noise": kills.noise.result(),
    }
    rows = [
        ("requests", str(values["num_requests"])),
        ("failed", str(kills.num_failed)),
        ("answers that differ", str(kills.num_different)),
        ("running when lookups were served again", spreads["num_running"].text(0)),
        ("lookups served again, ms after the kill", spreads["served_again_s"].text(0, 1e3)),
        ("sealed blocks before", spreads["num_sealed"].text(0)),
        ("of these found again %", spreads["found_again_share"].text(3, 1e2)),
        ("long prompt asked again, s after the kill", spreads["asked_after_s"].text(2)),
        (f"of its {cold.num_prompt_tokens} tokens cached", spreads["cached_tokens"].text(0)),
        ("its TTFT ms", spreads["ttft_s"].text(1, 1e3)),
        ("its TTFT ms, cold and alone", f"{1e3 * cold.ttft_s:.0f}"),
        (COLUMN, kills.noise.text()),
    ]
    title = "kill -9 of cachewarmd: median (min-max)"
    return Result(values, [Table(title, ("", "of each kill"), rows)])


MODE = Mode("daemon-kill", "kill -9 of cachewarmd under streams", _add_flags, _run)
