"""`cachewarmd-ctl`: what operators and scripts ask of the daemon.

Exit status: 0 ok, 1 failed, 2 usage, 3 not warm or degraded, 4 unknown model or job,
5 daemon unreachable, 6 timed out, 7 not permitted, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from cachewarmd import options, plan
from cachewarmd.ctl import (
    doctor,
    exporter,
    learned_plan,
    nodes,
    pins,
    simulation,
    size,
    snapshots,
    stats,
    verbs,
)
from cachewarmd.ctl.arguments import argument as _argument
from cachewarmd.ctl.outcome import (
    EXIT_FAILED,
    PROGRAM,
    InterruptedByUserError,
    Output,
    UsageError,
    exit_code,
)
from cachewarmd.errors import CachewarmError
from cachewarmd.warmup import MAX_PARALLEL

# Modules that bring verbs: each has `add_verbs(add)`.
_GROUPS = (stats, exporter, doctor, size, learned_plan, simulation, pins, nodes)


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and exiting, so that every error goes the same way."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def _add_common(parser: argparse.ArgumentParser, default: object) -> None:
    parser.add_argument(
        "--socket",
        type=_argument(options.path),
        default=default,
        metavar="PATH",
        help="the daemon's control socket (default: as cachewarmd's own) [CACHEWARMD_SOCKET]",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json"),
        default=default,
        help="table (default), or one JSON object with bytes as whole numbers",
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(PROGRAM, description="Operate cachewarmd.", epilog=(__doc__ or "").strip())
    _add_common(parser, None)
    subparsers = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)

    def add(name: str, run: verbs.Verb) -> argparse.ArgumentParser:
        about = run.__doc__
        verb = subparsers.add_parser(name, help=about, description=about)
        # Accepted on both sides of the verb; here without a default, to keep what stood before it.
        _add_common(verb, argparse.SUPPRESS)
        verb.set_defaults(run=run)
        return verb

    for run in (verbs.status, verbs.models, verbs.clients, verbs.jobs, verbs.version):
        add(run.__name__, run)
    _add_warmup(add("warmup", verbs.warmup))
    waiting = add("wait", verbs.wait)
    _add_job(waiting)
    _add_timeout(waiting)
    _add_job(add("cancel", verbs.cancel))
    add("kick", verbs.kick).add_argument(
        "client",
        type=_argument(options.integer(1, (1 << 64) - 1)),
        metavar="CLIENT",
        help="its number, as `clients` shows it",
    )
    add("is-warm", verbs.is_warm).add_argument(
        "model", metavar="MODEL", help="a model directory, or the name of a loaded model"
    )
    add("evict", verbs.evict).add_argument(
        "--model", metavar="NAME", help="only blocks of this model (default: of all)"
    )
    add("verify", verbs.verify)
    _add_snapshot(add)
    for group in _GROUPS:
        group.add_verbs(add)
    add("shutdown", verbs.shutdown).add_argument(
        "--only-if-unused", action="store_true", help="fail while an engine is connected"
    )
    return parser


def _add_snapshot(add: Callable[[str, verbs.Verb], argparse.ArgumentParser]) -> None:
    verb = add("snapshot", snapshots.snapshot)
    verb.add_argument("action", choices=("save", "load", "list"))
    verb.add_argument(
        "path",
        type=_argument(options.path),
        metavar="PATH",
        help="a file; of list a directory. The daemon's user must own it",
    )


def _add_job(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("job", type=_argument(options.integer(1, (1 << 64) - 1)), metavar="JOB")


def _add_timeout(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--timeout",
        type=_argument(options.seconds),
        metavar="DURATION",
        help="stop waiting after this long; the job goes on (default: never)",
    )


def _add_warmup(verb: argparse.ArgumentParser) -> None:
    path = _argument(options.path)
    verb.add_argument("--model", type=path, required=True, metavar="DIR", help="model directory")
    verb.add_argument(
        "--model-name", default="", metavar="NAME", help="default: the directory's name"
    )
    verb.add_argument(
        "--model-version",
        default="",
        metavar="VERSION",
        help="default: the start of the weights' SHA-256",
    )
    what = verb.add_mutually_exclusive_group()
    what.add_argument(
        "--weights-only", action="store_true", help="no prompts (also the default without a file)"
    )
    what.add_argument(
        "--plan", type=path, metavar="FILE", help="what to compute: TOML or JSON lines (warm-up.md)"
    )
    what.add_argument("--prompts", type=path, metavar="FILE", help="the same")
    verb.add_argument(
        "--shapes",
        type=_argument(_lengths),
        default=[],
        metavar="LENGTH,...",
        help="also run at these lengths, on blocks that are not kept",
    )
    verb.add_argument(
        "--iterations",
        type=_argument(options.integer(1, plan.MAX_ITERATIONS)),
        default=50,
        metavar="N",
        help="of each shape (default: 50)",
    )
    verb.add_argument("--pin", action="store_true", help="keep what is computed from eviction")
    verb.add_argument(
        "--ttl",
        type=_argument(options.seconds),
        metavar="DURATION",
        help="of the pins (default: until they are unpinned)",
    )
    verb.add_argument(
        "--urgency",
        choices=tuple(plan.URGENCIES),
        default="background",
        help="of items that don't say theirs (default: background)",
    )
    verb.add_argument(
        "--stall-timeout",
        type=_argument(options.seconds),
        default=5.0,
        metavar="DURATION",
        help="an item without progress for so long is given up (default: 5s)",
    )
    verb.add_argument(
        "--jobs",
        type=_argument(options.integer(1, MAX_PARALLEL)),
        default=1,
        metavar="N",
        help="items that an engine gets at a time (default: 1)",
    )
    verb.add_argument(
        "--if-version",
        default="",
        metavar="VERSION",
        help="only if the weights are of this version, or their SHA-256 starts with it",
    )
    verb.add_argument(
        "--key", default="", metavar="KEY", help="a job that has this key already is the answer"
    )
    verb.add_argument(
        "--no-wait", action="store_true", help="print the job's number and return at once"
    )
    _add_timeout(verb)


def _lengths(text: str) -> list[int]:
    return [options.integer(1, plan.MAX_SHAPE_LENGTH)(length) for length in text.split(",")]


def _wants_json(argv: Sequence[str]) -> bool:
    """Also of a command line that can't be parsed."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-o", "--output")
    try:
        return bool(parser.parse_known_args(list(argv))[0].output == "json")
    except UsageError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    output = Output(_wants_json(argv))
    try:
        args = _parser().parse_args(argv)
        args.socket = args.socket or options.default_socket()
        status: int = args.run(args, output)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from trying again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        exc: Exception = InterruptedByUserError("interrupted")
    except (CachewarmError, OSError) as error:
        exc = error
    output.error(exc)
    return exit_code(exc)


if __name__ == "__main__":
    sys.exit(main())
