"""From the start of a process to the first token, with more or less kept warm."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from scripts.lib.bench.asking import Answer, ask, cut_to_tokens
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.errors import BenchError, UsageError
from scripts.lib.bench.flags import tokens
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.processes import Daemon, Engine
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread

_TEXT = Path(__file__).resolve().parents[4] / "examples" / "handbook.txt"
_SHORT = "The capital of France is"
_NEW_TOKENS = 1

CASES = {
    "weights_warm": "cachewarmd up with the weights",
    "nothing_running": "nothing running before",
    "killed": "kill -9, same long prompt again",
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--length",
        type=tokens,
        default=7000,
        metavar="TOKENS",
        help="of the long prompt, at most (default: %(default)s)",
    )


@dataclass
class Case:
    """What was seen of one kind of start; seconds."""

    first_token: list[float] = field(default_factory=list)  # since the process began
    ready: list[float] = field(default_factory=list)  # since the process began
    answers: list[Answer] = field(default_factory=list)
    noise: NoiseMeter = field(default_factory=NoiseMeter)


def _start(bench: Bench, daemon: Daemon | None, prompt: str, case: Case) -> Engine:
    """Start an engine and ask it at once; nothing else is called before."""
    with case.noise:
        engine = bench.services.start_engine(daemon)
        with engine.client() as client:
            answer = ask(client, prompt, _NEW_TOKENS, bench.flags.timeout)
    case.ready.append(answer.sent - engine.started)
    case.first_token.append(answer.first - engine.started)
    case.answers.append(answer)
    return engine


def _long_prompt(engine: Engine, length: int, repeat: int) -> str:
    """Natural text of nearly that many tokens, of its own for each repetition."""
    words = [f"Copy {repeat + 1}.", *_TEXT.read_text().split()]
    with engine.client() as client:
        return cut_to_tokens(client, words, length)


def _round(bench: Bench, repeat: int, cases: dict[str, Case], cold: list[Answer]) -> None:
    """Each case once, in turn, so that a slow minute touches each."""
    daemon = bench.services.start_daemon()
    engine = bench.services.start_engine(daemon)
    bench.learn(engine).check_fits("--length", bench.flags.length, _NEW_TOKENS)
    prompt = _long_prompt(engine, bench.flags.length, repeat)
    with engine.client() as client:
        cold.append(ask(client, prompt, _NEW_TOKENS, bench.flags.timeout))
    if cold[-1].num_prompt_tokens > bench.flags.length:
        raise UsageError(f"--length: {bench.flags.length} is not allowed: too short for a text")
    if cold[-1].num_cached_tokens:
        raise BenchError(f"{cold[-1].num_cached_tokens} tokens of a fresh prompt were cached")
    engine.settle()
    engine.kill()
    _start(bench, daemon, prompt, cases["killed"]).stop()
    _start(bench, daemon, _SHORT, cases["weights_warm"])
    bench.services.stop()
    _start(bench, None, _SHORT, cases["nothing_running"])
    bench.services.stop()


def _run(bench: Bench) -> Result:
    cases: dict[str, Case] = defaultdict(Case)
    cold: list[Answer] = []
    for repeat in range(bench.flags.repeat):
        say(f"restart: repetition {repeat + 1} of {bench.flags.repeat} ...")
        _round(bench, repeat, cases, cold)
    values, rows = {}, []
    for name, title in CASES.items():
        case = cases[name]
        first_token, ready = Spread.of(case.first_token), Spread.of(case.ready)
        ttft = Spread.of(answer.ttft_s for answer in case.answers)
        cached = Spread.of(answer.num_cached_tokens for answer in case.answers)
        prompt_tokens = Spread.of(answer.num_prompt_tokens for answer in case.answers)
        values[name] = {
            "first_token_s": first_token.as_json(),
            "ready_s": ready.as_json(),
            "ttft_s": ttft.as_json(),
            "prompt_tokens": prompt_tokens.as_json(),
            "cached_tokens": cached.as_json(),
            "noise": case.noise.result(),
        }
        rows.append(
            (
                title,
                prompt_tokens.text(0),
                cached.text(0),
                first_token.text(2),
                ready.text(2),
                ttft.text(1, 1e3),
                case.noise.text(),
            )
        )
    again = [answer.ttft_s for answer in cases["killed"].answers]
    values["killed"]["cold_ttft_s"] = Spread.of(answer.ttft_s for answer in cold).as_json()
    values["killed"]["cold_over_again"] = Spread.of(
        before.ttft_s / after for before, after in zip(cold, again, strict=True)
    ).as_json()
    columns = ("", "prompt", "cached", "to first token s", "to ready s", "TTFT ms", COLUMN)
    title = "restart, since the process began: median (min-max)"
    return Result(values, [Table(title, columns, rows)])


MODE = Mode("restart", "process start to first token, also after kill -9", _add_flags, _run)
