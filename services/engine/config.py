"""The engine's settings: read here, frozen, passed on as constructor arguments."""

from __future__ import annotations

import argparse
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cachewarmd import options, settings
from cachewarmd.options import OptionError
from cachewarmd.settings import Setting
from engine.option_table import ROLE_OVERRIDES, ROLES, SERVE_OPTIONS, role_option_name

__all__ = ["ENV_PREFIX", "SERVE_OPTIONS", "ServeConfig", "WorkerConfig", "load_serve"]

ENV_PREFIX = "CACHEWARM_ENGINE_"
DEFAULT_FILE = "engine.toml"


@dataclass(frozen=True)
class ServeConfig:
    """All settings of one engine. `overrides` are fields with another value for one role."""

    model: Path
    model_name: str
    model_version: str
    host: str
    listen: str
    port: int
    http_port: int | None
    insecure: bool
    cachewarmd: str | Path
    warmup: Path | None
    warmup_required: bool
    keep_daemon: bool
    pool_bytes: int | None
    backend: str
    cpu_isa: str
    workers: tuple[tuple[str, int], ...]
    spare_workers: int
    external_workers: bool
    worker_socket: Path | None
    watchdog: float
    lookup_budget: float
    worker_cpus: tuple[int, ...]
    private_pool_bytes: int | None
    block_size: int
    prefill_chunk: int
    max_num_seqs: int
    max_context: int | None
    max_queue: int
    drain_timeout: float
    log_level: str
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def daemon_socket(self, environ: Mapping[str, str]) -> Path | None:
        """Where the daemon is; None = off."""
        match self.cachewarmd:
            case "off":
                return None
            case "auto":
                return options.default_socket(environ)
        return Path(self.cachewarmd)

    def for_role(self, role: str) -> ServeConfig:
        """These settings as they hold for the workers of that role."""
        return replace(self, overrides={}, **self.overrides.get(role, {}))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def resolve(
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    config_dir: Path = settings.DEFAULT_DIR,
) -> dict[str, Setting]:
    """Every setting and where it comes from. Raises OptionError."""
    return settings.resolve(SERVE_OPTIONS, flags, environ, ENV_PREFIX, config_dir / DEFAULT_FILE)


def serve_config(found: Mapping[str, Setting]) -> ServeConfig:
    """The settings of `serve`. Raises OptionError for what does not go together."""
    config = worker_side(found)
    errors = []
    host, listen, port = found["host"], found["listen"], found["port"]
    if not config.insecure and not _is_loopback(config.host):
        errors.append(
            f"{host.where}: {config.host!r} can be reached by others and there is no TLS: "
            "a loopback address, or --insecure"
        )
    if config.listen and not port.is_default:
        errors.append(f"{listen.where}: excludes {port.where}: a Unix socket has no port")
    if config.cachewarmd == "off" and "prefill" in dict(config.workers):
        errors.append(
            f"{found['workers'].where}: prefill and decode hand over through cachewarmd; "
            f"{found['cachewarmd'].where}: it is off"
        )
    if not config.external_workers:
        for name in unused_overrides(config):
            errors.append(f"{found[name].where}: no worker has this role: {_roles(config)}")
    if errors:
        raise OptionError(*errors)
    return config


def _roles(config: ServeConfig) -> str:
    return "workers = " + ",".join(f"{role}={count}" for role, count in config.workers)


def unused_overrides(config: ServeConfig) -> list[str]:
    """Fields of tables for roles that no worker of `serve` has."""
    idle = [role for role in ROLES if role not in dict(config.workers)]
    return [
        role_option_name(role, name) for role in idle for name in config.overrides.get(role, {})
    ]


def worker_side(found: Mapping[str, Setting]) -> ServeConfig:
    """The settings for a worker that is started on its own. Raises OptionError."""
    overrides: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        for name in (option.replace("-", "_") for option in ROLE_OVERRIDES):
            setting = found[role_option_name(role, name)]
            if setting.value is not None:
                overrides.setdefault(role, {})[name] = setting.value
    values = {name: setting.value for name, setting in found.items() if "." not in name}
    if values["model"] is None:
        raise OptionError("--model: a model directory is required")
    values["model"] = values["model"].resolve()
    values["model_name"] = values["model_name"] or values["model"].name
    if values["listen"] and values["worker_socket"] is None:
        values["worker_socket"] = _beside(found["listen"])
    return ServeConfig(**values, overrides=overrides)


def _beside(listen: Setting) -> Path:
    """Where workers dial in when the front listens on a Unix socket."""
    path = Path(listen.value.removeprefix("unix:") + ".workers")
    try:
        options.check_socket_path(path)
    except OptionError as exc:
        raise OptionError(f"{listen.where}: {exc}; name another with --worker-socket") from None
    return path


def load_serve(
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    config_dir: Path = settings.DEFAULT_DIR,
) -> ServeConfig:
    """Settings of `serve` from all sources. Raises OptionError naming every fault."""
    return serve_config(resolve(flags, environ, config_dir))


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker process needs; travels as JSON on its command line."""

    role: str
    backend: str
    cpu_isa: str
    log_level: str
    model: Path
    model_name: str
    model_version: str
    cachewarmd: Path | None
    cpus: tuple[int, ...]
    private_pool_bytes: int
    block_size: int
    prefill_chunk: int
    max_num_seqs: int
    max_context: int | None
    lookup_budget: float  # seconds

    def to_json(self) -> str:
        """For `from_json` in another process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """Raises OptionError for what is no worker config."""
        try:
            raw: dict[str, Any] = json.loads(text)
            raw["model"] = Path(raw["model"])
            raw["cachewarmd"] = Path(raw["cachewarmd"]) if raw["cachewarmd"] else None
            raw["cpus"] = tuple(raw["cpus"])
            return cls(**raw)
        except (ValueError, TypeError, KeyError) as exc:
            raise OptionError(f"--config-json: {exc}") from exc
