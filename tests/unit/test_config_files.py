"""Settings from files: which ones are read, in what order, and what is refused."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cachewarmd.__main__ as daemon_main
import cachewarmd.config as daemon_config
import engine
import engine.__main__ as engine_main
from cachewarmd import config_file, options, settings
from cachewarmd.options import Option, OptionError
from engine import config, worker_config
from engine.config import ServeConfig, WorkerConfig
from engine.models.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def write(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    settings.add_to_parser(made, config.DEFAULT_FILE)
    options.add_to_parser(made, config.SERVE_OPTIONS, config.ENV_PREFIX)
    return made


def load(
    folder: Path, *flags: str, make: Any = config.serve_config, environ: Mapping[str, str] = {}
) -> ServeConfig:
    found = config.resolve(parser().parse_args(["--model", "/m", *flags]), environ, folder)
    loaded: ServeConfig = make(found)
    return loaded


def refusals(folder: Path, *flags: str) -> tuple[str, ...]:
    with pytest.raises(OptionError) as caught:
        load(folder, *flags)
    return caught.value.errors


def refusal(folder: Path, text: str | bytes) -> str:
    """The one complaint about a file with that text."""
    path = write(folder / "engine.toml", text)
    (error,) = refusals(folder)
    assert error.startswith(f"{path}: ")
    assert error.isprintable()
    return error.removeprefix(f"{path}: ")


# -- which files -----------------------------------------------------------------------------------


def test_each_source_wins_over_those_below_it(tmp_path: Path) -> None:
    """Default, file, conf.d in name order, environment, flag."""
    assert load(tmp_path).max_queue == 1024
    write(tmp_path / "engine.toml", "max-queue = 1\nblock-size = 64")
    assert load(tmp_path).max_queue == 1
    write(tmp_path / "engine.d" / "20.toml", "max-queue = 3")
    write(tmp_path / "engine.d" / "10.toml", "max-queue = 2\nprefill-chunk = 7")
    assert load(tmp_path).max_queue == 3
    environ = {"CACHEWARM_ENGINE_MAX_QUEUE": "4"}
    assert load(tmp_path, environ=environ).max_queue == 4
    chosen = load(tmp_path, "--max-queue", "5", environ=environ)
    assert (chosen.max_queue, chosen.block_size, chosen.prefill_chunk) == (5, 64, 7)


def test_conf_d_counts_without_the_file(tmp_path: Path) -> None:
    """A package may ship the one, an operator the other."""
    write(tmp_path / "engine.d" / "a.toml", "max-queue = 2")
    assert load(tmp_path).max_queue == 2


def test_editors_leftovers_are_not_read(tmp_path: Path) -> None:
    """Hidden files and other endings."""
    for name in (".a.toml", "a.toml~", "a.toml.dpkg-new", "README"):
        write(tmp_path / "engine.d" / name, "no toml")
    assert load(tmp_path).max_queue == 1024


def test_a_named_file_must_exist_and_replaces_the_default_one(tmp_path: Path) -> None:
    """With its own conf.d; the default file is not read as well."""
    write(tmp_path / "engine.toml", "max-queue = 1\nblock-size = 64")
    other = write(tmp_path / "other.toml", "max-queue = 2")
    write(tmp_path / "other.d" / "a.toml", "prefill-chunk = 7")
    chosen = load(tmp_path, "--config", str(other))
    assert (chosen.max_queue, chosen.block_size, chosen.prefill_chunk) == (2, 32, 7)
    missing = tmp_path / "missing.toml"
    assert refusals(tmp_path, "--config", str(missing)) == (f"{missing}: does not exist",)


def test_a_default_directory_that_is_closed_to_us_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's engine runs on a machine whose /etc/cachewarm is another's."""
    write(tmp_path / "engine.toml", "max-queue = 1")
    asked = []

    def no_access(path: Path, mode: int) -> bool:
        asked.append((path, mode))
        return False

    monkeypatch.setattr(os, "access", no_access)
    assert load(tmp_path).max_queue == 1024
    assert asked == [(tmp_path, os.R_OK | os.X_OK)]
    assert load(tmp_path, "--config", str(tmp_path / "engine.toml")).max_queue == 1


