"""The process that reads and packs weights: what it may hold, and what its death means."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from cachewarmd import packers, segment, weights
from cachewarmd.client import Client
from cachewarmd.errors import (
    CachewarmError,
    InternalError,
    InvalidRequestError,
    ModelFilesError,
    NoSpaceError,
    ShuttingDownError,
)
from cachewarmd.huge_pages import Huge
from cachewarmd.packers import Packers
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, open_fds, wait_until
from tests.fixtures.weight_files import entry, write_file

DATA = struct.pack("<2f", 1, 2)
# Reads only once the gate is there.
GATED = """
import os, time, cachewarmd.weights as w
read_all = w._read_all
def gated(*args):
    while not os.path.exists({gate!r}):
        time.sleep(0.01)
    return read_all(*args)
w._read_all = gated
"""


def plan() -> pb.PackPlan:
    made = pb.PackPlan(description="test", segment_bytes=64)
    made.tensors.add(name="a", op=pb.PACK_OP_CAST, dtype="F32", shape=[2], num_bytes=8)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with one tensor."""
    folder = tmp_path / "m"
    folder.mkdir()
    write_file(folder / "model.safetensors", {"a": entry([2], 0, 8)}, DATA)
    return folder


@pytest.fixture
def pool() -> Iterator[Packers]:
    """Leaves neither descriptor nor process behind, whatever a test does."""
    before, children = open_fds(), set(psutil.Process().children())
    made = Packers()
    yield made
    made.close()
    assert open_fds() == before
    assert set(psutil.Process().children()) <= children


def allocate(fd: int, size: int, tell: Callable[[int], None]) -> Huge:
    return segment.reserve(fd, 0, size)


def load(
    pool: Packers,
    folder: Path,
    what: pb.PackPlan | None = None,
    progress: weights.Progress = lambda *_: None,
    allocate: weights.Allocate = allocate,
) -> tuple[bytes, bytes]:
    """(digest, first bytes of the segment)."""
    dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        loaded, _ = weights.load(
            dir_fd, what or plan(), progress, allocate, follow=False, read=pool.read
        )
    finally:
        os.close(dir_fd)
    try:
        return loaded.weights_sha256, os.pread(loaded.fd, 8, 0)
    finally:
        os.close(loaded.fd)


# -- as in this process ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_prepared", [True, False])
def test_process_gives_what_reading_here_gives(
    is_prepared: bool, pool: Packers, model: Path
) -> None:
    """Bytes, digest, identities and progress, whether it was started ahead or not."""
    told: list[tuple[str, int, int]] = []
    if is_prepared:
        pool.prepare()
    file = model / "model.safetensors"
    assert load(pool, model, progress=lambda *args: told.append(args)) == (
        hashlib.sha256(file.read_bytes()).digest(), DATA,
    )  # fmt: skip
    size = file.stat().st_size
    assert told[-1] == ("hash and pack", size, size)
    dir_fd = os.open(model, os.O_RDONLY | os.O_DIRECTORY)
    try:
        arguments = (dir_fd, None, lambda *_: None, lambda: pytest.fail("no memory"))
        assert pool.read(*arguments, follow=False) == weights.read_files(*arguments, follow=False)
    finally:
        os.close(dir_fd)


def test_errors_keep_type_and_text(pool: Packers, model: Path) -> None:
    """Of files, of the plan, and of whoever gives the memory or hears of progress."""

    def refuse(*_: object) -> Huge:
        raise NoSpaceError("needs 64 bytes, 1 are available")

    def leave(*_: object) -> None:
        raise ShuttingDownError("the daemon is stopping")

    with pytest.raises(NoSpaceError, match="needs 64 bytes"):
        load(pool, model, allocate=refuse)
    with pytest.raises(ShuttingDownError, match="is stopping"):
        load(pool, model, progress=leave)
    bad = plan()
    bad.tensors[0].offset = 3
    with pytest.raises(InvalidRequestError, match="plan: a: bad alignment"):
        load(pool, model, bad)
    (model / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelFilesError, match=r"model.safetensors: header"):
        load(pool, model)


