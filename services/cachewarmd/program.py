"""The daemon as a program: settings, descriptors that were passed, signals, exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
from collections.abc import Mapping, Sequence

import uvloop

from cachewarmd import (
    __version__,
    config,
    failpoints,
    fdstore,
    listener,
    log,
    memory_lock,
    notify,
    options,
    settings,
)
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


def _store_room(environ: Mapping[str, str]) -> int:
    """How many descriptors are kept for us: told by systemd from 254 on, and by our holder."""
    told = environ.get("FDSTORE", "")
    return int(told) if told.isdigit() else fdstore.DEFAULT_ROOM


async def _serve(
    settings: config.Config, notifier: notify.Notifier, passed: Mapping[str, int]
) -> None:
    activated = passed.get(_SOCKET_FD_NAME)
    stored = {name: fd for name, fd in passed.items() if name != _SOCKET_FD_NAME}
    kept = fdstore.FdStore(notifier, stored, _store_room(os.environ))
    for name in kept.forget_unknown():
        log.get_logger().warning("unknown_descriptor_closed", name=name)
    own = kept.take(fdstore.LISTENER)
    with listener.listen(settings.socket, activated, own) as listening:
        server = Server(settings, _bump_epoch(listening.lock_fd), kept)
        if not listening.is_activated and listening.sock.fileno() != own:
            kept.keep(fdstore.LISTENER, listening.sock.fileno())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)

        def ready() -> None:
            # What is there now mostly stays, and to look through it would only delay requests.
            gc.freeze()
            gc.enable()
            notifier.ready()
            line = {"event": "ready", "socket": str(settings.socket), "pid": os.getpid()}
            # Whoever started the first daemon may be gone when a later one is ready.
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(line), flush=True)

        await server.run(listening, notifier, ready)
        # Its path goes now, so nobody could reach a successor on it.
        kept.forget(fdstore.LISTENER)


def run(argv: Sequence[str]) -> int:
    """What the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        PROGRAM,
        description="Keeps model weights and KV blocks warm for engines on this host.",
        usage="%(prog)s [--OPTION VALUE]...",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    # Looked at in `__main__`; here for the help, and for those who only check settings.
    parser.add_argument(
        "--holder",
        action="store_true",
        help="start the daemon again when it dies, and keep its memory meanwhile: where no service "
        "manager does",
    )
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
    # Many objects are made of an adopted pool, and none of them is garbage; until `ready`.
    gc.disable()
    try:
        failpoints.arm(os.environ)
        memory_lock.raise_limits()
        notifier = notify.Notifier.from_environ(os.environ)
        uvloop.run(_serve(chosen, notifier, notify.listen_fds(os.environ)))
    except listener.SocketInUseError as exc:
        options.die(PROGRAM, str(exc), _EXIT_IN_USE)
    except CachewarmError as exc:
        options.die(PROGRAM, str(exc), 1)
    except KeyboardInterrupt:
        return 130
    log.get_logger().info("stopped")
    return 0