# -- whose files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o660, 0o606, 0o622])
@pytest.mark.parametrize("name", ["engine.toml", "engine.d/a.toml"])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    """Its settings are not used; the message tells mode and what is allowed."""
    path = write(tmp_path / name, "max-queue = 2", mode)
    (error,) = refusals(tmp_path)
    assert error.startswith(f"{path}: mode {mode:04o} lets others write; allowed: at most 06")


def test_a_conf_d_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """They could take files away."""
    write(tmp_path / "engine.d" / "a.toml", "max-queue = 2")
    (tmp_path / "engine.d").chmod(0o777)
    (error,) = refusals(tmp_path)
    assert error.startswith(f"{tmp_path / 'engine.d'}: mode 0777 lets others write")


@pytest.mark.parametrize(
    ("owner", "me", "is_trusted"),
    [(0, 0, True), (0, 1000, True), (1000, 1000, True), (1001, 1000, False), (1000, 0, False)],
)
def test_only_root_and_this_user_may_own_a_file(owner: int, me: int, is_trusted: bool) -> None:
    """Not even root trusts another user's file."""
    info = os.stat_result((0o100600, 1, 1, 1, owner, 0, 0, 0, 0, 0))
    reason = config_file.writable_by_others(info, me)
    assert (not reason) == is_trusted
    if reason:
        assert reason == f"belongs to uid {owner}; allowed: root or uid {me}"


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    """Opening a FIFO for reading would wait for a writer; a directory has no text."""
    fifo, folder = tmp_path / "fifo.toml", tmp_path / "folder.toml"
    os.mkfifo(fifo, 0o600)
    folder.mkdir(0o700)
    for path in (fifo, folder):
        assert refusals(tmp_path, "--config", str(path)) == (f"{path}: not a regular file",)


def test_a_file_of_more_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    """The last byte that is allowed is read."""
    text = b"max-queue = 2\n"
    full = text + b"#" * (config_file.MAX_BYTES - len(text))
    path = write(tmp_path / "engine.toml", full)
    assert load(tmp_path).max_queue == 2
    assert refusal(tmp_path, full + b"#") == f"more than {config_file.MAX_BYTES} bytes"
    path.unlink()


