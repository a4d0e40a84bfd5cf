"""`cachewarmd`: start the daemon."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence

import structlog
import uvloop

from cachewarmd import __version__, config, listener, log, options
from cachewarmd.errors import CachewarmError
from cachewarmd.server import Server

PROGRAM = "cachewarmd"
_EXIT_IN_USE = 75  # EX_TEMPFAIL: another daemon serves the socket


def _bump_epoch(lock_fd: int) -> int:
    """The number of this start, kept in the lock file; a new file begins at 1."""
    raw = os.pread(lock_fd, 32, 0).split()
    epoch = int(raw[0]) + 1 if raw and raw[0].isdigit() else 1
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{epoch} {os.getpid()}\n".encode(), 0)
    return epoch


async def _serve(settings: config.Config) -> None:
    sock, lock_fd = listener.listen(settings.socket)
    try:
        server = Server(settings, _bump_epoch(lock_fd))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)

        def ready() -> None:
            line = {"event": "ready", "socket": str(settings.socket), "pid": os.getpid()}
            print(json.dumps(line), flush=True)

        await server.run(sock, ready)
    finally:
        # Ours: the lock is still held.
        settings.socket.unlink(missing_ok=True)
        sock.close()
        os.close(lock_fd)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = argparse.ArgumentParser(
        PROGRAM, description="Keeps model weights and KV blocks warm for engines on this host."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    options.add_to_parser(parser, config.OPTIONS, config.ENV_PREFIX)
    flags = parser.parse_args(argv)
    try:
        settings = config.load(flags, os.environ)
    except options.OptionError as exc:
        options.die(PROGRAM, str(exc), 2)
    log.configure(PROGRAM, settings.log_level)
    try:
        uvloop.run(_serve(settings))
    except listener.SocketInUseError as exc:
        options.die(PROGRAM, str(exc), _EXIT_IN_USE)
    except CachewarmError as exc:
        options.die(PROGRAM, str(exc), 1)
    except KeyboardInterrupt:
        return 130
    structlog.get_logger().info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
