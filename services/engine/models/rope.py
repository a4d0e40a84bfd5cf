"""Rotary embeddings: the dialects of `config.json`, and the frequencies they ask for.

    older    rope_theta, rope_scaling: {"type" or "rope_type": …, "factor": …}
    newer    rope_parameters: {"rope_type": …, "rope_theta": …, "factor": …}

Both mean the same and give equal `Rope`s. Keys that contradict each other are refused, and so is
every key that would have to be left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from engine.models.fields import Fields

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_DEFAULT_THETA = 10000.0
# Keys that belong to each kind alone.
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_COMMON_KEYS = (
    "type", "rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"
)  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """What the frequencies follow from. Fields that a kind does not use have their defaults."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_context: float = 0.0

    @property
    def label(self) -> str:
        """All of it in a line, for the KV layout's id."""
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    def frequencies(self, head_dim: int) -> npt.NDArray[np.float32]:
        """[head_dim / 2]: component i turns by position × frequencies[i] radians.

        `linear` is position interpolation (Chen et al. 2023). `llama3` divides wavelengths beyond
        original_context / low_freq_factor, keeps those below original_context / high_freq_factor
        and blends between them (the formula published with Llama 3.1).
        """
        import numpy as np  # here: the front reads configs too, and its start is waited for

        kept = self.theta ** (-np.arange(0, head_dim, 2) / head_dim)
        slowed = kept / self.factor
        if self.kind != "llama3":
            return slowed.astype(np.float32)
        turns = self.original_context * kept / (2 * np.pi)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = np.clip(share, 0.0, 1.0)
        return (share * kept + (1.0 - share) * slowed).astype(np.float32)


def read_rope(config: Fields) -> Rope:
    """From either dialect of a config. Raises ModelError."""
    older, newer = config.inner("rope_scaling"), config.inner("rope_parameters")
    if older.raw and newer.raw and _scaling(older) != _scaling(newer):
        raise config.refuse("rope_scaling", "the same as rope_parameters where both are given")
    fields = newer if newer.raw else older
    kind = _kind(fields)
    for key, value in fields.raw.items():
        if key not in (*_COMMON_KEYS, *_KEYS[kind]) and value is not None:
            raise fields.refuse(key, f"null: rope type {json.dumps(kind)} has no such key")
    for place in (config, fields):
        place.must_be("partial_rotary_factor", 1, None)
    theta = _agreed("rope_theta", config, older, newer) or _DEFAULT_THETA
    if kind == "default":
        return Rope(theta)
    factor = fields.number("factor")
    if factor < 1:
        raise fields.refuse("factor", "a number from 1 on")
    if kind == "linear":
        return Rope(theta, kind, factor)
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        raise fields.refuse("high_freq_factor", f"a number above low_freq_factor = {low:g}")
    key = "original_max_position_embeddings"
    original = _agreed(key, config, fields) or fields.number(key)
    return Rope(theta, kind, factor, low, high, original)


def _kind(fields: Fields) -> str:
    named = [key for key in ("rope_type", "type") if fields.get(key) is not None]
    if not named:
        return "default"
    kind = fields.raw[named[0]]
    if not isinstance(kind, str) or kind not in _KEYS:
        raise fields.refuse(named[0], _list(_KEYS))
    if fields.raw[named[-1]] != kind:
        raise fields.refuse("type", f"{json.dumps(kind)}, as rope_type says")
    return kind


def _scaling(fields: Fields) -> dict[str, Any]:
    """What is compared between the dialects; the base has rules of its own."""
    members = {key: value for key, value in fields.raw.items() if value is not None}
    for key in ("type", "rope_theta"):
        members.pop(key, None)
    return {**members, "rope_type": _kind(fields)}


def _agreed(key: str, *places: Fields) -> float | None:
    """The number that all objects that have the key agree on; None when none has it."""
    having = [place for place in places if place.get(key) is not None]
    numbers = [place.number(key) for place in having]
    for place, number in zip(having, numbers, strict=True):
        if number != numbers[-1]:
            raise place.refuse(key, f"{numbers[-1]:g}, as it says elsewhere in the file")
    return numbers[-1] if numbers else None


def _list(names: Iterable[str]) -> str:
    return ", ".join(json.dumps(name) for name in names)
