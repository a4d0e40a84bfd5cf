"""What the daemon does about learning: lookups go into `traffic`, prefixes worth a plan come out.

Digests and lengths, and token ids only where an operator allowed to keep them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from cachewarmd.block import StampInfo
from cachewarmd.errors import InvalidRequestError
from cachewarmd.learn import Prefix, choose
from cachewarmd.protocol import KEY_BYTES
from cachewarmd.traffic import Traffic
from cachewarmd.v1 import control_pb2 as pb

MAX_TOP = 100_000
MAX_DOMAIN = 1024  # characters of a tenant or a cache salt
_ID_BYTES = 4
_REPLY_BYTES = 1 << 20
MAX_BYTES = 24 << 20  # of all replies: what has no room saves least

Group = tuple[bytes, str, str | None]  # stamp, tenant, cache salt


def check(stamp: StampInfo, request: pb.Lookup) -> None:
    """Raises InvalidRequestError where a lookup's tokens are not those of its keys."""
    wanted = len(request.keys) // KEY_BYTES * stamp.block_size * _ID_BYTES
    if request.token_ids and len(request.token_ids) != wanted:
        raise InvalidRequestError(
            f"{len(request.token_ids)} bytes of token_ids are not allowed: "
            f"{wanted} go with these keys"
        )
    if max(len(request.tenant), len(request.cache_salt)) > MAX_DOMAIN:
        raise InvalidRequestError(f"tenant and cache_salt: at most {MAX_DOMAIN} characters")


def count(traffic: Traffic, stamp: StampInfo, request: pb.Lookup, *, keeps_ids: bool) -> None:
    """A lookup came. Microseconds, whatever its length."""
    if request.is_prefill_only:
        return
    group: Group = (stamp.stamp, "", None)
    if keeps_ids:
        salt = request.cache_salt if request.HasField("cache_salt") else None
        group = (stamp.stamp, request.tenant, salt)
    ids = request.token_ids if keeps_ids else b""
    traffic.saw(group, request.keys, time.monotonic(), ids)


def chosen(
    traffic: Traffic | None, request: pb.Learned, stamps: Mapping[bytes, StampInfo]
) -> list[Prefix]:
    """The prefixes with these stamps. Raises InvalidRequestError."""
    if not 1 <= request.top <= MAX_TOP:
        raise InvalidRequestError(f"top {request.top} is not allowed: 1 to {MAX_TOP}")
    if not request.min_count >= 1:
        raise InvalidRequestError(f"min_count {request.min_count:g} is not allowed: at least 1")
    if traffic is None:
        return []

    def wanted(group: Group) -> bool:
        return group[0] in stamps

    now = time.monotonic()
    return choose(traffic, now, request.top, request.min_count, wanted=wanted)


def replies(
    prefixes: list[Prefix], stamps: Mapping[bytes, StampInfo]
) -> Iterator[tuple[pb.LearnedReply, bool]]:
    """(a reply of about a MiB, does another follow?); each is made when it is asked for."""
    reply = pb.LearnedReply()
    num_bytes = 0
    for number, prefix in enumerate(prefixes):
        stamp, tenant, salt = prefix.group
        block_size = stamps[stamp].block_size
        told = pb.LearnedPrefix(
            stamp=stamp.hex(),
            key=prefix.key_runs[-1][-KEY_BYTES:],
            num_tokens=prefix.num_blocks * block_size,
            count=prefix.count,
            saving_tokens=prefix.saving * block_size,
            token_ids=prefix.ids,
            tenant=tenant,
            cache_salt=salt,
        )
        size = told.ByteSize()
        if num_bytes + size > MAX_BYTES:
            reply.num_left_out = len(prefixes) - number
            break
        if reply.prefixes and reply.ByteSize() + size > _REPLY_BYTES:
            yield reply, True
            reply = pb.LearnedReply()
        num_bytes += size
        reply.prefixes.append(told)
    yield reply, False
