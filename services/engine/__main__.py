"""`cachewarm-engine`: serve, generate, demo-model; `worker` is what `serve` or a unit runs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from cachewarmd import log, options, settings
from engine import __version__, config, generate
from engine.option_table import ROLES, SERVE_OPTIONS, WORKER_OPTIONS
from engine.phases import Phases

PROGRAM = "cachewarm-engine"


class _Signals:
    """Until the front's loop takes them: what is under way is not cut in the middle.

    `caught` is the first; a second one ends the process as if nobody had asked for it.
    """

    def __init__(self) -> None:
        self.caught = 0
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._catch) for number in numbers}

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self.caught = number
        self.give_back()

    def give_back(self) -> None:
        """As it was before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _serve(flags: argparse.Namespace) -> int:
    phases = Phases()
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
    log.configure(PROGRAM, chosen.log_level, is_lazy=True)
    return _run_front(chosen, phases)


def _run_front(chosen: config.ServeConfig, phases: Phases) -> int:
    # Imports in the order of what is waited for: first what starts workers.
    from engine.errors import ModelError, StartError
    from engine.head_start import HeadStart

    signals = _Signals()
    try:
        with HeadStart(chosen, os.environ, phases) as begun:
            # Children are exec'd at once, so gRPC's fork handlers have nothing to do but complain.
            # It must be said before gRPC is imported.
            os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
            import uvloop

            from cachewarmd.errors import CachewarmError
            from engine.server import serve
            from engine.tokenizer import TokenizerError

            phases.end("imports")
            try:
                uvloop.run(serve(chosen, os.environ, begun, lambda: signals.caught != 0))
            except (CachewarmError, TokenizerError) as exc:
                options.die(PROGRAM, str(exc), 1)
    except (ModelError, StartError) as exc:
        options.die(PROGRAM, str(exc), 1)
    finally:
        signals.give_back()
    return 128 + signal.SIGINT if signals.caught == signal.SIGINT else 0


def _as_toml(found: Mapping[str, settings.Setting]) -> str:
    is_on_socket = found["listen"].value and found["port"].is_default
    unused = {"port": "listen names a Unix socket"} if is_on_socket else {}
    return settings.to_toml(SERVE_OPTIONS, found, unused)


def _worker(flags: argparse.Namespace) -> int:
    phases = Phases()
    from engine import worker_start
    from engine.errors import ModelError

    try:
        chosen, front = _worker_settings(flags)
    except options.OptionError as exc:
        return options.report(PROGRAM, exc.errors)
    except ModelError as exc:
        options.die(PROGRAM, str(exc), 1)
    log.configure("cachewarm-worker", chosen.log_level, is_lazy=True)
    return worker_start.run(chosen, front, phases)


def _worker_settings(flags: argparse.Namespace) -> tuple[config.WorkerConfig, str]:
    """Its settings and where the front is. Raises OptionError, ModelError."""
    if flags.config_json is not None:
        for name in ("config", *(option.name for option in WORKER_OPTIONS)):
            if getattr(flags, name.replace("-", "_")) is not None:
                raise options.OptionError(f"--{name}: not allowed with --config-json")
        if flags.front is None:
            raise options.OptionError("--front: a socket is required with --config-json")
        _check_front(flags.front, ("unix", "fd"))
        return config.WorkerConfig.from_json(flags.config_json), flags.front
    from engine.models.config import load_config
    from engine.worker_config import worker_config

    shared = config.worker_side(config.resolve(flags, os.environ))
    front = flags.front
    if front is None:
        if shared.worker_socket is None:
            raise options.OptionError("--front: a socket is required, or worker-socket or listen")
        front = f"unix:{shared.worker_socket}"
    _check_front(front, ("unix",))
    model = load_config(shared.model, shared.max_context)
    return worker_config(shared, model, flags.role, os.environ), front


def _check_front(front: str, schemes: Sequence[str]) -> None:
    """Only a front itself gives a descriptor. Raises OptionError."""
    scheme, _, place = front.partition(":")
    if scheme not in schemes or not place or (scheme == "fd" and not place.isdecimal()):
        raise options.OptionError(f"--front: {front!r} is not allowed: unix:PATH")


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
