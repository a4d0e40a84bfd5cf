"""Every fail point, one after the other: the daemon recovers, clients get right bytes.

One daemon under a holder has all of them armed; a point acts when a test puts its token there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachewarmd import layout
from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, environment, wait_until
from tests.fail_points import Tokens, in_the_code
from tests.integration import test_jobs
from tests.integration.test_restart import evict, reattach
from tests.integration.test_snapshots import load, save
from tests.integration.test_weight_service import attach, plan_of, write_model
from tests.worker import Worker, connect_worker, key

FALLIBLE = sorted(in_the_code("may_fail"))
POINTS = sorted(in_the_code("hit") + FALLIBLE)
# Leases of a process that lives are revoked soon, and invariants are looked at all the time.
QUICK = "import cachewarmd.server as s; s.QUARANTINE_S, s.IDLE_CHECK_S = 0.5, 0.05\n"
CHAIN = [f"chain{number}" for number in range(4)]
# Points of a start or of an end that is in order: not on a running daemon's way.
AT_START = {"commit.before", "commit.after"}
AT_END = {"clean.before", "clean.after"}
# From the death of a daemon until the next one answers, wherever it died.
RECOVERY_S = 2.0

Step = Callable[["Walk"], None]


class Walk:
    """One daemon and what is done to it; steps are repeated as the daemon may die in each."""

    def __init__(self, daemon: Daemon, tokens: Tokens, folder: Path) -> None:
        self.daemon = daemon
        self.tokens = tokens
        self.folder = folder
        self._numbers = itertools.count()

    def new_labels(self, count: int = 3) -> list[str]:
        number = next(self._numbers)
        return [f"n{number}.{index}" for index in range(count)]

    # -- steps: each tolerates the death of the daemon, and is tried again by `until_taken` -------

    def publish(self) -> None:
        with connect_worker(self.daemon.socket) as worker:
            lease = worker.lookup(*CHAIN).lease
            worker.publish(lease, *self.new_labels())
            worker.release(lease)

    def evict(self) -> None:
        self.publish()
        evict(self.daemon)

    def load_weights(self) -> None:
        folder = write_model(self.folder / f"m{next(self._numbers)}", next(self._numbers), 2.0)
        with connect_worker(self.daemon.socket) as worker:
            attach(worker.client, folder, plan_of(2))

    def register(self) -> None:
        with connect_worker(self.daemon.socket) as worker:
            stamp = os.urandom(32)
            register = pb.Register(stamp=stamp, slot_bytes=1 << 20, block_size=4)
            worker.call(pb.Envelope(register=register))

    def leave_with_leases(self) -> None:
        """A connection ends, its process lives: the leases are revoked after their time."""
        with connect_worker(self.daemon.socket) as worker:
            worker.publish(worker.lookup().lease, *self.new_labels())
        time.sleep(0.2)

    def restart(self) -> None:
        with connect_worker(self.daemon.socket) as worker:
            (block,) = worker.publish(worker.lookup().lease, *self.new_labels(1)).blocks
            told = worker.client.hello
            self.daemon.kill_under_holder()
            with connect_worker(self.daemon.socket) as after:
                reattach(after, told, block)
                after.lookup(*CHAIN)

    def restart_with_doubt(self) -> None:
        """The daemon died in the middle of a copy: a slot is reserved, for nobody."""
        pid = self.daemon.serving_pid()
        offset = layout.RECORDS_OFFSET + 60 * layout.RECORD.itemsize
        patch_records(pid, offset, int(layout.BlockState.RESERVED).to_bytes(8, "little"))
        self.daemon.kill_under_holder()
        self.daemon.status()

    def snapshot(self) -> None:
        """Written, and restored once what nobody holds is gone."""
        self.publish()
        file = self.folder / "snap"
        save(self.daemon, file)
        evict(self.daemon)
        load(self.daemon, file)

    def warm_up(self) -> None:
        """A job with one prompt, computed at once; also what earlier ones left."""
        folder = write_model(self.folder / "warmed", 1.0, 2.0)
        with connect_worker(self.daemon.socket) as worker:
            digest, _, _ = attach(worker.client, folder, plan_of(2))
        with test_jobs.Engine(self.daemon, digest, answers=True):
            job_id = test_jobs.start(self.daemon, folder, pb.WarmPrompt(text="a"))
            watch = pb.Envelope(watch_job=pb.WatchJob(job_id=job_id))
            with self.daemon.client(pb.ROLE_OBSERVER) as client:
                # A daemon that came since has no engine for it: the next try brings one.
                told = client.stream(watch, lambda _: None, 3.0)[0].job_progress
            assert told.state == "done"

    def until_taken(self, point: str, step: Step) -> None:
        end = time.monotonic() + PATIENCE_S
        self.tokens.put(point)
        while self.tokens.is_there(point):
            assert time.monotonic() < end, f"{point} is never hit"
            # The daemon dies, or refuses: what counts is what comes after.
            with contextlib.suppress(CachewarmError, ProcessLookupError):
                step(self)

    # -- what must hold afterwards --------------------------------------------------------------

    def check(self) -> None:
        """The sealed chain is there with its bytes, new ones can be sealed, all invariants hold."""
        # This process lives, so what it leased in every life before is held for its time.
        wait_until(
            lambda: not self.daemon.status().counters["quarantined"], "the quarantine is over"
        )
        with connect_worker(self.daemon.socket) as worker:
            self._check_chain(worker)
            labels = self.new_labels()
            lease = worker.lookup().lease
            assert not worker.publish(lease, *labels).refused
            blocks = worker.lookup(*labels).blocks
            assert worker.read(blocks[0]) == key(labels[0])
        before = self.daemon.status().counters["invariant_checks"]

        def is_checked() -> bool:
            time.sleep(0.1)  # only an idle daemon looks
            return self.daemon.status().counters["invariant_checks"] > before + 1

        wait_until(is_checked, "the daemon has looked at its invariants")
        counters = self.daemon.status().counters
        assert counters["broken_invariants"] == 0, self.daemon.log()
        assert counters["integrity_failures"] == 0

    def _check_chain(self, worker: Worker) -> None:
        lease = worker.lookup(*CHAIN)
        assert [worker.read(block) for block in lease.blocks] == [key(name) for name in CHAIN]
        worker.release(lease.lease)


def patch_records(pid: int, offset: int, data: bytes) -> None:
    """Write into the records of a daemon, as it might have done itself."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(fd).startswith("/memfd:cachewarm-records"):
            with open(fd, "r+b", buffering=0) as memory:
                os.pwrite(memory.fileno(), data, offset)
            return
    raise AssertionError("the daemon has no records")