def test_os_error_of_the_process_is_one_here(
    pool: Packers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails has the same number."""
    broken = "import os\ndef fail(*_): raise OSError(5, 'x')\nos.preadv = fail\n"
    monkeypatch.setattr(packers, "CODE", broken + packers.CODE)
    with pytest.raises(OSError, match=r"\[Errno 5\]"):
        load(pool, model)


def test_bug_in_the_process_is_an_internal_error_with_a_traceback(
    pool: Packers,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The caller learns that it ended, the log why."""
    broken = "import os\ndef fail(*_): raise KeyError('a bug')\nos.preadv = fail\n"
    monkeypatch.setattr(packers, "CODE", broken + packers.CODE)
    with pytest.raises(InternalError, match="ended with status 1"):
        load(pool, model)
    assert "KeyError: 'a bug'" in capfd.readouterr().err


@pytest.mark.parametrize("said", ["nonsense", "[]", '{"errno": 99999}', '{"sha256": "zz"}'])
def test_process_that_says_what_makes_no_sense_is_killed(
    said: str, pool: Packers, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of that load, also when it would go on for ever."""
    speaks = (
        "import socket, sys, time\n"
        "sock = socket.socket(fileno=int(sys.argv[1]))\n"
        f"sock.sendall({said.encode() + chr(10).encode()!r})\n"
        "time.sleep(100000)\n"
    )
    monkeypatch.setattr(packers, "CODE", speaks)
    with pytest.raises(InternalError, match="killed by SIGKILL"):
        load(pool, model)


def test_process_that_died_while_it_waited_is_replaced(pool: Packers, model: Path) -> None:
    """The one that was started ahead is no single point of failure."""
    before = set(psutil.Process().children())
    pool.prepare()
    (spare,) = set(psutil.Process().children()) - before
    spare.kill()
    wait_until(lambda: spare.status() == psutil.STATUS_ZOMBIE, "it is dead")
    assert load(pool, model)[1] == DATA


def test_nothing_is_started_after_the_end(pool: Packers, model: Path) -> None:
    """A load that comes too late is refused."""
    pool.prepare()
    pool.close()
    pool.prepare()
    with pytest.raises(ShuttingDownError):
        load(pool, model)


# -- of a daemon ----------------------------------------------------------------------------------


@contextlib.contextmanager
def gated_daemon(folder: Path, gate: Path) -> Iterator[Daemon]:
    """Its packers wait for the gate with files and memory at hand."""
    code = GATED.format(gate=str(gate))
    prelude = f"import cachewarmd.packers as p\np.CODE = {code!r} + p.CODE"
    with Daemon(folder / "s", "64MiB", prelude=prelude) as daemon:
        yield daemon


def submit(client: Client, model: Path) -> Callable[[], tuple[bytes, bool]]:
    """Ask for the weights; what comes back waits for them: (first bytes, already warm)."""
    fd = os.open(model, os.O_RDONLY | os.O_DIRECTORY)
    request = pb.AttachWeights(model_name="m", plan=plan())
    future = client.submit(pb.Envelope(attach_weights=request), [fd])
    os.close(fd)

    def wait() -> tuple[bytes, bool]:
        reply, fds = future.result(PATIENCE_S)
        try:
            return os.pread(fds[0], 8, 0), reply.attach_weights_reply.already_warm
        finally:
            os.close(fds[0])

    return wait


def links(pid: int) -> list[str]:
    """What the descriptors of a process are; empty when it is gone."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def busy_packer(daemon: Daemon) -> psutil.Process:
    """The packer that has the memory to pack into."""
    found: list[psutil.Process] = []

    def look() -> bool:
        children = psutil.Process(daemon.pid).children()
        found[:] = [
            c for c in children if any("cachewarm-weights" in link for link in links(c.pid))
        ]
        return bool(found)

    wait_until(look, "a packer is at work")
    (packer,) = found
    return packer


def is_gone(process: psutil.Process) -> bool:
    """Ended, whether or not somebody has reaped it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_packer_has_only_what_it_needs(short_dir: Path, model: Path) -> None:
    """One socket, the directory, its file, the memory: neither clients nor the pool."""
    gate = short_dir / "gate"
    with gated_daemon(short_dir, gate) as daemon, daemon.client(pb.ROLE_ENGINE) as client:
        wait = submit(client, model)
        held = links(busy_packer(daemon).pid)
        log = os.readlink(f"/proc/{daemon.pid}/fd/2")
        (sock,) = [link for link in held if link.startswith("socket:")]
        (memory,) = [link for link in held if link.startswith("/memfd:")]
        others = set(held) - {sock, memory, log, "/dev/null"}
        assert others == {str(model), str(model / "model.safetensors")}
        gate.touch()
        assert wait() == (DATA, False)


def test_killed_packer_is_an_error_of_that_load_and_the_next_starts_anew(
    short_dir: Path, model: Path
) -> None:
    """Everybody else goes on, nothing stays behind, and what then is loaded is loaded once."""
    gate = short_dir / "gate"
    with gated_daemon(short_dir, gate) as daemon, daemon.client(pb.ROLE_ENGINE) as client:
        wait = submit(client, model)
        busy_packer(daemon).kill()
        with pytest.raises(InternalError, match="killed by SIGKILL; try again"):
            wait()
        assert not daemon.status().models
        gate.touch()
        assert submit(client, model)() == (DATA, False)
        assert submit(client, model)() == (DATA, True)
        assert daemon.log().count("weights_loaded") == 1
        assert "weights_not_loaded" in daemon.log()
        assert not psutil.Process(daemon.pid).children()
        assert sum("cachewarm-weights" in link for link in links(daemon.pid)) == 1


def test_warm_up_shows_the_phases(short_dir: Path, model: Path) -> None:
    """Memory first, then what the packer tells."""
    gate = short_dir / "gate"
    with gated_daemon(short_dir, gate) as daemon, daemon.client(pb.ROLE_ADMIN) as client:

        def job() -> pb.JobProgress:
            return client.call(pb.Envelope(jobs=pb.Jobs()), PATIENCE_S)[0].jobs_reply.jobs[0]

        fd = os.open(model, os.O_RDONLY | os.O_DIRECTORY)
        request = pb.Warmup(model_name="m", plan=plan())
        client.call(pb.Envelope(warmup=request), PATIENCE_S, [fd])
        os.close(fd)
        wait_until(lambda: job().weights.phase == "allocate", "memory is allocated")
        assert (job().weights.done_bytes, job().weights.total_bytes) == (64, 64)
        gate.touch()
        wait_until(lambda: job().state == "done", "the job is done")
        told, size = job().weights, (model / "model.safetensors").stat().st_size
        assert (told.phase, told.done_bytes, told.total_bytes) == ("hash and pack", size, size)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_shutdown_ends_a_packer_that_makes_no_progress(
    is_stopped: bool, short_dir: Path, model: Path
) -> None:
    """Even one that can't run: the daemon exits as always."""
    with gated_daemon(short_dir, short_dir / "gate") as daemon:
        with daemon.client(pb.ROLE_ENGINE) as client:
            wait = submit(client, model)
            packer = busy_packer(daemon)
            if is_stopped:
                packer.suspend()
            daemon.stop()
            with pytest.raises(CachewarmError):
                wait()
        assert daemon.wait() == 0
        assert "Traceback" not in daemon.log()
        wait_until(lambda: is_gone(packer), "the packer is gone")


def test_packers_die_with_the_daemon(short_dir: Path, model: Path) -> None:
    """Neither the one that works nor the one that waits outlives a kill -9."""
    with gated_daemon(short_dir, short_dir / "gate") as daemon:
        with daemon.client(pb.ROLE_ENGINE) as client:
            submit(client, model)
            packer = busy_packer(daemon)
            packer.send_signal(signal.SIGTERM)  # that alone does not end it
            daemon.kill()
        wait_until(lambda: is_gone(packer), "the busy packer is gone")
        daemon.start()
        wait_until(lambda: bool(psutil.Process(daemon.pid).children()), "one is started ahead")
        (spare,) = psutil.Process(daemon.pid).children()
        daemon.kill()
        wait_until(lambda: is_gone(spare), "the waiting packer is gone")
