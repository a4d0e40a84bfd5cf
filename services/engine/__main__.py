"""`cachewarm-engine`: serve, generate, demo-model; `worker` is what `serve` runs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from cachewarmd import log, options
from engine import __version__, config

PROGRAM = "cachewarm-engine"


def _serve(flags: argparse.Namespace) -> int:
    try:
        settings = config.load_serve(flags, os.environ)
    except options.OptionError as exc:
        options.die(PROGRAM, str(exc), 2)
    log.configure(PROGRAM, settings.log_level)
    # Children are exec'd at once, so gRPC's fork handlers have nothing to do but complain. It must
    # be said before gRPC is imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # Imported here: `--help`, `worker` and `demo-model` don't need a gRPC server.
    import uvloop

    from engine.errors import ModelError, StartError
    from engine.server import Front
    from engine.tokenizer import TokenizerError

    async def run() -> None:
        await Front(settings, os.environ).run()

    try:
        uvloop.run(run())
    except (ModelError, StartError, TokenizerError) as exc:
        options.die(PROGRAM, str(exc), 1)
    return 0


def _worker(flags: argparse.Namespace) -> int:
    from engine import worker_start

    try:
        settings = config.WorkerConfig.from_json(flags.config_json)
    except options.OptionError as exc:
        options.die(PROGRAM, str(exc), 2)
    log.configure("cachewarm-worker", settings.log_level)
    return worker_start.run(settings, Path(flags.front.removeprefix("unix:")))


def _generate(flags: argparse.Namespace) -> int:
    from engine.client import Accepted, CallError, Done, EngineClient, Text

    prompt = sys.stdin.read() if flags.prompt == "-" else flags.prompt
    with EngineClient(flags.target) as client:
        try:
            for event in client.generate(
                prompt,
                max_tokens=flags.max_tokens,
                temperature=flags.temperature,
                top_p=flags.top_p,
                top_k=flags.top_k,
                min_p=flags.min_p,
                seed=flags.seed,
                ignore_eos=flags.ignore_eos,
                timeout=flags.timeout,
            ):
                if flags.json:
                    kind = {Accepted: "accepted", Text: "output", Done: "finished"}[type(event)]
                    print(json.dumps({"event": kind, **asdict(event)}), flush=True)
                elif isinstance(event, Text):
                    print(event.text, end="", flush=True)
        except CallError as exc:
            options.die(PROGRAM, str(exc), 1)
        except BrokenPipeError:
            return 1  # whoever read our output has left
    if not flags.json:
        print()
    return 0


def _demo_model(flags: argparse.Namespace) -> int:
    from engine.demo_model import DemoModelError, default_dest, write_demo_model

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        path = write_demo_model(flags.dest or default_dest(), flags.context, progress=progress)
    except DemoModelError as exc:
        options.die(PROGRAM, str(exc), 1)
    print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(PROGRAM, description="Streams tokens over gRPC.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    serve = verbs.add_parser("serve", help="run the gRPC service")
    options.add_to_parser(serve, config.SERVE_OPTIONS, config.ENV_PREFIX)
    serve.set_defaults(run=_serve)

    worker = verbs.add_parser("worker", help="what serve runs: dials a front and computes for it")
    worker.add_argument("--role", choices=["unified"], default="unified")
    worker.add_argument("--front", required=True, metavar="unix:PATH")
    worker.add_argument("--config-json", required=True, metavar="JSON")
    worker.set_defaults(run=_worker)

    generate = verbs.add_parser("generate", help="stream a completion to stdout")
    generate.add_argument("--target", default="127.0.0.1:50051", metavar="HOST:PORT|unix:PATH")
    generate.add_argument("--max-tokens", type=int)
    generate.add_argument("--temperature", type=float)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--min-p", type=float)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--ignore-eos", action="store_true")
    generate.add_argument("--timeout", type=float, metavar="SECONDS")
    generate.add_argument("--json", action="store_true", help="one JSON object per event")
    generate.add_argument("prompt", metavar="PROMPT", help="- reads it from stdin")
    generate.set_defaults(run=_generate)

    demo = verbs.add_parser("demo-model", help="write the demo model; prints its directory")
    demo.add_argument("--dest", type=Path, metavar="DIR")
    demo.add_argument("--context", type=int, metavar="TOKENS")
    demo.set_defaults(run=_demo_model)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    flags = _parser().parse_args(argv)
    try:
        status: int = flags.run(flags)
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
