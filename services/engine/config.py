"""The engine's settings: read here, frozen, passed on as constructor arguments."""

from __future__ import annotations

import argparse
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cachewarmd import log, options
from cachewarmd.options import Option, OptionError

ENV_PREFIX = "CACHEWARM_ENGINE_"


def _cpus(value: str) -> tuple[int, ...]:
    """A CPU list as in cpusets: 0-3,6."""
    cpus: set[int] = set()
    try:
        for part in value.split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
        if not cpus or min(cpus) < 0:
            raise ValueError
    except ValueError:
        raise OptionError(f"{value!r} is not a CPU list: as 0-3,6") from None
    return tuple(sorted(cpus))


def _block_size(value: str) -> int:
    size = options.integer(8, 256)(value)
    if size % 8:
        raise OptionError(f"{value!r} is not allowed: a multiple of 8")
    return size


SERVE_OPTIONS = (
    Option("model", options.path, None, "model directory in Hugging Face layout", "DIR"),
    Option("model-name", options.text, None, "name clients ask for (default: directory name)"),
    Option("model-version", options.text, "", "version name (default: digest of the weights)"),
    Option("host", options.text, "127.0.0.1", "address to listen on"),
    Option("port", options.integer(0, 65535), 50051, "TCP port; 0 = any free one", "PORT"),
    Option("insecure", options.flag, False, "allow an address that others can reach, without TLS"),
    Option(
        "cachewarmd",
        options.text,
        "auto",
        "auto = use the daemon on the default socket, start one if none answers; off; "
        "or a socket path",
        "auto|off|SOCKET",
    ),
    Option("keep-daemon", options.flag, False, "leave a daemon that was started here running"),
    Option("pool-bytes", options.size, None, "pool size of a daemon that is started here", "SIZE"),
    Option("backend", options.choice("auto", "reference"), "auto", "how the model is computed"),
    Option("worker-cpus", _cpus, (), "CPUs of the worker, as 0-3,6 (default: all)", "LIST"),
    Option(
        "private-pool-bytes",
        options.size,
        None,
        "KV memory of the worker itself (default: one request of the longest context)",
        "SIZE",
    ),
    Option("block-size", _block_size, 32, "tokens of a KV block", "TOKENS"),
    Option("prefill-chunk", options.integer(1, 8192), 128, "tokens of a prefill step", "TOKENS"),
    Option("max-context", options.integer(2, 1 << 24), None, "limit below the model's own"),
    Option("max-queue", options.integer(1, 100_000), 1024, "requests at most, waiting included"),
    Option("drain-timeout", options.seconds, 30.0, "how long SIGTERM lets streams finish"),
    Option("log-level", options.choice(*log.LEVELS), "info", "least level logged", "LEVEL"),
)


@dataclass(frozen=True)
class ServeConfig:
    """All settings of one engine."""

    model: Path
    model_name: str
    model_version: str
    host: str
    port: int
    insecure: bool
    cachewarmd: str
    keep_daemon: bool
    pool_bytes: int | None
    backend: str
    worker_cpus: tuple[int, ...]
    private_pool_bytes: int | None
    block_size: int
    prefill_chunk: int
    max_context: int | None
    max_queue: int
    drain_timeout: float
    log_level: str

    def daemon_socket(self, environ: Mapping[str, str]) -> Path | None:
        """Where the daemon is; None = off."""
        if self.cachewarmd == "off":
            return None
        if self.cachewarmd == "auto":
            return options.default_socket(environ)
        return Path(self.cachewarmd).expanduser()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_serve(flags: argparse.Namespace, environ: Mapping[str, str]) -> ServeConfig:
    """Raises OptionError naming the setting, its value and what is allowed."""
    values = options.resolve(SERVE_OPTIONS, flags, environ, ENV_PREFIX)
    if values["model"] is None:
        raise OptionError("--model: a model directory is required")
    values["model"] = values["model"].resolve()
    values["model_name"] = values["model_name"] or values["model"].name
    if not values["insecure"] and not _is_loopback(values["host"]):
        raise OptionError(
            f"--host: {values['host']!r} can be reached by others and there is no TLS: "
            "a loopback address, or --insecure"
        )
    return ServeConfig(**values)


@dataclass(frozen=True)
class WorkerConfig:
    """What a worker process needs; travels as JSON on its command line."""

    role: str
    backend: str
    log_level: str
    model: Path
    model_name: str
    model_version: str
    cachewarmd: Path | None
    cpus: tuple[int, ...]
    private_pool_bytes: int
    block_size: int
    prefill_chunk: int
    max_context: int | None

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
