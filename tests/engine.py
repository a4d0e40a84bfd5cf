"""The real `cachewarm-engine serve` as a child process, for tests.

    with Engine(model_dir, daemon.socket) as engine:
        answer = engine.generate([5, 6, 7], max_tokens=4)

`start` (or `with`) returns when the engine has said that it serves; the end of `with` leaves no
process behind, whatever state it is in. Each engine has a runtime directory of its own.

The steps of tiny models take a millisecond, so a stream is over before a test can do anything to
it, or the test is starved until it is. What needs a stream that still runs slows the engine down
until it has done what it wants to:

    with engine.slowed(0.2):
        stream = engine.stream([5, 6, 7], max_tokens=100)
        stream.wait_for_tokens(10)
        engine.kill_worker()
        stream.check_running()
    answer = stream.result()
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import numpy as np
import psutil
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cachewarmd.v1 import control_pb2
from engine.client import Accepted, CallError, Done, EngineClient, Event, Text, call_error
from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceStub
from tests.daemon import PATIENCE_S, Daemon, environment, wait_until
from tests.patched_workers import PatchedWorkers

START_S = 90.0  # of several processes, on a machine that may be busy
_CODE = "import sys; from engine.__main__ import main; sys.exit(main())"


@dataclass(frozen=True)
class Generation:
    """A whole answer. `pieces` are its messages in order."""

    accepted: Accepted
    pieces: list[Text]
    done: Done

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]


@dataclass
class Stream:
    """A request that is running; a thread of its own reads it to the end."""

    pieces: list[Text] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # when each piece came; monotonic, seconds
    accepted: Accepted | None = None
    done: Done | None = None
    error: CallError | None = None
    thread: threading.Thread | None = None
    _is_cancelled: bool = False

    @classmethod
    def begin(cls, events: Iterator[Event]) -> Stream:
        """Read them in a thread of their own, from now on."""
        stream = cls()
        stream.thread = threading.Thread(target=stream.run, args=(events,), daemon=True)
        stream.thread.start()
        return stream

    @property
    def ids(self) -> list[int]:
        """Token ids so far."""
        return [token for piece in list(self.pieces) for token in piece.token_ids]

    def cancel(self) -> None:
        """Leave with the next message."""
        self._is_cancelled = True

    def run(self, events: Iterator[Event]) -> None:
        """What the thread does. Closing the iterator cancels the call."""
        try:
            for event in events:
                match event:
                    case Accepted():
                        self.accepted = event
                    case Text():
                        self.arrivals.append(time.monotonic())
                        self.pieces.append(event)
                    case Done():
                        self.done = event
                if self._is_cancelled:
                    break
        except CallError as exc:
            self.error = exc
        finally:
            events.close()

    def wait_for_tokens(self, count: int) -> None:
        """Returns when at least that many messages with tokens are here."""
        wait_until(
            lambda: len(self.pieces) >= count or self.error is not None or self.done is not None,
            f"{count} tokens",
        )
        assert self.error is None, self.error

    def wait_accepted(self) -> None:
        """Returns when the request is queued; fails the test when it is refused."""
        wait_until(lambda: self.accepted is not None or self.error is not None, "Accepted")
        assert self.error is None, self.error

    def check_running(self) -> None:
        """Fails the test when it has ended: what was just done was not done to a running stream."""
        assert self.error is None, self.error
        assert self.done is None, "it was over too soon"

    def join(self) -> None:
        """Returns when it has ended, in whatever way."""
        assert self.thread is not None
        self.thread.join(3 * PATIENCE_S)
        assert not self.thread.is_alive(), "the stream did not end"

    def result(self) -> Generation:
        """The whole answer, once it has ended; fails the test when it ended with an error."""
        self.join()
        if self.error is not None:
            raise self.error
        assert self.accepted is not None
        assert self.done is not None
        return Generation(self.accepted, self.pieces, self.done)


def command(*arguments: str) -> list[str]:
    """`cachewarm-engine ARGUMENTS`, whether installed or not."""
    return [sys.executable, "-P", "-c", _CODE, *arguments]


class Engine:
    """One engine. `cachewarmd` is a socket, "auto" or "off"; `extra` are more flags of `serve`.

    With `step_s` every step of its workers takes that much longer, as a larger model's does;
    `slowed` changes that while it runs, also where `step_s` is 0. `patch` is code that is run in
    its workers (see `patched_workers`). With None and no patch, workers are as they are.
    """

    def __init__(
        self,
        model_dir: Path,
        cachewarmd: Path | str,
        *,
        port: int = 0,
        extra: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        step_s: float | None = None,
        patch: str = "",
    ) -> None:
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="cwe-", dir="/tmp"))
        self._flags = ["--model", str(model_dir), "--cachewarmd", str(cachewarmd)]
        self._flags += extra if "--listen" in extra else ["--port", str(port), *extra]
        if "--http-port" not in extra:
            self._flags += ["--http-port", "off"]
        if "--lookup-budget" not in extra:
            # On a busy machine the default makes a miss of what a test expects to hit.
            self._flags += ["--lookup-budget", "250ms"]
        self.env = {**environment(), "XDG_RUNTIME_DIR": str(self.runtime_dir), **(env or {})}
        self._patched: PatchedWorkers | None = None
        if step_s is not None or patch:
            self._patched = PatchedWorkers(self.runtime_dir / "site", step_s or 0.0, patch)
            paths = [str(self._patched.folder), self.env["PYTHONPATH"]]
            self.env["PYTHONPATH"] = os.pathsep.join(paths)
        self._stdout = self.runtime_dir / "stdout"
        self._stderr = self.runtime_dir / "stderr"
        self._process: subprocess.Popen[bytes] | None = None
        self._client: EngineClient | None = None
        self.ready: dict[str, Any] = {}

    def start(self) -> Engine:
        """Returns when it serves; fails the test when it ends or hangs instead."""
        self.launch()
        return self.wait_ready()

    def wait_ready(self) -> Engine:
        """The second half of `start`."""
        end = time.monotonic() + START_S
        while not (line := self._ready_line()):
            status = self.process.poll()
            assert status is None, f"the engine exited with {status}: {self.log()}"
            assert time.monotonic() < end, f"no ready line within {START_S} s: {self.log()}"
            time.sleep(0.02)
        self.ready = json.loads(line)
        return self

    def launch(self) -> None:
        """Only the first half of `start`."""
        with self._stdout.open("wb") as stdout, self._stderr.open("ab") as stderr:
            self._process = subprocess.Popen(
                command("serve", *self._flags),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def _ready_line(self) -> str:
        for line in self._stdout.read_text().splitlines(keepends=True):
            if line.endswith("\n") and '"ready"' in line:
                return line
        return ""

    # -- what its workers do --------------------------------------------------------------------

    @property
    def _workers(self) -> PatchedWorkers:
        assert self._patched is not None, "made without step_s"
        return self._patched

    @contextlib.contextmanager
    def slowed(self, step_s: float) -> Iterator[None]:
        """Every step of its workers takes that much longer until the end of the `with`."""
        before, self._workers.step_s = self._workers.step_s, step_s
        try:
            yield
        finally:
            self._workers.step_s = before

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No worker that starts gets ready until the end of the `with`."""
        self._workers.hold()
        try:
            yield
        finally:
            self._workers.release()

    # -- what it is -----------------------------------------------------------------------------

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def target(self) -> str:
        return str(self.ready["address"])

    @property
    def port(self) -> int:
        return int(self.target.rpartition(":")[2])

    def log(self) -> str:
        """What front and worker wrote to stderr so far."""
        return self._stderr.read_text(errors="replace")

    def worker_pid(self, role: str = "unified") -> int:
        """Of a worker of that role that takes requests; waits for one that is being replaced."""
        found: list[int] = []

        def look() -> bool:
            workers = self.info().workers
            found[:] = [w.pid for w in workers if w.role == role and not w.is_spare]
            return bool(found)

        wait_started(look, f"a {role} worker")
        return found[0]

    def worker_pids(self, count: int) -> list[int]:
        """Of at least that many workers that run now; waits for those that are being replaced."""
        found: list[int] = []

        def look() -> bool:
            found.clear()
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self.pid).children():
                    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                        if "--config-json" in child.cmdline():
                            found.append(child.pid)
            return len(found) >= count

        wait_until(look, f"{count} worker processes")
        return found

    def keep_port(self) -> None:
        """Whenever it is started again, it takes the port that it has now."""
        self._flags[self._flags.index("--port") + 1] = str(self.port)

    def http(self, path: str) -> tuple[int, Mapping[str, str], str]:
        """GET over its HTTP port: status, headers (names in lower case) and body."""
        return http_get(f"http://{self.ready['http_address']}{path}")

    # -- asking it ------------------------------------------------------------------------------

    def client(self) -> EngineClient:
        """One client, shared by all callers; it is closed with the engine."""
        if self._client is None:
            self._client = EngineClient(self.target)
        return self._client

    def info(self) -> pb.GetServerInfoResponse:
        return self.client().server_info()

    def worker(self, role: str = "unified") -> pb.WorkerInfo:
        """Counts of the one worker of that role that takes requests."""
        workers = self.info().workers
        (worker,) = [w for w in workers if w.role == role and not w.is_spare]
        return worker

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """A whole answer. Raises CallError."""
        options.setdefault("timeout", 3 * PATIENCE_S)
        stream = Stream(thread=threading.current_thread())
        stream.run(self.client().generate(prompt, **options))
        if stream.error is not None:
            raise stream.error
        assert stream.accepted is not None
        assert stream.done is not None
        return Generation(stream.accepted, stream.pieces, stream.done)

    def stream(self, prompt: str | Sequence[int], **options: Any) -> Stream:
        """Begin a request and return at once."""
        options.setdefault("timeout", 3 * PATIENCE_S)
        return Stream.begin(self.client().generate(prompt, **options))

    @contextlib.contextmanager
    def stub(self, **options: Any) -> Iterator[EngineServiceStub]:
        """The bare RPCs, on a channel of their own that knows none of our client's settings."""
        with grpc.insecure_channel(self.target, **options) as channel:
            yield EngineServiceStub(channel)

    def call(
        self, request: pb.GenerateRequest, *, metadata: Sequence[tuple[str, str]] = ()
    ) -> list[pb.GenerateResponse]:
        """All messages of a request, as they came. Raises CallError."""
        with self.stub() as stub:
            try:
                return list(stub.Generate(request, metadata=metadata))
            except grpc.RpcError as exc:
                raise call_error(exc) from exc

    def wait_idle(self, role: str = "unified") -> pb.WorkerInfo:
        """Returns, with `worker(role)`, when no request is there and no publish under way."""

        def is_idle() -> bool:
            info = self.info()
            if info.num_requests_running or info.num_requests_waiting or not info.workers:
                return False
            return all(w.num_private_blocks_free == w.num_private_blocks for w in info.workers)

        wait_until(is_idle, f"an idle engine: {self.info()}")
        return self.worker(role)

    # -- ending it ------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def terminate(self) -> None:
        """SIGTERM; does not wait."""
        self.signal(signal.SIGTERM)

    def kill_worker(self, role: str = "unified") -> int:
        """SIGKILL a worker of that role; returns its pid."""
        pid = self.worker_pid(role)
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_all(self) -> None:
        """SIGKILL front and workers at once, and wait for all."""
        workers = []
        for pid in self.worker_pids(0):
            with contextlib.suppress(psutil.NoSuchProcess):
                workers.append(psutil.Process(pid))
        self.signal(signal.SIGKILL)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        self.process.wait(PATIENCE_S)
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.wait(PATIENCE_S)
        self._drop_client()

    def wait(self, limit_s: float = PATIENCE_S) -> int:
        """Its exit status, once it has ended by itself."""
        return self.process.wait(limit_s)

    def stop(self) -> int:
        """SIGTERM and wait; SIGKILL when that takes too long. Idempotent."""
        self._drop_client()
        if self._process is None:
            return 0
        if self.process.poll() is None:
            self.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill_all()
                raise
        return int(self.process.returncode)

    def restart(self) -> Engine:
        """Stop it if it runs, then start it again with the same settings."""
        self.stop()
        return self.start()

    def _drop_client(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Engine:
        return self if self._process is not None else self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if value is not None and self._process is not None:
                print(f"--- stderr of engine {self.pid}:\n{self.log()}", file=sys.stderr)
            self.stop()
        finally:
            shutil.rmtree(self.runtime_dir)


@contextlib.contextmanager
def together(*engines: Engine) -> Iterator[None]:
    """All of them, started two at a time because a start takes a CPU, ended at the same time."""
    with contextlib.ExitStack() as stack:
        for first in range(0, len(engines), 2):
            pair = engines[first : first + 2]
            for engine in pair:
                engine.launch()
                stack.enter_context(engine)
            for engine in pair:
                engine.wait_ready()
        yield
        for engine in engines:
            if engine.process.poll() is None:
                engine.terminate()


def serve_fails(
    *flags: str,
    env: Mapping[str, str] | None = None,
    http_port: str = "off",
    limit_s: float = START_S,
) -> tuple[int, str]:
    """Run `serve` with a setting it can't accept: (exit status, stderr). Fails if it serves."""
    with tempfile.TemporaryDirectory(prefix="cwe-", dir="/tmp") as folder:
        ended = subprocess.run(
            command("serve", "--http-port", http_port, *flags),
            env={**environment(), "XDG_RUNTIME_DIR": folder, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    assert ended.returncode, f"it ended well: {ended.stdout}"
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stderr


def wait_started(condition: Callable[[], bool], what: str) -> None:
    """As `wait_until`, for what takes the start of a process."""
    end = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


def http_get(url: str) -> tuple[int, Mapping[str, str], str]:
    """Status, headers (names in lower case) and body; an error status is no exception."""
    try:
        reply = urllib.request.urlopen(url, timeout=PATIENCE_S)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        headers = {name.lower(): value for name, value in reply.headers.items()}
        return reply.status, headers, reply.read().decode()


def details_of(error: grpc.RpcError) -> dict[str, Any]:
    """The google.rpc details of a failed call, by the name of their message."""
    status = rpc_status.from_call(error)
    kinds = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
    found: dict[str, Message] = {}
    for packed in status.details if status is not None else ():
        for kind in kinds:
            message = kind()
            if packed.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


def make_prompt(length: int, salt: int) -> list[int]:
    """Ordinary token ids; another salt shares no prefix."""
    ids = np.random.default_rng(salt).integers(3, 512, length)
    return [3 + salt % 500, *ids.tolist()][:length]


def evict_all(daemon: Daemon) -> None:
    """Make every block of the daemon go that no lease keeps."""
    with daemon.client(control_pb2.ROLE_ADMIN) as client:
        client.call(control_pb2.Envelope(evict=control_pb2.Evict()), PATIENCE_S)


def num_sealed(daemon: Daemon) -> int:
    """Blocks that the daemon has sealed now."""
    return int(daemon.status().pool.blocks["sealed"])
