"""G1: who attaches to the daemon's memory may leave as he likes; it stays for the others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import SERVICES, Daemon, environment, wait_until
from tests.engine import Engine, make_prompt

_ATTACHER = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from cachewarmd.client import Client, create_private_pool
from cachewarmd.v1 import control_pb2 as pb
fd, memory = create_private_pool(1 << 20)
client = Client.connect(Path(sys.argv[1]), pb.ROLE_ENGINE, "attacher", private_pool=(fd, 1 << 20))
sealed = client.pool.records["state"] == 2
first = int(client.pool.records["offset"][sealed][0])
assert client.pool.memory[first : first + 4096].any()
print(sys.version_info[:2], int(sealed.sum()), flush=True)
if sys.argv[3] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "closes":
    client.close()
"""
# Of the light client; no torch, no gRPC.
_NEEDS = ("numpy", "protobuf>=7.35.1", "psutil", "xxhash")
_WAYS = {"closes": 0, "exits": 0, "killed": -9}


@pytest.fixture(scope="module")
def daemon(module_daemon: Daemon) -> Daemon:
    """The module's daemon, which no test ends."""
    return module_daemon


@pytest.fixture(scope="module")
def staying(daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    """Engine B, which stays."""
    with Engine(m_rand_dir, daemon.socket, step_s=0.0) as running:
        yield running


@pytest.fixture(scope="module")
def python_313(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python 3.13 that has what the light client needs."""
    found = [shutil.which("python3.13"), *Path.home().glob(".pyenv/versions/3.13*/bin/python")]
    for python in filter(None, found):
        venv = tmp_path_factory.mktemp("venv313")
        try:
            steps = [
                [str(python), "-m", "venv", str(venv)],
                [f"{venv}/bin/pip", "install", "-q", *_NEEDS],
            ]
            for step in steps:
                subprocess.run(step, check=True, capture_output=True, timeout=60)
        except (OSError, subprocess.SubprocessError) as exc:
            reason = getattr(exc, "stderr", None) or str(exc).encode()
            last = f"{python}: {reason.decode(errors='replace').strip()[-300:]}"
            continue
        return f"{venv}/bin/python"
    if not any(found):
        last = "none is installed"
    pytest.skip(f"NOT CHECKED ON PYTHON 3.13: {last}")


def attach_and_leave(python: str, daemon: Daemon, way: str) -> tuple[str, str]:
    """Run a light attacher to its end: what it saw, and its stderr."""
    kept = environment()
    kept.pop("PYTHONPATH")  # it may be another Python's
    ended = subprocess.run(
        [python, "-P", "-c", _ATTACHER, str(daemon.socket), str(SERVICES), way],
        env=kept,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == _WAYS[way], ended.stderr
    return ended.stdout, ended.stderr


def check_alive(daemon: Daemon, engine: Engine, epoch: int) -> None:
    """The pool is there: what was sealed is hit, what is new is sealed."""
    assert daemon.status().epoch == epoch
    assert engine.worker().daemon_connected
    old, new = make_prompt(70, 601), make_prompt(70, 700 + daemon.status().counters["published"])
    assert engine.generate(old, max_tokens=1).done.cached_tokens == 69
    assert engine.generate(new, max_tokens=1).done.cached_tokens == 0
    assert engine.generate(new, max_tokens=1).done.cached_tokens == 69


@pytest.fixture
def epoch(daemon: Daemon, staying: Engine) -> int:
    """The daemon's epoch; a prompt is sealed."""
    staying.generate(make_prompt(70, 601), max_tokens=1)
    return int(daemon.status().epoch)


@pytest.mark.parametrize("way", _WAYS)
def test_g1_a_light_attacher_leaves_the_pool_alone(
    daemon: Daemon, staying: Engine, epoch: int, way: str
) -> None:
    """However it leaves, nothing is unlinked and nothing is said on stderr."""
    said, stderr = attach_and_leave(sys.executable, daemon, way)
    assert said.startswith(str(tuple(sys.version_info[:2])))
    assert stderr == ""
    wait_until(lambda: len(daemon.status().clients) <= 3, "the attacher to be gone")
    check_alive(daemon, staying, epoch)


@pytest.mark.parametrize("way", _WAYS)
def test_g1_a_light_attacher_of_python_3_13_leaves_the_pool_alone(
    daemon: Daemon, staying: Engine, epoch: int, python_313: str, way: str
) -> None:
    """The same where Python tracks shared memory in another way."""
    said, stderr = attach_and_leave(python_313, daemon, way)
    assert said.startswith("(3, 13)")
    assert stderr == ""
    check_alive(daemon, staying, epoch)


def test_g1_engines_come_and_go_and_the_others_stream_on(
    daemon: Daemon, staying: Engine, m_rand_dir: Path, epoch: int
) -> None:
    """A leaves in order, then by kill -9, while B streams; C attaches and hits what they left."""
    prompt, theirs = make_prompt(50, 602), make_prompt(70, 603)
    whole = staying.generate(prompt, max_tokens=1000, bypass_prefix_cache=True).ids
    with Engine(m_rand_dir, daemon.socket) as coming:
        answer = coming.generate(theirs, max_tokens=4)
        for leave in (coming.stop, coming.kill_all):
            with staying.slowed(0.05):
                stream = staying.stream(prompt, max_tokens=1000)
                stream.wait_for_tokens(1)
                leave()
                stream.check_running()
            assert stream.result().ids == whole
            assert daemon.status().epoch == epoch
            coming.start()
            again = coming.generate(theirs, max_tokens=4)
            assert (again.done.cached_tokens, again.ids) == (69, answer.ids)
    check_alive(daemon, staying, epoch)