# -- what is in them -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("max_queue = 1", "'max_queue': no such option; did you mean max-queue?"),
        ("max-queu = 1", "did you mean max-queue?"),
        ("MAX-QUEUE = 1", "no such option"),
        ("zzz = 1", "allowed: model, model-name"),
        ("config = '/x'", "no such option"),
        ("[server]\nport = 1", "'server': no such option"),
        ("[worker.decod]\nmax-num-seqs = 1", "did you mean worker.decode.max-num-seqs?"),
        ("[worker.decod]", "'worker.decod': no such option"),
        ("[worker.decode]\nmax_num_seqs = 1", "did you mean worker.decode.max-num-seqs?"),
        ("[worker.decode]\nport = 1", "'worker.decode.port': no such option"),
        ("worker = 1", "'worker': no such option"),
        ('"a\\nb" = 1', "no such option"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(
    tmp_path: Path, text: str, named: str
) -> None:
    """File, key, and what may have been meant, or all there are."""
    assert named in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('port = "50051"', "port: '50051' is a string, not an integer: a whole number from 0 to"),
        ("port = 1.0", "port: 1.0 is a float, not an integer"),
        ("port = true", "port: True is a boolean, not an integer"),
        ("port = [1]", "port: [1] is an array, not an integer"),
        ("port = 1979-05-27", "is a date or time, not an integer"),
        ("port = 65536", "port: '65536' is not allowed: a whole number from 0 to 65535"),
        ('insecure = "true"', "insecure: 'true' is a string, not a boolean: true or false"),
        ("model-name = 7", "model-name: 7 is an integer, not a string"),
        ("pool-bytes = 1.5", "pool-bytes: 1.5 is a float, not an integer or a string"),
        ("pool-bytes = -1", "pool-bytes: '-1' is not allowed: a number of bytes"),
        ("drain-timeout = nan", "drain-timeout: 'nan' is not allowed: a number of seconds"),
        ("drain-timeout = -1", "drain-timeout: '-1' is not allowed"),
        ("worker-cpus = []", "worker-cpus: '' is not allowed: a CPU list"),
        ("worker-cpus = [true]", "worker-cpus: [True] is not allowed: a CPU list"),
        ('worker-cpus = ["0"]', "worker-cpus: ['0'] is not allowed: a CPU list"),
        ("worker-cpus = [-1]", "worker-cpus: '-1' is not allowed"),
        ("workers = { unified = '1' }", "workers: {'unified': '1'} is not allowed: unified=N"),
        ("workers = { prefill = 1 }", "workers: 'prefill=1' is not allowed: unified=N"),
        ("[workers]\nunified = 0", "workers: 'unified=0' is not allowed"),
        ("[workers.unified]\na = 1", "workers: {'unified': {'a': 1}} is not allowed"),
        ('worker-socket = "w.sock"', "worker-socket: 'w.sock' is not allowed: in a file, a path"),
        ('cachewarmd = "./d.sock"', "cachewarmd: './d.sock' is not allowed: in a file, a path"),
        ('worker-socket = "/a\\u0000"', "worker-socket: '/a\\x00' is not allowed: a path"),
        ('worker-socket = "~nobody.of.that.name/s"', "is not allowed: a path"),
        ('log-level = "loud"', "log-level: 'loud' is not allowed: debug, info"),
        (f'log-level = "{500 * "x"}"', "..."),
        ("[worker.decode]\nprefill-chunk = 0", "worker.decode.prefill-chunk: '0' is not allowed"),
        ('[worker.decode]\nmax-num-seqs = "9"', "is a string, not an integer"),
    ],
)
def test_a_bad_value_is_refused_with_key_and_what_is_allowed(
    tmp_path: Path, text: str, named: str
) -> None:
    """Types are not converted, ranges hold, and a file knows no current directory."""
    assert named in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("port = 1\nport = 2\n", "line 2"),
        ("port = \n", "line 1"),
        (b"model-name = '\xff'", "not UTF-8 at byte 14"),
        ("port = " + 100_000 * "[", "not TOML"),
        ("port = " + 5000 * "9", "not TOML"),
    ],
)
def test_what_is_no_toml_is_refused(tmp_path: Path, text: str | bytes, named: str) -> None:
    """With the place; nesting and length can't crash the reader."""
    assert named in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        ("port = 0", "port", 0),
        ("insecure = true", "insecure", True),
        ('model-name = "ä \\"b\\""', "model_name", 'ä "b"'),
        ("pool-bytes = 4096", "pool_bytes", 4096),
        ('pool-bytes = "2 GiB"', "pool_bytes", 2 << 30),
        ("drain-timeout = 2", "drain_timeout", 2.0),
        ("drain-timeout = 0.5", "drain_timeout", 0.5),
        ('drain-timeout = "2m"', "drain_timeout", 120.0),
        ("worker-cpus = [3, 1]", "worker_cpus", (1, 3)),
        ('worker-cpus = "0-2"', "worker_cpus", (0, 1, 2)),
        ("http-port = 9", "http_port", 9),
        ('http-port = "off"', "http_port", None),
        ("workers = { unified = 2 }", "workers", (("unified", 2),)),
        ("[workers]\nprefill = 1\ndecode = 2", "workers", (("prefill", 1), ("decode", 2))),
        ('workers = "unified=3"', "workers", (("unified", 3),)),
        ('cachewarmd = "~/d.sock"', "cachewarmd", Path.home() / "d.sock"),
        ('cachewarmd = "off"', "cachewarmd", "off"),
    ],
)
def test_a_good_value_is_read(tmp_path: Path, text: str, field: str, expected: object) -> None:
    """In TOML's own types, or as a flag spells it where units need text."""
    write(tmp_path / "engine.toml", text)
    assert getattr(load(tmp_path), field) == expected


