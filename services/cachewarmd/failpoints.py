"""Named places where a test can kill, delay or fail the process: on both sides of state changes.

    CACHEWARM_FAILPOINT=NAME:kill|delay[=SECONDS]|error[:TOKEN][,...]

With a TOKEN, a path, the point acts once for each time that file is put there: it removes the file
first. `error` acts only where something can fail. Nothing is armed unless a program's main calls
`arm`, and then `hit` costs a look at an empty dictionary.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "CACHEWARM_FAILPOINT"
_DELAY_S = 0.2


@dataclass(frozen=True)
class _Action:
    kind: str
    delay_s: float
    token: str


_armed: dict[str, _Action] = {}


def arm(environ: Mapping[str, str]) -> None:
    """Read the variable. Raises ValueError naming what it can't be."""
    for item in filter(None, environ.get(VARIABLE, "").split(",")):
        name, _, rest = item.partition(":")
        what, _, token = rest.partition(":")
        kind, _, seconds = what.partition("=")
        if not name or kind not in ("kill", "delay", "error"):
            raise ValueError(f"{VARIABLE}: {item!r} is not allowed: NAME:kill|delay|error[:TOKEN]")
        _armed[name] = _Action(kind, float(seconds or _DELAY_S), token)


def hit(name: str) -> None:
    """The process is at this point, where nothing but its death can go wrong."""
    if _armed and name in _armed:
        _act(name, _armed[name])


def may_fail(name: str) -> None:
    """As `hit`, where the kernel can refuse. Raises OSError when the point is armed to fail."""
    if _armed and name in _armed and _act(name, _armed[name]):
        raise OSError(errno.EIO, f"fail point {name}")


def _act(name: str, action: _Action) -> bool:
    """True = the caller is to fail."""
    if action.token:
        try:
            os.unlink(action.token)
        except FileNotFoundError:
            return False
    match action.kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "delay":
            time.sleep(action.delay_s)
    return action.kind == "error"
