"""Random kills of everything under load; at the end every byte and token was right.

    python -m tests.chaos.run --kills 1000 --seed 7

The clients are the engine's own cache code (`tests.chaos.client`); with --engine-kills or
--worker-kills a real engine with streams shares their daemon. A run tells on stderr how far it is,
prints what it saw as JSON, also when it is called off (--limit-s, Ctrl-C, SIGTERM), and ends with 1
when something was wrong. A planted bug (--plant) must make it so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb
from engine.client import CallError, EngineClient
from tests.chaos.client import COUNTERS, Stats
from tests.chaos.plants import PLANTS, Plant
from tests.daemon import PATIENCE_S, Daemon, children_of, environment, wait_readable
from tests.engine import Engine, Stream, make_prompt

ROOT = Path(__file__).resolve().parents[2]
NUM_CLIENTS = 3
NUM_STREAMS = 3
_STARVED_S = 180.0
_TELL_S = 10.0
POOL = "64MiB"  # a quarter of what the clients' chains would take
# A block that is found to hold other bytes than were sealed leaves a mark, whichever daemon saw it.
_MARK = """
import os, cachewarmd.kv as kv
def poison(self, block, kind, poison=kv.BlockStore.poison):
    with open({marks!r}, "ab") as marks:
        marks.write(b"x")
    poison(self, block, kind)
kv.BlockStore.poison = poison
import cachewarmd.server
cachewarmd.server.IDLE_CHECK_S = 0.2
"""


@dataclass
class Report:
    """What a run saw. `faults` are what must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        told = {"seconds": round(self.seconds, 1), **self.counts, "faults": self.faults}
        return json.dumps(told)


class LoadClient:
    """One client process; another takes its place when it is killed."""

    def __init__(self, socket: Path, stats: Path, flags: Sequence[str]) -> None:
        self._command = [sys.executable, "-m", "tests.chaos.client", str(socket), str(stats)]
        self._flags = flags
        self.stats = Stats(stats)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, seed: int) -> None:
        environ = {**environment(), "PYTHONPATH": os.pathsep.join(["services", "."])}
        command = [*self._command, str(seed), *self._flags]
        # A Ctrl-C is not for them: what they saw is reported.
        self._process = subprocess.Popen(command, cwd=ROOT, env=environ, process_group=0)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Its exit status, after an end in order; one that has only just begun may be ended."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(_STARVED_S)
            return 0 if status == -signal.SIGTERM else status
        finally:
            self._process.kill()


