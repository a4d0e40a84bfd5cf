"""One stream: tokens/s, and how near that is to what reading the weights allows."""

from __future__ import annotations

import argparse

from cachewarmd import options
from scripts.lib.bench import bandwidth
from scripts.lib.bench.asking import Answer, ask
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.errors import BenchError
from scripts.lib.bench.flags import checked, tokens
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.processes import Daemon
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread, percentile

_BANDWIDTH_REPEATS = 5


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens",
        type=checked(options.integer(2, 1 << 20)),
        default=128,
        metavar="N",
        help="new tokens of each prompt (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        type=checked(options.integer(1, 1000)),
        default=3,
        metavar="N",
        help="prompts of each repetition, one after the other (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt-length",
        type=tokens,
        default=32,
        metavar="TOKENS",
        help="of each prompt (default: %(default)s)",
    )


def rate(answers: list[Answer]) -> float:
    """Tokens/s by the times between messages. Raises BenchError when nothing lies between."""
    seconds = sum(answer.decode_s for answer in answers)
    if not seconds:
        raise BenchError("all tokens came in one message: ask for more with --tokens")
    return sum(answer.num_later_tokens for answer in answers) / seconds


def _weight_bytes(daemon: Daemon) -> int:
    """What the engine reads for each token. Raises BenchError when it has a copy of its own."""
    models = daemon.status().models
    if len(models) != 1:
        raise BenchError("the engine does not use cachewarmd's weights, so their size is not known")
    return int(models[0].segment_bytes)


def _run(bench: Bench) -> Result:
    flags = bench.flags
    daemon, engine, prompts = bench.start()
    prompts.check_fits("--prompt-length", flags.prompt_length, flags.tokens)
    weight_bytes = _weight_bytes(daemon)
    memory = bandwidth.allocate(weight_bytes, bench.num_threads)
    rates, bandwidths, gaps = [], [], []
    num_tokens = 0
    noise = NoiseMeter()
    with engine.client() as client, noise:
        for repeat in range(flags.repeat):
            say(f"decode: repetition {repeat + 1} of {flags.repeat} ...")
            # Beside each rate, while the engine idles: both drift with the machine.
            bandwidths.append(
                bandwidth.read_bandwidth(memory, bench.num_threads, _BANDWIDTH_REPEATS)
            )
            answers = []
            for index in range(flags.prompts):
                prompt = prompts.ids(flags.prompt_length, 1, repeat, index)
                answers.append(ask(client, prompt, flags.tokens, flags.timeout))
            rates.append(rate(answers))
            gaps += [gap for answer in answers for gap in answer.gaps]
            num_tokens += sum(answer.num_tokens for answer in answers)
    limits = [found / weight_bytes for found in bandwidths]
    shares = [found / limit for found, limit in zip(rates, limits, strict=True)]
    rates_spread, limits_spread, shares_spread = map(Spread.of, (rates, limits, shares))
    p50, p99 = percentile(gaps, 50), percentile(gaps, 99)
    return Result(
        {
            "num_tokens": num_tokens,
            "tokens_per_s": rates_spread.as_json(),
            "itl_s": {"p50": p50, "p99": p99},
            "weight_bytes": weight_bytes,
            "num_threads": bench.num_threads,
            "read_bytes_per_s": Spread.of(bandwidths).as_json(),
            "limit_tokens_per_s": limits_spread.as_json(),
            "of_limit": shares_spread.as_json(),
            "noise": noise.result(),
        },
        [
            Table(
                "decode, one stream: median (min-max)",
                ("", "tokens/s", "limit", "of limit", "ITL p50", "p99 ms", COLUMN),
                [
                    (
                        f"{flags.tokens} tokens",
                        rates_spread.text(1),
                        limits_spread.text(1),
                        shares_spread.text(3),
                        f"{1e3 * p50:.2f}",
                        f"{1e3 * p99:.2f}",
                        noise.text(),
                    )
                ],
            )
        ],
    )


MODE = Mode("decode", "tokens/s of one stream, and of the limit by memory", _add_flags, _run)
