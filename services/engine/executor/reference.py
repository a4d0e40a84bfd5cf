"""The oracle: torch float32 over weights and KV in place.

A block of B tokens is float32 [layer, K or V, KV head, B, head_dim]:

    layer 0: K [G, B, D] | V [G, B, D] | layer 1: K … | V … | …
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cachewarmd.v1 import control_pb2 as pb
from engine.executor.backends import backend_named
from engine.executor.base import Chunk
from engine.models import packing
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder


class ReferenceExecutor:
    """Implements `executor.base.Executor`."""

    name = "reference"
    why = "asked for"
    compute_dtype = "f32"
    kv_dtype = "f32"

    def __init__(
        self,
        config: ModelConfig,
        plan: pb.PackPlan,
        weights: npt.NDArray[np.uint8],
        block_size: int,
    ) -> None:
        """`weights` is the packed segment, mapped; it is never written to."""
        self._shape = (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        self._block_size = block_size
        self.block_bytes = backend_named(self.name).block_bytes(config, block_size)
        self.kv_layout = f"L,KV,G,B,D;f32;B={block_size};rope=half-split"
        self.numerics = f"reference;torch={torch.__version__}"
        tensors = packing.views(plan, weights)
        self._decoder = Decoder(config, {name: _tensor(view) for name, view in tensors.items()})

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32] | None]:
        """See `executor.base.Executor`; chunks run one after another."""
        return [self._run(chunk) for chunk in chunks]

    def _run(self, chunk: Chunk) -> npt.NDArray[np.float32] | None:
        blocks = [
            _tensor(memory[: self.block_bytes].view(np.float32)).view(self._shape)
            for memory in chunk.blocks.memories
        ]

        def kv_cache(
            layer: int, keys: torch.Tensor, values: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            self._write(blocks, layer, chunk, keys, values)
            before = self._read(blocks, layer, chunk.start)
            if before is None:
                return keys, values
            return torch.cat((before[0], keys), 1), torch.cat((before[1], values), 1)

        hidden = self._decoder.forward(torch.tensor(chunk.token_ids), chunk.start, kv_cache)
        return self._decoder.logits(hidden[-1]).numpy() if chunk.needs_logits else None

    def _read(self, blocks: list[torch.Tensor], layer: int, end: int) -> torch.Tensor | None:
        """K and V of positions 0 … end-1: [2, G, end, D]."""
        if not end:
            return None
        used = blocks[: -(-end // self._block_size)]
        return torch.cat([block[layer] for block in used], dim=2)[:, :, :end]

    def _write(
        self,
        blocks: list[torch.Tensor],
        layer: int,
        chunk: Chunk,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        end = chunk.start + len(chunk.token_ids)
        position = max(chunk.start, chunk.write_from)
        while position < end:
            index, place = divmod(position, self._block_size)
            count = min(self._block_size - place, end - position)
            source = slice(position - chunk.start, position - chunk.start + count)
            target = blocks[index][layer, :, :, place : place + count]
            target[0] = keys[:, source]
            target[1] = values[:, source]
            position += count


def _tensor(view: npt.NDArray[np.float32]) -> torch.Tensor:
    """A tensor on the same memory; it keeps the mapping alive."""
    with warnings.catch_warnings():
        # Read-only memory is the point: a write would be a crash, never a changed byte.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(view)
