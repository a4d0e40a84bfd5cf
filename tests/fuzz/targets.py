"""All targets. A new one is a module with a `make`, and a line here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from tests.fuzz.target import Target


@dataclass(frozen=True)
class Entry:
    """A target's module, and the modules whose branches guide the fuzzer."""

    module: str
    guides: tuple[str, ...]

    def make(self) -> Target:
        """Imports what is fuzzed, so that a fuzzer can instrument it before."""
        target: Target = importlib.import_module(f"tests.fuzz.{self.module}").make()
        return target


TARGETS = {
    "frames": Entry("frames", ("cachewarmd.protocol",)),
    "verbs": Entry("verbs", ("cachewarmd.server", "cachewarmd.calls", "cachewarmd.protocol")),
    "records": Entry("records", ("cachewarmd.recovery", "cachewarmd.lease")),
    "catalog": Entry("catalog", ("cachewarmd.catalog", "cachewarmd.weight_catalog")),
    "pack_plan": Entry("pack_plan", ("cachewarmd.pack", "cachewarmd.panels")),
    "safetensors": Entry("safetensors", ("cachewarmd.weight_files", "json.decoder")),
    "packer": Entry("packer", ("cachewarmd.packers",)),
    "channel": Entry("channel", ("engine.channel",)),
}
