"""The socket's place: who owns it, what is replaced, and what is left alone."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from cachewarmd.listener import SocketInUseError, SocketPathError, listen
from tests.daemon import open_fds


def path_of_length(folder: Path, length: int) -> Path:
    """A socket path of exactly so many bytes."""
    return folder / ("s" * (length - len(os.fsencode(folder)) - 1))


def close(listening: tuple[socket.socket, int]) -> None:
    listening[0].close()
    os.close(listening[1])


def test_socket_and_new_directory_are_private(short_dir: Path) -> None:
    """Nobody else can connect, and nobody else can put another socket there."""
    path = short_dir / "new" / "s"
    listening = listen(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    close(listening)


def test_second_listener_is_refused_and_the_first_stays(short_dir: Path) -> None:
    """The lock decides, and the loser touches neither socket nor lock, and leaks nothing."""
    path = short_dir / "s"
    listening = listen(path)
    inode = path.stat().st_ino
    before = open_fds()
    with pytest.raises(SocketInUseError, match="another cachewarmd serves"):
        listen(path)
    assert open_fds() == before
    assert path.stat().st_ino == inode
    close(listening)


def test_socket_left_by_a_dead_daemon_is_replaced(short_dir: Path) -> None:
    """A socket file without a lock holder is stale."""
    path = short_dir / "s"
    close(listen(path))
    assert path.is_socket()
    listening = listen(path)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))
    close(listening)


def test_other_files_at_the_path_are_left_untouched(short_dir: Path) -> None:
    """A regular file, and a link even to a socket, are errors that say so."""
    path = short_dir / "s"
    path.write_text("precious")
    with pytest.raises(SocketPathError, match="not a socket; it was left untouched"):
        listen(path)
    assert path.read_text() == "precious"
    link = short_dir / "link"
    link.symlink_to(path)
    with pytest.raises(SocketPathError, match="left untouched"):
        listen(link)
    assert link.is_symlink()


def test_longest_path_works_and_one_byte_more_is_a_clear_error(short_dir: Path) -> None:
    """The kernel's limit is told before anything is made."""
    close(listen(path_of_length(short_dir, 107)))
    too_long = path_of_length(short_dir, 108)
    with pytest.raises(SocketPathError, match="of 108 bytes: at most 107 are allowed"):
        listen(too_long)
    assert not Path(f"{too_long}.lock").exists()


def test_directory_that_others_can_write_is_refused(short_dir: Path) -> None:
    """They could replace the socket by their own; a sticky directory is fine."""
    short_dir.chmod(0o777)
    with pytest.raises(SocketPathError, match="writable by nobody else"):
        listen(short_dir / "s")
    short_dir.chmod(0o1777)
    close(listen(short_dir / "s"))
