"""The native kernels in the tests' own process: what an engine must answer, bit by bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachewarmd.client import load_private
from engine.block_table import BlockTable, PrivatePool
from engine.executor.backends import ExecutorOptions, backend_named
from engine.executor.base import Chunk
from engine.models.config import load_config

Logits = npt.NDArray[np.float32]


class NativeModel:
    """A model directory in an executor of the cpu backend."""

    def __init__(
        self,
        model_dir: Path,
        *,
        isa: str = "auto",
        block_size: int = 32,
        cpus: Sequence[int] | None = None,
    ) -> None:
        self.config = load_config(model_dir)
        self.block_size = block_size
        backend = backend_named("cpu")
        plan = backend.pack_plan(self.config)
        self.memory = load_private(model_dir, "", plan).memory
        threads = tuple(sorted(os.sched_getaffinity(0)) if cpus is None else cpus)
        options = ExecutorOptions(block_size, isa, threads)
        self.executor = backend.build(self.config, plan, self.memory, options)

    def sequence(self, num_tokens: int) -> NativeSequence:
        return NativeSequence(self, num_tokens)

    def greedy(self, prompt: Sequence[int], num_output: int) -> list[int]:
        """Computed alone: the prompt at once, then token by token."""
        sequence = self.sequence(len(prompt) + num_output)
        logits = sequence.run(prompt)
        for _ in range(num_output - 1):
            logits = sequence.run([int(logits.argmax())])
        return [*sequence.tokens[len(prompt) :], int(logits.argmax())]


class NativeSequence:
    """A sequence with blocks of its own, which hold NaNs before they are written."""

    def __init__(self, model: NativeModel, num_tokens: int) -> None:
        self.model = model
        self.tokens: list[int] = []
        size, block_bytes = model.block_size, model.executor.block_bytes
        self.memory = np.empty(-(-num_tokens // size) * block_bytes, np.uint8)
        self.table = BlockTable(PrivatePool(self.memory, block_bytes), size)
        self.table.make_writable(0, num_tokens)
        self.memory[:] = 0xFF

    def chunk(self, ids: Sequence[int], *, needs_logits: bool = True) -> Chunk:
        """The next tokens, for a step of several sequences."""
        start = len(self.tokens)
        self.tokens += ids
        return Chunk(ids, start, start, self.table, needs_logits)

    def run(self, ids: Sequence[int]) -> Logits:
        """Logits behind these next tokens, in a step of their own."""
        (logits,) = self.model.executor.forward([self.chunk(ids)])
        assert logits is not None
        return logits.copy()
