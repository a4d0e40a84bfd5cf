"""The verbs of cachewarmd-ctl: each takes the parsed command line and gives the exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cachewarmd import __version__
from cachewarmd.client import Client
from cachewarmd.ctl import progress, request, views
from cachewarmd.ctl.outcome import (
    EXIT_FAILED,
    EXIT_NOT_WARM,
    EXIT_OK,
    InterruptedByUserError,
    JobFailedError,
    Output,
    error_object,
    shown,
)
from cachewarmd.errors import (
    CachewarmError,
    NotFoundError,
    NotPermittedError,
    TimedOutError,
    UnreachableError,
)
from cachewarmd.v1 import control_pb2 as pb

CALL_TIMEOUT_S = 10.0
_VERSION_TIMEOUT_S = 2.0
_REDRAW_S = 0.25
_RECONNECT_S = 5.0  # to a daemon that is started again

Verb = Callable[[argparse.Namespace, Output], int]


def connect(args: argparse.Namespace, role: pb.Role, timeout: float = CALL_TIMEOUT_S) -> Client:
    try:
        return Client.connect(args.socket, role, "cachewarmd-ctl", timeout=timeout)
    except UnreachableError as exc:
        if isinstance(exc.__cause__, PermissionError):
            raise NotPermittedError(f"{args.socket}: {exc.__cause__.strerror}") from exc
        raise


def _ask(args: argparse.Namespace, role: pb.Role, envelope: pb.Envelope) -> pb.Envelope:
    with connect(args, role) as client:
        return client.call(envelope, CALL_TIMEOUT_S)[0]


def _status(args: argparse.Namespace) -> pb.StatusReply:
    return _ask(args, pb.ROLE_OBSERVER, pb.Envelope(status=pb.Status())).status_reply


def status(args: argparse.Namespace, output: Output) -> int:
    """What the daemon has and who uses it."""
    told = _status(args)
    output.answer(views.plain(told), views.status(told))
    return EXIT_OK


def models(args: argparse.Namespace, output: Output) -> int:
    """Weights in memory."""
    told = _status(args)
    output.answer({"models": views.plain(told.models)}, views.models(told))
    return EXIT_OK


def clients(args: argparse.Namespace, output: Output) -> int:
    """Who is connected."""
    told = _status(args)
    output.answer({"clients": views.plain(told.clients)}, views.clients(told))
    return EXIT_OK


def jobs(args: argparse.Namespace, output: Output) -> int:
    """Warm-up jobs."""
    told = _ask(args, pb.ROLE_OBSERVER, pb.Envelope(jobs=pb.Jobs())).jobs_reply.jobs
    output.answer({"jobs": [views.job_data(job) for job in told]}, views.jobs(told))
    return EXIT_OK


def cancel(args: argparse.Namespace, output: Output) -> int:
    """End a job."""
    _ask(args, pb.ROLE_ADMIN, pb.Envelope(cancel_job=pb.CancelJob(job_id=args.job)))
    output.answer(
        {"job_id": args.job}, lambda console: console.print(f"job {args.job} is cancelled")
    )
    return EXIT_OK


def evict(args: argparse.Namespace, output: Output) -> int:
    """Drop cached blocks that nobody holds."""
    envelope = pb.Envelope(evict=pb.Evict(model=args.model or ""))
    told = _ask(args, pb.ROLE_ADMIN, envelope).evict_reply
    text = (
        f"{told.num_blocks} blocks evicted ({views.human_bytes(told.num_bytes)}), "
        f"{told.num_kept} in use were kept"
    )
    output.answer(views.plain(told), lambda console: console.print(text))
    return EXIT_OK


def kick(args: argparse.Namespace, output: Output) -> int:
    """End a client's connection; it may come back."""
    _ask(args, pb.ROLE_ADMIN, pb.Envelope(kick=pb.Kick(client_id=args.client)))
    text = f"client {args.client} is disconnected; its leases end when its process does, or in 60 s"
    output.answer({"client_id": args.client}, lambda console: console.print(text))
    return EXIT_OK


@contextlib.contextmanager
def directory(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def is_warm(args: argparse.Namespace, output: Output) -> int:
    """Are a model's weights in memory, and still those of its files?"""
    envelope = pb.Envelope(is_warm=pb.IsWarm(model=args.model))
    is_directory = Path(args.model).is_dir()
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect(args, pb.ROLE_OBSERVER))
        fds = [stack.enter_context(directory(Path(args.model)))] if is_directory else []
        told = client.call(envelope, CALL_TIMEOUT_S, fds)[0].is_warm_reply
    if not told.is_known and not is_directory:
        raise NotFoundError(f"{args.model}: neither a directory nor the name of a loaded model")
    detail = told.detail or ("" if told.is_known else "not loaded")
    data = {"model": args.model, "is_warm": told.is_warm, "detail": detail}
    text = "warm" if told.is_warm else f"not warm: {shown(detail)}"
    output.answer(data, lambda console: console.print(text))
    return EXIT_OK if told.is_warm else EXIT_NOT_WARM


def verify(args: argparse.Namespace, output: Output) -> int:
    """Hash all sealed blocks now; 1 if some were not what was sealed (they are dropped)."""
    with connect(args, pb.ROLE_ADMIN) as client, progress.work("verify") as show:
        told = client.stream(pb.Envelope(verify=pb.Verify()), show, None)[0].verify_reply
    text = f"{told.num_blocks} blocks ({views.human_bytes(told.num_bytes)}) hashed, "
    text += f"{told.num_failures} were not what was sealed"
    output.answer(views.plain(told), lambda console: console.print(text))
    return EXIT_FAILED if told.num_failures else EXIT_OK


