"""The packed GEMM: GB/s and GFLOP/s by number of rows, beside bandwidth and torch's oneDNN."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np

from engine.kernels import _kernels
from scripts.lib.bench import bandwidth
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.flags import token_counts
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import COLUMN, NoiseMeter
from scripts.lib.bench.report import Result, Table
from scripts.lib.bench.spread import Spread

_OUTPUTS, _INPUTS = 3072, 576  # an MLP's gate and up of the demo model
# Where reading the weights is the limit there are more of them than caches hold.
_NUM_MATRICES = 72
_STREAM_BYTES = 2 * _OUTPUTS * _INPUTS * _NUM_MATRICES
_MANY_ROWS = 32  # from here on a matrix of one layer is multiplied again and again
_CALL_S = 0.2  # measured at once


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rows",
        type=token_counts,
        default=(1, 2, 4, 8, 16, 64, 512),
        metavar="N,N",
        help="rows multiplied at once (default: 1,2,4,8,16,64,512)",
    )


def peak_flops(isa: str, threads: _kernels.Threads, rows: int = 512) -> float:
    """FLOP/s of the packed GEMM where arithmetic is the limit."""
    return 2 * rows * _OUTPUTS * _INPUTS / _packed(rows, isa, threads)()


def _num_outputs(rows: int) -> int:
    return _OUTPUTS * (_NUM_MATRICES if rows < _MANY_ROWS else 1)


def _packed(rows: int, isa: str, threads: _kernels.Threads) -> Callable[[], float]:
    """Seconds of one product, each time it is called."""
    outputs = _num_outputs(rows)
    panels = bandwidth.allocate(2 * outputs * _INPUTS, 1)
    rng = np.random.default_rng(0)
    # Halves of small floats, and not zeros: some CPUs are faster with those.
    panels.view(np.uint16)[:] = rng.integers(0x3B00, 0x3C00, panels.size // 2, dtype=np.uint16)
    x = rng.standard_normal((rows, _INPUTS), dtype=np.float32)
    y = np.empty((rows, outputs), dtype=np.float32)
    once = _kernels.multiply(x, panels, y, isa, threads)
    repeats = max(1, int(_CALL_S / once))
    return lambda: _kernels.multiply(x, panels, y, isa, threads, repeats)


def _torch(rows: int, num_threads: int) -> Callable[[], float] | None:
    """The same by torch's bfloat16 linear layer; None without torch."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    torch.set_num_threads(num_threads)
    count = _num_outputs(rows) // _OUTPUTS
    weights = [torch.randn(_OUTPUTS, _INPUTS).bfloat16() for _ in range(count)]
    x = torch.randn(rows, _INPUTS).bfloat16()

    def measure() -> float:
        with torch.inference_mode():
            started, calls = time.perf_counter(), 0
            while (passed := time.perf_counter() - started) < _CALL_S or not calls:
                for weight in weights:
                    torch.nn.functional.linear(x, weight)
                calls += 1
        return passed / calls

    return measure


def _run(bench: Bench) -> Result:
    cpus = sorted(os.sched_getaffinity(0))
    threads = _kernels.Threads(cpus)
    isa = bench.flags.cpu_isa or "auto"
    isa = _kernels.isas()[0] if isa == "auto" else isa
    memory = bandwidth.allocate(_STREAM_BYTES, len(cpus))
    bandwidths, cases, rows = [], [], []
    for count in bench.flags.rows:
        say(f"kernels: {count} rows ...")
        packed, torch, noise = _packed(count, isa, threads), _torch(count, len(cpus)), NoiseMeter()
        ours, theirs = [], []
        with noise:
            for _ in range(bench.flags.repeat):
                bandwidths.append(_kernels.read_bandwidth(memory, threads, 3))
                ours.append(packed())
                if torch is not None:
                    theirs.append(torch())
        outputs = _num_outputs(count)
        flops, num_bytes = 2 * count * outputs * _INPUTS, 2 * outputs * _INPUTS
        rate = Spread.of(flops / seconds for seconds in ours)
        read = Spread.of(num_bytes / seconds for seconds in ours)
        beside = bandwidths[-len(ours) :]
        share = Spread.of(num_bytes / s / b for s, b in zip(ours, beside, strict=True))
        ratio = Spread.of(t / o for o, t in zip(ours, theirs, strict=True)) if theirs else None
        cases.append(
            {
                "rows": count,
                "flop_per_s": rate.as_json(),
                "weight_bytes_per_s": read.as_json(),
                "of_bandwidth": share.as_json(),
                "torch_seconds_over_ours": ratio.as_json() if ratio else None,
                "noise": noise.result(),
            }
        )
        rows.append(
            (
                f"{count} rows",
                rate.text(0, 1e-9),
                read.text(1, 1e-9),
                f"{share.median:.2f}",
                ratio.text(1) if ratio else "no torch",
                noise.text(),
            )
        )
    columns = ("", "GFLOP/s", "GB/s", "of bandwidth", "faster than torch by", COLUMN)
    title = f"packed GEMM, {isa}, {len(cpus)} threads: median (min-max)"
    values = {"isa": isa, "read_bytes_per_s": Spread.of(bandwidths).as_json(), "rows": cases}
    return Result(values, [Table(title, columns, rows)])


MODE = Mode("kernels", "the packed GEMM for each number of rows", _add_flags, _run)
