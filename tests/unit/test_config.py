"""The engine's settings: flag before environment before default."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from cachewarmd import options
from cachewarmd.options import OptionError
from engine import config
from engine.config import ServeConfig, WorkerConfig

NO_FILES = Path("/nonexistent")


def load(*flags: str, **environ: str) -> ServeConfig:
    parser = argparse.ArgumentParser()
    options.add_to_parser(parser, config.SERVE_OPTIONS, config.ENV_PREFIX)
    chosen = parser.parse_args(["--model", "/models/m", *flags])
    return config.load_serve(chosen, environ, NO_FILES)


def refusal(*flags: str, **environ: str) -> str:
    with pytest.raises(OptionError) as caught:
        load(*flags, **environ)
    return str(caught.value)


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    """Each source is asked in turn."""
    assert load().port == 50051
    assert load(CACHEWARM_ENGINE_PORT="7").port == 7
    assert load("--port", "8", CACHEWARM_ENGINE_PORT="7").port == 8


def test_the_defaults_are_safe_ones() -> None:
    """Loopback, a model name from its directory, the daemon found by itself."""
    settings = load()
    assert (settings.host, settings.insecure) == ("127.0.0.1", False)
    assert (settings.model_name, settings.cachewarmd) == ("m", "auto")
    assert (settings.block_size, settings.prefill_chunk) == (32, 128)
    assert load("--model-name", "mine").model_name == "mine"


def test_an_unknown_variable_of_ours_is_refused() -> None:
    """A typing error in a unit file is not passed over in silence; the known names are listed."""
    text = refusal(CACHEWARM_ENGINE_PROT="1")
    assert text.startswith("CACHEWARM_ENGINE_PROT: no such setting")
    assert "CACHEWARM_ENGINE_PORT" in text
    assert load(CACHEWARMD_SOCKET="/s", OTHER="1").port == 50051


@pytest.mark.parametrize(
    ("flag", "value", "named"),
    [
        ("port", "65536", "0 to 65535"),
        ("port", "x", "0 to 65535"),
        ("block-size", "12", "multiple of 8"),
        ("block-size", "4", "8 to 256"),
        ("block-size", "264", "8 to 256"),
        ("prefill-chunk", "0", "1 to 8192"),
        ("max-queue", "0", "1 to 100000"),
        ("max-context", "1", "2 to"),
        ("private-pool-bytes", "-1", "MiB"),
        ("pool-bytes", "1 parsec", "MiB"),
        ("drain-timeout", "soon", "seconds"),
        ("backend", "abacus", "reference"),
        ("log-level", "loud", "info"),
        ("insecure", "maybe", "true or false"),
        ("keep-daemon", "2", "true or false"),
        ("worker-cpus", "", "0-3,6"),
        ("worker-cpus", "3-1", "0-3,6"),
        ("worker-cpus", "a-b", "0-3,6"),
        ("worker-cpus", "0,-1", "0-3,6"),
        ("worker-cpus", "0-99999999999", "0-3,6"),
        ("pool-bytes", "9" * 60, "MiB"),
        ("pool-bytes", "9" * 60 + ".5T", "MiB"),
        ("drain-timeout", "9" * 60, "seconds"),
        ("watchdog", "0", "above 0"),
        ("http-port", "on", "0 to 65535, or off"),
        ("listen", "/run/e.sock", "unix:"),
        ("listen", "unix:e.sock", "absolute"),
        ("listen", "unix:", "absolute path"),
        ("cachewarmd", "aut", "auto, off, or a path"),
        ("worker-socket", "", "a path"),
        ("workers", "unified", "unified=N"),
        ("workers", "unified=0", "unified=N"),
        ("workers", "unified=1,unified=2", "unified=N"),
        ("workers", "prefill=1", "prefill=N,decode=M"),
        ("workers", "unified=1,decode=1", "prefill=N,decode=M"),
        ("workers", "prefill=32,decode=33", "64 workers at most"),
    ],
)
def test_a_bad_value_is_refused_with_its_source_and_what_is_allowed(
    flag: str, value: str, named: str
) -> None:
    """Flag and variable are each named as they were written."""
    variable = "CACHEWARM_ENGINE_" + flag.upper().replace("-", "_")
    for text, origin in (
        (refusal(f"--{flag}={value}"), f"--{flag}"),
        (refusal(**{variable: value}), variable),
    ):
        assert text.startswith(f"{origin}: {value!r}")
        assert named in text


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("private-pool-bytes", "1.5MiB", 3 << 19),
        ("private-pool-bytes", "2G", 2 << 30),
        ("drain-timeout", "500ms", 0.5),
        ("drain-timeout", "2m", 120.0),
        ("worker-cpus", "0-2,5", (0, 1, 2, 5)),
        ("worker-cpus", "3", (3,)),
        ("insecure", "yes", True),
        ("block-size", "256", 256),
        ("http-port", "off", None),
        ("http-port", "0", 0),
        ("workers", "unified=2", (("unified", 2),)),
        ("workers", "prefill=1,decode=3", (("prefill", 1), ("decode", 3))),
        ("listen", "unix:/run//e.sock", "unix:/run/e.sock"),
        ("pool-bytes", "9007199254740993", 9007199254740993),
    ],
)
def test_a_good_value_is_read(flag: str, value: str, expected: object) -> None:
    """Sizes, durations, CPU lists and flags have their usual spellings."""
    assert getattr(load(f"--{flag}={value}"), flag.replace("-", "_")) == expected


def test_a_bare_flag_means_true() -> None:
    """`--insecure` needs no value."""
    assert load("--insecure").insecure is True


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_others_can_reach_needs_consent(host: str) -> None:
    """Without TLS only loopback, unless told otherwise; the message says how."""
    text = refusal("--host", host)
    assert host in text
    assert "--insecure" in text
    assert load("--host", host, "--insecure").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_needs_none(host: str) -> None:
    """Every form of it."""
    assert load("--host", host).host == host


@pytest.mark.parametrize("host", ["127.evil.example.org", "localhost.example.org", "::1234"])
def test_a_name_that_only_looks_like_loopback_needs_consent(host: str) -> None:
    """A prefix is not an address."""
    assert "--insecure" in refusal("--host", host)


def test_a_unix_socket_and_a_port_exclude_one_another() -> None:
    """Only when both are given: the port's default is no wish."""
    assert load("--listen", "unix:/run/e.sock").port == 50051
    text = refusal("--listen", "unix:/run/e.sock", CACHEWARM_ENGINE_PORT="50051")
    assert text.startswith("--listen: excludes CACHEWARM_ENGINE_PORT")


