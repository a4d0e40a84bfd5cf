"""What a backend is to the worker: it turns chunks of tokens into KV and logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Blocks(Protocol):
    """A request's blocks in position order, each the raw bytes of one."""

    @property
    def memories(self) -> Sequence[npt.NDArray[np.uint8]]:
        """Views; they keep their mappings alive."""
        ...

    @property
    def addresses(self) -> array[int]:
        """Of the same bytes ("Q")."""
        ...


@dataclass(frozen=True)
class Chunk:
    """A run of tokens of one request for one step.

    Positions start … start + len(token_ids) - 1 are computed. KV is written for positions from
    `write_from` on: those before it stand in sealed blocks already. Blocks written to are writable.
    """

    token_ids: Sequence[int]
    start: int
    write_from: int
    blocks: Blocks
    needs_logits: bool


class Executor(Protocol):
    """One model on one backend."""

    name: str  # of the backend
    why: str  # this one, in a few words
    compute_dtype: str
    kv_dtype: str
    block_bytes: int
    kv_layout: str  # for the stamp: order, dtype, block size, rope
    numerics: str  # for the stamp: backend, ISA class, versions

    def forward(self, chunks: Sequence[Chunk]) -> list[npt.NDArray[np.float32] | None]:
        """Logits [vocab] of each chunk's last token, None where not needed.

        Reads every block before `start`, writes only positions from `write_from` on. What it
        returns may be overwritten by the next call.
        """
        ...
