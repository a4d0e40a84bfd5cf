"""Messages with descriptors, in the daemon's own handlers, one client after the other.

An input is a list of messages: a byte that says which descriptors come with it (up to 2 of them,
and of which kind), two for the length, and an Envelope. Memory and clients are small; weights are
never read.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from cachewarmd import layout

# Before anything else takes over the figures.
layout.EXTENT_BYTES = 128 << 10
layout.RECORDS_PER_EXTENT = layout.EXTENT_BYTES // layout.MIN_SLOT_BYTES
layout.MAX_CLIENTS, layout.MAX_LEASES_PER_CLIENT = 4, 8

from google.protobuf.message import DecodeError  # noqa: E402 - see above

from cachewarmd import lease, log, protocol, segment, server  # noqa: E402
from cachewarmd.config import Config  # noqa: E402
from cachewarmd.errors import InvalidRequestError, ModelFilesError  # noqa: E402
from cachewarmd.fdstore import FdStore  # noqa: E402
from cachewarmd.kv import BlockStore  # noqa: E402
from cachewarmd.notify import Notifier  # noqa: E402
from cachewarmd.pins import Pins  # noqa: E402
from cachewarmd.server import Server  # noqa: E402
from cachewarmd.state import Client  # noqa: E402
from cachewarmd.survey import Survey  # noqa: E402
from cachewarmd.v1 import control_pb2 as pb  # noqa: E402
from cachewarmd.warmup import Warmer  # noqa: E402
from tests.fuzz.target import Target, replaced  # noqa: E402

_POOL_BYTES = 64 << 10
_STEPS = 6  # of the loop, in which a task ends that reads no weights
_NEAR = 8  # descriptors from the first free one on, of which none may be left open


class _Peer:
    """A connection as the handlers see it: it keeps what it is told to send."""

    def __init__(self) -> None:
        self.pid, self.uid = os.getpid(), os.getuid()
        self.is_closed = False
        self.sent: list[pb.Envelope] = []

    def is_open(self) -> bool:
        return not self.is_closed

    def send(self, envelope: pb.Envelope, fds: tuple[int, ...] = ()) -> None:
        for fd in fds:
            os.fstat(fd)
        envelope.num_fds = len(fds)
        protocol.encode(envelope)
        self.sent.append(envelope)

    def close(self) -> None:
        self.is_closed = True

    def forget_peer(self) -> None:
        pass

    async def wait_peer_dead(self, limit_s: float) -> bool:
        return True


async def _no_weights(*_: object, **__: object) -> Any:
    raise ModelFilesError("there are none")


async def _no_snapshot(*_: object) -> Any:
    raise InvalidRequestError("there is no disk")


def _new_server() -> Server:
    log.configure("fuzz", "error")
    config = Config(
        socket=Path("/nowhere/s"),
        pool_bytes=2 * layout.EXTENT_BYTES,
        exit_when_unused=None,
        cgroup_root=Path("/nowhere"),
        state_dir=None,
        snapshot_path=None,
        snapshot_on_stop=False,
        snapshot_at_boot=False,
        snapshot_max_bytes=0,
        scrub_bytes_per_second=0,
        max_client_slots=75,
        l2_policy="arc",
        pin_bytes=25,
        prompt_bytes=1 << 20,
        prefault_bytes_per_second=0,
        numa="off",
        numa_nodes=(),
        on_change="keep",
        lock="off",
        strict=False,
        learn="digests",
        log_level="error",
    )
    made = Server(config, 1, FdStore(Notifier(), {}))
    state = made._state
    while state.commit_extent():
        pass
    state.weights.attach = _no_weights  # type: ignore[method-assign]
    state.snapshots.save = _no_snapshot  # type: ignore[method-assign]
    state.snapshots.load = _no_snapshot  # type: ignore[method-assign]
    lease.start_time = lambda pid: 1  # reads a file
    # So does this, in a thread: it may have one open when an input is over.
    state.surveys._look = lambda regions, of: Survey(  # type: ignore[method-assign]
        time.monotonic(), of, pb.NumaReply(), 0
    )
    # A new memfd takes another number, which looks like a leak.
    state.drop_prompts = lambda: None  # type: ignore[method-assign]
    # It never stops.
    state.stop = cast(asyncio.Event, SimpleNamespace(set=lambda: None, is_set=lambda: False))
    return made


def _private_pool() -> int:
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, _POOL_BYTES)
    fcntl.fcntl(fd, segment.F_ADD_SEALS, segment.F_SEAL_SHRINK)
    return fd


_loop = asyncio.new_event_loop()
_server = _new_server()
_state = _server._state
_KINDS = (
    _private_pool(),
    os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC),
    os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
    os.eventfd(0),
)


def check(data: bytes) -> None:
    """No error but the caller's, everything in order, and nothing left when the client is gone."""
    first = os.dup(_KINDS[0])
    os.close(first)
    _loop.run_until_complete(_serve(data))
    for fd in range(first, first + _NEAR):
        try:
            os.fstat(fd)
        except OSError:
            continue
        raise AssertionError("a descriptor was leaked")


