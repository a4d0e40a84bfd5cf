"""What the verbs of pins do: pin, unpin, pins, purge."""

from __future__ import annotations

import math
import time

from cachewarmd.block import Block
from cachewarmd.errors import InvalidRequestError, NotFoundError, NotPermittedError
from cachewarmd.failpoints import hit
from cachewarmd.pins import Pin
from cachewarmd.protocol import KEY_BYTES
from cachewarmd.state import Client, State
from cachewarmd.v1 import control_pb2 as pb


def pin(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    request = envelope.pin
    block = _block_of(state, client, request)
    ttl_s = request.ttl_ms / 1000 if request.ttl_ms else math.inf
    made, num_bytes = state.pins.add(block, ttl_s, request.label)
    state.remember()
    hit("pin.after")
    client.reply(envelope.id, pin_reply=pb.PinReply(pin_id=made.pin_id, num_bytes=num_bytes))


def _block_of(state: State, client: Client, request: pb.Pin) -> Block:
    """An engine pins what it leases, an operator any chain. Raises the caller's mistakes."""
    match client.role, request.WhichOneof("what"):
        case pb.ROLE_ENGINE, "lease":
            if request.lease not in client.leases:
                raise NotFoundError(f"lease {request.lease} is not held by this client")
            block = state.kv.leased(request.lease)
            if block is None:
                raise NotFoundError(f"lease {request.lease} names no block")
        case pb.ROLE_ADMIN, "key":
            if len(request.key) != KEY_BYTES:
                raise InvalidRequestError(f"key: {KEY_BYTES} bytes are expected")
            block = state.kv.block(request.key)
            if block is None:
                raise NotFoundError(f"no block has the key {request.key.hex()}")
        case pb.ROLE_ENGINE | pb.ROLE_ADMIN, _:
            raise InvalidRequestError("pin: an engine names a lease, an operator a key")
        case role, _:
            raise NotPermittedError(f"pin is not for role {pb.Role.Name(role)}")
    if state.kv.is_retired(block.stamp):
        raise NotFoundError("the weights of that block are retired")
    return block


def unpin(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    request = envelope.unpin
    if not (request.pin_ids or request.label or request.all):
        raise InvalidRequestError("unpin: pin ids, a label or all must be given")
    ids = set(request.pin_ids)
    unknown = ids - {found.pin_id for found in state.pins}
    if unknown:
        raise NotFoundError(f"pin {min(unknown)} is not known")

    def is_wanted(known: Pin) -> bool:
        has_label = bool(request.label) and known.label == request.label
        return request.all or known.pin_id in ids or has_label

    num_pins = state.pins.end(is_wanted)
    state.remember()
    client.reply(envelope.id, unpin_reply=pb.UnpinReply(num_pins=num_pins))


def pins(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    told = [_pin_status(state, found) for found in state.pins]
    reply = pb.PinsReply(
        pins=filter(None, told), num_bytes=state.pins.num_bytes, max_bytes=state.pins.max_bytes
    )
    client.reply(envelope.id, pins_reply=reply)


def _pin_status(state: State, found: Pin) -> pb.PinStatus | None:
    num_blocks = 0
    block = state.pins.block(found)
    if block is None:
        return None  # it ends in a moment
    node: Block | None = block
    while node is not None:
        num_blocks += 1
        node = node.parent
    left = state.pins.seconds_left(found)
    return pb.PinStatus(
        pin_id=found.pin_id,
        label=found.label,
        key=found.key,
        stamp=found.stamp.stamp.hex(),
        num_blocks=num_blocks,
        num_bytes=num_blocks * found.stamp.slot_bytes,
        expires_unix_ms=0 if left == math.inf else int(1000 * (time.time() + left)),
    )


def purge(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    digests = state.weights_of(envelope.purge.model)
    if state.pins.end(lambda pin: digests is None or pin.stamp.weights_sha256 in digests):
        state.remember()
    num_blocks, num_bytes, kept = state.kv.evict(
        lambda stamp: digests is None or stamp.weights_sha256 in digests
    )
    reply = pb.EvictReply(num_blocks=num_blocks, num_bytes=num_bytes, num_kept=kept)
    client.reply(envelope.id, evict_reply=reply)
