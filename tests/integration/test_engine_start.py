"""The start of an engine: what its processes import, what it says of it, and how it is called off.

Each process that is started here, and each one that those start, finds a `sitecustomize` of ours
first, and carries a mark in its environment by which a test finds all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.daemon import Daemon, environment, wait_until
from tests.engine import START_S, Engine, command, serve_fails, wait_started

REPEATS = int(os.environ.get("CACHEWARM_TEST_REPEATS", "5"))
MARK = "CACHEWARM_TEST_MARK"

# SIGUSR2 writes the names of all modules that are imported by then.
TELLS_MODULES = """
import os, signal, sys

def tell(number, frame):
    folder = os.environ["CACHEWARM_TEST_MARK"]
    path = f"{folder}/{os.getpid()}"
    names = "\\n".join(sorted(sys.modules))
    with open(path + ".part", "w") as file:
        file.write(names)
    os.rename(path + ".part", path)

signal.signal(signal.SIGUSR2, tell)
"""
# A worker that never gets as far as its hello.
WORKER_DIES = """
import os, sys
if "--config-json" in sys.orig_argv:
    os._exit(3)
"""
# A worker that begins when somebody has opened the pipe for writing.
WORKER_WAITS = """
import os, sys
if "--config-json" in sys.orig_argv:
    open(os.environ["CACHEWARM_TEST_MARK"] + "/gate").read()
"""

# What a front has no use for. With HTTP off, the second half too.
NOT_IN_A_FRONT = {
    *("torch", "numpy", "engine.executor.base", "engine.executor.cpu", "engine.kernels"),
    *("engine.executor.reference", "engine.models.decoder"),
    *("engine.models.packing", "engine.worker", "engine.worker_start", "engine.scheduler"),
    *("safetensors", "xxhash", "jinja2", "transformers", "rich", "psutil"),
}
ONLY_FOR_HTTP = {"uvicorn", "starlette", "prometheus_client", "engine.http", "http.client"}
# What a worker does not need before it computes.
NOT_IN_A_WORKER = {
    *("torch", "asyncio", "uvloop", "grpc", "tokenizers", "structlog", "rich", "psutil"),
    *("uvicorn", "starlette", "prometheus_client", "jinja2", "safetensors", "transformers"),
    *("multiprocessing", "cachewarmd.weights", "cachewarmd.budget", "cachewarmd.server"),
    *("engine.server", "engine.service", "engine.router", "engine.v1"),
}


def hooked(folder: Path, code: str) -> dict[str, str]:
    """Environment of processes that run the code first and are marked with the folder."""
    (folder / "sitecustomize.py").write_text(code)
    paths = [str(folder), environment()["PYTHONPATH"]]
    return {MARK: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def marked(mark: str) -> list[psutil.Process]:
    """Processes that run with the mark, of whatever parent."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def wait_nobody(mark: str) -> None:
    """Returns when no marked process runs."""
    end = time.monotonic() + START_S
    while left := marked(mark):
        assert time.monotonic() < end, f"left: {[process.cmdline() for process in left]}"
        time.sleep(0.05)


def modules_of(pid: int, folder: Path) -> set[str]:
    os.kill(pid, signal.SIGUSR2)
    path = folder / str(pid)
    wait_until(path.exists, f"{pid} tells its modules")
    return set(path.read_text().splitlines())


# -- what is imported ---------------------------------------------------------------------------


@pytest.mark.parametrize("http_port", ["off", "0"])
def test_a_front_imports_nothing_that_computes(
    tmp_path: Path, m_rand_dir: Path, http_port: str
) -> None:
    """Of a real one that serves; with HTTP, once that has answered."""
    env = hooked(tmp_path, TELLS_MODULES)
    with Engine(m_rand_dir, "off", env=env, extra=["--http-port", http_port]) as engine:
        assert len(engine.generate([5, 6, 7], max_tokens=2).ids) == 2
        if http_port != "off":
            assert engine.http("/health")[0] == 200
            assert "engine_start_seconds" in engine.http("/metrics")[2]
        found = modules_of(engine.pid, tmp_path)
    forbidden = NOT_IN_A_FRONT | (ONLY_FOR_HTTP if http_port == "off" else set())
    assert {"engine.server", "grpc", "tokenizers"} <= found
    assert found & forbidden == set()


