"""Brings a worker process up: pins it, attaches weights, registers its stamp, runs its loop."""

from __future__ import annotations

import os
import queue
import socket
import threading

from cachewarmd.client import AttachedWeights, Client, create_private_pool, load_private
from cachewarmd.errors import CachewarmError, InvalidRequestError, ModelFilesError
from cachewarmd.keys import Stamp
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from engine.block_table import PrivatePool
from engine.channel import BlockingChannel, BrokenChannelError
from engine.config import WorkerConfig
from engine.daemon_link import DaemonLink
from engine.errors import ModelError
from engine.executor.backends import ExecutorOptions, backend_named
from engine.executor.base import Executor
from engine.models.config import ModelConfig, load_config
from engine.phases import Phases
from engine.request import WorkerFailed, WorkerHello, WorkerReady
from engine.shared_cache import SharedCache
from engine.worker import Inbox, Worker

_log = get_logger()


def _read_inbox(channel: BlockingChannel, inbox: Inbox) -> None:
    try:
        while True:
            inbox.put(channel.receive())
    except BrokenChannelError as exc:
        inbox.put(exc)


def _attach_weights(
    config: WorkerConfig, plan: pb.PackPlan, link: DaemonLink | None
) -> tuple[AttachedWeights, Client | None]:
    """From the daemon if it answers and makes progress, else this process's own copy."""
    if link is not None:
        try:
            client = link.connect()
        except CachewarmError as exc:
            _log.warning("daemon_not_reached_weights_private", reason=str(exc))
        else:
            try:
                name, version = config.model_name, config.model_version
                weights = client.attach_weights(config.model, name, version, plan, lambda *_: None)
                return weights, client
            except (ModelFilesError, InvalidRequestError):
                client.close()
                raise  # our own reading would find the same
            except CachewarmError as exc:
                _log.warning("daemon_failed_weights_private", reason=str(exc))
                client.close()
    return load_private(config.model, config.model_version, plan), None


def _make_stamp(model: ModelConfig, weights: AttachedWeights, executor: Executor) -> Stamp:
    return Stamp(
        version=weights.version,
        weights_sha256=weights.weights_sha256.hex(),
        config_sha256=model.digest(),
        compute_dtype=executor.compute_dtype,
        weight_quantisation="none",
        kv_layout=f"{executor.kv_layout};{model.rope.label}",
        numerics=executor.numerics,
    )


def _pin(cpus: list[int]) -> list[int]:
    """Pin this process; returns where it runs. Raises ModelError for CPUs that can't be had.

    The kernel silently drops unknown CPUs of a set, so the result is compared.
    """
    if cpus:
        allowed = sorted(os.sched_getaffinity(0))
        if not set(cpus) <= set(allowed):
            raise ModelError(f"worker-cpus {cpus} is not allowed: among {allowed}")
        os.sched_setaffinity(0, cpus)
    return sorted(os.sched_getaffinity(0))


def _build(
    config: WorkerConfig, channel: BlockingChannel, inbox: Inbox, phases: Phases
) -> tuple[Worker, SharedCache | None, WorkerReady]:
    cpus = _pin(list(config.cpus))
    backend = backend_named(config.backend)
    phases.end("imports")
    model = load_config(config.model, config.max_context)
    backend.check(model, config.block_size)
    plan = backend.pack_plan(model)
    block_bytes = backend.block_bytes(model, config.block_size)
    pool_bytes = config.private_pool_bytes // block_bytes * block_bytes
    if not pool_bytes:
        raise ModelError(
            f"private-pool-bytes {config.private_pool_bytes} is not allowed: at least one block of "
            f"{block_bytes} bytes"
        )
    phases.end("config")
    pool_fd, pool_memory = create_private_pool(pool_bytes)
    pool = PrivatePool(pool_memory, block_bytes)

    def wake() -> None:
        inbox.put(None)

    link = None
    if config.cachewarmd is not None:
        link = DaemonLink(config.cachewarmd, (pool_fd, pool_bytes), wake)
    weights, client = _attach_weights(config, plan, link)
    phases.end("weights")
    options = ExecutorOptions(config.block_size, config.cpu_isa, tuple(cpus))
    executor = backend.build(model, plan, weights.memory, options)
    phases.end("executor")
    stamp = _make_stamp(model, weights, executor)
    cache = None
    if link is not None:
        registration = pb.Register(
            stamp=stamp.digest(),
            slot_bytes=block_bytes,
            block_size=config.block_size,
            description=f"{stamp.version} {stamp.kv_layout} {stamp.numerics}",
            weights_sha256=weights.weights_sha256,
        )
        link.start(registration, client)
        cache = SharedCache(link, pool, config.block_size, wake)
    source = "shared" if weights.is_shared else "private"
    worker = Worker(channel.send, inbox, config, executor, pool, cache, source)
    ready = WorkerReady(
        role=config.role,
        model_version=weights.version,
        weights_sha256=weights.weights_sha256.hex(),
        stamp=stamp.digest().hex(),
        backend=executor.name,
        backend_reason=executor.why,
        dtype=executor.compute_dtype,
        kv_dtype=executor.kv_dtype,
        block_size=config.block_size,
        num_private_blocks=pool.num_blocks,
        max_num_seqs=config.max_num_seqs,
        cpus=cpus,
        start_phases_s=phases.seconds,
    )
    return worker, cache, ready


def _dial(front: str) -> socket.socket:
    """The socket that a front gave, "fd:N", or a connection to "unix:PATH". Raises OSError."""
    scheme, _, place = front.partition(":")
    if scheme == "fd":
        return socket.socket(fileno=int(place))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(place)
    except BaseException:
        sock.close()
        raise
    return sock


def run(config: WorkerConfig, front: str, phases: Phases) -> int:
    """Work for the front until it is gone; returns the exit status.

    `front` is "unix:PATH" or "fd:N"; `phases` began with the process and go on.
    """
    try:
        sock = _dial(front)
    except OSError as exc:
        _log.error("front_not_reached", front=front, reason=exc.strerror)
        return 1
    channel = BlockingChannel(sock)
    inbox: Inbox = queue.SimpleQueue()
    cache: SharedCache | None = None
    try:
        channel.send(WorkerHello(os.getpid(), config.role))
        threading.Thread(
            target=_read_inbox, args=(channel, inbox), name="inbox", daemon=True
        ).start()
        try:
            worker, cache, ready = _build(config, channel, inbox, phases)
        except (ModelError, CachewarmError, OSError) as exc:
            channel.send(WorkerFailed(str(exc)))
            return 1
        channel.send(ready)
        worker.run()
    except BrokenChannelError:
        _log.info("front_is_gone")
    finally:
        if cache is not None:
            cache.close()
    return 0
