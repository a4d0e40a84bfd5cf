"""Few values in few numbers. A median needs no assumption about what disturbs a measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Spread:
    """Of at least one value, in the values' unit.

    `mad` is the median of the distances from the median: it grows when most repetitions differ,
    where one outlier moves only `min` or `max`.
    """

    count: int
    median: float
    min: float
    max: float
    mad: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError when there is none."""
        known = [float(value) for value in values]
        if not known:
            raise ValueError("no value, so no median")
        middle = median(known)
        mad = median(abs(value - middle) for value in known)
        return cls(len(known), middle, min(known), max(known), mad)

    def text(self, digits: int, scale: float = 1.0) -> str:
        """Median and range for a table: 12.3 (11.9-14.0)."""
        middle, low, high = (
            f"{scale * value:.{digits}f}" for value in (self.median, self.min, self.max)
        )
        return f"{middle} ({low}-{high})"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks. Raises ValueError when there is no value."""
    if not values:
        raise ValueError("no value, so no percentile")
    return float(np.percentile(values, percent))
