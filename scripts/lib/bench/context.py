"""What a mode is given: its flags, the programs it may start, and where facts are kept."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.lib.bench.asking import Prompts, ask
from scripts.lib.bench.processes import Daemon, Engine, Services

_WARM_UP = (0, 1 << 32)  # a name that no measured prompt has
_WARM_UP_TOKENS = (64, 8)  # in, out


def say(text: str) -> None:
    """Progress goes to stderr, results to stdout."""
    print(text, file=sys.stderr, flush=True)


def num_cpus() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass
class Bench:
    """One run. `facts` stand in the JSON object beside the values of the mode."""

    flags: argparse.Namespace
    model: Path
    services: Services
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def num_threads(self) -> int:
        """Threads an engine computes with: what a flag says, else one for each of its CPUs."""
        cpus = self.facts.get("engine", {}).get("cpus")
        return int(getattr(self.flags, "threads", None) or len(cpus or ()) or num_cpus())

    def start(self) -> tuple[Daemon, Engine, Prompts]:
        """A daemon, and an engine that has answered once: its own warm-up is not measured.

        Raises BenchError, CallError.
        """
        say("starting cachewarmd and an engine ...")
        daemon = self.services.start_daemon()
        engine = self.services.start_engine(daemon)
        prompts = self.learn(engine)
        num_in, num_out = _WARM_UP_TOKENS
        with engine.client() as client:
            info = client.model_info()
            num_in = max(1, min(num_in, info.max_context - num_out))
            ask(client, prompts.ids(num_in, *_WARM_UP), num_out, self.flags.timeout)
        engine.settle()
        return daemon, engine, prompts

    def learn(self, engine: Engine) -> Prompts:
        """Keep what the engine says of itself; returns prompts for its model. Raises CallError."""
        with engine.client() as client:
            info, server = client.model_info(), client.server_info()
        self.facts["engine"] = {
            "version": server.version,
            "backend": server.workers[0].backend if server.workers else None,
            "cpus": list(server.workers[0].cpus) if server.workers else None,
            "model": info.model,
            "weights_sha256": info.weights_sha256,
            "dtype": info.dtype,
            "kv_dtype": info.kv_dtype,
            "block_size": info.block_size,
            "max_context": info.max_context,
        }
        return Prompts(self.flags.seed, info)
