"""The light client of cachewarmd: all that engines and `cachewarmd-ctl` use of it.

A `Client` is one connection. A thread reads replies and resolves futures, so callers may look at a
result later (`submit`), and an asyncio program can wrap the future. Who waits for a reply (`call`)
reads the socket itself meanwhile: to hand a reply from one thread to another can cost more than all
the rest of a lookup. Nothing here reconnects: who owns the client decides what a lost daemon means.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachewarmd import protocol
from cachewarmd.errors import (
    CachewarmError,
    ProtocolError,
    TimedOutError,
    UnreachableError,
    from_wire,
)
from cachewarmd.protocol import blocks_of as blocks_of  # for who reads a LookupReply
from cachewarmd.v1 import control_pb2 as pb

# What maps memory is imported by who maps some: an engine's front never does, and its start is
# waited for.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cachewarmd.huge_pages import Huge
    from cachewarmd.weights import Progress

ATTACH_STALL_S = 5.0
HELLO_TIMEOUT_S = 5.0
# A stopped daemon fills the socket; whoever writes must notice instead of hanging with it.
_WRITE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class AttachedWeights:
    """Packed weights, mapped read-only (shared) or this process's own (private)."""

    memory: npt.NDArray[np.uint8]
    weights_sha256: bytes
    version: str
    is_shared: bool
    already_warm: bool


@dataclass(frozen=True)
class SharedPool:
    """The daemon's pool as mapped here, read-only. Views keep it mapped after a daemon's death."""

    memory: npt.NDArray[np.uint8]
    records: npt.NDArray[Any]  # layout.RECORD
    header: npt.NDArray[Any]  # layout.HEADER, one
    pool_id: bytes  # of this memory, whichever daemon serves it

    @property
    def change_word(self) -> int:
        """Grows with every generation; no change = all that was intact still is."""
        return int(self.header["change_word"][0])

    def is_intact(self, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]) -> bool:
        """Do all these slots still hold what was leased?"""
        return bool((self.records["generation"][slots] == generations).all())


class _Reply:
    """A pending request: its final future, and a queue for what comes before (`more`)."""

    def __init__(self, on_more: Callable[[pb.Envelope], None] | None) -> None:
        self.future: Future[tuple[pb.Envelope, list[int]]] = Future()
        # So that nobody can cancel it (an asyncio wrapper would): its result must be settable.
        self.future.set_running_or_notify_cancel()
        self.on_more = on_more


