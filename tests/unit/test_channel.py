"""The front's end of a worker's channel, on the loop that the front has."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
import uvloop

from engine.channel import AsyncChannel, BlockingChannel, BrokenChannelError
from engine.request import StatsRequest


def test_a_worker_that_is_gone_shows_at_receive_and_never_at_send() -> None:
    """One that was killed with unread messages resets the connection, which closes our end."""

    async def run() -> None:
        ours, theirs = socket.socketpair()
        channel = AsyncChannel(*await asyncio.open_unix_connection(sock=ours))
        channel.send(StatsRequest())
        await asyncio.to_thread(theirs.recv, 1, socket.MSG_PEEK)
        theirs.close()
        for _ in range(10):
            await asyncio.sleep(0)
            channel.send(StatsRequest())
        with pytest.raises(BrokenChannelError):
            await channel.receive()
        channel.send(StatsRequest())
        channel.close()

    uvloop.run(run())


def test_a_field_that_is_nested_without_end_breaks_the_channel() -> None:
    """Unknown fields are passed over, but not at any depth; no other error gets out."""
    body = b"\x83\xa4type\xa5Abort\xa7attempt\x01\xa1x" + b"\x91" * 100_000 + b"\x00"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = theirs.makefile("wb", buffering=1 << 20)
        sender.write(struct.pack("<I", len(body)) + body)
        sender.flush()
        with pytest.raises(BrokenChannelError):
            BlockingChannel(ours).receive()