def test_a_worker_imports_little_before_its_backend() -> None:
    """All that a worker process imports by itself; backends import what they are made of."""
    code = "import sys, engine.__main__, engine.worker_start; print(*sys.modules, sep='\\n')"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=START_S,
    )
    found = set(ended.stdout.splitlines())
    assert {"engine.worker", "cachewarmd.client", "numpy"} <= found
    assert found & NOT_IN_A_WORKER == set()


def test_what_starts_processes_imports_hardly_anything() -> None:
    """It stands between the command and the worker's first instruction."""
    code = "import sys, engine.__main__, engine.head_start; print(*sys.modules, sep='\\n')"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=START_S,
    )
    found = set(ended.stdout.splitlines())
    heavy = {"asyncio", "numpy", "msgspec", "google.protobuf", "logging", "concurrent.futures"}
    assert "engine.spawn" in found
    assert found & (NOT_IN_A_FRONT | NOT_IN_A_WORKER | ONLY_FOR_HTTP | heavy) == set()


# -- what is said of it ---------------------------------------------------------------------------


def test_phases_of_both_processes_are_told(m_rand_dir: Path, module_daemon: Daemon) -> None:
    """In the ready line and as metrics, from the process's exec on."""
    with Engine(m_rand_dir, module_daemon.socket, extra=["--http-port", "0"]) as engine:
        phases = engine.ready["start_phases"]
        text = engine.http("/metrics")[2]
        assert engine.info().start_seconds == pytest.approx(phases["total"], abs=0.001)
    front = {"process", "spawn", "imports", "tokenizer", "bind", "workers"}
    worker = {"process", "imports", "config", "weights", "executor"}
    assert set(phases) == {f"front_{name}" for name in front} | worker | {"total"}
    for name, seconds in phases.items():
        assert f'engine_start_seconds{{phase="{name}"}}' in text
        assert seconds >= 0
    sum_of_front = sum(phases[f"front_{name}"] for name in front)
    assert sum_of_front == pytest.approx(phases["total"], abs=0.01), "each is rounded"


# -- starts that fail or take long ----------------------------------------------------------------


def test_a_worker_that_dies_before_its_hello_is_tried_again_and_given_up(
    tmp_path: Path, m_rand_dir: Path
) -> None:
    """Those that were begun early count as any other."""
    env = hooked(tmp_path, WORKER_DIES)
    status, stderr = serve_fails(
        *("--model", str(m_rand_dir), "--cachewarmd", "off", "--port", "0"), env=env
    )
    assert status == 1
    assert stderr.splitlines()[-1].endswith("the worker died 3 times before it was ready")
    assert stderr.count("worker_ended") == 3
    wait_nobody(str(tmp_path))


def test_the_front_answers_while_its_worker_starts(tmp_path: Path, m_rand_dir: Path) -> None:
    """HTTP says that it is warming, for as long as that takes; then it serves."""
    env = hooked(tmp_path, WORKER_WAITS)
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    engine = Engine(m_rand_dir, "off", env=env, extra=["--http-port", str(port)])
    engine.launch()
    try:
        with gate.open("w"):  # opening waits until the worker has opened its end
            engine.ready = {"http_address": f"127.0.0.1:{port}"}

            def answers() -> bool:
                with contextlib.suppress(OSError):
                    return bool(engine.http("/health")[0] == 200)
                return False

            wait_started(answers, "HTTP is served")
            status, _, body = engine.http("/ready")
            assert (status, json.loads(body)["reason"]) == (503, "warming")
            assert engine.process.poll() is None
        engine.wait_ready()
        assert engine.http("/ready")[0] == 200
        assert len(engine.generate([5], max_tokens=2).ids) == 2
    finally:
        with engine:
            pass
    wait_nobody(str(tmp_path))


