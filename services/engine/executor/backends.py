"""Which backends there are, and what each needs; a backend's own module is imported to build it.

So the front can ask how large a block is, and the daemon's tools for a pack plan, without torch
or the native kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.models.config import PANEL, ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cachewarmd.v1 import control_pb2 as pb
    from engine.executor.base import Executor

_MAX_HEAD_DIM = 256
_MAX_GROUP = 96  # query heads of a KV head


@dataclass(frozen=True)
class ExecutorOptions:
    """What an executor is told besides the model."""

    block_size: int
    cpu_isa: str  # "auto", or an instruction set by name
    cpus: tuple[int, ...]  # one thread for each


@dataclass(frozen=True)
class Backend:
    """One way to compute a model."""

    name: str
    pack_plan: Callable[[ModelConfig], pb.PackPlan]
    block_bytes: Callable[[ModelConfig, int], int]  # of one KV block of so many tokens
    check: Callable[[ModelConfig, int], None]  # raises ModelError for what it can't compute
    build: Callable[[ModelConfig, pb.PackPlan, npt.NDArray[np.uint8], ExecutorOptions], Executor]


def backend_named(name: str) -> Backend:
    """By `--backend`; "auto" is the native one. Raises ModelError."""
    backends = {backend.name: backend for backend in (_CPU, _REFERENCE)}
    if name == "auto":
        return _CPU
    if name not in backends:
        raise ModelError(f"backend {name!r} is not allowed: auto, {', '.join(backends)}")
    return backends[name]


# -- cpu -------------------------------------------------------------------------------------------


def _cpu_plan(config: ModelConfig) -> pb.PackPlan:
    from engine.models.packing import panel_plan

    return panel_plan(config)


def _cpu_block_bytes(config: ModelConfig, block_size: int) -> int:
    padded_head = -(-config.head_dim // PANEL) * PANEL
    return 2 * config.num_layers * config.num_kv_heads * 2 * padded_head * block_size


def _check_cpu(config: ModelConfig, block_size: int) -> None:
    group = config.num_heads // config.num_kv_heads
    for name, value, is_allowed, allowed in (
        ("block-size", block_size, block_size % PANEL == 0, f"a multiple of {PANEL}"),
        ("head_dim", config.head_dim, config.head_dim <= _MAX_HEAD_DIM, f"up to {_MAX_HEAD_DIM}"),
        ("query heads of a KV head", group, group <= _MAX_GROUP, f"up to {_MAX_GROUP}"),
    ):
        if not is_allowed:
            raise ModelError(
                f"{name} {value} is not allowed on the cpu backend: {allowed}; "
                "the reference backend takes it"
            )


def _build_cpu(
    config: ModelConfig,
    plan: pb.PackPlan,
    weights: npt.NDArray[np.uint8],
    options: ExecutorOptions,
) -> Executor:
    try:
        from engine.executor.cpu import CpuExecutor
    except ImportError as exc:
        raise ModelError(f"the cpu backend has no native module: {exc}") from exc

    return CpuExecutor(config, plan, weights, options)


# -- reference -------------------------------------------------------------------------------------


def _reference_plan(config: ModelConfig) -> pb.PackPlan:
    from engine.models.packing import reference_plan

    return reference_plan(config)


def _reference_block_bytes(config: ModelConfig, block_size: int) -> int:
    return 4 * config.kv_elements_per_token * block_size


def _build_reference(
    config: ModelConfig,
    plan: pb.PackPlan,
    weights: npt.NDArray[np.uint8],
    options: ExecutorOptions,
) -> Executor:
    try:
        from engine.executor.reference import ReferenceExecutor
    except ModuleNotFoundError as exc:
        raise ModelError(
            f"the reference backend needs {exc.name}: pip install 'cachewarm[torch]'"
        ) from exc

    return ReferenceExecutor(config, plan, weights, options.block_size)


_CPU = Backend("cpu", _cpu_plan, _cpu_block_bytes, _check_cpu, _build_cpu)
_REFERENCE = Backend(
    "reference",
    _reference_plan,
    _reference_block_bytes,
    lambda config, block_size: None,
    _build_reference,
)