STEPS: dict[str, Step] = {
    "attach": Walk.restart,
    "catalog": Walk.register,
    "copy": Walk.publish,
    "evict": Walk.evict,
    "free": Walk.evict,
    "job": Walk.warm_up,
    "lease": Walk.publish,
    "lookup": Walk.publish,
    "pack": Walk.load_weights,
    "publish": Walk.publish,
    "quarantine": Walk.restart,
    "reattach": Walk.restart,
    "reclaim": Walk.leave_with_leases,
    "recover": Walk.restart_with_doubt,
    "register": Walk.register,
    "release": Walk.publish,
    "reserve": Walk.publish,
    "seal": Walk.publish,
    "snapshot": Walk.snapshot,
    "store": Walk.load_weights,
    "verify": Walk.restart,
    "weights": Walk.load_weights,
}
RUNNING = [name for name in POINTS if name not in AT_START | AT_END]


@contextlib.contextmanager
def walk(action: str, points: list[str], tmp_path: Path, pool: str = "64MiB") -> Iterator[Walk]:
    """A daemon with these points armed, in which CHAIN is sealed and never evicted."""
    tokens = Tokens(tmp_path / "tokens")
    tokens.folder.mkdir()
    with (
        tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in tokens.environ(action, points).items():
            patch.setenv(name, value)
        flags = ["--holder", "--state-dir", f"{folder}/state"]
        with Daemon(Path(folder) / "s", pool, flags, prelude=QUICK) as daemon:
            patch.undo()
            keeper = subprocess.Popen(
                [sys.executable, "-P", "-c", _KEEPER, str(daemon.socket), *CHAIN],
                env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            try:
                assert keeper.stdout is not None
                assert keeper.stdout.readline() == b"sealed\n"
                yield Walk(daemon, tokens, tmp_path)
            finally:
                print(daemon.log())  # shown when a test fails
                assert keeper.stdin is not None
                keeper.stdin.close()
                keeper.wait()
                keeper.stdout.close()


# Seals the chain, and again whenever an eviction took it.
_KEEPER = """
import sys, threading
from pathlib import Path
from cachewarmd.errors import CachewarmError
from tests.worker import connect_worker
path, chain = Path(sys.argv[1]), sys.argv[2:]
end = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
is_told = False
while not end.is_set():
    try:
        with connect_worker(path) as worker:
            lease = worker.lookup(*chain).lease
            worker.publish(lease, *chain)
            if not is_told:
                is_told = True
                print("sealed", flush=True)
            while not end.wait(0.05) and not worker.client.is_lost:
                pass
    except CachewarmError:
        end.wait(0.05)
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """Every point kills."""
    with walk("kill", RUNNING, tmp_path_factory.mktemp("kill")) as running:
        yield running


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """Where the kernel can refuse, it does."""
    with walk("error", FALLIBLE, tmp_path_factory.mktemp("error")) as running:
        yield running


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    """Every point takes its time."""
    with walk("delay=0.3", RUNNING, tmp_path_factory.mktemp("delay")) as running:
        yield running


def step_of(point: str) -> Step:
    return STEPS[point.partition(".")[0]]


def test_points_are_many_and_each_stands_once() -> None:
    """Every one has a step that hits it, or is one of a start or an end."""
    assert len(POINTS) >= 25
    assert len(set(POINTS)) == len(POINTS)
    assert {name.partition(".")[0] for name in RUNNING} == set(STEPS)
    assert set(POINTS) >= AT_START | AT_END


@pytest.mark.parametrize("point", RUNNING)
def test_a_kill_there_loses_nothing(killed: Walk, point: str) -> None:
    """The daemon dies there; the next one has what was sealed, and every byte of it is right."""
    # Again where the machine had a busy moment; what is slow by itself is so each time.
    for _ in range(5):
        seconds = time_to_serve(killed, point)
        print(f"{point}: served after {seconds:.2f} s")
        killed.check()
        if seconds < RECOVERY_S:
            return
    raise AssertionError(f"no daemon served within {RECOVERY_S:g} s")


def time_to_serve(walk: Walk, point: str) -> float:
    """Let the daemon die there; how long it took from then until the next one answered."""
    before = walk.daemon.status().epoch

    def measure() -> float:
        walk.tokens.wait_taken(point)
        started = time.monotonic()
        wait_until(lambda: is_served(walk.daemon, before), "the next daemon serves")
        return time.monotonic() - started

    walk.tokens.put(point)
    with ThreadPoolExecutor(1) as thread:
        seconds = thread.submit(measure)
        walk.until_taken(point, step_of(point))
        return seconds.result()


def is_served(daemon: Daemon, epoch: int) -> bool:
    try:
        return daemon.status().epoch > epoch
    except CachewarmError:
        return False


@pytest.mark.parametrize("point", [name for name in FALLIBLE if name not in AT_START])
def test_a_refusal_there_is_an_error_and_no_more(failing: Walk, point: str) -> None:
    """The same daemon goes on."""
    pid = failing.daemon.serving_pid()
    failing.until_taken(point, step_of(point))
    assert failing.daemon.serving_pid() == pid
    failing.check()


@pytest.mark.parametrize("group", sorted({name.partition(".")[0] for name in RUNNING}))
def test_a_delay_there_changes_nothing(delayed: Walk, group: str) -> None:
    """Slow is not wrong."""
    for point in RUNNING:
        if point.partition(".")[0] == group:
            delayed.until_taken(point, STEPS[group])
    delayed.check()


@pytest.mark.parametrize("point", sorted(AT_START))
def test_a_kill_while_the_pool_is_allocated(tmp_path: Path, short_dir: Path, point: str) -> None:
    """The first daemon never served; the second one has the whole pool."""
    tokens = Tokens(tmp_path)
    tokens.put(point)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tokens.environ("kill", [point]).items():
            patch.setenv(name, value)
        with Daemon(short_dir / "s", "128MiB", ["--holder"]) as daemon:
            assert not tokens.is_there(point)
            wait_until(lambda: daemon.status().pool.committed_bytes == 128 << 20, "all of it")
            assert daemon.status().epoch == 2


@pytest.mark.parametrize("point", sorted(AT_END))
def test_a_kill_at_the_very_end(tmp_path: Path, short_dir: Path, point: str) -> None:
    """A stop that ends in a kill is a stop all the same."""
    tokens = Tokens(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in tokens.environ("kill", [point]).items():
            patch.setenv(name, value)
        daemon = Daemon(short_dir / "s", "64MiB", ["--holder"]).start()
        tokens.put(point)
        daemon.stop()
        assert not tokens.is_there(point)
        with daemon:
            assert daemon.status().pool.blocks["sealed"] == 0


def test_points_cost_nothing_when_none_is_armed() -> None:
    """A program that arms none only looks at an empty dictionary."""
    from cachewarmd import failpoints

    assert not failpoints._armed
    failpoints.hit("no such point")
    failpoints.may_fail("no such point")


@pytest.mark.parametrize("value", ["x", "x:explode", ":kill"])
def test_a_variable_that_says_nothing_is_refused(value: str) -> None:
    """A typo must not make a chaos test green."""
    from cachewarmd import failpoints

    with pytest.raises(ValueError, match="is not allowed"):
        failpoints.arm({failpoints.VARIABLE: value})