def test_a_bad_value_is_refused_even_where_a_flag_overrides_it(tmp_path: Path) -> None:
    """It would come back when the flag goes."""
    write(tmp_path / "engine.toml", "port = 65536")
    assert len(refusals(tmp_path, "--port", "1")) == 1


def test_every_fault_of_every_file_is_told(tmp_path: Path) -> None:
    """Files that can't be read are one thing, settings in those that can another."""
    write(tmp_path / "engine.toml", "port = 'x'\nzzz = 1\n")
    write(tmp_path / "engine.d" / "a.toml", "block-size = 9")
    assert len(refusals(tmp_path)) == 3
    write(tmp_path / "engine.d" / "b.toml", "=")
    write(tmp_path / "engine.d" / "c.toml", "port = 1", 0o666)
    assert len(refusals(tmp_path)) == 2


# -- one role's workers ----------------------------------------------------------------------------

ROLES_FILE = """
workers = { prefill = 1, decode = 2 }
max-num-seqs = 16
worker-cpus = [0]
[worker.decode]
max-num-seqs = 128
worker-cpus = "1-2"
private-pool-bytes = "1MiB"
[worker.prefill]
prefill-chunk = 512
"""


def test_a_roles_table_overrides_the_general_value_for_that_role(tmp_path: Path) -> None:
    """Also one from a flag; the other roles keep the general value."""
    write(tmp_path / "engine.toml", ROLES_FILE)
    chosen = load(tmp_path, "--max-num-seqs", "32")
    prefill, decode = chosen.for_role("prefill"), chosen.for_role("decode")
    assert (prefill.max_num_seqs, prefill.prefill_chunk, prefill.worker_cpus) == (32, 512, (0,))
    assert (decode.max_num_seqs, decode.prefill_chunk, decode.worker_cpus) == (128, 128, (1, 2))
    assert (prefill.private_pool_bytes, decode.private_pool_bytes) == (None, 1 << 20)


def test_a_table_for_a_role_without_workers_is_refused(tmp_path: Path) -> None:
    """Unless the workers are started by somebody else, or it is such a worker that reads it."""
    path = write(tmp_path / "engine.toml", "[worker.decode]\nmax-num-seqs = 1")
    (error,) = refusals(tmp_path)
    named = f"{path}: worker.decode.max-num-seqs: no worker has this role: workers = unified=1"
    assert error == named
    assert load(tmp_path, "--external-workers").for_role("decode").max_num_seqs == 1
    assert load(tmp_path, make=config.worker_side).for_role("decode").max_num_seqs == 1


def test_roles_without_a_daemon_are_refused(tmp_path: Path) -> None:
    """They hand over through it; both settings are named, wherever they stand."""
    write(tmp_path / "engine.toml", "workers = { prefill = 1, decode = 1 }")
    assert load(tmp_path).workers == (("prefill", 1), ("decode", 1))
    assert refusals(tmp_path, "--cachewarmd", "off") == (
        f"{tmp_path / 'engine.toml'}: workers: prefill and decode hand over through cachewarmd; "
        "--cachewarmd: it is off",
    )
    assert load(tmp_path, "--cachewarmd", "off", "--workers", "unified=2").cachewarmd == "off"


def test_roles_have_no_flags_and_no_variables(tmp_path: Path) -> None:
    """They are the file's alone."""
    assert "worker.decode" not in parser().format_help()
    with pytest.raises(OptionError, match="no such setting"):
        load(tmp_path, environ={"CACHEWARM_ENGINE_WORKER.DECODE.MAX_NUM_SEQS": "1"})


