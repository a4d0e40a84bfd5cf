"""What a mode is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from scripts.lib.bench.context import Bench
from scripts.lib.bench.report import Result


@dataclass(frozen=True)
class Mode:
    """`help` is one line; `add_flags` declares its own flags beside the common ones.

    `run` measures and hands back numbers and tables. It may start programs through
    `Bench.services` and leaves ending them to it. It raises BenchError, or CallError as the client
    does.
    """

    name: str
    help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Bench], Result]
