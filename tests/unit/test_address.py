"""Where the front listens: taken by nobody else, and given back."""

from __future__ import annotations

import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.address import GrpcAddress
from engine.errors import StartError

# As the server does: else a second one takes the same port in silence.
NO_REUSE = (("grpc.so_reuseport", 0),)


@pytest.fixture
async def server() -> AsyncIterator[Any]:
    made = grpc.aio.server(options=NO_REUSE)
    yield made
    await made.stop(0)


def unix(path: Path) -> GrpcAddress:
    return GrpcAddress("ignored", 1, f"unix:{path}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def can_connect(address: GrpcAddress) -> bool:
    async with grpc.aio.insecure_channel(address.target) as channel:
        try:
            await channel.unary_unary("/no/Method")(b"", timeout=10)
        except grpc.aio.AioRpcError as exc:
            return exc.code() == grpc.StatusCode.UNIMPLEMENTED
    return True


# -- TCP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
async def test_port_0_is_a_free_one_that_is_told(server: Any, host: str, shown: str) -> None:
    """`target` is what clients dial, brackets included."""
    address = GrpcAddress(host, 0, "")
    with address.bind(server):
        await server.start()
        address.publish()
        name, _, port = address.target.rpartition(":")
        assert (name, int(port) > 0) == (shown, True)
        assert await can_connect(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
async def test_f6_a_port_that_somebody_listens_on_is_refused(server: Any, host: str) -> None:
    """Also under a wildcard, which the kernel would let us bind over a loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with (
            pytest.raises(StartError, match=rf"{host}:{port} is in use"),
            GrpcAddress(host, port, "").bind(server),
        ):
            raise AssertionError("bound")


async def test_an_address_that_is_not_ours_is_refused_by_name(server: Any) -> None:
    """One of another host (a documentation address) can't be bound."""
    with (
        pytest.raises(StartError, match=r"192\.0\.2\.1:0 .*can't be bound"),
        GrpcAddress("192.0.2.1", 0, "").bind(server),
    ):
        raise AssertionError("bound")


def test_workers_dial_in_beside_the_address(tmp_path: Path) -> None:
    """A socket per front: by port, or beside its own socket."""
    assert GrpcAddress("h", 50, "").worker_socket(tmp_path) == tmp_path / "engine-50.sock"
    assert unix(tmp_path / "e").worker_socket(Path("/other")) == tmp_path / "e.workers"


# -- Unix sockets -------------------------------------------------------------------------------


async def test_a_unix_socket_is_there_when_the_server_serves(server: Any, short_dir: Path) -> None:
    """Not before, for this user only, and nothing is left of it at the end."""
    path = short_dir / "e"
    address = unix(path)
    assert address.target == f"unix:{path}"
    with address.bind(server):
        assert not path.exists()
        await server.start()
        address.publish()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await can_connect(address)
        assert names(short_dir) == ["e"]
        await server.stop(0)
        assert path.exists(), "gRPC deletes only the name it bound"
    assert names(short_dir) == []


async def test_a_start_that_fails_leaves_nothing(server: Any, short_dir: Path) -> None:
    """Bound, but never published."""
    with pytest.raises(ValueError, match="later"), unix(short_dir / "e").bind(server):
        raise ValueError("later")
    await server.stop(0)
    assert names(short_dir) == []


async def test_g13_a_socket_that_nobody_listens_on_is_taken_over(
    server: Any, short_dir: Path
) -> None:
    """Left by an engine that was killed."""
    path = short_dir / "e"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    address = unix(path)
    with address.bind(server):
        await server.start()
        address.publish()
        assert await can_connect(address)
    assert not path.exists()


async def test_g13_a_socket_in_use_is_refused_and_left_alone(server: Any, short_dir: Path) -> None:
    """The one that listens keeps it."""
    path = short_dir / "e"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with (
            pytest.raises(StartError, match="is in use: another server"),
            unix(path).bind(server),
        ):
            raise AssertionError("bound")
        assert names(short_dir) == ["e"]


async def test_g13_what_is_no_socket_is_left_alone(server: Any, short_dir: Path) -> None:
    """A file of somebody's, or a link."""
    file, link = short_dir / "file", short_dir / "link"
    file.write_text("mine")
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(StartError, match="no socket"), unix(path).bind(server):
            raise AssertionError("bound")
    assert file.read_text() == "mine"


async def test_g13_a_path_too_long_for_the_kernel_is_refused_with_the_limit(
    server: Any, short_dir: Path
) -> None:
    """It would be cut, or fail without a reason."""
    path = short_dir / ("x" * 100)
    with pytest.raises(StartError, match=r"at most \d+ bytes"), unix(path).bind(server):
        raise AssertionError("bound")


async def test_the_folder_of_a_socket_is_made_for_this_user_only(
    server: Any, short_dir: Path
) -> None:
    """What can't be made is named."""
    path = short_dir / "new" / "e"
    with unix(path).bind(server):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (short_dir / "file").write_text("mine")
    with pytest.raises(StartError, match="file"), unix(short_dir / "file" / "e").bind(server):
        raise AssertionError("bound")


async def test_a_socket_that_another_engine_has_put_there_stays(
    server: Any, short_dir: Path
) -> None:
    """An upgrade takes the name over while the old one drains; its end must not cut the new."""
    path = short_dir / "e"
    address = unix(path)
    with socket.socket(socket.AF_UNIX) as successor:
        with address.bind(server):
            await server.start()
            address.publish()
            successor.bind(str(short_dir / "new"))
            (short_dir / "new").rename(path)
        assert path.exists()
