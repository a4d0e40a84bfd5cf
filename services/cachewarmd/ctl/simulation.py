"""`simulate`: what a trace of requests would find in pools of several sizes, without a daemon."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cachewarmd import options, simulate
from cachewarmd.ctl import views
from cachewarmd.ctl.arguments import Add, argument
from cachewarmd.ctl.outcome import EXIT_OK, Output, UsageError
from cachewarmd.simulate_policies import POLICIES

_SHARES = (0.05, 0.1, 0.25, 0.5, 1.0)  # of what the whole trace needs
_BAR_CELLS = 40
_KV_DTYPE_BYTES = 2


def add_verbs(add: Add) -> None:
    """`simulate`."""
    verb = add("simulate", run)
    verb.add_argument(
        "trace",
        type=argument(options.path),
        metavar="TRACE",
        help="JSON lines with timestamp (ms), input_length and hash_ids (blocks of 512 tokens)",
    )
    verb.add_argument(
        "--policy",
        choices=(*POLICIES, "all"),
        default="all",
        help="which blocks go first when the pool is full (default: all, beside each other)",
    )
    verb.add_argument(
        "--pool-bytes",
        type=argument(options.size),
        action="append",
        metavar="SIZE",
        help="may be given several times (default: shares of what the whole trace needs)",
    )
    size = verb.add_mutually_exclusive_group()
    size.add_argument(
        "--bytes-per-token",
        type=argument(options.integer(1, 1 << 32)),
        metavar="N",
        help="of KV (default: 131072)",
    )
    size.add_argument(
        "--model",
        type=argument(options.path),
        metavar="DIR",
        help="take the bytes of KV per token from this model's config.json",
    )
    verb.add_argument(
        "--learn-from",
        type=float,
        metavar="SHARE",
        help="make a plan from so much of the trace, and replay the rest without and with it",
    )
    verb.add_argument(
        "--top",
        type=argument(options.integer(1, 1_000_000)),
        default=10_000,
        metavar="N",
        help="prefixes in that plan at most (default: 10000)",
    )
    verb.add_argument(
        "--min-count",
        type=float,
        default=2.0,
        metavar="N",
        help="how often a prefix was seen to be in it (default: 2)",
    )


def run(args: argparse.Namespace, output: Output) -> int:
    """Replay a trace of requests: hit rates by policy and pool size."""
    share = args.learn_from
    if share is not None and not 0 < share < 1:
        raise UsageError(f"--learn-from {share:g} is not allowed: a share between 0 and 1")
    if args.min_count < 1:
        raise UsageError(f"--min-count {args.min_count:g} is not allowed: at least 1")
    token_bytes = args.bytes_per_token or (131_072 if args.model is None else _of(args.model))
    trace = simulate.load(args.trace)
    if not trace.requests:
        raise UsageError(f"{args.trace} is not allowed: it has no request")
    block_bytes = token_bytes * simulate.BLOCK_TOKENS
    sizes = args.pool_bytes or [
        max(1, round(part * trace.num_blocks)) * block_bytes for part in _SHARES
    ]
    if min(sizes) < block_bytes:
        raise UsageError(
            f"--pool-bytes {min(sizes)} is not allowed: at least {block_bytes} (one block)"
        )
    policies = list(POLICIES) if args.policy == "all" else [args.policy]
    rows = []
    for pool_bytes in sizes:
        capacity = pool_bytes // block_bytes
        for policy in policies:
            about = {"pool_bytes": pool_bytes, "pool_blocks": capacity, "policy": policy}
            if share is None:
                rows.append({**about, **simulate.replay(trace, capacity, policy).row()})
                continue
            start = round(share * len(trace.requests))
            plan = simulate.learn(trace, start, args.top, capacity, args.min_count)
            for warmed in ([], plan):
                result = simulate.replay(trace, capacity, policy, start=start, warmed=warmed)
                rows.append({**about, "num_planned": len(warmed), **result.row()})
    answer = {
        "trace": str(args.trace),
        "num_requests": len(trace.requests),
        "footprint_bytes": trace.num_blocks * block_bytes,
        "footprint_blocks": trace.num_blocks,
        "rows": rows,
    }
    output.answer(answer, views.table("simulation", _columns(share), _cells(rows, share)))
    return EXIT_OK


def _columns(share: float | None) -> tuple[str, ...]:
    head = ("pool", "blocks", "policy", *(() if share is None else ("planned", "first", "old")))
    return (*head, "tokens %", "blocks %", "ghost hits", "evictions", "of the possible")


def _cells(rows: Sequence[dict[str, Any]], share: float | None) -> list[tuple[object, ...]]:
    cells = []
    for row in rows:
        planned = (
            ()
            if share is None
            else (
                row["num_planned"],
                f"{row['first_response_percent']:.1f}",
                f"{row['old_first_response_percent']:.1f}",
            )
        )
        cells.append(
            (
                views.human_bytes(row["pool_bytes"]),
                row["pool_blocks"],
                row["policy"],
                *planned,
                f"{row['hit_tokens_percent']:.1f}",
                f"{row['hit_blocks_percent']:.1f}",
                row["ghost_hits"],
                row["evictions"],
                _bar(row["hit_tokens"], row["oracle_tokens"], row["oracle_tokens_percent"]),
            )
        )
    return cells


def _bar(part: int, whole: int, bound: float) -> str:
    """A bar as long as the share of the oracle's hits."""
    filled = round(_BAR_CELLS * part / whole) if whole else 0
    return "█" * filled + "░" * (_BAR_CELLS - filled) + f" {bound:.1f} %"


def _of(model_dir: Path) -> int:
    """Bytes of KV for each token: keys and values of every layer, two bytes a number."""
    path = model_dir / "config.json"
    try:
        told = json.loads(path.read_bytes())
        heads = told["num_attention_heads"]
        kv_heads = told.get("num_key_value_heads") or heads
        head_dim = told.get("head_dim") or told["hidden_size"] // heads
        num_bytes = int(2 * told["num_hidden_layers"] * kv_heads * head_dim * _KV_DTYPE_BYTES)
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as exc:
        raise UsageError(
            f"{path} is not allowed: it does not tell the size of KV ({type(exc).__name__} {exc})"
        ) from None
    if num_bytes < 1:
        raise UsageError(f"{path} is not allowed: KV of {num_bytes} bytes a token")
    return num_bytes
