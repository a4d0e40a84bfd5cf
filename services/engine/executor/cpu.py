"""The native backend: C++ kernels over packed weights and KV blocks, in place. No torch.

A token's KV and logits depend on its prefix alone: not on what else is in a step, on how a prompt
is cut into chunks, on the number of threads, nor on whether the prefix was cached.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cachewarmd.v1 import control_pb2 as pb
from engine.errors import ModelError
from engine.executor.backends import ExecutorOptions, backend_named
from engine.executor.base import Chunk
from engine.kernels import _kernels
from engine.models.config import ModelConfig

# Raised by every change that changes a bit of any result.
_VERSION = 1


class CpuExecutor:
    """Implements `executor.base.Executor`."""

    name = "cpu"
    compute_dtype = "bf16"
    kv_dtype = "bf16"

    def __init__(
        self,
        config: ModelConfig,
        plan: pb.PackPlan,
        weights: npt.NDArray[np.uint8],
        options: ExecutorOptions,
    ) -> None:
        """`weights` is the packed segment, mapped; it is never written to. Raises ModelError."""
        isas = _kernels.isas()
        isa = isas[0] if options.cpu_isa == "auto" else options.cpu_isa
        if isa not in isas:
            raise ModelError(f"cpu-isa {isa!r} is not allowed on this CPU: {', '.join(isas)}")
        self.why = f"{isa}, {'the best here' if isa == isas[0] else 'asked for'}"
        self.block_bytes = backend_named(self.name).block_bytes(config, options.block_size)
        self.kv_layout = f"L,G,K|V panels;bf16;B={options.block_size}"
        self.numerics = f"cpu;{isa};v{_VERSION};{_kernels.COMPILER}"
        self.threads = _kernels.Threads(options.cpus)
        shape = {
            "num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "ffn_size": config.ffn_size,
            "vocab_size": config.vocab_size,
            "block_size": options.block_size,
            "rms_eps": config.rms_eps,
        }
        offsets = {item.name: item.offset for item in plan.tensors}
        frequencies = config.rope.frequencies(config.head_dim)
        self.decoder = _kernels.Decoder(weights, frequencies, shape, offsets, isa, self.threads)
        # Reused: a fresh one of many rows costs more in page faults than a row's logits.
        self._logits = np.empty((1, config.vocab_size), dtype=np.float32)

    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32] | None]:
        """See `executor.base.Executor`. Rows are valid until the next call."""
        num_logits = sum(chunk.needs_logits for chunk in chunks)
        if num_logits > len(self._logits):
            self._logits = np.empty((num_logits, self._logits.shape[1]), dtype=np.float32)
        logits = self._logits[:num_logits]
        table = []
        tokens: list[int] = []
        first_block = row = 0
        for chunk in chunks:
            num_blocks = len(chunk.blocks.addresses)
            table.append(
                (
                    first_block,
                    num_blocks,
                    len(chunk.token_ids),
                    chunk.start,
                    chunk.write_from,
                    row if chunk.needs_logits else -1,
                )
            )
            tokens += chunk.token_ids
            first_block += num_blocks
            row += chunk.needs_logits
        addresses = b"".join([chunk.blocks.addresses for chunk in chunks])
        self.decoder.step(
            np.array(tokens, dtype=np.int32),
            np.array(table, dtype=np.int64),
            np.frombuffer(addresses, dtype=np.uint64),
            logits,
        )
        rows = iter(logits)
        return [next(rows) if chunk.needs_logits else None for chunk in chunks]
