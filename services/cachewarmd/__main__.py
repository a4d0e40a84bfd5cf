"""`cachewarmd`: start the daemon."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence

import uvloop

from cachewarmd import __version__, config, listener, log, notify, options, settings
from cachewarmd.errors import CachewarmError
from cachewarmd.server import Server

PROGRAM = "cachewarmd"
_SOCKET_FD_NAME = "control.sock"  # FileDescriptorName= in systemd/cachewarmd.socket
_EXIT_IN_USE = 75  # EX_TEMPFAIL: another daemon serves the socket


def _bump_epoch(lock_fd: int) -> int:
    """The number of this start, kept in the lock file; a new file begins at 1."""
    raw = os.pread(lock_fd, 32, 0).split()
    epoch = int(raw[0]) + 1 if raw and raw[0].isdigit() else 1
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{epoch} {os.getpid()}\n".encode(), 0)
    return epoch


def _activated_fd() -> int | None:
    """The control socket, when a service manager listens on it for us."""
    passed = notify.listen_fds(os.environ)
    fd = passed.pop(_SOCKET_FD_NAME, None)
    for name, unknown in passed.items():
        log.get_logger().warning("unknown_descriptor_closed", name=name)
        os.close(unknown)
    return fd


async def _serve(
    settings: config.Config, notifier: notify.Notifier, activated_fd: int | None
) -> None:
    with listener.listen(settings.socket, activated_fd) as listening:
        server = Server(settings, _bump_epoch(listening.lock_fd))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)

        def ready() -> None:
            notifier.ready()
            line = {"event": "ready", "socket": str(settings.socket), "pid": os.getpid()}
            print(json.dumps(line), flush=True)

        await server.run(listening, notifier, ready)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Keeps model weights and KV blocks warm for engines on this host.",
        usage="%(prog)s [--OPTION VALUE]...",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    settings.add_to_parser(parser, config.DEFAULT_FILE)
    options.add_to_parser(parser, config.OPTIONS, config.ENV_PREFIX)
    flags = parser.parse_args(argv)
    try:
        found = config.resolve(flags, os.environ)
        if flags.print_config:
            print(settings.to_toml(config.OPTIONS, found))
            return 0
        chosen = config.make(found, os.environ)
        if flags.check_config:
            return options.report(PROGRAM, config.faults(chosen))
    except options.OptionError as exc:
        return options.report(PROGRAM, exc.errors)
    log.configure(PROGRAM, chosen.log_level)
    try:
        notifier = notify.Notifier.from_environ(os.environ)
        uvloop.run(_serve(chosen, notifier, _activated_fd()))
    except listener.SocketInUseError as exc:
        options.die(PROGRAM, str(exc), _EXIT_IN_USE)
    except CachewarmError as exc:
        options.die(PROGRAM, str(exc), 1)
    except KeyboardInterrupt:
        return 130
    log.get_logger().info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
