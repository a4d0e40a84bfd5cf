"""The socket's place: who owns it, what is replaced, and what is left alone."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachewarmd.listener import Listening, SocketInUseError, SocketPathError, listen
from tests.daemon import open_fds


def path_of_length(folder: Path, length: int) -> Path:
    """A socket path of exactly so many bytes."""
    return folder / ("s" * (length - len(os.fsencode(folder)) - 1))


def die(listening: Listening) -> None:
    """What the kernel does for a daemon that is killed: the socket file stays."""
    listening.sock.close()
    os.close(listening.lock_fd)


@contextlib.contextmanager
def manager_socket(
    path: Path, kind: socket.SocketKind = socket.SOCK_STREAM, mode: int = 0o600
) -> Iterator[int]:
    """A listening socket as a service manager holds it; yields a descriptor to be passed on."""
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.bind(str(path))
        path.chmod(mode)
        if kind == socket.SOCK_STREAM:
            sock.listen()
        yield os.dup(sock.fileno())


def test_socket_and_new_directory_are_private(short_dir: Path) -> None:
    """Nobody else can connect, and nobody else can put another socket there."""
    path = short_dir / "new" / "s"
    with listen(path) as listening:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert listening.engine_gid is None


def test_own_socket_is_removed_in_the_end_and_nothing_leaks(short_dir: Path) -> None:
    """The lock file stays: it keeps the count of starts."""
    before = open_fds()
    with listen(short_dir / "s"):
        pass
    assert [path.name for path in short_dir.iterdir()] == ["s.lock"]
    assert open_fds() == before


def test_second_listener_is_refused_and_the_first_stays(short_dir: Path) -> None:
    """The lock decides, and the loser touches neither socket nor lock, and leaks nothing."""
    path = short_dir / "s"
    with listen(path):
        inode = path.stat().st_ino
        before = open_fds()
        with pytest.raises(SocketInUseError, match="another cachewarmd serves"):
            listen(path)
        assert open_fds() == before
        assert path.stat().st_ino == inode


def test_socket_left_by_a_dead_daemon_is_replaced(short_dir: Path) -> None:
    """A socket file without a lock holder is stale."""
    path = short_dir / "s"
    die(listen(path))
    assert path.is_socket()
    with listen(path), socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(path))


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


def test_lock_that_is_a_link_is_not_followed(short_dir: Path) -> None:
    """Else the start's number would overwrite the file it leads to."""
    path = short_dir / "s"
    Path(f"{path}.lock").symlink_to(short_dir / "victim")
    with pytest.raises(SocketPathError, match="symbolic links"):
        listen(path)
    assert not (short_dir / "victim").exists()


def test_passed_socket_is_used_and_its_path_stays(short_dir: Path) -> None:
    """It belongs to the service manager, before, during and after our time."""
    path = short_dir / "s"
    with manager_socket(path) as fd:
        inode = path.stat().st_ino
        with listen(path, fd) as listening:
            assert listening.is_activated
            assert listening.sock.fileno() == fd
            assert not listening.sock.getblocking()
        assert path.stat().st_ino == inode


def test_longest_path_works_and_one_byte_more_is_a_clear_error(short_dir: Path) -> None:
    """The kernel's limit is told before anything is made."""
    die(listen(path_of_length(short_dir, 107)))
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
    die(listen(short_dir / "s"))


@pytest.mark.parametrize(("mode", "lets_in"), [(0o600, False), (0o640, False), (0o660, True)])
def test_group_that_may_write_to_the_passed_socket_may_connect(
    short_dir: Path, mode: int, lets_in: bool
) -> None:
    """Whoever made the socket says so with its group and mode."""
    path = short_dir / "s"
    with manager_socket(path, mode=mode) as fd, listen(path, fd) as listening:
        assert listening.engine_gid == (path.stat().st_gid if lets_in else None)


def test_passed_socket_does_not_make_a_second_daemon(short_dir: Path) -> None:
    """The lock decides here too."""
    path = short_dir / "s"
    with manager_socket(path) as fd:
        other = os.dup(fd)
        with listen(path, fd), pytest.raises(SocketInUseError, match="another cachewarmd serves"):
            listen(path, other)
        os.close(other)


def test_passed_descriptor_that_cannot_be_ours_is_refused(short_dir: Path) -> None:
    """Another path, a datagram socket, a file: each named, and nothing leaks."""
    path = short_dir / "s"
    before = open_fds()
    other = r"listens on '.*/other', not on .*/s"
    with manager_socket(short_dir / "other") as fd, pytest.raises(SocketPathError, match=other):
        listen(path, fd)
    datagrams = manager_socket(short_dir / "datagrams", socket.SOCK_DGRAM)
    with datagrams as fd, pytest.raises(SocketPathError, match="a listening Unix stream socket"):
        listen(path, fd)
    no_socket = os.open(short_dir, os.O_RDONLY)
    with pytest.raises(SocketPathError, match=f"passed descriptor {no_socket} is no socket"):
        listen(path, no_socket)
    os.close(no_socket)
    assert open_fds() == before


def test_socket_that_somebody_listens_on_is_not_replaced(short_dir: Path) -> None:
    """A service manager holds it for a daemon that is not running: no lock, and yet not stale."""
    path = short_dir / "s"
    with manager_socket(path) as fd:
        inode = path.stat().st_ino
        with pytest.raises(SocketInUseError, match="another process listens"):
            listen(path)
        assert path.stat().st_ino == inode
        os.close(fd)