class Client(AbstractContextManager["Client"]):
    """One connection to the daemon; use `Client.connect`, close it or use `with`."""

    def __init__(self, sock: socket.socket, on_event: Callable[[pb.Envelope], None] | None) -> None:
        self._sock = sock
        self._on_event = on_event
        self._ids = itertools.count(1)
        self._pending: dict[int, _Reply] = {}
        self._lock = threading.Lock()
        self._lost = False
        self._is_broken = False  # what comes can't be read any more
        # Blocking mode belongs to the open file, timeouts to the socket object: a duplicate may
        # wait as long as it likes while writes keep their own short timeout.
        self._reading = sock.dup()
        self._decoder = protocol.FrameDecoder()
        self._read_lock = threading.Lock()  # of the two above
        self._caller = 0  # the thread that reads in place of ours, for a `call`
        # With no event asked for it still tells the end, so the thread sleeps until then.
        self._epoll = select.epoll()
        self._epoll.register(self._reading, select.EPOLLIN)
        self._lost_reason: CachewarmError = UnreachableError("the connection to cachewarmd is lost")
        self.hello = pb.HelloReply()
        self.pool: SharedPool | None = None
        self._reader = threading.Thread(target=self._read, name="cachewarmd-client", daemon=True)
        self._reader.start()

    @classmethod
    def connect(
        cls,
        path: Path,
        role: pb.Role,
        name: str,
        *,
        private_pool: tuple[int, int] | None = None,
        on_event: Callable[[pb.Envelope], None] | None = None,
        timeout: float = HELLO_TIMEOUT_S,
    ) -> Client:
        """Connect and say hello; `private_pool` = (memfd, bytes) makes it a worker's connection.

        `on_event` gets what the daemon says unasked, on the thread that reads just then. It must
        not wait for a reply.
        Raises UnreachableError, TimedOutError, VersionMismatchError, NotPermittedError.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout)
        try:
            sock.connect(str(path))
        except OSError as exc:
            sock.close()
            reason = exc.strerror or exc
            raise UnreachableError(f"no cachewarmd answers on {path}: {reason}") from exc
        sock.settimeout(_WRITE_TIMEOUT_S)
        client = cls(sock, on_event)
        try:
            client._say_hello(role, name, private_pool, timeout)
        except BaseException:
            client.close()
            raise
        return client

    def _say_hello(
        self, role: pb.Role, name: str, private_pool: tuple[int, int] | None, timeout: float
    ) -> None:
        hello = pb.Hello(
            protocol_version=protocol.PROTOCOL_VERSION, role=role, name=name, pid=os.getpid()
        )
        fds: list[int] = []
        if private_pool is not None:
            hello.private_pool_bytes = private_pool[1]
            fds = [private_pool[0]]
        reply, shared = self.call(pb.Envelope(hello=hello), timeout, fds)
        try:
            self.hello = reply.hello_reply
            if private_pool is not None:
                self.pool = _map_pool(self.hello, shared)
        finally:
            protocol.close_all(shared)

    # -- calls ----------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Is the connection over? It never comes back."""
        return self._lost

    def submit(
        self,
        envelope: pb.Envelope,
        fds: Sequence[int] = (),
        on_more: Callable[[pb.Envelope], None] | None = None,
    ) -> Future[tuple[pb.Envelope, list[int]]]:
        """Send a request; the future gives (reply, fds) or raises the daemon's typed error.

        Whoever takes the result owns the fds. When the connection was lost before, this raises
        UnreachableError, or the daemon's last words; one that breaks now ends the future so.
        """
        reply = _Reply(on_more)
        with self._lock:
            if self._lost:
                raise self._lost_error()
            envelope.id = next(self._ids)
            envelope.num_fds = len(fds)
            self._pending[envelope.id] = reply
            try:
                self._send(protocol.encode(envelope), fds)
            except OSError:
                self._drop_socket()  # the reader ends what is pending
            except ProtocolError:
                self._pending.pop(envelope.id)
                raise
        return reply.future

    def notify(self, envelope: pb.Envelope) -> None:
        """Send something that has no reply. Raises UnreachableError."""
        with self._lock:
            if self._lost:
                raise self._lost_error()
            try:
                self._send(protocol.encode(envelope), ())
            except OSError as exc:
                self._drop_socket()
                raise UnreachableError(f"cachewarmd does not take requests: {exc}") from exc

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        view = memoryview(data)
        sent = protocol.send_with_fds(self._sock, view, fds)
        while sent < len(view):
            sent += self._sock.send(view[sent:])

    def ask(
        self, envelope: pb.Envelope, wait_s: float, fds: Sequence[int] = ()
    ) -> Future[tuple[pb.Envelope, list[int]]]:
        """`submit`, and read here until the reply is there or `wait_s` are over.

        No thread has to be woken for a reply that comes meanwhile.
        """
        end = time.monotonic() + wait_s
        if not self._read_lock.acquire(blocking=False):
            future = self.submit(envelope, fds)
            wait([future], wait_s)
            return future
        try:
            self._caller = threading.get_ident()
            self._watch(0)
            future = self.submit(envelope, fds)
            self._read_until(future, end)
        finally:
            self._watch(select.EPOLLIN)
            self._caller = 0
            self._read_lock.release()
        return future

    def call(
        self, envelope: pb.Envelope, timeout: float, fds: Sequence[int] = ()
    ) -> tuple[pb.Envelope, list[int]]:
        """`submit` and wait. Raises TimedOutError after `timeout` seconds, and the daemon's error.

        A reply that comes too late has its descriptors closed.
        """
        end = time.monotonic() + timeout
        future = self.ask(envelope, timeout, fds)
        try:
            # Another thread may be about to set what it has read.
            return future.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            future.add_done_callback(_close_fds_of)
            raise TimedOutError(f"no reply from cachewarmd within {timeout:g} s") from None

    def stream(
        self,
        envelope: pb.Envelope,
        on_more: Callable[[pb.Envelope], None],
        stall_s: float | None,
        fds: Sequence[int] = (),
    ) -> tuple[pb.Envelope, list[int]]:
        """A request with progress: `on_more` for each, here in the calling thread.

        Raises TimedOutError when neither progress nor the reply came for `stall_s` seconds.
        """
        events: queue.SimpleQueue[pb.Envelope | None] = queue.SimpleQueue()
        future = self.submit(envelope, fds, events.put)
        future.add_done_callback(lambda _: events.put(None))
        while True:
            try:
                event = events.get(timeout=stall_s)
            except queue.Empty:
                future.add_done_callback(_close_fds_of)
                raise TimedOutError(f"no progress from cachewarmd for {stall_s} s") from None
            if event is None:
                return future.result()
            on_more(event)

    def attach_weights(
        self,
        model_dir: Path,
        name: str,
        version: str,
        plan: pb.PackPlan,
        progress: Progress,
        stall_s: float = ATTACH_STALL_S,
    ) -> AttachedWeights:
        """Map the model's weights, which the daemon reads first if it does not have them.

        Raises ModelFilesError, NoSpaceError, TimedOutError (no progress), UnreachableError.
        """
        from cachewarmd import segment

        request = pb.AttachWeights(model_name=name, version=version, plan=plan)

        def on_more(envelope: pb.Envelope) -> None:
            told = envelope.attach_progress
            progress(told.phase, told.done_bytes, told.total_bytes)

        dir_fd = os.open(model_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            reply, fds = self.stream(
                pb.Envelope(attach_weights=request), on_more, stall_s, [dir_fd]
            )
        finally:
            os.close(dir_fd)
        try:
            told = reply.attach_weights_reply
            if len(fds) != 1 or os.fstat(fds[0]).st_size != told.segment_bytes:
                raise ProtocolError("the weight segment is not what was told")
            memory = segment.map_memory(fds[0], told.segment_bytes)
        finally:
            protocol.close_all(fds)
        return AttachedWeights(
            memory,
            told.weights_sha256,
            told.version,
            is_shared=True,
            already_warm=told.already_warm,
        )

    # -- reading --------------------------------------------------------------------------------

    def _read(self) -> None:
        """The thread: reads whatever nobody waits for, and is the one that ends the connection."""
        is_open = True
        while is_open:
            self._epoll.poll()
            with self._read_lock:
                is_open = self._read_once(0.0)
        self._fail_all()
        with self._read_lock:
            self._decoder.close()
            self._reading.close()
            self._epoll.close()

    def _watch(self, events: int) -> None:
        """What wakes the thread, beside the end. Needs the read lock."""
        if not self._epoll.closed:
            self._epoll.modify(self._reading, events)

    def _read_until(self, future: Future[Any], end: float) -> None:
        """In place of the thread: until the future is done, the time is over or nothing comes."""
        while not future.done() and (left := end - time.monotonic()) > 0:
            if not self._read_once(left):
                return

    def _read_once(self, timeout: float) -> bool:
        """Take the frames of one recvmsg; False = the connection is over. Needs the read lock."""
        if self._is_broken:
            return False
        try:
            self._reading.settimeout(timeout)
            data, fds = protocol.recv_bytes_and_fds(self._reading)
            frames = self._decoder.feed(data, fds) if data else []
        except (BlockingIOError, TimeoutError):
            return True
        except (OSError, ProtocolError):
            data = b""  # what it means is the same as end of stream: the daemon is lost
        if not data:
            self._is_broken = True
            # From a caller: so that the thread notices, whose part the rest is.
            with contextlib.suppress(OSError):
                self._reading.shutdown(socket.SHUT_RDWR)
            return False
        for envelope, frame_fds in frames:
            self._take(envelope, frame_fds)
        return True

    def _take(self, envelope: pb.Envelope, fds: list[int]) -> None:
        is_error = envelope.WhichOneof("body") == "error"
        with self._lock:
            take = self._pending.get if envelope.more else self._pending.pop
            reply = take(envelope.id, None)
        if reply is None or envelope.more or is_error:
            protocol.close_all(fds)  # nobody is there to own them
        if envelope.id == 0 and is_error:
            # Last words about the connection; what is pending ends with it.
            self._lost_reason = from_wire(envelope.error)
        elif envelope.id == 0:
            if self._on_event is not None:
                self._on_event(envelope)
        elif reply is None:
            pass
        elif envelope.more:
            if reply.on_more is not None:
                reply.on_more(envelope)
        elif is_error:
            reply.future.set_exception(from_wire(envelope.error))
        else:
            reply.future.set_result((envelope, fds))

    def _fail_all(self) -> None:
        with self._lock:
            # Also when it was the daemon's bytes that made no sense: what is lost must look closed
            # to the daemon, or it would still seal what it copies for us.
            self._drop_socket()
            waiting = list(self._pending.values())
            self._pending.clear()
        for reply in waiting:
            reply.future.set_exception(self._lost_error())
        if self._on_event is not None:
            self._on_event(pb.Envelope())  # nothing inside: the end

    def _lost_error(self) -> CachewarmError:
        # A new one each time: a raised exception carries its own traceback.
        return type(self._lost_reason)(str(self._lost_reason))

    def _drop_socket(self) -> None:
        self._lost = True
        with contextlib.suppress(OSError):  # the peer was first
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection; its leases go back. Idempotent."""
        with self._lock:
            self._drop_socket()
        if threading.get_ident() not in (self._reader.ident, self._caller):
            self._reader.join()
        self._sock.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _close_fds_of(future: Future[tuple[pb.Envelope, list[int]]]) -> None:
    if future.exception() is None:
        protocol.close_all(future.result()[1])


def _map_pool(hello: pb.HelloReply, fds: Sequence[int]) -> SharedPool:
    """Check the frozen header, then map. Raises ProtocolError when it is not what we can read."""
    from cachewarmd import layout, segment

    if len(fds) != 2:
        raise ProtocolError("the daemon gave no pool")
    raw = segment.map_memory(fds[0], os.fstat(fds[0]).st_size)
    header = raw[: layout.HEADER.itemsize].view(layout.HEADER)[0]
    if bytes(header["magic"]) != layout.MAGIC:
        raise ProtocolError("the pool's header is not one of ours")
    if (
        header["format_version"] != layout.FORMAT_VERSION
        or bytes(header["layout_hash"]) != layout.layout_hash()
    ):
        raise ProtocolError("the daemon's pool has another layout than this engine reads")
    num_extents = hello.pool_bytes // layout.EXTENT_BYTES
    if len(raw) != layout.records_bytes(num_extents):
        raise ProtocolError("the pool's records have another size than they must have")
    memory = segment.map_memory(fds[1], hello.pool_bytes)
    shared = layout.RecordsMap.of(raw, num_extents)
    return SharedPool(memory, shared.records, shared.header, bytes(header["pool_id"]))


def load_private(
    model_dir: Path, version: str, plan: pb.PackPlan, cgroup_root: Path | None = None
) -> AttachedWeights:
    """Read and pack the weights into this process's own memory: what is left without a daemon.

    `cgroup_root` is where limits stand, if not where the kernel shows them.
    Raises ModelFilesError, NoSpaceError, InvalidRequestError.
    """
    from cachewarmd import segment, weights
    from cachewarmd.budget import DEFAULT_CGROUP_ROOT, Budget

    budget = Budget(cgroup_root or DEFAULT_CGROUP_ROOT)

    def allocate(fd: int, size: int, tell: Callable[[int], None]) -> Huge:
        return budget.allocate(fd, size, "a private copy of the weights", tell)

    dir_fd = os.open(model_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        loaded, _ = weights.load(dir_fd, plan, lambda *_: None, allocate, follow=True)
    finally:
        os.close(dir_fd)
    readonly = segment.reopen_readonly(loaded.fd)
    os.close(loaded.fd)
    try:
        memory = segment.map_memory(readonly, loaded.size)
    finally:
        os.close(readonly)
    shown = version or loaded.weights_sha256.hex()[:12]
    return AttachedWeights(
        memory, loaded.weights_sha256, shown, is_shared=False, already_warm=False
    )


def create_private_pool(size: int) -> tuple[int, npt.NDArray[np.uint8]]:
    """Memory for a worker's own blocks, as `Client.connect` takes it: (memfd, writable view).

    Pages come as blocks are used, huge ones only if the host is set so: to ask for them here would
    take all the memory at once.
    """
    from cachewarmd import segment

    fd = segment.create_memfd("cachewarm-private", size)
    return fd, segment.map_memory(fd, size, writable=True)