class Streams:
    """Requests to an engine, over and over; each answer is compared with the one alone."""

    def __init__(self, engine: Engine, report: Report) -> None:
        self._report = report
        self._prompts = [make_prompt(60, 90 + number) for number in range(6)]
        self._alone = [
            engine.generate(prompt, **self._options(number), bypass_prefix_cache=True).ids
            for number, prompt in enumerate(self._prompts)
        ]
        # Not the engine's own, which is closed when it is killed.
        self._client = EngineClient(engine.target)
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(NUM_STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _options(number: int) -> dict[str, float]:
        drawn = {"temperature": 0.8, "seed": number} if number % 2 else {}
        return {"max_tokens": 40, **drawn}

    def _run(self, thread: int) -> None:
        number = thread
        while not self._is_over.is_set():
            number = (number + 1) % len(self._prompts)
            events = self._client.generate(
                self._prompts[number], resume_s=_STARVED_S, **self._options(number)
            )
            stream = Stream.begin(events)
            stream.join()
            if stream.error is not None and stream.accepted is None:
                # The engine is down, or has just died: nothing was promised.
                if stream.error.status != "UNAVAILABLE":
                    self._report.faults.append(f"refused: {stream.error}")
                self._is_over.wait(0.2)
                continue
            self._report.counts["streams"] += 1
            if stream.error is not None:
                self._report.faults.append(f"request failed: {stream.error}")
            elif stream.ids != self._alone[number]:
                self._report.faults.append(f"wrong tokens: {stream.ids} for {self._alone[number]}")

    def ready_worker(self) -> int:
        """Pid of a worker that takes requests; waits until there is one."""
        end = time.monotonic() + _STARVED_S
        while time.monotonic() < end:
            with contextlib.suppress(CallError):
                if workers := self._client.server_info().workers:
                    return int(workers[0].pid)
            time.sleep(0.01)
        raise AssertionError("no worker was ready in time")

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(180)
        self._client.close()


class Chaos:
    """One run: a daemon under its holder, clients, an engine if asked for."""

    def __init__(self, seed: int, plant: Plant | None = None) -> None:
        self.chance = random.Random(seed)
        self.report = Report()
        self.used = 0  # what a plant has seen of the load
        self._folder = Path(tempfile.mkdtemp(prefix="cwc-", dir="/tmp"))
        self._marks = self._folder / "marks"
        prelude = _MARK.format(marks=str(self._marks))
        flags: Sequence[str] = ()
        if plant is not None:
            prelude += plant.prelude.format(folder=str(self._folder))
            flags = plant.client_flags
        self.daemon = Daemon(self._folder / "s", POOL, ["--holder"], prelude=prelude)
        self.clients = [
            LoadClient(self.daemon.socket, self._folder / f"stats{number}", flags)
            for number in range(NUM_CLIENTS)
        ]
        self.engine: Engine | None = None
        self.streams: Streams | None = None

    def __enter__(self) -> Chaos:
        self.daemon.start()
        self._base_fds = self._num_fds()
        for client in self.clients:
            client.start(self.chance.getrandbits(32))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for client in self.clients:
            client.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.daemon.stop()
        shutil.rmtree(self._folder)

    def _num_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.daemon.serving_pid()}/fd"))

    # -- kills ----------------------------------------------------------------------------------

    def kill_daemon(self, *, waits: bool = True) -> None:
        """At any moment, now and then also while it starts."""
        # Asked of its holder: one that starts does not answer yet.
        for pid in children_of(self.daemon.pid):
            with contextlib.suppress(ProcessLookupError):
                self._kill(pid)
                self.report.counts["daemon_kills"] += 1
        if waits:
            started = time.monotonic()
            self.wait(lambda: self._epoch() > 0, "the next daemon serves")
            took = int(1000 * (time.monotonic() - started))
            self.report.counts["longest_gap_ms"] = max(self.report.counts["longest_gap_ms"], took)

    @staticmethod
    def _kill(pid: int) -> None:
        """Returns when it is dead."""
        pidfd = os.pidfd_open(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            assert wait_readable(pidfd), "it is killed, but not dead"
        finally:
            os.close(pidfd)

    def _epoch(self) -> int:
        try:
            return self.daemon.status().epoch
        except CachewarmError:
            return 0

    def kill_client(self) -> None:
        self.report.counts["client_kills"] += 1
        client = self.chance.choice(self.clients)
        client.kill()
        client.start(self.chance.getrandbits(32))

    def kill_worker(self) -> None:
        """One that is ready: a front gives up when three in a row die in their start."""
        assert self.streams is not None
        self.report.counts["worker_kills"] += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.streams.ready_worker(), signal.SIGKILL)

    def kill_engine(self) -> None:
        """Front and worker; streams that had begun go on with the next one."""
        assert self.engine is not None
        self.report.counts["engine_kills"] += 1
        workers = self.engine.worker_pids(0)
        self.engine.signal(signal.SIGKILL)
        self.engine.process.wait()
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.engine.start()

    def evict(self) -> None:
        """Everything that no lease keeps."""
        with (
            contextlib.suppress(CachewarmError),
            self.daemon.client(pb.ROLE_ADMIN) as client,
        ):
            client.call(pb.Envelope(evict=pb.Evict()), PATIENCE_S)

    @staticmethod
    def wait(condition: Callable[[], bool], what: str) -> None:
        """As `wait_until`, for a machine on which this load is the last to get a turn."""
        end = time.monotonic() + _STARVED_S
        while not condition():
            assert time.monotonic() < end, f"never happened: {what}"
            time.sleep(0.02)

    # -- what was seen --------------------------------------------------------------------------

    def seen(self, name: str) -> int:
        return sum(client.stats[name] for client in self.clients)

    def count_seen(self) -> None:
        self.report.counts.update({name: self.seen(name) for name in COUNTERS})

    @property
    def num_poisoned(self) -> int:
        return self._marks.stat().st_size if self._marks.exists() else 0

    def look(self) -> list[str]:
        """Faults that can be told at any time."""
        names = ("wrong", "stale", "lost")
        faults = [f"{self.seen(name)} {name}" for name in names if self.seen(name)]
        return faults + ([f"{self.num_poisoned} poisoned"] if self.num_poisoned else [])

    def finish(self) -> Report:
        """End the load in order; nothing may be left of it in the daemon."""
        report = self.report
        if self.streams is not None:
            self.streams.stop()
        for client in self.clients:
            if status := client.stop():
                report.faults.append(f"a client ended with {status}")
        if self.engine is not None:
            self.engine.stop()
        try:
            self.wait(self._is_quiet, "no lease and no client is left")
        except AssertionError:
            counters = self.daemon.status().counters
            report.faults.append(f"leases are left: {dict(counters)}")
        status = self.daemon.status()
        checks = status.counters["invariant_checks"]

        def is_checked() -> bool:
            time.sleep(0.5)  # only an idle daemon looks
            return self.daemon.status().counters["invariant_checks"] > checks

        self.wait(is_checked, "the daemon has looked at its invariants")
        if self.daemon.status().counters["broken_invariants"]:
            report.faults.append(f"broken invariants: {self.daemon.log()[-2000:]}")
        if status.pool.blocks["reserved"]:
            report.faults.append("slots stayed reserved")
        num_fds = self._num_fds()
        if num_fds > self._base_fds + 4:  # the connection that asks, and what an adopted pool has
            report.faults.append(f"{num_fds} descriptors are open, {self._base_fds} were")
        report.faults += self.look()
        self.count_seen()
        report.counts["epoch"] = status.epoch
        return report

    def _is_quiet(self) -> bool:
        counters = self.daemon.status().counters
        return not counters["leases"] and not counters["quarantined"]


