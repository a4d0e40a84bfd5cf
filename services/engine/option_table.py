"""The engine's options: one table for flags, environment, files, help and documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cachewarmd import log, options
from cachewarmd.options import Kind, Option, grouped

ROLES = ("unified", "prefill", "decode")
_MAX_WORKERS = 64
_MAX_CPU = 8191  # what the kernel is built for at most


def _cpus(value: str) -> tuple[int, ...]:
    """A CPU list as in cpusets: 0-3,6."""
    cpus: set[int] = set()
    for part in value.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), min(int(last or first), _MAX_CPU + 1) + 1)
        if not numbers:
            raise ValueError
        cpus.update(numbers)
    if min(cpus) < 0 or max(cpus) > _MAX_CPU:
        raise ValueError
    return tuple(sorted(cpus))


def _http_port(value: str) -> int | None:
    return None if value == "off" else _port.read(value)


def _workers(value: str) -> tuple[tuple[str, int], ...]:
    """Roles and their counts: unified alone, or prefill and decode together."""
    pairs = [part.partition("=") for part in value.split(",")]
    counts = {role: int(count) for role, _, count in pairs}
    if len(counts) < len(pairs) or set(counts) not in ({"unified"}, {"prefill", "decode"}):
        raise ValueError
    if min(counts.values()) < 1 or sum(counts.values()) > _MAX_WORKERS:
        raise ValueError
    return tuple(counts.items())


def _block_size(value: str) -> int:
    size = int(value)
    if size % 8 or not 8 <= size <= 256:
        raise ValueError
    return size


def _watchdog(value: str) -> float:
    seconds = options.seconds.read(value)
    if not seconds:
        raise ValueError  # every worker would be hung at once
    return seconds


def _listen(value: str) -> str:
    """unix:PATH with an absolute path; empty = not given."""
    if not value:
        return ""
    scheme, _, path = value.partition(":")
    place = options.socket_path.read(path)
    if scheme != "unix" or not place.is_absolute():
        raise ValueError
    return f"unix:{place}"


def _daemon(value: str) -> str | Path:
    if value in ("auto", "off"):
        return value
    if "/" not in value:
        raise ValueError  # rather a misspelled word than a file of the current directory
    return options.socket_path.read(value)


_port = options.integer(0, 65535)

_GENERAL = (
    *grouped(
        "model",
        Option("model", options.path, None, "model directory in Hugging Face layout", "DIR"),
        Option("model-name", options.text, None, "name clients ask for (default: directory name)"),
        Option("model-version", options.text, "", "version name (default: digest of the weights)"),
        Option("max-context", options.integer(2, 1 << 24), None, "limit below the model's own"),
        Option(
            "backend",
            options.choice("auto", "cpu", "reference"),
            "auto",
            "what computes: cpu = native kernels (auto takes them), reference = torch, slow",
        ),
        Option(
            "cpu-isa",
            options.choice("auto", "avx512_bf16", "avx512", "avx2", "portable"),
            "auto",
            "instruction set of the native kernels; auto = the best that the CPU has",
        ),
    ),
    *grouped(
        "address",
        Option("host", options.text, "127.0.0.1", "address to listen on"),
        Option("port", _port, 50051, "TCP port; 0 = any free one", "PORT"),
        Option(
            "listen",
            Kind(_listen, "unix: and an absolute path", show=lambda value: value or None),
            "",
            "listen on a Unix socket instead of host and port",
            "unix:PATH",
        ),
        Option(
            "http-port",
            Kind(
                _http_port,
                f"{_port.allowed}, or off",
                (int, str),
                lambda port: "off" if port is None else port,
            ),
            8000,
            "TCP port of /metrics, /health, /ready, /version; 0 = any free one",
            "PORT|off",
        ),
        Option(
            "insecure", options.flag, False, "allow an address that others can reach, without TLS"
        ),
    ),
    *grouped(
        "cachewarmd",
        Option(
            "cachewarmd",
            Kind(_daemon, "auto, off, or a path with a /"),
            "auto",
            "auto = use the daemon on the default socket, start one if none answers; off; "
            "or a socket path",
            "auto|off|SOCKET",
        ),
        Option(
            "warmup",
            options.path,
            None,
            "plan of what to warm (docs/warm-up.md): ready only when what it requires is there",
            "PLAN",
        ),
        Option(
            "warmup-required",
            options.flag,
            False,
            "a required item of the plan that can't be warmed ends the start, instead of a warning",
        ),
        Option("keep-daemon", options.flag, False, "leave a daemon that was started here running"),
        Option(
            "pool-bytes", options.size, None, "pool size of a daemon that is started here", "SIZE"
        ),
    ),
    *grouped(
        "workers",
        Option(
            "workers",
            Kind(
                _workers,
                f"unified=N or prefill=N,decode=M, {_MAX_WORKERS} workers at most",
                (dict, str),
                dict,
            ),
            (("unified", 1),),
            "how many workers: unified=N, or prefill=N,decode=M for separate roles",
            "ROLE=N[,ROLE=N]",
        ),
        Option(
            "spare-workers",
            options.integer(0, 16),
            0,
            "ready workers that stay idle until another one dies",
            "N",
        ),
        Option(
            "external-workers",
            options.flag,
            False,
            "start no worker here: they run on their own and dial the worker socket",
        ),
        Option(
            "worker-socket",
            options.socket_path,
            None,
            "where workers dial in (default: the path of `listen` with .workers behind it, "
            "else engine-PORT.sock in the runtime directory)",
            "PATH",
        ),
        Option(
            "watchdog",
            Kind(_watchdog, f"{options.seconds.allowed}, above 0", options.seconds.toml),
            30.0,
            "a worker that says nothing for this long is taken for hung, killed and replaced",
            "DURATION",
        ),
        Option(
            "lookup-budget",
            options.seconds,
            0.02,
            "how long a request waits for cachewarmd's answer; then it is computed cold",
            "DURATION",
        ),
        Option(
            "worker-cpus",
            Kind(_cpus, "a CPU list, as 0-3,6", (list, str), lambda cpus: list(cpus or ()) or None),
            (),
            "CPUs of each worker, as 0-3,6 (default: all)",
            "LIST",
        ),
        Option(
            "private-pool-bytes",
            options.size,
            None,
            "KV memory of each worker itself (default: two requests of the longest context, less "
            "where memory is short)",
            "SIZE",
        ),
    ),
    *grouped(
        "computation",
        Option(
            "block-size",
            Kind(_block_size, "a multiple of 8 from 8 to 256", (int,)),
            32,
            "tokens of a KV block",
            "TOKENS",
        ),
        Option(
            "prefill-chunk", options.integer(1, 8192), 128, "tokens of a prefill step", "TOKENS"
        ),
        Option("max-num-seqs", options.integer(1, 1024), 64, "requests computed at once", "N"),
    ),
    *grouped(
        "service",
        Option(
            "max-queue", options.integer(1, 100_000), 1024, "requests at most, waiting included"
        ),
        Option("drain-timeout", options.seconds, 30.0, "how long SIGTERM lets streams finish"),
        Option("log-level", options.choice(*log.LEVELS), "info", "least level logged", "LEVEL"),
    ),
)

ROLE_OVERRIDES = ("worker-cpus", "private-pool-bytes", "max-num-seqs", "prefill-chunk")


def role_option_name(role: str, name: str) -> str:
    """How a file overrides an option for the workers of one role."""
    return f"worker.{role}.{name}"


SERVE_OPTIONS = (
    *_GENERAL,
    *(
        replace(
            option,
            name=role_option_name(role, option.name),
            default=None,
            help=f"`{option.name}` of {role} workers (default: the general one)",
            group="one role's workers",
            is_file_only=True,
        )
        for role in ROLES
        for option in _GENERAL
        if option.name in ROLE_OVERRIDES
    ),
)

# What a worker that is started on its own can be told by flags; its files may hold everything.
WORKER_OPTIONS = tuple(
    option
    for option in _GENERAL
    if option.name
    in (
        *(
            "model",
            "model-name",
            "model-version",
            "max-context",
            "backend",
            "cpu-isa",
            "cachewarmd",
        ),
        *("worker-socket", *ROLE_OVERRIDES, "block-size", "lookup-budget", "log-level"),
    )
)