async def _serve(data: bytes) -> None:
    peer = _Peer()
    client = Client(1, cast(Any, peer), Counter())
    _state.clients.add(client)
    while data and not peer.is_closed:
        kinds, size = data[0], int.from_bytes(data[1:3], "little")
        body, data = data[3 : 3 + size], data[3 + size :]
        try:
            envelope = pb.Envelope.FromString(body)
        except DecodeError:
            break
        count = min(kinds & 3, protocol.MAX_FDS)
        fds = [os.dup(_KINDS[kinds >> shift & 3]) for shift in (2, 4)[:count]]
        _server._on_frame(client, envelope, fds)
    if _state.kv._index:
        _state.kv.check_invariants()
    for _ in range(_STEPS if len(asyncio.all_tasks()) > 1 else 0):
        await asyncio.sleep(0)
    _server._on_end(client)
    # Nothing tells when all that it began is over.
    while client.tasks or _server._background or client in _state.clients:  # noqa: ASYNC110
        await asyncio.sleep(0)
    for envelope in peer.sent:
        if envelope.WhichOneof("body") == "error":
            assert envelope.error.code != pb.ERROR_CODE_INTERNAL, envelope.error.message
    _forget_all()


def _forget_all() -> None:
    """The next client finds a daemon that has just started."""
    _state.pins.end(lambda _: True)
    assert not _state.pins.num_bytes, "pinned by no pin"
    assert not _state.kv.num_leases, "a lease outlives its client"
    assert not _state.pool.shared.clients["is_used"].any(), "rows outlive their client"
    _state.kv.evict(lambda _: True)
    _state.kv.check_invariants()
    assert not _state.kv._index, "a block that nothing holds can't be evicted"
    _state.kv = BlockStore(_state.pool, _state._sizes_in_use, _state.config.l2_policy)
    _state.pins = Pins(_state.kv, _state.pins.max_bytes)
    _state.warmer = Warmer(_state.weights)
    _state.counters.clear()


def plant() -> AbstractContextManager[object]:
    """An unchecked count: of the descriptors that come with a hello."""
    return replaced(server, "_FD_VERBS", {**server._FD_VERBS, "hello": (0, 2)})


def _message(kinds: int, envelope: pb.Envelope) -> bytes:
    body = envelope.SerializeToString()
    return bytes([kinds]) + len(body).to_bytes(2, "little") + body