def test_a_worker_gets_its_roles_settings(tmp_path: Path, m_rand_dir: Path) -> None:
    """Everything of WorkerConfig comes from the engine's settings."""
    write(tmp_path / "engine.toml", ROLES_FILE)
    chosen = load(tmp_path, "--model", str(m_rand_dir), "--cachewarmd", "/run/d")
    made = worker_config.worker_config(chosen, load_config(m_rand_dir), "decode", {})
    assert (made.role, made.cpus, made.max_num_seqs) == ("decode", (1, 2), 128)
    assert (made.private_pool_bytes, made.cachewarmd) == (1 << 20, Path("/run/d"))
    assert WorkerConfig.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("max_num_seqs", "available_requests", "blocks"),
    [
        (1, 1000, 2 * 9),  # two requests, each with a copied tail
        (64, 1000, 64),  # a block for each that runs
        (64, 8 * 3, 3 * 9),  # an eighth of what is available
        (64, 8 * 1, 9),
        (64, 1, 9),  # one request fits in any case
    ],
)
def test_the_default_private_pool_follows_context_and_memory(
    m_rand_dir: Path, tmp_path: Path, max_num_seqs: int, available_requests: int, blocks: int
) -> None:
    """In whole blocks."""
    settings = replace(load(tmp_path), max_num_seqs=max_num_seqs, block_size=8)
    model = replace(load_config(m_rand_dir), max_context=64)
    block_bytes = worker_config.private_block_bytes(settings, model)
    available = available_requests * 9 * block_bytes
    assert worker_config.default_pool_bytes(settings, model, available) == blocks * block_bytes


# -- printing and checking -------------------------------------------------------------------------


@given(
    st.text().filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text)),
    st.tuples(
        st.sampled_from([[], ["--listen", "unix:/run/e"], ["--port", "7", "--http-port", "off"]]),
        st.sampled_from([[], ["--workers", "prefill=2,decode=1"], ["--worker-cpus", "0-2,5"]]),
        st.sampled_from([[], ["--watchdog", "1.5ms", "--pool-bytes", "3MiB", "--insecure"]]),
    ),
)
def test_printed_settings_read_back_as_the_same(name: str, groups: tuple[list[str], ...]) -> None:
    """Whatever text, type and kind; also without its comments, so they hold no settings."""
    given_flags = [f"--model-name={name}", *(flag for group in groups for flag in group)]
    table, nowhere = config.SERVE_OPTIONS, Path("/nonexistent")
    environ = {"CACHEWARM_ENGINE_MODEL": "/m"}
    found = config.resolve(parser().parse_args(given_flags), environ, nowhere)
    printed = settings.to_toml(table, found, {"port": "x"} if found["listen"].value else {})
    layer = config_file.Layer(Path("/f"), tomllib.loads(printed))
    for option in table:
        if option.name in layer.values:
            value = option.parse.from_toml(layer.values[option.name])
            assert value == found[option.field].value
    absent = {option.name for option in table} - set(layer.values)
    assert all(found[name.replace("-", "_")].is_default for name in absent)


def test_every_printed_setting_names_its_origin(tmp_path: Path) -> None:
    """Default, file, variable and flag, in one line each."""
    path = write(tmp_path / "engine.toml", "block-size = 64\n[worker.unified]\nmax-num-seqs = 2")
    late = write(tmp_path / "engine.d" / "a.toml", "prefill-chunk = 7")
    environ = {"CACHEWARM_ENGINE_HTTP_PORT": "off"}
    flags = parser().parse_args(["--model", "/m", "--max-queue", "9"])
    printed = settings.to_toml(config.SERVE_OPTIONS, config.resolve(flags, environ, tmp_path))
    assert {
        'model = "/m"  # --model',
        "max-queue = 9  # --max-queue",
        'http-port = "off"  # CACHEWARM_ENGINE_HTTP_PORT',
        f"block-size = 64  # {path}",
        f"worker.unified.max-num-seqs = 2  # {path}",
        f"prefill-chunk = 7  # {late}",
        "workers = { unified = 1 }  # default",
        "# pool-bytes is not set  # default",
    } <= set(printed.splitlines())
    again = write(tmp_path / "again" / "engine.toml", printed)
    assert load(again.parent) == load(tmp_path, "--max-queue", "9", environ=environ)