def test_an_address_in_use_is_found_before_anything_is_started(
    tmp_path: Path, m_rand_dir: Path
) -> None:
    """No worker, and no daemon, which would be found running afterwards."""
    env = hooked(tmp_path, WORKER_WAITS)  # one would wait for ever
    model = ("--model", str(m_rand_dir), "--cachewarmd", str(tmp_path / "s"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, stderr = serve_fails(*model, "--port", str(other.getsockname()[1]), env=env)
    assert (status, "in use" in stderr) == (1, True)
    assert marked(str(tmp_path)) == []
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("spoilt", ["HTTP port", "tokenizer"])
def test_what_was_begun_is_ended_when_the_front_can_not_go_on(
    tmp_path: Path, bare_model: Path, spoilt: str
) -> None:
    """Worker and daemon have begun by then; the error is the front's own."""
    folder = tmp_path / "hook"
    folder.mkdir()
    env = hooked(folder, "")
    model = ("--model", str(bare_model), "--port", "0")
    for cachewarmd in ("off", str(tmp_path / "s")):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = str(other.getsockname()[1]) if spoilt == "HTTP port" else "off"
            if spoilt == "tokenizer":
                (bare_model / "tokenizer.json").write_text("{")
            status, stderr = serve_fails(
                *model, "--cachewarmd", cachewarmd, env=env, http_port=port
            )
        assert status == 1
        named = "--http-port" if spoilt == "HTTP port" else "cannot read the tokenizer file"
        assert named in stderr
        wait_nobody(str(folder))


@pytest.fixture
def bare_model(tmp_path: Path, m_rand_dir: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(m_rand_dir, tmp_path / "model"))


# -- starts that are called off -------------------------------------------------------------------


def interrupt(
    flags: Sequence[str], env: dict[str, str], number: int, after_s: float
) -> tuple[int, str]:
    """Begin to serve, and send the signal so much later: (exit status, stderr)."""
    with subprocess.Popen(
        command("serve", "--http-port", "off", "--port", "0", *flags),
        env={**environment(), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            time.sleep(after_s)
            process.send_signal(number)
            _, stderr = process.communicate(timeout=START_S)
        finally:
            process.kill()
    return process.returncode, stderr


@pytest.fixture
def mark(short_dir: Path) -> Iterator[str]:
    """Nobody who bears it is left."""
    yield str(short_dir)
    for process in marked(str(short_dir)):
        with contextlib.suppress(psutil.Error):
            process.kill()


def was_before_us(stderr: str) -> bool:
    """Did it end before anything of ours had run: while the interpreter started, or in what our
    first lines import, where an interrupt may come out as another error?"""
    if stderr.startswith("Fatal Python error: init"):
        return True
    return "KeyboardInterrupt" in stderr and ", in main" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("daemon", ["none", "its own", "another's"])
def test_f8_a_start_can_be_called_off_at_any_time(
    short_dir: Path,
    mark: str,
    m_rand_dir: Path,
    module_daemon: Daemon,
    number: signal.Signals,
    daemon: str,
) -> None:
    """It ends by itself, in order, and leaves no worker, no daemon that it began, no socket."""
    sockets = {"none": "off", "its own": "auto", "another's": str(module_daemon.socket)}
    flags = ["--model", str(m_rand_dir), "--cachewarmd", sockets[daemon]]
    env = hooked(short_dir, "")
    env["XDG_RUNTIME_DIR"] = str(short_dir)
    seed = uuid.uuid4().int
    print(f"seed {seed}")
    chance = random.Random(seed)
    allowed = {0, -number, 128 + number}
    for _ in range(REPEATS):
        after_s = chance.uniform(0.0, 1.5)
        status, stderr = interrupt(flags, env, number, after_s)
        if was_before_us(stderr):
            continue
        assert status in allowed, f"after {after_s:.3f} s: {stderr}"
        if status == 0 or number == signal.SIGTERM:
            assert "Traceback" not in stderr, f"after {after_s:.3f} s: {stderr}"
        wait_nobody(mark)
        left = [name for name in os.listdir(short_dir) if name.endswith(".sock")]
        assert left == [], f"after {after_s:.3f} s"
    if daemon == "another's":
        wait_until(lambda: module_daemon.status().counters["leases"] == 0, "no lease left")


def test_sigterm_ends_a_start_in_order_once_processes_are_begun(
    tmp_path: Path, m_rand_dir: Path
) -> None:
    """Exit status 0, as after the loop has begun; a second signal is not waited for."""
    env = hooked(tmp_path, WORKER_WAITS)
    os.mkfifo(tmp_path / "gate")
    process = subprocess.Popen(
        command("serve", "--model", str(m_rand_dir), "--cachewarmd", "off", "--port", "0"),
        env={**environment(), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        with (tmp_path / "gate").open("w"):  # the worker has begun; the front may still import
            process.send_signal(signal.SIGTERM)
            assert process.wait(START_S) == 0
    finally:
        process.kill()
        process.wait()
    wait_nobody(str(tmp_path))
