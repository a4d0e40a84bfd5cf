"""Worker processes: spawn, accept, hear, watch, replace.

A worker is exec'd with a socket to the front; or it is a unit of its own (`external`) and dials the
front's. Spares are workers that are ready and get nothing to do
until another one of their role dies.
"""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from cachewarmd import options
from cachewarmd.log import get_logger
from engine.channel import AsyncChannel, BrokenChannelError
from engine.child import Child
from engine.errors import StartError, WeightsChangedError
from engine.live_worker import LiveWorker, greet, peer_pid
from engine.request import (
    Finished,
    FromWorker,
    Output,
    Progress,
    Stats,
    StatsRequest,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
)
from engine.router import Router
from engine.spawn import StartedWorker

_log = get_logger()

_HELLO_TIMEOUT_S = 60.0  # of a process that has to start first
_DIALLED_TIMEOUT_S = 5.0  # of one that dialled in
_STOP_TIMEOUT_S = 5.0
_MAX_FAILED_STARTS = 3
_RETRY_S = 1.0
_STATS_EVERY_S = 1.0
_STATS_TIMEOUT_S = 2.0


class WorkerPool:
    """Keeps `counts` workers of each role alive, spares beside them, and tells the router.

    `start_worker(role)` starts a process, or gives one that runs already; external workers start
    themselves and dial `socket_path`. `on_change(ready)` is called with what a worker serves
    when one becomes able to take requests, and with None when the last one is lost.
    """

    def __init__(
        self,
        start_worker: Callable[[str], StartedWorker],
        counts: Mapping[str, int],
        num_spares: int,
        watchdog_s: float,
        socket_path: Path,
        router: Router,
        on_change: Callable[[WorkerReady | None], None],
        *,
        is_external: bool = False,
    ) -> None:
        self._start_worker = start_worker
        self._counts = counts
        self._num_spares = num_spares
        self._watchdog_s = watchdog_s
        self._path = socket_path
        self._router = router
        self._on_change = on_change
        self._is_external = is_external
        self._server: asyncio.Server | None = None
        self._processes: set[Child] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] | None = None
        self._was_ready = False
        self._stamp = ""  # of what was served last
        self._stopping = False
        self.on_stats: Callable[[int, Stats], None] = lambda pid, stats: None
        self.on_gone: Callable[[int], None] = lambda pid: None
        self.live: list[LiveWorker] = []

    # -- views ----------------------------------------------------------------------------------

    @property
    def active(self) -> list[LiveWorker]:
        """Those that take requests."""
        return [worker for worker in self.live if worker.routed is not None]

    @property
    def spares(self) -> list[LiveWorker]:
        return [worker for worker in self.live if worker.ready and worker.routed is None]

    @property
    def max_positions(self) -> int:
        """What a request can come to fill on any of them."""
        readies = [worker.ready for worker in self.live if worker.ready is not None]
        return min((r.num_private_blocks * r.block_size for r in readies), default=0)

    @property
    def kv_usage(self) -> float:
        """Private blocks in use, of all, by the workers' last word: 0 to 1."""
        pairs = [(worker.ready, worker.stats) for worker in self.active]
        total = sum(ready.num_private_blocks for ready, stats in pairs if ready and stats)
        free = sum(stats.num_private_blocks_free for ready, stats in pairs if ready and stats)
        return 1 - free / total if total else 0.0

    async def fresh_stats(self) -> list[LiveWorker]:
        """All ready workers, with counts of now as far as they answer in time."""
        ready = [worker for worker in self.live if worker.ready]
        loop = asyncio.get_running_loop()
        waiters = []
        for worker in ready:
            waiters.append(loop.create_future())
            worker.stats_waiters.append(waiters[-1])
            worker.channel.send(StatsRequest())
        if waiters:
            await asyncio.wait(waiters, timeout=_STATS_TIMEOUT_S)
        return ready

    # -- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until `stop`. Raises StartError when no worker can be had.

        A worker that names its reason (no such model, say) is not tried again, unless others run.
        """
        self._failure = asyncio.get_running_loop().create_future()
        if self._is_external:
            await self._listen()
        try:
            self._spawn_task(self._watch())
            if not self._is_external:
                for role, count in self._counts.items():
                    for _ in range(count + self._num_spares):
                        self._spawn_task(self._keep(role))
            await self._failure
        finally:
            was_told, self._stopping = self._stopping, True
            for worker in self.live:
                worker.channel.close()
            self._router.no_worker_left(is_stopping=was_told)
            await self._close()

    def _spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    def stop(self) -> None:
        """Let workers finish their last publishes and go; `run` then ends."""
        self._stopping = True
        if self._failure is not None and not self._failure.done():
            self._failure.set_result(None)

    async def _listen(self) -> None:
        try:
            options.ensure_private_dir(self._path.parent)
        except options.OptionError as exc:
            raise StartError(str(exc)) from exc
        if self._path.exists() and stat.S_ISSOCK(self._path.lstat().st_mode):
            self._path.unlink()  # of an engine that died on this address; we hold it now
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._on_dial, str(self._path))
        except OSError as exc:
            raise StartError(f"worker socket {self._path}: {exc.strerror}") from exc
        finally:
            os.umask(before)

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        heard = {worker.pid for worker in self.live}
        for process in self._processes:
            if process.pid not in heard and process.returncode is None:
                process.terminate()  # it has not said hello yet: nobody else tells it
        await asyncio.gather(*(self._reap(process) for process in list(self._processes)))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- spawning -------------------------------------------------------------------------------

    async def _keep(self, role: str) -> None:
        """One place for a worker of that role: fill it, again and again. Raises StartError."""
        failed = 0
        while not self._stopping:
            failed = 0 if await self._one_life(role) else failed + 1
            if failed >= _MAX_FAILED_STARTS and not self._stopping:
                if not self.active:
                    raise StartError(f"the worker died {failed} times before it was ready")
                await asyncio.sleep(_RETRY_S)

    async def _one_life(self, role: str) -> bool:
        """Spawn a worker and wait until it is gone; was it ever ready?"""
        started = self._start_worker(role)
        process = Child(started.process)
        self._processes.add(process)
        try:
            channel = AsyncChannel(*await asyncio.open_unix_connection(sock=started.socket))
            worker = await greet(process.pid, channel, _HELLO_TIMEOUT_S)
            await self._hear(worker)
            return worker.ready is not None
        except BrokenChannelError:
            return False  # it ended, or hung, before its hello
        finally:
            await self._reap(process)
            self._processes.discard(process)
            if process.returncode and not self._stopping:
                _log.warning("worker_ended", pid=process.pid, status=process.returncode)

    async def _reap(self, process: Child) -> None:
        """A worker leaves when its channel closes; one that does not is killed."""
        if not await process.wait(_STOP_TIMEOUT_S if self._stopping else 0.2):
            process.kill()
            await process.wait()

    # -- hearing --------------------------------------------------------------------------------

    async def _on_dial(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A process has connected; who it is, the kernel says."""
        channel = AsyncChannel(reader, writer)
        try:
            worker = await greet(peer_pid(writer), channel, _DIALLED_TIMEOUT_S)
        except BrokenChannelError as exc:
            _log.warning("stranger_on_worker_socket", reason=str(exc))
            return
        if worker.role in self._counts and not self._stopping:
            await self._hear(worker)
        else:
            _log.warning("stranger_on_worker_socket", pid=worker.pid, role=worker.role)
            worker.close()

    async def _hear(self, worker: LiveWorker) -> None:
        """Everything a worker says, until it is gone."""
        worker.heard_at = time.monotonic()
        self.live.append(worker)
        try:
            while not self._stopping:
                message = await worker.channel.receive()
                worker.heard_at = time.monotonic()
                if not self._take(worker, message):
                    break
        except BrokenChannelError:
            if not self._stopping:
                _log.warning("worker_lost", pid=worker.pid, role=worker.role)
        finally:
            self._forget(worker)

    def _take(self, worker: LiveWorker, message: FromWorker) -> bool:
        """False = it must not go on."""
        match message:
            case WorkerReady():
                return self._make_ready(worker, message)
            case WorkerFailed():
                _log.error("worker_failed", pid=worker.pid, reason=message.message)
                if not self._was_ready:
                    self._fail(StartError(message.message))
                return False
            case Stats():
                worker.stats, worker.asked_at = message, 0.0
                self.on_stats(worker.pid, message)
                waiters, worker.stats_waiters = worker.stats_waiters, []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(message)
                return True
            case Output() | Finished() | Progress():
                return worker.routed is None or self._router.on_message(message)
            case WorkerHello():
                return False

    def _make_ready(self, worker: LiveWorker, ready: WorkerReady) -> bool:
        others = [w.ready for w in self.live if w.ready is not None]
        if others and others[0].stamp != ready.stamp:
            # A request may go from one to the other: they must compute the same.
            _log.error("worker_refused_other_stamp", pid=worker.pid, stamp=ready.stamp)
            return False
        if self._stamp not in ("", ready.stamp):
            # The last one of the old stamp is gone: nobody can continue what it began.
            _log.warning("weights_changed", stamp=ready.stamp)
            text = f"weights {ready.weights_sha256} are served now"
            self._router.fail_all(WeightsChangedError(text))
        self._stamp = ready.stamp
        worker.ready, self._was_ready = ready, True
        self._fill_places()
        return True

    def _fill_places(self) -> None:
        """Spares take the places that are empty."""
        for role, count in self._counts.items():
            missing = count - sum(1 for worker in self.active if worker.role == role)
            for worker in [spare for spare in self.spares if spare.role == role][: max(0, missing)]:
                worker.routed = self._router.worker_ready(role, worker.channel.send)
                assert worker.ready is not None
                if self.can_serve:
                    self._on_change(worker.ready)

    @property
    def can_serve(self) -> bool:
        """Is there a worker of every role?"""
        return set(self._counts) <= {worker.role for worker in self.active}

    def _forget(self, worker: LiveWorker) -> None:
        self.live.remove(worker)
        if not self._stopping:
            worker.kill()  # it may be only hung, or wrong
        worker.close()  # from here on nothing it says is heard
        self.on_gone(worker.pid)
        for waiter in worker.stats_waiters:
            waiter.cancel()
        routed, worker.routed = worker.routed, None
        if routed is None or self._stopping:
            return
        self._router.worker_lost(routed, worker.heard_at)
        self._fill_places()
        if not self.can_serve:
            self._on_change(None)

    # -- watching -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Ask every worker for its counts; one that says nothing for too long is hung."""
        tick = min(_STATS_EVERY_S, self._watchdog_s / 4)
        last = time.monotonic()
        while not self._stopping:
            await asyncio.sleep(tick)
            now = time.monotonic()
            was_stopped = now - last > 4 * tick
            last = now
            for worker in list(self.live):
                if worker.ready is None:
                    continue
                if was_stopped:  # it was us who slept
                    worker.heard_at, worker.asked_at = now, 0.0
                silent_since = max(worker.heard_at, worker.asked_at)
                if worker.asked_at and now - silent_since > self._watchdog_s:
                    _log.error("worker_hung", pid=worker.pid, silent_s=round(now - silent_since, 1))
                    worker.channel.close()
                    worker.kill()
                else:
                    worker.ask(now)
