"""What would keep an engine from starting, found without starting anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cachewarmd import options, plan
from cachewarmd.errors import InvalidRequestError
from cachewarmd.options import OptionError
from engine.config import ServeConfig
from engine.errors import ModelError
from engine.models.config import ModelConfig, load_config
from engine.option_table import ROLES
from engine.tokenizer import Tokenizer, TokenizerError
from engine.worker_config import private_block_bytes


def faults(config: ServeConfig, environ: Mapping[str, str]) -> list[str]:
    """One line for each. Looks only, changes nothing."""
    return [
        *_model(config),
        *_cpus(config),
        *_sockets(config, environ),
        *_warmup(config),
    ]


def _warmup(config: ServeConfig) -> list[str]:
    if config.warmup is None:
        return ["warmup-required true is not allowed: without warmup"] * config.warmup_required
    if config.cachewarmd == "off":
        return ["warmup is not allowed: with cachewarmd off nothing is kept warm"]
    try:
        plan.load(config.warmup)
    except (InvalidRequestError, OSError) as exc:
        return [f"warmup: {exc}"]
    return []


def _worker_roles(config: ServeConfig) -> tuple[str, ...]:
    """Roles that may come: external workers bring their own."""
    return ROLES if config.external_workers else tuple(role for role, _ in config.workers)


def _model(config: ServeConfig) -> list[str]:
    errors = []
    try:
        errors += _private_pools(config, load_config(config.model, config.max_context))
    except ModelError as exc:
        return [str(exc)]
    try:
        Tokenizer(config.model)
    except TokenizerError as exc:
        errors.append(str(exc))
    return errors


def _private_pools(config: ServeConfig, model: ModelConfig) -> list[str]:
    block_bytes = private_block_bytes(config, model)
    sizes = {config.for_role(role).private_pool_bytes for role in _worker_roles(config)}
    return [
        f"private-pool-bytes {size} is not allowed: at least one block of {block_bytes} bytes"
        for size in sorted(size for size in sizes if size is not None)
        if size < block_bytes
    ]


def _cpus(config: ServeConfig) -> list[str]:
    usable = sorted(os.sched_getaffinity(0))
    lists = dict.fromkeys(config.for_role(role).worker_cpus for role in _worker_roles(config))
    return [
        f"worker-cpus {list(cpus)} is not allowed: among {usable}"
        for cpus in lists
        if not set(cpus) <= set(usable)
    ]


def _sockets(config: ServeConfig, environ: Mapping[str, str]) -> list[str]:
    """Paths must fit, and nobody else may be able to swap the socket that workers dial."""
    listen = Path(config.listen.removeprefix("unix:")) if config.listen else None
    worker_socket = config.worker_socket or options.runtime_dir(environ) / "engine-65535.sock"
    errors: list[str] = []
    for path in (config.daemon_socket(environ), worker_socket, listen):
        if path is not None:
            errors += _complaints(options.check_socket_path, path)
    return [*errors, *_complaints(options.check_private_dir, worker_socket.parent)]


def _complaints(check: Callable[[Path], None], path: Path) -> Sequence[str]:
    try:
        check(path)
    except OptionError as exc:
        return exc.errors
    return ()
