"""`pin`, `unpin`, `pins`, `purge`: what no eviction takes, and what takes all."""

from __future__ import annotations

import argparse
import time

from cachewarmd import options
from cachewarmd.client import Client
from cachewarmd.ctl import views
from cachewarmd.ctl.arguments import Add, argument
from cachewarmd.ctl.outcome import EXIT_OK, Output, UsageError
from cachewarmd.ctl.verbs import CALL_TIMEOUT_S, connect
from cachewarmd.protocol import KEY_BYTES
from cachewarmd.v1 import control_pb2 as pb


def add_verbs(add: Add) -> None:
    """`pin`, `unpin`, `pins`, `purge`."""
    verb = add("pin", pin)
    verb.add_argument("key", type=argument(_key), metavar="KEY", help="of the chain's last block")
    verb.add_argument(
        "--ttl",
        type=argument(options.seconds),
        metavar="DURATION",
        help="until then (default: until it is unpinned)",
    )
    verb.add_argument("--label", default="", metavar="NAME", help="for `unpin --label`")
    verb = add("unpin", unpin)
    verb.add_argument(
        "pins",
        nargs="*",
        type=argument(options.integer(1, (1 << 64) - 1)),
        metavar="PIN",
        help="its number, as `pins` shows it",
    )
    verb.add_argument("--label", default="", metavar="NAME", help="all that have this label")
    verb.add_argument("--all", action="store_true", help="every pin")
    add("pins", pins)
    add("purge", purge).add_argument(
        "--model", default="", metavar="NAME", help="only blocks of this model (default: of all)"
    )


def _key(text: str) -> bytes:
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise options.OptionError(f"{text!r} is not allowed: {2 * KEY_BYTES} hexadecimal digits")
    return key


def _ask(client: Client, envelope: pb.Envelope) -> pb.Envelope:
    return client.call(envelope, CALL_TIMEOUT_S)[0]


def pin(args: argparse.Namespace, output: Output) -> int:
    """Keep a chain from eviction, also when the daemon starts again."""
    ttl_ms = 0 if args.ttl is None else max(1, int(1000 * args.ttl))
    request = pb.Pin(key=args.key, ttl_ms=ttl_ms, label=args.label)
    with connect(args, pb.ROLE_ADMIN) as client:
        told = _ask(client, pb.Envelope(pin=request)).pin_reply
    text = f"pin {told.pin_id}: {views.human_bytes(told.num_bytes)} that no other pin kept"
    output.answer(views.plain(told), lambda console: console.print(text))
    return EXIT_OK


def unpin(args: argparse.Namespace, output: Output) -> int:
    """End pins; what they kept stays until its room is needed."""
    if not (args.pins or args.label or args.all):
        raise UsageError("unpin: numbers of pins, --label or --all must be given")
    request = pb.Unpin(pin_ids=args.pins, label=args.label, all=args.all)
    with connect(args, pb.ROLE_ADMIN) as client:
        told = _ask(client, pb.Envelope(unpin=request)).unpin_reply
    output.answer(views.plain(told), lambda console: console.print(f"{told.num_pins} pins ended"))
    return EXIT_OK


def pins(args: argparse.Namespace, output: Output) -> int:
    """What is pinned, and how much may be."""
    with connect(args, pb.ROLE_OBSERVER) as client:
        told = _ask(client, pb.Envelope(pins=pb.Pins())).pins_reply
    rows = [
        (p.pin_id, p.label, p.num_blocks, views.human_bytes(p.num_bytes), _left(p), p.key.hex())
        for p in told.pins
    ]
    used = f"pins, {views.human_bytes(told.num_bytes)} of {views.human_bytes(told.max_bytes)}"
    columns = ("pin", "label", "blocks", "size", "expires in", "key")
    output.answer(views.plain(told), views.table(used, columns, rows))
    return EXIT_OK


def _left(found: pb.PinStatus) -> str:
    if not found.expires_unix_ms:
        return "never"
    return f"{max(0.0, found.expires_unix_ms / 1000 - time.time()):.0f} s"


def purge(args: argparse.Namespace, output: Output) -> int:
    """Drop cached blocks that nobody leases, and end their pins."""
    with connect(args, pb.ROLE_ADMIN) as client:
        told = _ask(client, pb.Envelope(purge=pb.Purge(model=args.model))).evict_reply
    text = (
        f"{told.num_blocks} blocks purged ({views.human_bytes(told.num_bytes)}), "
        f"{told.num_kept} in use were kept"
    )
    output.answer(views.plain(told), lambda console: console.print(text))
    return EXIT_OK
