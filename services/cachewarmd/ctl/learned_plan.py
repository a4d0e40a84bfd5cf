"""`plan`: a warm-up plan made from what lookups began with most."""

from __future__ import annotations

import argparse
import json
from array import array
from typing import Any

from cachewarmd import options
from cachewarmd.ctl import views
from cachewarmd.ctl.arguments import Add, argument
from cachewarmd.ctl.outcome import EXIT_FAILED, EXIT_OK, Output
from cachewarmd.ctl.verbs import connect
from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb

_STALL_S = 30.0


def add_verbs(add: Add) -> None:
    """`plan`."""
    verb = add("plan", run)
    verb.add_argument(
        "--top",
        type=argument(options.integer(1, 100_000)),
        default=10_000,
        metavar="N",
        help="prefixes at most (default: 10000)",
    )
    verb.add_argument(
        "--min-count",
        type=float,
        default=2.0,
        metavar="N",
        help="where fewer lookups went on alike, a prefix ends (default: 2)",
    )
    verb.add_argument("--model", default="", metavar="NAME", help="default: all models")


def run(args: argparse.Namespace, output: Output) -> int:
    """Print a warm-up plan (JSON lines) of the prefixes that requests had most."""
    request = pb.Learned(top=args.top, min_count=args.min_count, model=args.model)
    found: list[pb.LearnedPrefix] = []
    with connect(args, pb.ROLE_ADMIN) as client:

        def more(envelope: pb.Envelope) -> None:
            found.extend(envelope.learned_reply.prefixes)

        last = client.stream(pb.Envelope(learned=request), more, _STALL_S)[0].learned_reply
    found.extend(last.prefixes)
    if last.learn != "ids":
        rows = [
            {
                "key": prefix.key.hex(),
                "stamp": prefix.stamp,
                "num_tokens": prefix.num_tokens,
                "count": round(prefix.count, 2),
                "saving_tokens": round(prefix.saving_tokens),
            }
            for prefix in found
        ]
        cells = [tuple(row.values()) for row in rows]
        columns = ("key", "stamp", "tokens", "count", "saved tokens")
        output.answer({"learn": last.learn, "prefixes": rows}, views.table("seen", columns, cells))
        output.complain(
            CachewarmError(
                f"this is not a plan: with learn {last.learn} the daemon keeps no token ids to "
                "write one of (cachewarmd --learn ids)"
            )
        )
        return EXIT_FAILED
    for number, prefix in enumerate(found, 1):
        if prefix.token_ids:
            print(json.dumps(_item(number, prefix)))
    if last.num_left_out:
        output.complain(CachewarmError(f"{last.num_left_out} prefixes had no room: left out"))
    if missing := sum(1 for prefix in found if not prefix.token_ids):
        output.complain(CachewarmError(f"{missing} prefixes came without token ids: left out"))
    return EXIT_OK


def _item(number: int, prefix: pb.LearnedPrefix) -> dict[str, Any]:
    item: dict[str, Any] = {"name": f"learned-{number}"}
    if prefix.tenant:
        item["tenant"] = prefix.tenant
    if prefix.HasField("cache_salt"):
        item["cache_salt"] = prefix.cache_salt
    return {**item, "token_ids": array("I", prefix.token_ids).tolist()}
