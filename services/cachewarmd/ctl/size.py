"""`size`: how much memory a model needs, from its files alone, and whether it is here."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachewarmd import layout, options
from cachewarmd.budget import DEFAULT_CGROUP_ROOT, available_bytes
from cachewarmd.ctl import views
from cachewarmd.ctl.arguments import Add, argument
from cachewarmd.ctl.outcome import EXIT_NOT_WARM, EXIT_OK, Output
from cachewarmd.errors import ModelFilesError

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
# Heads are padded to whole panels by the kernels that use bfloat16.
_PANEL = {"bfloat16": 32, "float32": 1}


@dataclass(frozen=True)
class KvShape:
    """What of `config.json` decides how large KV is."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Of one block, as a worker publishes it."""
        padded = -(-self.head_dim // _PANEL[dtype]) * _PANEL[dtype]
        elements = 2 * self.num_layers * self.num_kv_heads * padded
        return elements * _ELEMENT_BYTES[dtype] * block_size


def read_shape(model_dir: Path) -> KvShape:
    """Raises ModelFilesError naming file and field."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except OSError as exc:
        raise ModelFilesError(f"{path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelFilesError(f"{path}: no JSON") from exc
    if not isinstance(config, dict):
        raise ModelFilesError(f"{path}: no JSON object")

    def positive(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ModelFilesError(f"{path}: {name} must be a whole number from 1 on")
        return value

    heads = positive("num_attention_heads")
    return KvShape(
        num_layers=positive("num_hidden_layers"),
        num_kv_heads=positive("num_key_value_heads", heads),
        head_dim=positive("head_dim", positive("hidden_size") // heads),
    )


def prediction(
    shape: KvShape, num_tokens: int, num_requests: int, block_size: int, dtype: str
) -> dict[str, int]:
    """KV of so many requests that share nothing. Raises ModelFilesError for too large blocks."""
    block_bytes = shape.block_bytes(block_size, dtype)
    slot_bytes = layout.round_slot_bytes(block_bytes)
    slots_per_extent = layout.EXTENT_BYTES // slot_bytes
    if not slots_per_extent:
        raise ModelFilesError(
            f"a block of {block_size} tokens has {block_bytes} bytes, at most "
            f"{layout.EXTENT_BYTES} are allowed: take a smaller --block-size"
        )
    num_blocks = num_requests * -(-num_tokens // block_size)
    num_extents = -(-num_blocks // slots_per_extent)
    return {
        "kv_bytes_per_token": block_bytes // block_size,
        "block_bytes": block_bytes,
        "slot_bytes": slot_bytes,
        "num_blocks": num_blocks,
        "pool_bytes": num_extents * layout.EXTENT_BYTES,
    }


def weights_bytes(model_dir: Path) -> int:
    """Of the safetensors files; packed weights take about as much."""
    return sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))


def add_verbs(add: Add) -> None:
    verb = add("size", size)
    count = argument(options.integer(1, 1 << 30))
    verb.add_argument(
        "--model", type=argument(options.path), required=True, metavar="DIR", help="model directory"
    )
    verb.add_argument(
        "--context", type=count, required=True, metavar="TOKENS", help="of each request, all in all"
    )
    verb.add_argument(
        "--concurrency", type=count, default=1, metavar="N", help="requests at a time (default: 1)"
    )
    verb.add_argument(
        "--block-size",
        type=count,
        default=32,
        metavar="TOKENS",
        help="as the engine's (default: 32)",
    )
    verb.add_argument(
        "--kv-dtype",
        choices=tuple(_ELEMENT_BYTES),
        default="bfloat16",
        help="bfloat16 (default; backend cpu) or float32 (backend reference)",
    )


def size(args: argparse.Namespace, output: Output) -> int:
    """Memory for a model's weights and KV; 3 if there is not as much here now."""
    told: dict[str, Any] = prediction(
        read_shape(args.model), args.context, args.concurrency, args.block_size, args.kv_dtype
    )
    weights = weights_bytes(args.model)
    available = available_bytes(DEFAULT_CGROUP_ROOT)
    needed = weights + told["pool_bytes"]
    told |= {
        "weights_bytes": weights,
        "needed_bytes": needed,
        "available_bytes": available,
        "fits": needed <= available,
    }
    rows = [
        ("KV of a token", views.human_bytes(told["kv_bytes_per_token"])),
        (f"a block of {args.block_size} tokens", views.human_bytes(told["block_bytes"])),
        ("its slot in the pool", views.human_bytes(told["slot_bytes"])),
        ("blocks", told["num_blocks"]),
        ("--pool-bytes, at least", views.human_bytes(told["pool_bytes"])),
        ("weights", views.human_bytes(weights)),
        ("both", views.human_bytes(needed)),
        ("available here now", views.human_bytes(available)),
        ("fits", "yes" if told["fits"] else "no"),
    ]
    output.answer(told, views.table("memory", ("what", "size"), rows))
    return EXIT_OK if told["fits"] else EXIT_NOT_WARM