def shutdown(args: argparse.Namespace, output: Output) -> int:
    """Stop the daemon, and wait until it is gone."""
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(connect(args, pb.ROLE_ADMIN))
        pid = client.hello.pid
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            pidfd = -1  # not of our pid namespace: nothing to wait for
        else:
            stack.callback(os.close, pidfd)
        envelope = pb.Envelope(shutdown=pb.Shutdown(only_if_unused=args.only_if_unused))
        client.call(envelope, CALL_TIMEOUT_S)
        if pidfd >= 0 and not _is_readable(pidfd, CALL_TIMEOUT_S):
            raise TimedOutError(f"cachewarmd (pid {pid}) has not stopped yet")
    output.answer({"pid": pid}, lambda console: console.print(f"cachewarmd (pid {pid}) stopped"))
    return EXIT_OK


def _is_readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def version(args: argparse.Namespace, output: Output) -> int:
    """Of this program, and of the daemon if one answers."""
    daemon = None
    with (
        contextlib.suppress(CachewarmError),
        connect(args, pb.ROLE_OBSERVER, _VERSION_TIMEOUT_S) as client,
    ):
        told = client.hello
        daemon = {"version": told.version, "pid": told.pid, "epoch": told.epoch}
    text = f"cachewarmd-ctl {__version__}\n"
    text += f"cachewarmd {daemon['version']}" if daemon else "cachewarmd: not reachable"
    output.answer({"version": __version__, "daemon": daemon}, lambda console: console.print(text))
    return EXIT_OK


def warmup(args: argparse.Namespace, output: Output) -> int:
    """Load weights and compute prompts ahead of traffic."""
    envelope, plan_fds = request.build(args, request.prompts(args))
    with contextlib.ExitStack() as stack:
        for fd in plan_fds:
            stack.callback(os.close, fd)
        client = stack.enter_context(connect(args, pb.ROLE_ADMIN))
        fds = [stack.enter_context(directory(args.model)), *plan_fds]
        told = client.call(envelope, CALL_TIMEOUT_S, fds)[0].warmup_reply
    if not args.no_wait:
        return _follow(args, told.job_id, output)
    data = {"job_id": told.job_id, "is_known": told.is_known}
    output.answer(data, lambda console: console.print(told.job_id))
    return EXIT_OK


def wait(args: argparse.Namespace, output: Output) -> int:
    """Wait for a job."""
    return _follow(args, args.job, output)


def _follow(args: argparse.Namespace, job_id: int, output: Output) -> int:
    view = progress.JobView()
    began = time.monotonic()
    try:
        with progress.display() as display:
            _watch_on(args, job_id, view, display, began)
    except KeyboardInterrupt:
        raise InterruptedByUserError(
            f"detached; job {job_id} goes on (see: cachewarmd-ctl wait {job_id})"
        ) from None
    seconds = time.monotonic() - began
    data = {"job": view.data(seconds)}
    failure = None
    if view.job.state != "done":
        reason = f": {view.job.error}" if view.job.error else ""
        failure = JobFailedError(f"job {job_id} {view.job.state}{reason}")
        data["error"] = error_object(failure)
    output.answer(data, lambda console: console.print(view.summary(seconds)))
    if failure is None:
        return EXIT_OK
    output.complain(failure)
    return EXIT_FAILED


def _watch_on(
    args: argparse.Namespace,
    job_id: int,
    view: progress.JobView,
    display: progress.Display,
    began: float,
) -> None:
    """As `_watch`; a daemon that dies is waited for, as the next one goes on with the job."""
    lost: tuple[float, UnreachableError] | None = None
    while True:
        num_told = view.num_told
        try:
            with connect(args, pb.ROLE_OBSERVER) as client:
                _watch(client, job_id, args.timeout, view, display, began)
            return
        except UnreachableError as exc:
            now = time.monotonic()
            if view.num_told > num_told or lost is None:
                lost = (now, exc)
            if not view.num_told or now - lost[0] > _RECONNECT_S:
                raise lost[1] from None
        time.sleep(_REDRAW_S)


def _watch(
    client: Client,
    job_id: int,
    timeout: float | None,
    view: progress.JobView,
    display: progress.Display,
    began: float,
) -> None:
    """Show the job until it has ended. Raises TimedOutError, UnreachableError, NotFoundError."""
    events: queue.SimpleQueue[pb.Envelope | None] = queue.SimpleQueue()
    envelope = pb.Envelope(watch_job=pb.WatchJob(job_id=job_id))
    future = client.submit(envelope, on_more=events.put)
    future.add_done_callback(lambda _: events.put(None))
    while True:
        event = _next(events)
        told = future.result()[0] if event is None else event
        seconds = time.monotonic() - began
        if told.HasField("job_progress"):
            view.take(told.job_progress, seconds)
        if view.job.job_id:
            display.show(view)
        if event is None:
            return
        if timeout is not None and seconds > timeout:
            raise TimedOutError(f"job {job_id} has not ended within {timeout:g} s; it goes on")


def _next(events: queue.SimpleQueue[pb.Envelope | None]) -> pb.Envelope | None:
    """The next event, an empty one when nothing came for a moment; None at the end."""
    try:
        return events.get(timeout=_REDRAW_S)
    except queue.Empty:
        return pb.Envelope()
