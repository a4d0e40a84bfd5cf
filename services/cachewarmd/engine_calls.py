"""What the verbs of engines do, on the daemon's loop; none of them waits.

A long call becomes a task of its client.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from cachewarmd import (
    __version__,
    layout,
    learned,
    protocol,
    segment,
    verification,
)
from cachewarmd.block import Block, StampInfo
from cachewarmd.errors import (
    InvalidRequestError,
    LimitError,
    NotFoundError,
    NotPermittedError,
    ProtocolError,
    VersionMismatchError,
)
from cachewarmd.failpoints import hit
from cachewarmd.job import Provider
from cachewarmd.keys import peer_salt
from cachewarmd.kv import NewBlock, Source
from cachewarmd.layout import MAX_LEASES_PER_CLIENT
from cachewarmd.log import get_logger
from cachewarmd.prompts import MAX_IDS_BYTES
from cachewarmd.state import Client, State
from cachewarmd.v1 import control_pb2 as pb

_log = get_logger()

MAX_KEYS = 65_536
MAX_PUBLISH_BLOCKS = 8192  # 128K tokens of the smallest usual block; the loop copies them all
MAX_PIECES = 1024  # of prompts in a message: 250K tokens
MAX_TEXT = 1024  # characters of names and descriptions that clients give


def _hello(state: State, client: Client, envelope: pb.Envelope, fds: list[int]) -> bool:
    hello = envelope.hello
    if hello.protocol_version != protocol.PROTOCOL_VERSION:
        raise VersionMismatchError(
            f"protocol version {hello.protocol_version}, "
            f"this daemon speaks {protocol.PROTOCOL_VERSION}"
        )
    if hello.role not in (pb.ROLE_OBSERVER, pb.ROLE_ENGINE, pb.ROLE_ADMIN):
        raise ProtocolError(f"role {hello.role} is not known")
    if fds:
        if hello.role != pb.ROLE_ENGINE:
            raise ProtocolError("only an engine brings a private pool")
        segment.check_private_pool(fds[0], hello.private_pool_bytes)
    is_engine = hello.role == pb.ROLE_ENGINE
    reply = pb.HelloReply(
        protocol_version=protocol.PROTOCOL_VERSION,
        version=__version__,
        pid=os.getpid(),
        epoch=state.epoch,
        pool_bytes=state.pool.pool_bytes,
        extent_bytes=layout.EXTENT_BYTES,
        salt=peer_salt(state.pool.salt, client.connection.uid) if is_engine else b"",
        client_id=client.client_id,
        pool_id=state.pool.pool_id,
    )
    if is_engine:
        client.rows = state.lease_table.open(client.connection.pid, client.client_id)
        client.holding.limit = lambda: state.max_held_bytes(client)
    client.reply(envelope.id, state.readonly_fds if fds else (), hello_reply=reply)
    # Only now: duplicating descriptors for the reply can fail, and then `fds` are closed.
    if fds:
        client.pool_fd, client.pool_bytes = fds[0], hello.private_pool_bytes
    client.role, client.name = hello.role, hello.name[:64]
    client.pid = client.connection.pid
    if is_engine:
        _log.info("engine_came", client=client.name, pid=client.pid)
    return bool(fds)


def _attach_weights(state: State, client: Client, envelope: pb.Envelope, fds: list[int]) -> bool:
    client.check_tasks()
    check_names(envelope.attach_weights)
    client.run(envelope.id, "attach_weights", _attach(state, client, envelope, fds))
    return True


async def _attach(state: State, client: Client, envelope: pb.Envelope, fds: list[int]) -> None:
    request = envelope.attach_weights
    last_told = 0.0

    def notify(phase: str, done: int, total: int) -> None:
        nonlocal last_told
        now = time.monotonic()
        if now - last_told < 0.1:
            return
        last_told = now
        progress = pb.AttachProgress(phase=phase, done_bytes=done, total_bytes=total)
        client.connection.send(pb.Envelope(id=envelope.id, more=True, attach_progress=progress))

    try:
        model, loaded, already = await state.weights.attach(
            fds[0],
            request.plan,
            request.model_name,
            request.version,
            notify,
            follow_links=client.may_follow_links,
        )
    finally:
        protocol.close_all(fds)
    hit("weights.loaded")
    state.serve_weights(client, request.model_name or model.name, loaded.weights_sha256)
    hit("weights.served")
    reply = pb.AttachWeightsReply(
        weights_sha256=loaded.weights_sha256,
        version=model.shown_version,
        segment_bytes=loaded.size,
        already_warm=already,
    )
    readonly = segment.reopen_readonly(loaded.fd)
    try:
        client.reply(envelope.id, (readonly,), attach_weights_reply=reply)
    finally:
        os.close(readonly)


def _register(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    request = envelope.register
    num_known = len(state.kv.stamps)
    hit("register.before")
    info = state.kv.register(
        request.stamp,
        request.slot_bytes,
        request.block_size,
        request.description[:MAX_TEXT],
        request.weights_sha256,
    )
    if len(state.kv.stamps) > num_known:
        state.remember()  # before a record can name it
    hit("register.after")
    client.stamps[info.stamp_id] = info
    reply = pb.RegisterReply(stamp_id=info.stamp_id, wants_token_ids=state.config.learn == "ids")
    client.reply(envelope.id, register_reply=reply)


def _peek(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    stamp = _stamp_of(client, envelope.peek.stamp_id)
    num_blocks = state.kv.peek(stamp, envelope.peek.keys)
    client.reply(envelope.id, peek_reply=pb.PeekReply(num_blocks=num_blocks))


def _stamp_of(client: Client, stamp_id: int) -> StampInfo:
    stamp = client.stamps.get(stamp_id)
    if stamp is None:
        raise InvalidRequestError(f"stamp_id {stamp_id} was not registered")
    return stamp


def _lookup(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    request = envelope.lookup
    stamp = _stamp_of(client, request.stamp_id)
    if len(request.keys) + len(request.tail_keys) > MAX_KEYS * protocol.KEY_BYTES:
        raise LimitError(f"at most {MAX_KEYS} keys are allowed in a lookup")
    learned.check(stamp, request)
    unverified = state.kv.unverified(stamp, protocol.split_keys(request.keys))
    if unverified and client.may_run:

        async def verify_first() -> None:
            await verification.verify(state.kv, unverified)
            _answer_lookup(state, client, envelope.id, stamp, request)

        client.run(envelope.id, "lookup", verify_first())
    else:
        _answer_lookup(state, client, envelope.id, stamp, request)


def _answer_lookup(
    state: State, client: Client, request_id: int, stamp: StampInfo, request: pb.Lookup
) -> None:
    if len(client.leases) >= MAX_LEASES_PER_CLIENT:
        raise LimitError(f"{MAX_LEASES_PER_CLIENT} leases are held, no more are allowed")
    started = time.monotonic()
    keys, tail_keys = map(protocol.split_keys, (request.keys, request.tail_keys))
    lease, blocks = state.kv.lookup(stamp, keys, tail_keys, client.rows, client.holding)
    _took(state, "lookup", started)
    client.leases.add(lease)
    reply = pb.LookupReply(lease=lease, blocks=b"".join([b.packed for b in blocks]))
    client.reply(request_id, lookup_reply=reply)
    if state.traffic is not None:
        learned.count(state.traffic, stamp, request, keeps_ids=state.config.learn == "ids")


def _publish(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    request = envelope.publish
    if not client.is_worker:
        raise NotPermittedError("publish needs a private pool, passed with hello")
    _check_lease(client, request.lease)
    if len(request.chain) > MAX_PUBLISH_BLOCKS:
        raise LimitError(f"at most {MAX_PUBLISH_BLOCKS} blocks are allowed in a publish")
    chain = [NewBlock(b.parent_key, b.key, b.num_tokens, b.private_offset) for b in request.chain]
    source = Source(client.pool_fd, client.pool_bytes, client.connection.is_open)
    started = time.monotonic()
    blocks, refused = state.kv.publish(request.lease, chain, source, is_root=request.is_root)
    _took(state, "publish", started)
    reply = pb.PublishReply(blocks=map(_wire_block, blocks), refused=refused)
    client.reply(envelope.id, publish_reply=reply)


def _took(state: State, call: str, started: float) -> None:
    """Count it by the power of two of microseconds below which it stayed."""
    spent = int(1e6 * (time.monotonic() - started))
    state.counters[f"{call}_us"] += spent
    state.counters[f"{call}_us_below_{1 << spent.bit_length()}"] += 1


def _release(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    _check_lease(client, envelope.release.lease)
    state.kv.release(envelope.release.lease)
    client.leases.discard(envelope.release.lease)
    client.reply(envelope.id, ok=pb.Ok())


def _reattach(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    """What a client still holds of before a restart becomes leases; the rest it had is freed."""
    request = envelope.reattach
    if len(client.leases) + len(request.claims) > MAX_LEASES_PER_CLIENT:
        raise LimitError(f"{MAX_LEASES_PER_CLIENT} leases are held, no more are allowed")
    hit("reattach.before")
    leases = []
    for claim in request.claims:
        stamp = _stamp_of(client, claim.stamp_id)
        handle = None
        if claim.HasField("block"):
            handle = (claim.block.slot, claim.block.generation)
        lease = state.kv.claim(stamp, handle, client.rows, client.holding)
        leases.append(lease or 0)
        if lease is not None:
            client.leases.add(lease)
    hit("reattach.claimed")
    state.quarantine.end(request.epoch, request.client_id, client.connection.pid)
    for other in state.clients:
        is_named = (state.epoch, other.client_id) == (request.epoch, request.client_id)
        if is_named and other.connection.is_closed and other.pid == client.pid:
            state.release_all(other)
    hit("reattach.after")
    client.reply(envelope.id, reattach_reply=pb.ReattachReply(leases=leases))


def _check_lease(client: Client, lease: int) -> None:
    if lease not in client.leases:
        raise NotFoundError(f"lease {lease} is not held by this client")


def _provide(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    if client.provider is not None:
        raise InvalidRequestError("this client provides already")

    client.reply(envelope.id, ok=pb.Ok())
    client.provider = Provider(envelope.provide.weights_sha256, client.connection.send)
    state.warmer.add_provider(client.provider)


def _warm_item_update(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    if client.provider is None:
        raise InvalidRequestError("this client does not provide")
    state.warmer.update(client.provider, envelope.warm_item_update)


def _get_prompts(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    keys = protocol.split_keys(envelope.get_prompts.keys)
    if len(keys) > MAX_PIECES:
        raise LimitError(f"at most {MAX_PIECES} keys are allowed in a get_prompts")
    now = time.monotonic()
    room = protocol.MAX_FRAME_BYTES // 2
    reply = pb.GetPromptsReply()
    for key in keys:
        ids = state.prompts.get(key, now) if room > 0 else b""
        room -= len(ids)
        reply.ids.append(ids)
    client.reply(envelope.id, get_prompts_reply=reply)


def _put_prompts(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    request = envelope.put_prompts
    keys = protocol.split_keys(request.keys)
    if not len(keys) == len(request.ids) <= MAX_PIECES:
        text = f"{len(keys)} keys, {len(request.ids)} pieces: as many, at most {MAX_PIECES}"
        raise InvalidRequestError(f"put_prompts: {text}")
    if any(not 0 < len(ids) <= MAX_IDS_BYTES or len(ids) % 4 for ids in request.ids):
        raise InvalidRequestError(f"put_prompts: a piece has 4 to {MAX_IDS_BYTES} bytes, by four")
    now = time.monotonic()
    for key, ids in zip(keys, request.ids, strict=True):
        state.prompts.put(key, ids, now)


def check_names(request: pb.AttachWeights | pb.Warmup) -> None:
    """Raises InvalidRequestError."""
    names = (request.model_name, request.version, request.plan.description)
    if max(map(len, names)) > MAX_TEXT:
        raise InvalidRequestError(f"names and descriptions: at most {MAX_TEXT} characters")


def _wire_block(block: Block) -> pb.Block:
    return pb.Block(
        slot=block.slot,
        generation=block.generation,
        offset=block.offset,
        num_tokens=block.num_tokens,
    )


# Returns True when it took the descriptors over.
Handler = Callable[[State, Client, pb.Envelope, list[int]], bool | None]

HANDLERS: dict[str, Handler] = {
    "hello": _hello,
    "attach_weights": _attach_weights,
    "register": _register,
    "peek": _peek,
    "lookup": _lookup,
    "publish": _publish,
    "release": _release,
    "reattach": _reattach,
    "provide": _provide,
    "warm_item_update": _warm_item_update,
    "get_prompts": _get_prompts,
    "put_prompts": _put_prompts,
}
