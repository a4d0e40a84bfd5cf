"""All targets. A new one is a module with a `make`, and a line here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from tests.fuzz.target import Target


@dataclass(frozen=True)
class Entry:
    """A target's module, and the package whose branches guide the fuzzer."""

    module: str
    guide: str
    # Also what values are compared with; not where whole arrays are compared, which atheris leaks.
    sees_comparisons: bool = True
    cost: int = 1  # of an input; the dear ones are started first

    def make(self) -> Target:
        """Imports what is fuzzed, so that a fuzzer can instrument it before."""
        target: Target = importlib.import_module(f"tests.fuzz.{self.module}").make()
        return target


TARGETS = {
    "frames": Entry("frames", "cachewarmd"),
    "verbs": Entry("verbs", "cachewarmd", sees_comparisons=False, cost=10),
    "records": Entry("records", "cachewarmd", sees_comparisons=False, cost=10),
    "catalog": Entry("catalog", "cachewarmd"),
    "pack_plan": Entry("pack_plan", "cachewarmd"),
    "safetensors": Entry("safetensors", "cachewarmd"),
    "packer": Entry("packer", "cachewarmd"),
    "snapshots": Entry("snapshots", "cachewarmd"),
    "channel": Entry("channel", "engine"),
}
