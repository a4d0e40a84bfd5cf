"""The secret salt of block keys on disk, so that a snapshot's keys mean something after a reboot.

It is written when the first snapshot is: who takes none keeps no secret at rest.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from cachewarmd.config_file import writable_by_others
from cachewarmd.errors import InvalidRequestError
from cachewarmd.failpoints import may_fail

SALT_BYTES = 32
_SALT = "salt"


def refusal(info: os.stat_result, *, is_secret: bool) -> str:
    """Why a file or directory is not ours alone; "" if it is."""
    reason = writable_by_others(info, os.getuid())
    if not reason and is_secret and info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        reason = f"mode {stat.S_IMODE(info.st_mode):04o} lets others read; allowed: 0600"
    return reason


def read_salt(folder: Path) -> bytes | None:
    """The kept salt; None when there is none. Raises OSError, InvalidRequestError (not secret)."""
    try:
        fd = os.open(folder / _SALT, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        reason = refusal(os.fstat(fd), is_secret=True)
        salt = os.read(fd, SALT_BYTES + 1)
    finally:
        os.close(fd)
    if reason or len(salt) != SALT_BYTES:
        raise InvalidRequestError(f"{folder / _SALT}: {reason or f'not {SALT_BYTES} bytes'}")
    return salt


def keep_salt(folder: Path, salt: bytes) -> None:
    """Write it unless it is there. Raises OSError, InvalidRequestError: another one is kept."""
    may_fail("snapshot.salt")
    kept = read_salt(folder)
    if kept is None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = refusal(folder.stat(), is_secret=False)
        if reason:
            raise InvalidRequestError(f"{folder}: {reason}")
        path = folder / f".{_SALT}.{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, salt)
            os.fsync(fd)
        finally:
            os.close(fd)
        # Not renamed: of two daemons that come here together one must not replace the other's.
        with contextlib.suppress(FileExistsError):
            os.link(path, folder / _SALT)
        os.unlink(path)
        kept = read_salt(folder)
    if kept != salt:
        raise InvalidRequestError(
            f"{folder} keeps another salt than this pool's: a snapshot could not be used later; "
            "a daemon that starts with an empty pool takes the one that is kept"
        )