def run(
    kills: int,
    seed: int,
    client_kills: int = 0,
    worker_kills: int = 0,
    engine_kills: int = 0,
    model_dir: Path | None = None,
    *,
    limit_s: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """`kills` of the daemon, and so many of the others, in random order.

    `limit_s` ends the kills, and then the load in order. A KeyboardInterrupt ends all at once: what
    is wrong with what is left of the load can't be told then, the rest is reported all the same.
    """
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        chaos = stack.enter_context(Chaos(seed))
        report = chaos.report
        try:
            if model_dir is not None:
                chaos.engine = stack.enter_context(Engine(model_dir, chaos.daemon.socket))
                chaos.engine.keep_port()
                chaos.streams = Streams(chaos.engine, report)
            deeds = [chaos.kill_daemon] * kills + [chaos.kill_client] * client_kills
            deeds += [chaos.kill_worker] * worker_kills + [chaos.kill_engine] * engine_kills
            chaos.chance.shuffle(deeds)
            told = started
            for number, deed in enumerate(deeds):
                now = time.monotonic()
                if limit_s is not None and now - started > limit_s:
                    report.counts["not_done"] = len(deeds) - number
                    break
                if tell is not None and now - told > _TELL_S:
                    told = now
                    tell(f"{number} of {len(deeds)} in {now - started:.0f} s, {chaos.look()}")
                time.sleep(chaos.chance.uniform(0, 0.2))
                if deed == chaos.kill_daemon and chaos.chance.random() < 0.1:
                    chaos.kill_daemon(waits=False)
                else:
                    deed()
            chaos.finish()
        except KeyboardInterrupt:
            report.counts["interrupted"] = 1
            report.faults += chaos.look()
            chaos.count_seen()
        except AssertionError as exc:
            report.faults += [str(exc), *chaos.look()]
            chaos.count_seen()
    report.seconds = time.monotonic() - started
    return report


def run_plant(name: str, seed: int, limit_s: float = 120.0) -> Report:
    """With a bug in it: kills until something is wrong; without faults after that time."""
    started = time.monotonic()
    with Chaos(seed, PLANTS[name]) as chaos:
        while not chaos.look() and time.monotonic() - started < limit_s:
            PLANTS[name].provoke(chaos)
        chaos.report.faults += chaos.look()
        chaos.count_seen()
    chaos.report.seconds = time.monotonic() - started
    return chaos.report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30, help="of the daemon")
    parser.add_argument("--client-kills", type=int, default=10)
    parser.add_argument("--worker-kills", type=int, default=0)
    parser.add_argument("--engine-kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--limit-s", type=float, help="no more kills after so many seconds")
    parser.add_argument("--plant", choices=sorted(PLANTS))
    flags = parser.parse_args()
    # Both also where a shell has us ignore them, as one does in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"seed {flags.seed}", flush=True)
    if flags.plant:
        report = run_plant(flags.plant, flags.seed)
    else:
        with _model(flags.worker_kills + flags.engine_kills > 0) as model_dir:
            report = run(
                flags.kills,
                flags.seed,
                flags.client_kills,
                flags.worker_kills,
                flags.engine_kills,
                model_dir,
                limit_s=flags.limit_s,
                tell=lambda text: print(text, file=sys.stderr, flush=True),
            )
    print(report, flush=True)
    if report.faults:
        return 1
    return 130 if report.counts["interrupted"] else 0


@contextlib.contextmanager
def _model(is_needed: bool) -> Iterator[Path | None]:
    from tests.fixtures.models import write_m_rand

    if not is_needed:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        write_m_rand(Path(folder))
        yield Path(folder)


if __name__ == "__main__":
    sys.exit(main())
