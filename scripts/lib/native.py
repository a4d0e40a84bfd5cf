"""The native kernels in this process: what tests compare an engine's answers with, bit by bit, and
what the benchmarks of the kernels run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachewarmd.client import load_private
from cachewarmd.v1 import control_pb2 as pb
from engine.block_table import BlockTable, PrivatePool
from engine.executor.backends import ExecutorOptions
from engine.executor.base import Chunk
from engine.executor.cpu import CpuExecutor
from engine.models.config import ModelConfig, load_config
from engine.models.packing import panel_plan

Logits = npt.NDArray[np.float32]


class NativeModel:
    """An executor of the cpu backend, on all CPUs of this process unless told otherwise."""

    def __init__(
        self,
        config: ModelConfig,
        plan: pb.PackPlan,
        weights: npt.NDArray[np.uint8],
        *,
        isa: str = "auto",
        block_size: int = 32,
        cpus: Sequence[int] | None = None,
    ) -> None:
        """Raises ModelError."""
        threads = tuple(sorted(os.sched_getaffinity(0)) if cpus is None else cpus)
        self.config = config
        self.plan = plan
        self.weights = weights
        self.block_size = block_size
        options = ExecutorOptions(block_size, isa, threads)
        self.executor = CpuExecutor(config, plan, weights, options)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        *,
        isa: str = "auto",
        block_size: int = 32,
        cpus: Sequence[int] | None = None,
    ) -> NativeModel:
        """A model directory. Raises ModelError, ModelFilesError, NoSpaceError."""
        config = load_config(model_dir)
        plan = panel_plan(config)
        weights = load_private(model_dir, "", plan).memory
        return cls(config, plan, weights, isa=isa, block_size=block_size, cpus=cpus)

    def sequence(self, num_tokens: int) -> NativeSequence:
        """An empty one that may come to have so many tokens."""
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
