"""The process that reads, hashes and packs weights, so that neither touches the daemon's loop.

The daemon starts it (`packers`) with one socket and sends, and gets back, on it:

    daemon                              packer
    request, plan  + directory fd  →
                                     ←  {"fits": true}           plan and files are checked
    one byte       + memfd         →                             not when it only hashes
                                     ←  {"progress": [phase, done bytes, total bytes]}
                                     ←  {"sha256": hex, "identities": [[…], …]}, or
                                        {"error": code, "message": text}, or {"errno": n}

One JSON object a line. It has no other descriptors but stderr, opens nothing but the files of that
directory, for reading, and ends after one request, or with the daemon.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

from cachewarmd import weights
from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb

REQUEST = struct.Struct("<Q??")  # bytes of the plan that follows, is there one, follow links
_PROGRESS_S = 0.05
_PR_SET_PDEATHSIG = 1
# Of 1000; the daemon's own is far below 0. What a load has lost can be had again.
_OOM_SCORE = "500"


class _Gone(Exception):
    """The daemon has closed the socket."""


def main(socket_fd: int) -> None:
    """Serve one request and end the process. A bug ends it with a traceback and status 1."""
    _die_with_the_daemon()
    with socket.socket(fileno=socket_fd) as sock, contextlib.suppress(_Gone, ConnectionError):
        _tell(sock, **_serve(sock))
    os._exit(0)  # at once: somebody waits for it


def _die_with_the_daemon() -> None:
    # Its end is told by the socket too, but not to somebody who reads from a disk that hangs.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A stop of the whole service is the daemon's to handle: it ends its packers itself.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # some sandboxes don't let one
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _serve(sock: socket.socket) -> dict[str, Any]:
    head, dir_fd = _receive(sock, REQUEST.size)
    plan_bytes, has_plan, follow = REQUEST.unpack(head)
    plan = pb.PackPlan()
    plan.ParseFromString(_receive_exactly(sock, plan_bytes))
    last_told = 0.0

    def obtain() -> int:
        _tell(sock, fits=True)
        return _receive(sock, 1)[1]

    def progress(phase: str, done: int, total: int) -> None:
        nonlocal last_told
        now = time.monotonic()
        if now - last_told >= _PROGRESS_S or done == total:
            last_told = now
            _tell(sock, progress=[phase, done, total])

    try:
        digest, identities = weights.read_files(
            dir_fd, plan if has_plan else None, progress, obtain, follow=follow
        )
    except CachewarmError as exc:
        return {"error": exc.code, "message": str(exc)}
    except ConnectionError:  # the daemon's, no file has one
        raise
    except OSError as exc:
        return {"errno": exc.errno}
    return {"sha256": digest.hex(), "identities": identities}


def _receive(sock: socket.socket, size: int) -> tuple[bytes, int]:
    """A short message with one descriptor."""
    data, fds, _, _ = socket.recv_fds(sock, size, 1)
    if len(data) != size or len(fds) != 1:
        raise _Gone
    return data, fds[0]


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (more := sock.recv(size - len(data))):
            raise _Gone
        data += more
    return bytes(data)


def _tell(sock: socket.socket, **message: Any) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")
