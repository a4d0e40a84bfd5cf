"""Where the time of a decode step and of a prefill goes, kernel by kernel, in this process."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping

import numpy as np

from engine.kernels import _kernels
from engine.models.config import PANEL, ModelConfig
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.errors import UsageError
from scripts.lib.bench.flags import tokens
from scripts.lib.bench.modes.kernels import peak_flops
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import NoiseMeter
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread
from scripts.lib.native import NativeModel

_DECODES = 100
_CHUNK = 512

Counts = Mapping[str, int]  # by phase


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--length",
        type=tokens,
        default=2048,
        metavar="TOKENS",
        help="of the prompt that is prefilled and decoded behind (default: %(default)s)",
    )


def weight_counts(config: ModelConfig) -> Counts:
    """Weights, padded, of all layers that each phase multiplies with."""

    def padded(size: int) -> int:
        return -(-size // PANEL) * PANEL

    head, hidden, ffn = padded(config.head_dim), padded(config.hidden_size), padded(config.ffn_size)
    layers, heads, kv_heads = config.num_layers, config.num_heads, config.num_kv_heads
    return {
        "qkv": layers * hidden * (heads + 2 * kv_heads) * head,
        "output": layers * hidden * heads * head,
        "gate_up": layers * hidden * 2 * ffn,
        "down": layers * hidden * ffn,
        "head": hidden * padded(config.vocab_size),
    }


def _attention_counts(config: ModelConfig, start: int, end: int) -> tuple[int, int]:
    """FLOP of all layers for tokens start … end-1, and bytes of KV where each reads its own."""
    pairs = (end * (end + 1) - start * (start + 1)) // 2
    head = -(-config.head_dim // PANEL) * PANEL
    per_pair = config.num_layers * head
    return 4 * config.num_heads * per_pair * pairs, 4 * config.num_kv_heads * per_pair * pairs


def _table(
    title: str,
    seconds: Mapping[str, float],
    flops: Counts,
    num_bytes: Counts,
    limits: tuple[float, float],
) -> tuple[Table, dict[str, dict[str, float]]]:
    """`limits` are FLOP/s and bytes/s."""
    total = sum(seconds.values())
    rows, values = [], {}
    for phase, passed in seconds.items():
        rate, read = flops.get(phase, 0) / passed, num_bytes.get(phase, 0) / passed
        values[phase] = {
            "seconds": passed,
            "share": passed / total,
            "flop_per_s": rate,
            "bytes_per_s": read,
        }
        rows.append(
            (
                phase,
                f"{100 * passed / total:.1f} %",
                f"{1e3 * passed:.3f}",
                f"{rate / 1e9:.0f}",
                f"{100 * rate / limits[0]:.0f} %",
                f"{read / 1e9:.1f}",
                f"{100 * read / limits[1]:.0f} %",
            )
        )
    columns = ("", "share", "ms", "GFLOP/s", "of GEMM", "GB/s", "of bandwidth")
    return Table(title, columns, rows), values


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {phase: Spread.of(run[phase] for run in runs).median for phase in runs[0]}


def _run(bench: Bench) -> Result:
    model = NativeModel.load(bench.model, isa=bench.flags.cpu_isa or "auto")
    config, executor, length = model.config, model.executor, bench.flags.length
    if length + _DECODES > config.max_context:
        most = config.max_context - _DECODES
        raise UsageError(f"--length: {length} is not allowed: 1 to {most} for this model")
    isa = executor.decoder.isa
    rng = np.random.default_rng(bench.flags.seed)
    ids = rng.integers(0, config.vocab_size, length + _DECODES).tolist()
    prefills, decodes, peaks, bandwidths, python = [], [], [], [], []
    noise = NoiseMeter()
    with noise:
        for repeat in range(bench.flags.repeat):
            say(f"profile: repetition {repeat + 1} of {bench.flags.repeat} ...")
            peaks.append(peak_flops(isa, executor.threads))
            bandwidths.append(_kernels.read_bandwidth(model.weights, executor.threads, 3))
            sequence = model.sequence(length + _DECODES)
            executor.decoder.profile()
            for start in range(0, length, _CHUNK):
                end = min(start + _CHUNK, length)
                executor.forward([sequence.chunk(ids[start:end], needs_logits=end == length)])
            prefills.append(executor.decoder.profile())
            started = time.perf_counter()
            for token in ids[length:]:
                executor.forward([sequence.chunk([token])])
            passed = time.perf_counter() - started
            found = executor.decoder.profile()
            python.append(1 - sum(found.values()) / passed)
            decodes.append({phase: value / _DECODES for phase, value in found.items()})
    limits = Spread.of(peaks).median, Spread.of(bandwidths).median
    weights = weight_counts(config)
    once = {phase: 2 * count for phase, count in weights.items()}
    num_chunks = -(-length // _CHUNK)
    flops, kv = _attention_counts(config, 0, length)
    prefill_flops = {**{p: n * length for p, n in once.items()}, "attention": flops}
    prefill_flops["head"] = once["head"]
    prefill_bytes = {**{p: n * num_chunks for p, n in once.items()}, "head": once["head"]}
    middle = length + _DECODES // 2
    flops, kv = _attention_counts(config, middle, middle + 1)
    decode_title = f"a decode step behind {middle} tokens, {isa}: medians"
    prefill_title = f"a prefill of {length} tokens, {isa}: medians"
    decode, decode_values = _table(
        decode_title,
        _median(decodes),
        {**once, "attention": flops},
        {**once, "attention": kv},
        limits,
    )
    prefill, prefill_values = _table(
        prefill_title, _median(prefills), prefill_flops, prefill_bytes, limits
    )
    outside = Spread.of(python)
    summary = Table(
        f"limits, {len(os.sched_getaffinity(0))} CPUs: median (min-max)",
        ("GEMM GFLOP/s", "read GB/s", "Python's share of a decode step"),
        [
            (
                Spread.of(peaks).text(0, 1e-9),
                Spread.of(bandwidths).text(1, 1e-9),
                outside.text(1, 100) + " %",
            )
        ],
    )
    values = {
        "isa": isa,
        "length": length,
        "gemm_flop_per_s": Spread.of(peaks).as_json(),
        "read_bytes_per_s": Spread.of(bandwidths).as_json(),
        "decode": decode_values,
        "prefill": prefill_values,
        "python_share_of_decode": outside.as_json(),
        "noise": noise.result(),
    }
    return Result(values, [decode, prefill, summary])


MODE = Mode("profile", "time of a step and of a prefill by kernel", _add_flags, _run)
