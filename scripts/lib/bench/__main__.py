"""scripts/bench: flags, one mode, then tables and perhaps one JSON object."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# Children are exec'd at once, so gRPC's fork handlers have nothing to do but complain. It must be
# said before gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

from cachewarmd.errors import CachewarmError
from engine.client import CallError
from engine.demo_model import DemoModelError, default_dest, write_demo_model
from scripts.lib.bench.context import Bench, num_cpus, say
from scripts.lib.bench.errors import BenchError, UsageError
from scripts.lib.bench.flags import Parser, add_common, serve_flags
from scripts.lib.bench.modes import MODES
from scripts.lib.bench.modes.mode import Mode
from scripts.lib.bench.noise import NoiseMeter
from scripts.lib.bench.processes import Services, adopt_orphans
from scripts.lib.bench.report import Result, as_json

SCHEMA_VERSION = 1


def parse(argv: Sequence[str] | None) -> tuple[Mode, argparse.Namespace]:
    """The mode and its flags; ends the process with status 2 for what is not allowed."""
    parser = Parser("bench", description="Measures this tree's programs. See docs/benchmarks.md.")
    verbs = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    for mode in MODES:
        verb = verbs.add_parser(mode.name, help=mode.help, allow_abbrev=False)
        mode.add_flags(verb)
        add_common(verb)
        verb.set_defaults(chosen=mode)
    flags = parser.parse_args(argv)
    chosen: Mode = flags.chosen
    del flags.chosen
    if flags.model is not None and not flags.model.is_dir():
        parser.error(f"--model: {str(flags.model)!r} is not allowed: a model directory")
    return chosen, flags


def _machine() -> dict[str, Any]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo").read_text()
    names = [line for line in info.splitlines() if line.startswith(("model name", "CPU part"))]
    return {
        "cpu": names[0].partition(":")[2].strip() if names else None,
        "num_cpus": num_cpus(),
        "kernel": os.uname().release,
        "machine": os.uname().machine,
    }


class Stopped(SystemExit):
    """From outside, or by the limit. An event loop lets no other kind of exception through."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status)
        self.status, self.text = status, text


def _catch_signals(limit_s: float) -> None:
    """From now on each of them is a Stopped, once."""
    meanings = {
        signal.SIGINT: (130, "interrupted"),
        signal.SIGTERM: (143, "terminated"),
        signal.SIGALRM: (1, f"error: the limit of {limit_s:g} s is over (--limit)"),
    }

    def stop(number: int, _: object) -> NoReturn:
        _ignore_signals()
        raise Stopped(*meanings[signal.Signals(number)])

    for number in meanings:
        signal.signal(number, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)


def _ignore_signals() -> None:
    """What was started is being stopped: that is the end in any case, and must not be cut off."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _measure(mode: Mode, flags: argparse.Namespace, folder: Path) -> tuple[Result, dict[str, Any]]:
    """The mode's result, and the whole JSON object. No process of ours is left afterwards."""
    model = flags.model or write_demo_model(default_dest(), progress=say)
    noise = NoiseMeter()
    passed = serve_flags(flags)
    with Services(folder, model.resolve(), passed, flags.pool_bytes) as services:
        bench = Bench(flags, model, services)
        try:
            with noise:
                result = mode.run(bench)
        finally:
            _ignore_signals()
    settings = {name: value for name, value in vars(flags).items() if name not in ("mode", "json")}
    values = {
        "schema_version": SCHEMA_VERSION,
        "mode": mode.name,
        "settings": {**settings, "model": str(model)},
        "machine": _machine(),
        **bench.facts,
        **result.values,
        "noise_of_all": noise.result(),
    }
    return result, values


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    mode, flags = parse(argv)
    started = time.monotonic()
    adopt_orphans()
    folder = Path(tempfile.mkdtemp(prefix="cwb-"))
    status = 0
    try:
        _catch_signals(flags.limit)
        result, values = _measure(mode, flags, folder)
    except Stopped as exc:
        say(f"bench: {exc.text}; all that was started has been stopped")
        status = exc.status
    except UsageError as exc:
        say(f"bench: error: {exc}")
        status = 2
    except (BenchError, CallError, CachewarmError, DemoModelError, OSError) as exc:
        say(f"bench: error: {exc}\nlogs: {folder}")
        return 1
    else:
        for table in result.tables:
            print(table)
        print(f"seed {flags.seed}, {time.monotonic() - started:.0f} s")
        if flags.json:
            print(as_json(values))
    shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
