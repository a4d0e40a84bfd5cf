"""Time to the first token of a prompt nobody has seen, and of the same prompt again."""

from __future__ import annotations

import argparse
from collections import defaultdict

from engine.models.config import load_config
from scripts.lib.bench.asking import Answer, Prompts, ask
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.errors import BenchError
from scripts.lib.bench.flags import token_counts
from scripts.lib.bench.modes.attention import attention_model, num_flops
from scripts.lib.bench.modes.attention import prefill as attention_prefill
from scripts.lib.bench.modes.kernels import peak_flops
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.modes.profile import weight_counts
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.processes import Engine
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread

_NEW_TOKENS = 1


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=token_counts,
        default=(512, 2048, 7000),
        metavar="N,N",
        help="tokens of the prompts (default: 512,2048,7000)",
    )


class _Limit:
    """What a prompt's arithmetic takes at least: the packed GEMM's peak, and attention alone."""

    def __init__(self, bench: Bench) -> None:
        self._config = load_config(bench.model)
        shape = (self._config.num_heads, self._config.num_kv_heads, self._config.head_dim)
        self._attention = attention_model(bench.flags.cpu_isa or "auto", *shape)

    def seconds(self, length: int) -> float:
        """Measured now, in this process, on the engine's CPUs."""
        executor = self._attention.executor
        gemm = peak_flops(executor.decoder.isa, executor.threads)
        attention, _ = attention_prefill(self._attention, length)
        counts = weight_counts(self._config)
        rows = sum(count for phase, count in counts.items() if phase != "head") * length
        layers = self._config.num_layers
        flops = num_flops(length, self._config.num_heads, self._config.head_dim)
        return 2 * (rows + counts["head"]) / gemm + layers * flops / attention


def _pair(bench: Bench, engine: Engine, prompt: list[int]) -> tuple[Answer, Answer]:
    """The prompt cold, then again once its blocks are published."""
    with engine.client() as client:
        cold = ask(client, prompt, _NEW_TOKENS, bench.flags.timeout)
        if cold.num_cached_tokens:
            raise BenchError(f"{cold.num_cached_tokens} tokens of a fresh prompt were cached")
        engine.settle()
        again = ask(client, prompt, _NEW_TOKENS, bench.flags.timeout)
    engine.settle()
    return cold, again


def _run(bench: Bench) -> Result:
    flags = bench.flags
    _, engine, prompts = bench.start()
    for length in flags.lengths:
        prompts.check_fits("--lengths", length, _NEW_TOKENS)
    pairs, limits, noises = _measure(bench, engine, prompts)
    cases, rows = [], []
    for length in flags.lengths:
        cold = Spread.of(cold.ttft_s for cold, _ in pairs[length])
        again = Spread.of(again.ttft_s for _, again in pairs[length])
        speedup = Spread.of(cold.ttft_s / again.ttft_s for cold, again in pairs[length])
        share = Spread.of(
            limit / cold.ttft_s
            for limit, (cold, _) in zip(limits[length], pairs[length], strict=True)
        )
        cached = Spread.of(again.num_cached_tokens for _, again in pairs[length])
        cases.append(
            {
                "length": length,
                "cold_s": cold.as_json(),
                "again_s": again.as_json(),
                "cold_over_again": speedup.as_json(),
                "limit_s": Spread.of(limits[length]).as_json(),
                "of_limit": share.as_json(),
                "again_cached_tokens": cached.as_json(),
                "prompt_tokens": pairs[length][0][0].num_prompt_tokens,
                "noise": noises[length].result(),
            }
        )
        rows.append(
            (
                f"{length} tokens",
                cold.text(1, 1e3),
                share.text(2),
                again.text(1, 1e3),
                speedup.text(1),
                cached.text(0),
                noises[length].text(),
            )
        )
    columns = ("", "cold ms", "of limit", "again ms", "cold / again", "cached tokens again", COLUMN)
    title = "prefill, time to the first token: median (min-max)"
    return Result({"lengths": cases}, [Table(title, columns, rows)])


def _measure(
    bench: Bench, engine: Engine, prompts: Prompts
) -> tuple[dict[int, list[tuple[Answer, Answer]]], dict[int, list[float]], dict[int, NoiseMeter]]:
    """By length: answers, limits in seconds, noise.

    All lengths in turn, so that a slow minute touches each.
    """
    pairs: dict[int, list[tuple[Answer, Answer]]] = defaultdict(list)
    limits: dict[int, list[float]] = defaultdict(list)
    limit = _Limit(bench)
    noises = {length: NoiseMeter() for length in bench.flags.lengths}
    for repeat in range(bench.flags.repeat):
        for length, noise in noises.items():
            say(f"prefill: {length} tokens, repetition {repeat + 1} of {bench.flags.repeat} ...")
            limits[length].append(limit.seconds(length))
            with noise:
                pairs[length].append(_pair(bench, engine, prompts.ids(length, 2, repeat, length)))
    return pairs, limits, noises


MODE = Mode("prefill", "time to the first token, cold and again", _add_flags, _run)
