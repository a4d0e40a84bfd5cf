"""What a start begins before the front imports what it needs itself: half of a warm start is that.

If a cachewarmd takes connections, the workers: they start beside the front. If none does, the
daemon; workers come when it serves, because one that is there first has weights of its own. And the
tokenizer, whose library reads beside Python.
"""

from __future__ import annotations

import socket
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from engine import spawn
from engine.address import GrpcAddress
from engine.config import ServeConfig
from engine.errors import StartError
from engine.models.config import load_config
from engine.phases import Phases
from engine.spawn import StartedWorker
from engine.worker_config import worker_config

if TYPE_CHECKING:
    from concurrent.futures import Future

    from engine.tokenizer import Tokenizer


class HeadStart:
    """Processes that run already. `with` ends the workers that nobody took.

    `model` and `worker_configs` are what they were started with, `daemon` is the process of a
    cachewarmd that was started here, and `phases` go on.
    """

    tokenizer: Future[Tokenizer]

    def __init__(self, config: ServeConfig, environ: Mapping[str, str], phases: Phases) -> None:
        """Nothing is started yet. Raises ModelError; StartError when the address is in use."""
        self.model = load_config(config.model, config.max_context)
        GrpcAddress(config.host, config.port, config.listen).probe()
        self.worker_configs = {
            role: worker_config(config, self.model, role, environ) for role, _ in config.workers
        }
        self.daemon: subprocess.Popen[bytes] | None = None
        self.phases = phases
        self._config = config
        self._socket = config.daemon_socket(environ)
        self._started: defaultdict[str, list[StartedWorker]] = defaultdict(list)

    def __enter__(self) -> HeadStart:
        """Raises StartError when a process can't be had."""
        config = self._config
        try:
            if self._socket is not None and not _is_served(self._socket):
                self.daemon = spawn.start_daemon(self._socket, config.pool_bytes)
            elif not config.external_workers:
                for role, count in config.workers:
                    for _ in range(count + config.spare_workers):
                        started = spawn.start_worker(role, self.worker_configs[role])
                        self._started[role].append(started)
        except OSError as exc:
            self._end_workers()
            raise StartError(f"a process can't be started: {exc}") from exc
        self.phases.end("spawn")
        from concurrent.futures import ThreadPoolExecutor

        from engine.tokenizer import Tokenizer

        thread = ThreadPoolExecutor(1, "tokenizer")
        self.tokenizer = thread.submit(Tokenizer, config.model)
        thread.shutdown(wait=False)
        return self

    def start_worker(self, role: str) -> StartedWorker:
        """One that was started already, else a new one. Raises OSError."""
        if self._started[role]:
            return self._started[role].pop()
        return spawn.start_worker(role, self.worker_configs[role])

    def _end_workers(self) -> None:
        for started in (started for role in self._started.values() for started in role):
            started.socket.close()
            started.process.kill()
            started.process.wait()
        self._started.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_workers()


def _is_served(path: Path) -> bool:
    """Does a process take connections there? Whether it answers, workers find out."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            pass  # so many wait for it that there is no room in its queue
        except OSError:
            return False
    return True
