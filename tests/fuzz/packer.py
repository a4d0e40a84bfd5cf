"""What a packer says to its daemon.

An input is all that comes from the packer until its end.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import AbstractContextManager
from typing import Any

import msgspec

from cachewarmd import packers
from cachewarmd.errors import CachewarmError
from cachewarmd.packers import Packers
from tests.fuzz.target import Target, replaced

_SHA256 = "ab" * 32
_IDENTITY = ["model.safetensors", 1, 2, 3, 4, 5]


class _Packer(packers._Process):
    """Says what it is told to say, without a process."""

    def __init__(self, said: bytes) -> None:
        self._sock, theirs = socket.socketpair()
        with theirs:
            # Room for it there is: an input is smaller than a socket's buffer.
            theirs.sendall(said)
            theirs.shutdown(socket.SHUT_WR)
            self._theirs = socket.socket(fileno=theirs.detach())

    def kill(self) -> None:
        self._theirs.close()

    def end(self) -> str:
        self._sock.close()
        self._theirs.close()
        return f"was killed by {signal.SIGKILL.name}"


class _OnePacker(Packers):
    def __init__(self, said: bytes) -> None:
        super().__init__()
        self._said = said

    def _take(self) -> packers._Process:
        return _Packer(self._said)


_FD = os.memfd_create("fuzz", os.MFD_CLOEXEC)


def _progress(phase: str, done: int, total: int) -> None:
    assert isinstance(phase, str)
    assert 0 <= done < 1 << 63
    assert 0 <= total < 1 << 63


def check(data: bytes) -> None:
    """A digest and identities, or an error that a client can be told."""
    try:
        digest, identities = _OnePacker(data).read(_FD, None, _progress, lambda: _FD, follow=False)
    except CachewarmError:
        return
    except OSError as exc:
        assert exc.strerror, "an error without a text"
        return
    assert len(digest) == 32
    for identity in identities:
        name, *numbers = identity
        assert isinstance(name, str)
        assert len(numbers) == 5
        assert all(type(number) is int for number in numbers)


class _Unchecked(msgspec.Struct):
    """As `_Said`, without what is allowed."""

    fits: bool = False
    progress: tuple[str, int, int] | None = None
    error: int | None = None
    message: str = ""
    errno: int | None = None
    sha256: str | None = None
    identities: list[Any] = []


def plant() -> AbstractContextManager[object]:
    """Unchecked numbers and texts."""
    return replaced(packers, "_Said", _Unchecked)


def make() -> Target:
    """What the packer says when all goes well, and when it does not."""
    good = [
        {"fits": True},
        {"progress": ["hash and pack", 5, 10]},
        {"sha256": _SHA256, "identities": [_IDENTITY]},
    ]
    error = {"error": 5, "message": "model.safetensors: truncated"}
    lines = [good, [good[2]], [error], [{"errno": 28}]]
    seeds = [b"".join(json.dumps(said).encode() + b"\n" for said in told) for told in lines]
    return Target(check, seeds, plant)
