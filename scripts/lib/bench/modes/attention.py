"""Attention over KV blocks alone: prefills and decodes at growing contexts, and of their limits.

The kernels run a model whose other parts are next to nothing. It has two layers: in the last one
only rows with logits attend.
"""

from __future__ import annotations

import argparse
import os

import numpy as np

from engine.kernels import _kernels
from engine.models.config import ModelConfig
from engine.models.packing import panel_plan
from engine.models.rope import Rope
from scripts.lib.bench import bandwidth
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.flags import token_counts
from scripts.lib.bench.modes.kernels import peak_flops
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread
from scripts.lib.native import NativeModel, NativeSequence

_HEADS, _KV_HEADS, _HEAD_DIM = 9, 3, 64  # of the demo model
_CHUNK = 512
_DECODES = 200


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lengths",
        type=token_counts,
        default=(512, 2048, 7000, 32768),
        metavar="N,N",
        help="tokens of context (default: 512,2048,7000,32768)",
    )


def attention_model(
    isa: str = "auto",
    heads: int = _HEADS,
    kv_heads: int = _KV_HEADS,
    head_dim: int = _HEAD_DIM,
) -> NativeModel:
    """With zeros for weights. KV is zeros too, which costs the instructions used here the same."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden_size=32,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=32,
        vocab_size=32,
        max_context=1 << 20,
        rms_eps=1e-5,
        rope=Rope(10000.0),
        attention_bias=False,
        mlp_bias=False,
        tie_embeddings=True,
        eos_token_ids=(),
    )
    plan = panel_plan(config)
    weights = np.zeros(plan.segment_bytes, np.uint8)
    return NativeModel(config, plan, weights, isa=isa)


def num_flops(length: int, heads: int = _HEADS, head_dim: int = _HEAD_DIM) -> int:
    """Of one layer's causal attention over a whole prompt: scores and weighted sums."""
    return 4 * heads * head_dim * length * (length + 1) // 2


def prefill(model: NativeModel, length: int) -> tuple[float, NativeSequence]:
    """FLOP/s over a prompt in chunks; and the sequence, to go on with."""
    sequence = model.sequence(length + _DECODES)
    model.executor.decoder.profile()
    for start in range(0, length, _CHUNK):
        size = min(_CHUNK, length - start)
        model.executor.forward([sequence.chunk([0] * size, needs_logits=False)])
    seconds = model.executor.decoder.profile()["attention"]
    return num_flops(length, model.config.num_heads, model.config.head_dim) / seconds, sequence


def _decode(model: NativeModel, sequence: NativeSequence) -> float:
    """Bytes/s of KV that tokens behind the context read."""
    length = len(sequence.tokens)
    model.executor.decoder.profile()
    for _ in range(_DECODES):
        model.executor.forward([sequence.chunk([0])])
    seconds = model.executor.decoder.profile()["attention"]
    num_bytes = model.executor.block_bytes / model.block_size * (length + _DECODES / 2)
    return num_bytes * _DECODES / seconds


def _run(bench: Bench) -> Result:
    cpus = sorted(os.sched_getaffinity(0))
    model = attention_model(bench.flags.cpu_isa or "auto")
    isa = model.executor.decoder.isa
    cases, rows = [], []
    for length in bench.flags.lengths:
        say(f"attention: {length} tokens ...")
        noise = NoiseMeter()
        flops, peaks, reads, limits = [], [], [], []
        with noise:
            for _ in range(bench.flags.repeat):
                peaks.append(peak_flops(isa, model.executor.threads))
                rate, sequence = prefill(model, length)
                flops.append(rate)
                memory = bandwidth.allocate(sequence.memory.nbytes, len(cpus))
                limits.append(_kernels.read_bandwidth(memory, model.executor.threads, 3))
                reads.append(_decode(model, sequence))
        of_peak = Spread.of(f / p for f, p in zip(flops, peaks, strict=True))
        of_bandwidth = Spread.of(r / b for r, b in zip(reads, limits, strict=True))
        flops_spread, reads_spread = Spread.of(flops), Spread.of(reads)
        cases.append(
            {
                "length": length,
                "prefill_flop_per_s": flops_spread.as_json(),
                "prefill_of_gemm_peak": of_peak.as_json(),
                "decode_bytes_per_s": reads_spread.as_json(),
                "decode_of_bandwidth": of_bandwidth.as_json(),
                "noise": noise.result(),
            }
        )
        rows.append(
            (
                f"{length} tokens",
                flops_spread.text(0, 1e-9),
                of_peak.text(2),
                reads_spread.text(1, 1e-9),
                of_bandwidth.text(2),
                noise.text(),
            )
        )
    columns = ("", "prefill GFLOP/s", "of GEMM", "decode GB/s", "of bandwidth", COLUMN)
    title = f"attention of {_HEADS} heads over {_KV_HEADS} KV heads, {isa}: median (min-max)"
    return Result({"isa": isa, "lengths": cases}, [Table(title, columns, rows)])


MODE = Mode("attention", "attention alone, at growing contexts", _add_flags, _run)
