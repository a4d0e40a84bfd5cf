"""Sealed blocks and the stamps they belong to; `kv` is the only writer of both."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from cachewarmd.layout import EXTENT_BYTES, round_slot_bytes
from cachewarmd.policy import Place
from cachewarmd.protocol import KEY_BYTES


@dataclass(frozen=True)
class StampInfo:
    """What a registered stamp's blocks look like."""

    stamp_id: int
    stamp: bytes
    slot_bytes: int  # of the pool, rounded
    block_bytes: int  # of content
    block_size: int  # tokens
    description: str
    weights_sha256: bytes

    def to_json(self) -> dict[str, Any]:
        """For the catalog."""
        told = asdict(self)
        return {**told, "stamp": self.stamp.hex(), "weights_sha256": self.weights_sha256.hex()}

    @classmethod
    def from_json(cls, told: Any) -> StampInfo:
        """Back from `to_json`. Raises ValueError for what can't be that."""
        try:
            hexes = {name: bytes.fromhex(told[name]) for name in ("stamp", "weights_sha256")}
            info = msgspec.convert({**told, **hexes}, cls)
        except (KeyError, TypeError, msgspec.ValidationError) as exc:
            raise ValueError(f"a stamp is malformed: {exc}") from exc
        if (
            len(info.stamp) != KEY_BYTES
            or not 0 < info.block_bytes <= EXTENT_BYTES
            or info.slot_bytes != round_slot_bytes(info.block_bytes)
            or not 0 < info.block_size < 1 << 32
        ):
            raise ValueError("a stamp's sizes can't be")
        return info


def stamps_from_json(told: Any) -> list[StampInfo]:
    """All of a catalog, in their order. Raises ValueError for what can't be that."""
    if not isinstance(told, list):
        raise ValueError("the stamps are no list")
    infos = [StampInfo.from_json(item) for item in told]
    if [info.stamp_id for info in infos] != list(range(len(infos))):
        raise ValueError("stamps are numbered in their order")
    if len({info.stamp for info in infos}) != len(infos):
        raise ValueError("a stamp stands twice")
    return infos


@dataclass(eq=False, slots=True)
class Block:
    """A sealed block. `last_used` is a tick of the store, not a time."""

    key: bytes
    parent: Block | None
    stamp: StampInfo
    slot: int
    generation: int
    offset: int
    num_tokens: int
    children: set[Block] = field(default_factory=set)
    num_holds: int = 0  # leases of this block, and children that are held themselves
    last_used: int = 0
    place: Place = (0, (0, 0))  # in the eviction policy's order
    packed: bytes = b""  # as a lookup's reply tells it; `kv` packs it once
    is_sealed: bool = True
    is_verified: bool = True  # False: another daemon sealed it, nobody has looked since

    @property
    def is_evictable(self) -> bool:
        return self.is_sealed and not self.children and not self.num_holds

    @property
    def is_short(self) -> bool:
        return self.num_tokens < self.stamp.block_size

    def subtree(self) -> list[Block]:
        """This block and all that hangs on it, parents first."""
        found = [self]
        for block in found:
            found += block.children
        return found
