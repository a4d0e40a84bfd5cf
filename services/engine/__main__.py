"""`cachewarm-engine`: serve, generate, demo-model; `worker` is what `serve` or a unit runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cachewarmd import log, options, settings
from engine import __version__, config, generate
from engine.option_table import ROLES, SERVE_OPTIONS, WORKER_OPTIONS

PROGRAM = "cachewarm-engine"


def _serve(flags: argparse.Namespace) -> int:
    try:
        found = config.resolve(flags, os.environ)
        if flags.print_config:
            print(_as_toml(found))
            return 0
        chosen = config.serve_config(found)
        if flags.check_config:
            from engine import check_config

            return options.report(PROGRAM, check_config.faults(chosen, os.environ))
    except options.OptionError as exc:
        return options.report(PROGRAM, exc.errors)
    log.configure(PROGRAM, chosen.log_level)
    # Children are exec'd at once, so gRPC's fork handlers have nothing to do but complain. It must
    # be said before gRPC is imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    # Imported here: `--help`, `worker` and `demo-model` don't need a gRPC server.
    import uvloop

    from cachewarmd.errors import CachewarmError
    from engine.errors import ModelError, StartError
    from engine.server import Front
    from engine.tokenizer import TokenizerError

    async def run() -> None:
        await Front(chosen, os.environ).run()

    try:
        uvloop.run(run())
    except (CachewarmError, ModelError, StartError, TokenizerError) as exc:
        options.die(PROGRAM, str(exc), 1)
    return 0


def _as_toml(found: Mapping[str, settings.Setting]) -> str:
    is_on_socket = found["listen"].value and found["port"].is_default
    unused = {"port": "listen names a Unix socket"} if is_on_socket else {}
    return settings.to_toml(SERVE_OPTIONS, found, unused)


def _worker(flags: argparse.Namespace) -> int:
    from engine import worker_start
    from engine.errors import ModelError

    try:
        chosen, front = _worker_settings(flags)
    except options.OptionError as exc:
        return options.report(PROGRAM, exc.errors)
    except ModelError as exc:
        options.die(PROGRAM, str(exc), 1)
    log.configure("cachewarm-worker", chosen.log_level)
    return worker_start.run(chosen, front)


def _worker_settings(flags: argparse.Namespace) -> tuple[config.WorkerConfig, Path]:
    """Its settings and where the front is. Raises OptionError, ModelError."""
    if flags.config_json is not None:
        for name in ("config", *(option.name for option in WORKER_OPTIONS)):
            if getattr(flags, name.replace("-", "_")) is not None:
                raise options.OptionError(f"--{name}: not allowed with --config-json")
        if flags.front is None:
            raise options.OptionError("--front: a socket is required with --config-json")
        return config.WorkerConfig.from_json(flags.config_json), _unix_path(flags.front)
    from engine.models.config import load_config
    from engine.worker_config import worker_config

    shared = config.worker_side(config.resolve(flags, os.environ))
    front = shared.worker_socket if flags.front is None else _unix_path(flags.front)
    if front is None:
        raise options.OptionError("--front: a socket is required, or worker-socket or listen")
    model = load_config(shared.model, shared.max_context)
    return worker_config(shared, model, flags.role, os.environ), front


def _unix_path(front: str) -> Path:
    """The socket of --front unix:PATH. Raises OptionError."""
    scheme, _, path = front.partition(":")
    if scheme != "unix" or not path:
        raise options.OptionError(f"--front: {front!r} is not allowed: unix:PATH")
    return Path(path)


def _generate(flags: argparse.Namespace) -> int:
    return generate.run(flags, PROGRAM)


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

    serve = verbs.add_parser(
        "serve",
        help="run the gRPC service",
        usage=f"{PROGRAM} serve --model DIR [--OPTION VALUE]...",
        allow_abbrev=False,
    )
    settings.add_to_parser(serve, config.DEFAULT_FILE)
    options.add_to_parser(serve, SERVE_OPTIONS, config.ENV_PREFIX)
    serve.set_defaults(run=_serve)

    worker = verbs.add_parser(
        "worker",
        help="dials a front and computes for it; serve runs it, or a unit of its own",
        usage=f"{PROGRAM} worker [--role ROLE] [--OPTION VALUE]...",
        allow_abbrev=False,
    )
    worker.add_argument("--role", choices=ROLES, default="unified")
    worker.add_argument(
        "--front", metavar="unix:PATH", help="where the front listens (default: --worker-socket)"
    )
    worker.add_argument("--config-json", metavar="JSON", help="all other settings, from a front")
    worker.add_argument(
        "--config", metavar="FILE", help="settings in TOML, as for serve (default: as for serve)"
    )
    options.add_to_parser(worker, WORKER_OPTIONS, config.ENV_PREFIX)
    worker.set_defaults(run=_worker)

    talk = verbs.add_parser("generate", help="stream a completion to stdout")
    generate.add_arguments(talk)
    talk.set_defaults(run=_generate)

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