def test_what_toml_cannot_hold_is_refused(tmp_path: Path) -> None:
    """A path need not be Unicode; it is named instead of written wrong."""
    flags = parser().parse_args(["--model", os.fsdecode(b"/m\xff")])
    found = config.resolve(flags, {}, tmp_path)
    with pytest.raises(OptionError, match=r"model: .* is not Unicode"):
        settings.to_toml(config.SERVE_OPTIONS, found)


@pytest.fixture
def quiet(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No settings of ours in the environment; a runtime directory of its own."""
    for name in list(os.environ):
        if name.startswith(("CACHEWARM_ENGINE_", "CACHEWARMD_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_dir))
    return short_dir


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """Copies: whoever checked the files out is not who may write settings."""
    folder = shutil.copytree(ROOT / "examples", tmp_path / "examples")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return folder


def test_check_config_says_ok_and_leaves_no_trace(
    quiet: Path, m_rand_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of both services, before anything exists that a start would make."""
    flags = ["--config", str(write(tmp_path / "e.toml", "http-port = 'off'")), "--check-config"]
    assert engine_main.main(["serve", "--model", str(m_rand_dir), *flags]) == 0
    flags = ["--config", str(write(tmp_path / "d.toml", "")), "--check-config"]
    assert daemon_main.main(flags) == 0
    assert capsys.readouterr() == ("ok\nok\n", "")
    assert list(quiet.iterdir()) == []


def test_check_config_of_serve_tells_every_fault(
    quiet: Path, m_rand_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model, pools, CPUs and sockets, each in a line; the exit status is 2."""
    (quiet / "cachewarm").mkdir(0o777)
    (quiet / "cachewarm").chmod(0o777)
    text = """
    workers = { prefill = 1, decode = 1 }
    worker-cpus = [8000]
    [worker.decode]
    private-pool-bytes = 1
    """
    flags = ["--config", str(write(tmp_path / "e.toml", text)), "--check-config"]
    (tmp_path / "m").mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(m_rand_dir / name, tmp_path / "m")
    assert engine_main.main(["serve", "--model", str(tmp_path / "m"), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for named in (
        "private-pool-bytes 1 is not allowed: at least one block of",
        "tokenizer.json",
        "worker-cpus [8000] is not allowed: among",
        f"{quiet / 'cachewarm'}: must belong to this user",
    ):
        (line,) = [line for line in err.splitlines() if named in line]
        assert line.startswith("cachewarm-engine: error: ")
    assert len(err.splitlines()) == 4
    assert engine_main.main(["serve", "--model", "/nowhere", *flags]) == 2
    assert "model directory /nowhere does not exist" in capsys.readouterr().err


def test_check_config_of_cachewarmd_tells_every_fault(
    quiet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool below an extent and a socket that others could swap."""
    folder = quiet / "open"
    folder.mkdir()
    folder.chmod(0o777)
    path = write(tmp_path / "d.toml", f'pool-bytes = "1MiB"\nsocket = "{folder}/s"')
    assert daemon_main.main(["--config", str(path), "--check-config"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("cachewarmd: error: ") for line in lines] == [True, True]
    assert "pool-bytes 1048576 is not allowed: at least 67108864 (one extent)" in lines[0]
    assert f"{folder}: must belong to this user" in lines[1]


def test_print_config_prints_what_holds(
    quiet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of both services; a port that `listen` makes void does not come back as a given one."""
    path = write(tmp_path / "e.toml", 'listen = "unix:/run/e.sock"')
    assert engine_main.main(["serve", "--config", str(path), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert f'listen = "unix:/run/e.sock"  # {path}\n' in printed
    again = write(tmp_path / "again.toml", printed)
    assert load(tmp_path, "--config", str(again)).listen == "unix:/run/e.sock"
    path = write(tmp_path / "d.toml", "exit-when-unused = 5")
    assert daemon_main.main(["--config", str(path), "--print-config"]) == 0
    assert f"exit-when-unused = 5.0  # {path}\n" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--check-conf", "--log-lev=info", "--zzz"])
def test_a_flag_is_written_in_full(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    """A short form would change its meaning when an option is added; usage and error are short."""
    for run in (lambda: engine_main.main(["serve", flag]), lambda: daemon_main.main([flag])):
        with pytest.raises(SystemExit) as caught:
            run()
        assert caught.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert flag.partition("=")[0] in lines[1]


def test_a_worker_of_its_own_takes_the_same_file(
    quiet: Path, tmp_path: Path, m_rand_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Role, flags, and where to dial; a front's JSON leaves no room for other settings."""
    calls: list[tuple[WorkerConfig, str]] = []
    fake = SimpleNamespace(run=lambda made, front, phases: calls.append((made, front)) or 0)
    monkeypatch.setitem(sys.modules, "engine.worker_start", fake)
    monkeypatch.setattr(engine, "worker_start", fake, raising=False)
    text = f'model = "{m_rand_dir}"\nlisten = "unix:/run/e"\nmax-queue = 3\n' + ROLES_FILE
    path = write(tmp_path / "e.toml", text)
    flags = ["worker", "--role", "decode", "--config", str(path), "--block-size", "64"]
    assert engine_main.main(flags) == 0
    assert engine_main.main([*flags, "--front", "unix:/run/other"]) == 0
    (made, front), (_, other) = calls
    assert (made.role, made.max_num_seqs, made.block_size) == ("decode", 128, 64)
    assert (front, other) == ("unix:/run/e.workers", "unix:/run/other")
    given_json = ["worker", "--front", "unix:/run/e", "--config-json", made.to_json()]
    assert engine_main.main(given_json) == 0
    assert calls[-1] == (made, "unix:/run/e")
    for more in (["--config", str(path)], ["--block-size", "64"]):
        assert engine_main.main([*given_json, *more]) == 2
    for bad in (
        ["--front", "/run/e"],
        ["--front", "unix:"],
        ["--front", "fd:3"],
        ["--max-context", "0"],
    ):
        assert engine_main.main([*flags, *bad]) == 2
    assert len(calls) == 3


def test_the_examples_hold(
    quiet: Path, examples: Path, m_rand_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Model directory and socket aside, they pass --check-config, with what conf.d adds."""
    flags = ["--config", str(examples / "engine.toml")]
    model = ["--model", str(m_rand_dir)]
    assert engine_main.main(["serve", *flags, *model, "--check-config"]) == 0
    daemon = ["--config", str(examples / "cachewarmd.toml"), "--socket", str(quiet / "s")]
    assert daemon_main.main([*daemon, "--check-config"]) == 0
    assert capsys.readouterr() == ("ok\nok\n", "")
    assert dict(load(examples).workers) == {"prefill": 1, "decode": 1}


def test_the_documentation_lists_todays_options() -> None:
    """The tables are generated, and every name of both services is in them."""
    script = [str(ROOT / "scripts" / "gen-config-docs"), "--check"]
    environ = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run(script, capture_output=True, text=True, env=environ)
    assert (result.returncode, result.stderr) == (0, "")
    document = (ROOT / "docs" / "configuration.md").read_text()
    table: tuple[Option, ...] = (*config.SERVE_OPTIONS, *daemon_config.OPTIONS)
    assert all(f"| `{option.name}` |" in document for option in table)