def test_workers_dial_in_beside_the_unix_socket() -> None:
    """Unless a place is named; a path that leaves no room for it needs one."""
    assert load("--listen", "unix:/run/e.sock").worker_socket == Path("/run/e.sock.workers")
    chosen = load("--listen", "unix:/run/e.sock", "--worker-socket", "/run/w")
    assert chosen.worker_socket == Path("/run/w")
    assert load().worker_socket is None
    long = "unix:/" + 100 * "s"
    assert "--worker-socket" in refusal("--listen", long)
    assert load("--listen", long, "--worker-socket", "/run/w").listen == long


@pytest.mark.parametrize("name", ["listen", "cachewarmd", "worker-socket"])
def test_a_socket_path_that_is_too_long_is_refused(name: str) -> None:
    """The kernel's limit is named, with the option."""
    path = "/" + 107 * "s"
    text = refusal(f"--{name}", f"unix:{path}" if name == "listen" else path)
    assert text.startswith(f"--{name}: socket path of 108 bytes: at most 107 are allowed")


def test_all_faults_are_told_at_once() -> None:
    """Nobody wants to start it once for each."""
    with pytest.raises(OptionError) as caught:
        load("--port", "x", "--block-size", "9", CACHEWARM_ENGINE_PROT="1")
    assert len(caught.value.errors) == 3


def test_a_model_is_required() -> None:
    """The one setting without a default."""
    parser = argparse.ArgumentParser()
    options.add_to_parser(parser, config.SERVE_OPTIONS, config.ENV_PREFIX)
    with pytest.raises(OptionError, match="--model: a model directory is required"):
        config.load_serve(parser.parse_args([]), {}, NO_FILES)


def test_the_daemons_socket_follows_the_setting() -> None:
    """Off is none, auto the default place, anything else a path."""
    environ = {"XDG_RUNTIME_DIR": "/run/user/9"}
    assert load("--cachewarmd", "off").daemon_socket(environ) is None
    default = Path("/run/user/9/cachewarm/control.sock")
    assert load().daemon_socket(environ) == default
    assert load().daemon_socket({**environ, "CACHEWARMD_SOCKET": "/s"}) == Path("/s")
    assert load("--cachewarmd", "/x/y").daemon_socket(environ) == Path("/x/y")
    assert load("--cachewarmd", "~/y").daemon_socket(environ) == Path.home() / "y"


def test_a_workers_config_survives_its_journey() -> None:
    """What the front writes on the command line is what the worker reads."""
    made = WorkerConfig(
        backend="reference",
        cpu_isa="avx2",
        log_level="info",
        role="unified",
        model=Path("/m"),
        model_name="m",
        model_version="",
        cachewarmd=Path("/s"),
        cpus=(0, 3),
        private_pool_bytes=1 << 40,
        block_size=32,
        prefill_chunk=128,
        max_num_seqs=64,
        max_context=None,
        lookup_budget=0.02,
    )
    assert WorkerConfig.from_json(made.to_json()) == made


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1}', "null"])
def test_what_is_no_workers_config_is_refused(text: str) -> None:
    """As a bad setting, not as a crash."""
    with pytest.raises(OptionError, match="--config-json"):
        WorkerConfig.from_json(text)
