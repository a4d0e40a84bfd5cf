"""Frames and descriptors: in whatever pieces they arrive, nothing is lost, guessed or leaked."""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachewarmd import protocol
from cachewarmd.errors import ProtocolError
from cachewarmd.protocol import FrameDecoder
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import open_fds


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets, of which the second does not block."""
    left, right = socket.socketpair()
    right.setblocking(False)
    with left, right:
        yield left, right


@pytest.fixture
def no_fd_leak() -> Iterator[None]:
    """Fails the test when it ends with more, or fewer, descriptors open than it began with."""
    before = open_fds()
    yield
    assert open_fds() == before


def new_fds(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]


def hello(name: str = "x", num_fds: int = 0) -> pb.Envelope:
    return pb.Envelope(id=1, num_fds=num_fds, hello=pb.Hello(name=name))


def test_frames_survive_a_split_at_every_byte() -> None:
    """Two frames cut in two at any place come out the same."""
    sent = [hello("first"), pb.Envelope(id=2, status=pb.Status())]
    data = b"".join(map(protocol.encode, sent))
    for cut in range(len(data) + 1):
        decoder = FrameDecoder()
        got = decoder.feed(data[:cut], []) + decoder.feed(data[cut:], [])
        assert [envelope for envelope, _ in got] == sent


def test_frames_survive_single_bytes() -> None:
    """A peer that sends byte by byte is understood."""
    decoder = FrameDecoder()
    got = [frame for byte in protocol.encode(hello()) for frame in decoder.feed(bytes([byte]), [])]
    assert [envelope for envelope, _ in got] == [hello()]


@settings(max_examples=50)
@given(
    names=st.lists(st.text(max_size=30), max_size=5),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_any_frames_in_any_pieces_come_out_in_order(names: list[str], cuts: list[int]) -> None:
    """What goes in comes out, whatever the pieces are."""
    sent = [hello(name) for name in names]
    data = b"".join(map(protocol.encode, sent))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    decoder = FrameDecoder()
    got = []
    for start, end in itertools.pairwise(places):
        got += decoder.feed(data[start:end], [])
    assert [envelope for envelope, _ in got] == sent


def test_frame_over_the_limit_is_refused_by_its_length_alone() -> None:
    """Nothing is buffered for a frame that says it is too large."""
    with pytest.raises(ProtocolError, match=r"at most 8388608"):
        FrameDecoder().feed(struct.pack("<I", protocol.MAX_FRAME_BYTES + 1), [])


def test_frame_at_the_limit_is_taken_and_one_byte_more_can_not_be_encoded() -> None:
    """The limit is the same on both sides."""
    empty = hello("").ByteSize()
    room = protocol.MAX_FRAME_BYTES - empty - 8  # tag and length of the name, longer inner lengths
    largest = hello("n" * room)
    while largest.ByteSize() < protocol.MAX_FRAME_BYTES:
        room += 1
        largest = hello("n" * room)
    assert largest.ByteSize() == protocol.MAX_FRAME_BYTES
    assert FrameDecoder().feed(protocol.encode(largest), [])[0][0] == largest
    with pytest.raises(ProtocolError, match="at most"):
        protocol.encode(hello("n" * (room + 1)))


@pytest.mark.usefixtures("no_fd_leak")
def test_garbage_is_an_error_and_closes_descriptors_of_frames_before_it() -> None:
    """A good frame with a descriptor in the same piece as garbage leaks nothing."""
    fds = new_fds(1)
    data = protocol.encode(hello(num_fds=1)) + struct.pack("<I", 4) + b"\xff" * 4
    with pytest.raises(ProtocolError, match="not an Envelope"):
        FrameDecoder().feed(data, fds)


@pytest.mark.usefixtures("no_fd_leak")
@pytest.mark.parametrize(
    ("named", "passed"), [(0, 1), (1, 0), (2, 1), (1, 2), (3, 3), (0, 3), (2**32 - 1, 2)]
)
def test_descriptors_that_do_not_match_the_frame_are_refused_and_closed(
    named: int, passed: int
) -> None:
    """Too many, too few or more than are ever allowed: an error, and every one is closed."""
    decoder = FrameDecoder()
    with pytest.raises(ProtocolError):
        decoder.feed(protocol.encode(hello(num_fds=named)), new_fds(passed))


@pytest.mark.usefixtures("no_fd_leak")
def test_descriptors_wait_for_the_rest_of_their_frame_and_are_closed_with_the_decoder() -> None:
    """They come with the first byte; a connection that ends before the last gives them up."""
    data = protocol.encode(hello(num_fds=1))
    decoder = FrameDecoder()
    assert decoder.feed(data[:3], new_fds(1)) == []
    ((envelope, fds),) = decoder.feed(data[3:], [])
    assert envelope.num_fds == len(fds) == 1
    protocol.close_all(fds)
    assert decoder.feed(data[:3], new_fds(1)) == []
    decoder.close()


@pytest.mark.usefixtures("no_fd_leak")
def test_descriptors_travel_beside_their_own_frame(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """Of frames sent in a row each gets its own descriptors, in order."""
    left, right = pair
    sizes = [0, 2, 1, 0, 1]
    sent: list[os.stat_result] = []
    for number, size in enumerate(sizes):
        fds = [os.memfd_create(f"m{number}"), *new_fds(size - 1)] if size else []
        sent += [os.fstat(fd) for fd in fds[:1]]
        data = protocol.encode(hello(str(number), num_fds=len(fds)))
        assert protocol.send_with_fds(left, data, fds) == len(data)
        protocol.close_all(fds)
    decoder = FrameDecoder()
    got: list[tuple[pb.Envelope, list[int]]] = []
    while len(got) < len(sizes):
        got += decoder.feed(*protocol.recv_bytes_and_fds(right))
    assert [envelope.hello.name for envelope, _ in got] == list("01234")
    assert [len(fds) for _, fds in got] == sizes
    firsts = [os.fstat(fds[0]) for _, fds in got if fds]
    assert [info.st_ino for info in firsts] == [info.st_ino for info in sent]
    for _, fds in got:
        protocol.close_all(fds)


@pytest.mark.usefixtures("no_fd_leak")
def test_more_descriptors_than_there_is_room_for_are_an_error(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """The kernel cuts them off; those that came through are closed."""
    left, right = pair
    fds = new_fds(40)
    protocol.send_with_fds(left, b"x", fds)
    protocol.close_all(fds)
    with pytest.raises(ProtocolError, match="truncated"):
        protocol.recv_bytes_and_fds(right)


def test_received_descriptors_are_not_inherited(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """A child process never holds a client's pool open."""
    left, right = pair
    (fd,) = new_fds(1)
    protocol.send_with_fds(left, b"x", [fd])
    os.close(fd)
    _, (received,) = protocol.recv_bytes_and_fds(right)
    assert not os.get_inheritable(received)
    os.close(received)
