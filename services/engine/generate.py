"""`cachewarm-engine generate`: stream a completion to stdout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from cachewarmd import options

if TYPE_CHECKING:
    from engine.client import Event

_TUNING = (
    ("max-tokens", int, "N"),
    ("min-tokens", int, "N"),
    ("temperature", float, "T"),
    ("top-p", float, "P"),
    ("top-k", int, "K"),
    ("min-p", float, "P"),
    ("seed", int, "SEED"),
    ("cache-salt", str, "TEXT"),
    ("n", int, "SAMPLES"),
    ("timeout", float, "SECONDS"),
)
_RESUME_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare its flags."""
    parser.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT|unix:PATH")
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message, in the model's template"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: a system message before it")
    parser.add_argument(
        "--template", default="", metavar="NAME", help="with --chat: one of the model's templates"
    )
    for name, kind, metavar in _TUNING:
        parser.add_argument(f"--{name}", type=kind, metavar=metavar)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="repeatable")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument(
        "--resume",
        type=float,
        default=_RESUME_S,
        metavar="SECONDS",
        help="how long to look for the engine when it is lost in mid-stream (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per event")
    parser.add_argument("prompt", metavar="PROMPT", help="- reads it from stdin")


def run(flags: argparse.Namespace, program: str) -> int:
    """Returns the exit status."""
    from engine.client import CallError, EngineClient

    if (flags.system is not None or flags.template) and not flags.chat:
        options.die(program, "--system and --template: only with --chat", 2)
    prompt = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    chat = None
    if flags.chat:
        chat = [("system", flags.system)] if flags.system is not None else []
        chat.append(("user", prompt))
    tuning = {
        name.replace("-", "_"): getattr(flags, name.replace("-", "_")) for name, *_ in _TUNING
    }
    with EngineClient(flags.target) as client:
        try:
            events = client.generate(
                prompt,
                chat=chat,
                template=flags.template,
                stop=flags.stop,
                ignore_eos=flags.ignore_eos,
                resume_s=flags.resume,
                **tuning,
            )
            _print(events, as_json=flags.json)
        except CallError as exc:
            options.die(program, str(exc), 1)
        except BrokenPipeError:
            return 1  # whoever read our output has left
    return 0


def _print(events: Iterable[Event], *, as_json: bool) -> None:
    """One sample as it comes; of several each whole, after the other, when all are there."""
    from engine.client import Accepted, Done, Text

    samples: dict[int, str] = {}
    for event in events:
        if as_json:
            kind = {Accepted: "accepted", Text: "output", Done: "finished"}[type(event)]
            print(json.dumps({"event": kind, **asdict(event)}), flush=True)
        elif isinstance(event, Text):
            if event.sample_index == 0:
                print(event.text, end="", flush=True)
            else:
                samples[event.sample_index] = samples.get(event.sample_index, "") + event.text
    if not as_json:
        print()
        for _, text in sorted(samples.items()):
            print(f"---\n{text}")
