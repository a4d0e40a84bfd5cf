"""How often the native kernels and float32 choose the same token, over a fixed text."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from engine.models import packing
from engine.models.config import ModelConfig
from scripts.lib.bench.context import Bench, say
from scripts.lib.bench.errors import BenchError
from scripts.lib.bench.flags import tokens
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import NoiseMeter
from scripts.lib.bench.report import Result, Table
from scripts.lib.native import NativeModel

_ROOT = Path(__file__).resolve().parents[4]
# Prose of this tree: a licence, descriptions, instructions.
_TEXTS = ("LICENSE", "ARCHITECTURE.md", "docs/systemd.md", "docs/chat.md", "docs/sharing.md")
_PART = 1024  # tokens that see each other

Logits = npt.NDArray[np.float32]


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--positions",
        type=tokens,
        default=6000,
        metavar="N",
        help="tokens of the text that are compared, at most (default: %(default)s)",
    )


def _reference_logits(config: ModelConfig, model_dir: Path, ids: list[int]) -> list[Logits]:
    """[tokens, vocab] of each part, by the reference decoder in float32."""
    try:
        import torch
    except ModuleNotFoundError as exc:
        raise BenchError("agreement needs torch: pip install 'cachewarm[torch]'") from exc
    from cachewarmd.client import load_private
    from engine.models.decoder import Decoder

    plan = packing.reference_plan(config)
    memory = load_private(model_dir, "", plan).memory
    views = packing.views(plan, memory)
    decoder = Decoder(config, {name: torch.tensor(view) for name, view in views.items()})
    found = []
    with torch.inference_mode():
        for start in range(0, len(ids), _PART):
            part = torch.tensor(ids[start : start + _PART])
            hidden = decoder.forward(part, 0, lambda _, keys, values: (keys, values))
            found.append(decoder.logits(hidden).numpy())
    return found


def _surprise(logits: Logits, token: int) -> float:
    """Minus the log probability of the token, in nats."""
    row = logits.astype(np.float64)
    return float(np.log(np.exp(row - row.max()).sum()) + row.max() - row[token])


def _run(bench: Bench) -> Result:
    text = "\n".join((_ROOT / name).read_text() for name in _TEXTS)
    tokenizer = tokenizers.Tokenizer.from_file(str(bench.model / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: bench.flags.positions]
    model = NativeModel.load(bench.model, isa=bench.flags.cpu_isa or "auto")
    say(f"agreement: {len(ids)} tokens by the reference ...")
    expected = _reference_logits(model.config, bench.model, ids)
    num_equal, surprises = 0, []
    noise = NoiseMeter()
    with noise:
        for number, rows in enumerate(expected):
            say(f"agreement: part {number + 1} of {len(expected)} by the kernels ...")
            part = ids[number * _PART :][: len(rows)]
            sequence = model.sequence(len(part))
            for index, (token, row) in enumerate(zip(part, rows, strict=True)):
                logits = sequence.run([token])
                num_equal += int(logits.argmax() == row.argmax())
                if index + 1 < len(part):
                    after = part[index + 1]
                    surprises.append((_surprise(logits, after), _surprise(row, after)))
    ours, theirs = np.mean(surprises, axis=0)
    isa = model.executor.decoder.isa
    values = {
        "isa": isa,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "positions": len(ids),
        "agreement": num_equal / len(ids),
        "nll": float(ours),
        "nll_float32": float(theirs),
        "nll_excess": float(ours / theirs - 1),
        "noise": noise.result(),
    }
    table = Table(
        f"the kernels ({isa}) beside float32",
        ("", "positions", "same best token", "NLL", "float32's NLL", "excess"),
        [
            (
                "text",
                str(len(ids)),
                f"{num_equal / len(ids):.4f}",
                f"{ours:.4f}",
                f"{theirs:.4f}",
                f"{100 * (ours / theirs - 1):+.3f} %",
            )
        ],
    )
    return Result(values, [table])


MODE = Mode("agreement", "same tokens as float32 over a text (needs torch)", _add_flags, _run)