def make() -> Target:
    """What an engine, a front and an operator say."""
    hello = pb.Hello(protocol_version=protocol.PROTOCOL_VERSION, role=pb.ROLE_ENGINE, name="e")
    hello.private_pool_bytes = _POOL_BYTES
    stamp = pb.Register(stamp=b"s" * 32, slot_bytes=5000, block_size=4, description="d")
    keys = [b"k" * 32, b"l" * 32]
    chain = [
        pb.PublishBlock(parent_key=b"r" * 32, key=keys[0], num_tokens=4),
        pb.PublishBlock(parent_key=keys[0], key=keys[1], num_tokens=2, private_offset=8192),
    ]
    claims = [pb.Claim(stamp_id=0, block=pb.Handle(slot=0, generation=0)), pb.Claim(stamp_id=0)]
    engine = [
        _message(1, pb.Envelope(id=1, hello=hello)),
        _message(0, pb.Envelope(id=2, register=stamp)),
        _message(0, pb.Envelope(id=3, lookup=pb.Lookup(keys=keys[0], tail_keys=keys[1]))),
        _message(0, pb.Envelope(id=4, publish=pb.Publish(lease=1, chain=chain, is_root=True))),
        _message(0, pb.Envelope(id=5, lookup=pb.Lookup(keys=keys[0], tail_keys=keys[1]))),
        _message(0, pb.Envelope(id=6, reattach=pb.Reattach(epoch=1, client_id=1, claims=claims))),
        _message(0, pb.Envelope(id=9, pin=pb.Pin(lease=1, ttl_ms=1000, label="l"))),
        _message(0, pb.Envelope(id=7, release=pb.Release(lease=1))),
        _message(0, pb.Envelope(id=8, peek=pb.Peek(keys=keys))),
    ]
    plan = pb.PackPlan(segment_bytes=64)
    attach = pb.AttachWeights(model_name="m", plan=plan)
    front = [
        _message(
            0,
            pb.Envelope(
                id=1,
                hello=pb.Hello(protocol_version=protocol.PROTOCOL_VERSION, role=pb.ROLE_ENGINE),
            ),
        ),
        _message(9, pb.Envelope(id=2, attach_weights=attach)),
        _message(0, pb.Envelope(id=3, provide=pb.Provide(weights_sha256=b"w" * 32))),
        _message(0, pb.Envelope(warm_item_update=pb.WarmItemUpdate(job_id=1))),
    ]
    prompt = pb.WarmPrompt(text="hello")
    boss = pb.Hello(protocol_version=protocol.PROTOCOL_VERSION, role=pb.ROLE_ADMIN)
    warmup = pb.Warmup(model_name="m", plan=plan, prompts=[prompt])
    admin = [
        _message(0, pb.Envelope(id=1, hello=boss)),
        _message(9, pb.Envelope(id=2, warmup=warmup)),
        _message(0, pb.Envelope(id=3, watch_job=pb.WatchJob(job_id=1))),
        _message(0, pb.Envelope(id=4, jobs=pb.Jobs())),
        _message(9, pb.Envelope(id=5, is_warm=pb.IsWarm(model="m"))),
        _message(0, pb.Envelope(id=6, evict=pb.Evict())),
        _message(0, pb.Envelope(id=7, cancel_job=pb.CancelJob(job_id=1))),
        _message(0, pb.Envelope(id=8, status=pb.Status())),
        _message(0, pb.Envelope(id=9, kick=pb.Kick(client_id=7))),
        _message(9, pb.Envelope(id=10, snapshot_save=pb.SnapshotSave(name="s"))),
        _message(9, pb.Envelope(id=11, snapshot_load=pb.SnapshotLoad())),
        _message(0, pb.Envelope(id=12, verify=pb.Verify())),
        _message(0, pb.Envelope(id=14, pin=pb.Pin(key=keys[0]))),
        _message(0, pb.Envelope(id=15, pins=pb.Pins())),
        _message(0, pb.Envelope(id=16, unpin=pb.Unpin(all=True))),
        _message(0, pb.Envelope(id=17, purge=pb.Purge())),
        _message(0, pb.Envelope(id=18, numa=pb.Numa())),
        _message(0, pb.Envelope(id=13, shutdown=pb.Shutdown())),
    ]
    seeds = [b"".join(said) for said in (engine, engine[:3], front, admin, admin[:3])]
    return Target(check, seeds, plant)
