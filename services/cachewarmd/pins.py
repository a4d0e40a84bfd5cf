"""Chains that operators keep: no eviction takes them until they are unpinned or their time is over.

A pin is a lease that the daemon itself holds; all share the store's Holding `pinned`, so a block on
several pinned chains counts once against the budget. A pin ends with its blocks: where content was
not what was sealed, where weights are retired, at a purge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from cachewarmd.block import Block, StampInfo
from cachewarmd.errors import InvalidRequestError, LimitError
from cachewarmd.failpoints import hit
from cachewarmd.kv import BlockStore

MAX_PINS = 1024
MAX_LABEL = 64  # characters
MAX_TTL_S = 366 * 86_400.0


class Saved(msgspec.Struct, frozen=True):
    """A pin in the catalog. `expires` is of CLOCK_MONOTONIC: a catalog never outlives a boot."""

    pin_id: int
    key: str
    stamp: str
    label: str
    expires: float | None


@dataclass(eq=False)
class Pin:
    """`expires` is of the monotonic clock, infinite for one without an end."""

    pin_id: int
    lease: int
    stamp: StampInfo
    key: bytes
    label: str
    expires: float


class Pins:
    """All pins of a store; `max_bytes` of the pool may be pinned."""

    def __init__(
        self, store: BlockStore, max_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self._store = store
        self._clock = clock
        self._pins: dict[int, Pin] = {}
        self._next_id = 1

    @property
    def num_bytes(self) -> int:
        """Pinned, each block once."""
        return self._store.pinned.num_bytes

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def block(self, pin: Pin) -> Block | None:
        """The last of its chain; None when that is gone, and so is the pin soon."""
        return self._store.leased(pin.lease)

    def seconds_left(self, pin: Pin) -> float:
        return pin.expires - self._clock()

    def add(self, block: Block, ttl_s: float = math.inf, label: str = "") -> tuple[Pin, int]:
        """Pin the chain that ends with `block`; the bytes that no other pin kept before.

        A chain that has a pin of this label gets the new time. Raises LimitError,
        InvalidRequestError.
        """
        if len(label) > MAX_LABEL:
            raise InvalidRequestError(f"label: at most {MAX_LABEL} characters are allowed")
        if ttl_s != math.inf and not 0 < ttl_s <= MAX_TTL_S:
            raise InvalidRequestError(f"ttl {ttl_s:g} s is not allowed: at most {MAX_TTL_S:.0f} s")
        self.end_over()
        expires = self._clock() + ttl_s
        for pin in self._pins.values():
            if pin.label == label and pin.key == block.key:
                pin.expires = expires
                return pin, 0
        if len(self._pins) >= MAX_PINS:
            raise LimitError(f"{MAX_PINS} pins are held, no more are allowed")
        if self._store.is_draining(block):
            raise LimitError("a part of that chain is about to go: its extent changes slot size")
        used = self._store.pinned.num_bytes
        self._check_budget(block)
        hit("pin.before")
        lease = self._store.keep(block)
        pin = Pin(self._next_id, lease, block.stamp, block.key, label, expires)
        self._pins[pin.pin_id] = pin
        self._next_id += 1
        return pin, self._store.pinned.num_bytes - used

    def _check_budget(self, block: Block) -> None:
        num_new = 0
        node: Block | None = block
        while node is not None and node not in self._store.pinned:
            num_new += 1
            node = node.parent
        needed, used = num_new * block.stamp.slot_bytes, self._store.pinned.num_bytes
        if used + needed > self.max_bytes:
            raise LimitError(
                f"the pin needs {needed} bytes beside {used} that are pinned: "
                f"at most {self.max_bytes} are allowed (pin-bytes)"
            )

    def end(self, wanted: Callable[[Pin], bool]) -> int:
        """End all wanted pins: how many?"""
        ended = [pin for pin in self._pins.values() if wanted(pin)]
        for pin in ended:
            hit("unpin.before")
            del self._pins[pin.pin_id]
            self._store.release(pin.lease)
            hit("unpin.after")
        return len(ended)

    def end_over(self) -> int:
        """End pins whose time is over, and those whose blocks are gone: how many?"""
        now = self._clock()
        return self.end(lambda pin: pin.expires <= now or self.block(pin) is None)

    # -- across restarts ------------------------------------------------------------------------

    def to_json(self) -> list[dict[str, Any]]:
        """For the catalog."""
        return [
            {
                "pin_id": pin.pin_id,
                "key": pin.key.hex(),
                "stamp": pin.stamp.stamp.hex(),
                "label": pin.label,
                "expires": None if pin.expires == math.inf else pin.expires,
            }
            for pin in self._pins.values()
        ]

    def restore(self, told: Any) -> int:
        """Pin again what `to_json` told, as far as it is there and the budget is: how many not?

        Raises ValueError for what can't be that.
        """
        try:
            saved = msgspec.convert(told, list[Saved])
            keys = [bytes.fromhex(item.key) for item in saved]
        except (ValueError, msgspec.ValidationError) as exc:
            raise ValueError(f"the pins are malformed: {exc}") from exc
        num_lost = 0
        for item, key in zip(saved, keys, strict=True):
            block = self._store.block(key)
            left = math.inf if item.expires is None else item.expires - self._clock()
            # Numbers that operators know stay; none is used twice.
            self._next_id = max(self._next_id, item.pin_id)
            if block is None or block.stamp.stamp.hex() != item.stamp or left <= 0:
                num_lost += 1
                continue
            try:
                self.add(block, left, item.label)
            except (LimitError, InvalidRequestError):
                num_lost += 1
        self._next_id = max([self._next_id, *(item.pin_id + 1 for item in saved)])
        return num_lost
