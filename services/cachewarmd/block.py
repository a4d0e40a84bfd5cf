"""Sealed blocks and the stamps they belong to; `kv` is the only writer of both."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


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
    def from_json(cls, told: dict[str, Any]) -> StampInfo:
        """Back from `to_json`."""
        stamp, weights = (bytes.fromhex(told[name]) for name in ("stamp", "weights_sha256"))
        return cls(**{**told, "stamp": stamp, "weights_sha256": weights})


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
