"""How processes of ours are started: exec'd anew with this interpreter, never forked."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from engine.config import WorkerConfig


def entry_command(program: str) -> list[str]:
    """Command line of one of our programs with this interpreter; -P keeps stray files out."""
    code = f"import sys; from {program}.__main__ import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code]


def worker_command(role: str, front: Path, config: WorkerConfig) -> list[str]:
    """Command line of a worker that dials the front's socket."""
    command = [*entry_command("engine"), "worker", "--role", role, "--front", f"unix:{front}"]
    return [*command, "--config-json", config.to_json()]


def worker_environment() -> dict[str, str]:
    """Spinning OpenMP threads starve a busy machine: they wait passively unless told otherwise."""
    return {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
