"""What one worker needs, from the settings of its engine and the model's shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.config import ServeConfig, WorkerConfig
from engine.executor.backends import backend_named
from engine.models.config import ModelConfig

_MEMORY_SHARE = 8  # a private pool that nobody sized takes one part in so many


def private_block_bytes(config: ServeConfig, model: ModelConfig) -> int:
    """Bytes of one private KV block."""
    return backend_named(config.backend).block_bytes(model, config.block_size)


def default_pool_bytes(config: ServeConfig, model: ModelConfig, available_bytes: int) -> int:
    """Size of a private pool that nobody sized, a whole number of blocks.

    Two requests of the longest context with a copied short tail each, and a block for each of the
    requests computed at once. Memory may be too small for that: one request of the longest context
    always fits, more only within an eighth of what is available.
    """
    block_bytes = private_block_bytes(config, model)
    one_request = -(-model.max_context // config.block_size) + 1
    affordable = available_bytes // _MEMORY_SHARE // block_bytes
    wanted = max(2 * one_request, config.max_num_seqs)
    return block_bytes * min(wanted, max(affordable, one_request))


def _available_bytes() -> int:
    """Memory that could be taken without swapping; 0 where the kernel does not say."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(value.split()[0])
    return 0


def worker_config(
    config: ServeConfig,
    model: ModelConfig,
    role: str,
    environ: Mapping[str, str],
) -> WorkerConfig:
    """Settings of a worker of this role; `model` gives the size of its private pool."""
    config = config.for_role(role)
    pool_bytes = config.private_pool_bytes
    if pool_bytes is None:
        pool_bytes = default_pool_bytes(config, model, _available_bytes())
    return WorkerConfig(
        role=role,
        backend=config.backend,
        cpu_isa=config.cpu_isa,
        log_level=config.log_level,
        model=config.model,
        model_name=config.model_name,
        model_version=config.model_version,
        cachewarmd=config.daemon_socket(environ),
        cpus=config.worker_cpus,
        private_pool_bytes=pool_bytes,
        block_size=config.block_size,
        prefill_chunk=config.prefill_chunk,
        max_num_seqs=config.max_num_seqs,
        max_context=config.max_context,
        lookup_budget=config.lookup_budget,
    )
