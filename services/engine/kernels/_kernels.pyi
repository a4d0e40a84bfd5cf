from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Isa = Literal["avx512_bf16", "avx512", "avx2", "portable"]

COMPILER: str

def isas() -> list[Isa]: ...

class Threads:
    def __init__(self, cpus: Sequence[int]) -> None: ...
    @property
    def count(self) -> int: ...

class Decoder:
    def __init__(
        self,
        weights: npt.NDArray[np.uint8],
        frequencies: npt.NDArray[np.float32],
        shape: dict[str, int | float],
        tensors: dict[str, int],
        isa: str,
        threads: Threads,
    ) -> None: ...
    def step(
        self,
        tokens: npt.NDArray[np.int32],
        chunks: npt.NDArray[np.int64],
        blocks: npt.NDArray[np.uint64],
        logits: npt.NDArray[np.float32],
    ) -> None: ...
    def profile(self) -> dict[str, float]: ...
    @property
    def isa(self) -> Isa: ...

def multiply(
    x: npt.NDArray[np.float32],
    panels: npt.NDArray[np.uint8],
    y: npt.NDArray[np.float32],
    isa: str,
    threads: Threads,
    repeats: int = 1,
) -> float: ...
def read_bandwidth(memory: npt.NDArray[np.uint8], threads: Threads, repeats: int = 5) -> float: ...
