"""Memory of two engines on one daemon, beside one copy of weights and KV blocks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import psutil

from scripts.lib.bench import memory
from scripts.lib.bench.asking import ask
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.flags import tokens
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.processes import Daemon, Engine
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread

_NEW_TOKENS = 8
_MIB = 1 << 20


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt-length",
        type=tokens,
        default=512,
        metavar="TOKENS",
        help="of the prompt both engines answer first (default: %(default)s)",
    )


def _look(daemon: Daemon) -> Mapping[str, int]:
    """Bytes now: PSS of all that was started, and one copy of what must be somewhere.

    Of the shared pool that is what holds blocks: it is allocated as a whole, and what nobody maps
    is in no PSS.
    """
    pids = [process.pid for process in psutil.Process().children(recursive=True)]
    found = memory.pss(pids)
    shared = memory.memfds(pids)
    pool = daemon.status().pool
    blocks = sum(num_bytes for state, num_bytes in pool.bytes.items() if state != "free")
    weights, private = (shared.get(f"cachewarm-{name}", 0) for name in ("weights", "private"))
    return {
        **{f"pss_{kind}_bytes": num_bytes for kind, num_bytes in found.items()},
        "weights_bytes": weights,
        "shared_blocks_bytes": blocks,
        "private_pools_bytes": private,
        "one_copy_bytes": weights + blocks + private,
        "pool_allocated_bytes": shared.get("cachewarm-pool", 0),
    }


def _serve(bench: Bench, engine: Engine, prompt: list[int]) -> None:
    """An answer touches all weights."""
    with engine.client() as client:
        ask(client, prompt, _NEW_TOKENS, bench.flags.timeout)
    engine.settle()


def _round(bench: Bench) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """With one engine, then with two."""
    daemon = bench.services.start_daemon()
    first = bench.services.start_engine(daemon)
    prompts = bench.learn(first)
    prompts.check_fits("--prompt-length", bench.flags.prompt_length, _NEW_TOKENS)
    prompt = prompts.ids(bench.flags.prompt_length, 4)
    _serve(bench, first, prompt)
    one = _look(daemon)
    _serve(bench, bench.services.start_engine(daemon), prompt)
    two = _look(daemon)
    bench.services.stop()
    return one, two


def _run(bench: Bench) -> Result:
    noise = NoiseMeter()
    rounds = []
    for repeat in range(bench.flags.repeat):
        say(f"pss: repetition {repeat + 1} of {bench.flags.repeat} ...")
        with noise:
            rounds.append(_round(bench))
    values: dict[str, Any] = {}
    rows = []
    for name, looks in zip(("one_engine", "two_engines"), zip(*rounds, strict=True), strict=True):
        spreads = {key: Spread.of(look[key] for look in looks) for key in looks[0]}
        ratio = Spread.of(look["pss_total_bytes"] / look["one_copy_bytes"] for look in looks)
        values[name] = {key: spread.as_json() for key, spread in spreads.items()}
        values[name]["pss_over_one_copy"] = ratio.as_json()
        sizes = [
            spreads[f"{key}_bytes"].text(0, 1 / _MIB)
            for key in ("pss_total", "one_copy", "weights", "shared_blocks", "private_pools")
        ]
        rows.append((name.replace("_", " "), *sizes, ratio.text(2), noise.text()))
    added = Spread.of(two["pss_total_bytes"] - one["pss_total_bytes"] for one, two in rounds)
    values["second_engine_adds_bytes"] = added.as_json()
    values["noise"] = noise.result()
    rows.append(("the second adds", added.text(0, 1 / _MIB), *[""] * 6))
    columns = (
        *("", "PSS MiB", "one copy MiB", "weights", "shared blocks", "private pools"),
        *("PSS / one copy", COLUMN),
    )
    title = "memory of daemon and engines: median (min-max)"
    return Result(values, [Table(title, columns, rows)])


MODE = Mode("pss", "memory of two engines on one daemon", _add_flags, _run)
