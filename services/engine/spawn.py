"""How processes of ours are started: exec'd anew with this interpreter, never forked.

The front does this before it has imported what it needs itself, so nothing here imports more than
a process needs to be started.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from engine.config import WorkerConfig

# What a service manager told the front alone: nobody else may speak for it.
_MANAGERS = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
_LINGER_S = 600.0  # a daemon we started outlives our crash by this much


@dataclass(frozen=True)
class StartedWorker:
    """A worker process and our end of its socket; both are to be closed by whoever has it."""

    process: subprocess.Popen[bytes]
    socket: socket.socket


def entry_command(program: str) -> list[str]:
    """Command line of one of our programs with this interpreter; -P keeps stray files out."""
    code = f"import sys; from {program}.__main__ import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", code]


def start_worker(role: str, config: WorkerConfig) -> StartedWorker:
    """Exec one. It has the other end of the socket, so it ends when this process does."""
    ours, theirs = socket.socketpair()
    command = [*entry_command("engine"), "worker", "--role", role]
    command += ["--front", f"fd:{theirs.fileno()}", "--config-json", config.to_json()]
    # Spinning OpenMP threads starve a busy machine: they wait passively unless told otherwise.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **_environment()}
    with theirs:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()]
            )
        except BaseException:
            ours.close()
            raise
    return StartedWorker(process, ours)


def start_daemon(socket: Path, pool_bytes: int | None) -> subprocess.Popen[bytes]:
    """Exec a cachewarmd; its stdout is a pipe that gets a line when it serves."""
    # Under its holder: its own death must not cost the warmth that it is there for.
    command = [*entry_command("cachewarmd"), "--holder", "--socket", str(socket)]
    command += ["--exit-when-unused", f"{_LINGER_S:g}s"]
    if pool_bytes is not None:
        command += ["--pool-bytes", str(pool_bytes)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=_environment(),
        start_new_session=True,  # Ctrl-C at our terminal is not meant for it
    )


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _MANAGERS}
