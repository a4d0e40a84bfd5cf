"""What the verbs of operators do, and which there are at all; as `engine_calls`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from cachewarmd import (
    engine_calls,
    learned,
    pin_calls,
    protocol,
    scrub,
)
from cachewarmd.engine_calls import Handler, check_names
from cachewarmd.errors import (
    InvalidRequestError,
    NotFoundError,
    NotPermittedError,
)
from cachewarmd.log import get_logger
from cachewarmd.snapshot import Outcome
from cachewarmd.state import Client, State
from cachewarmd.status import status_now
from cachewarmd.v1 import control_pb2 as pb

_log = get_logger()

_TELL_EVERY_S, _VERIFY_PAUSE_S = 0.1, 0.001


def _warmup(state: State, client: Client, envelope: pb.Envelope, fds: list[int]) -> bool:
    check_names(envelope.warmup)
    client.check_tasks()
    known = state.warmer.find_key(envelope.warmup.key)
    job = known or state.warmer.start(
        fds[0],
        envelope.warmup,
        follow_links=client.may_follow_links,
        close_fd=lambda: protocol.close_all(fds),
        plan_fd=fds[1] if len(fds) > 1 else -1,
    )

    async def tell() -> None:
        await job.is_kept.wait()  # a job that was told is there after a restart
        reply = pb.WarmupReply(job_id=job.job_id, is_known=known is not None)
        client.reply(envelope.id, warmup_reply=reply)

    client.run(envelope.id, "warmup", tell())
    return known is None


def _watch_job(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    client.check_tasks()
    job = state.warmer.get(envelope.watch_job.job_id)

    async def watch() -> None:
        async for progress in state.warmer.watch(job):
            more = progress.state not in ("done", "failed", "cancelled")
            client.connection.send(pb.Envelope(id=envelope.id, more=more, job_progress=progress))

    client.run(envelope.id, "watch_job", watch())


def _jobs(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    jobs = [job.progress(since=job.version) for job in state.warmer.jobs]
    client.reply(envelope.id, jobs_reply=pb.JobsReply(jobs=jobs))


def _cancel_job(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    state.warmer.cancel(state.warmer.get(envelope.cancel_job.job_id))
    client.reply(envelope.id, ok=pb.Ok())


def _is_warm(state: State, client: Client, envelope: pb.Envelope, fds: list[int]) -> None:
    dir_key = None
    if fds:
        info = os.fstat(fds[0])
        dir_key = (info.st_dev, info.st_ino)
    models = state.weights.find(envelope.is_warm.model, dir_key)
    stale = [m for m in models if m.files_now() not in (None, m.identities)]
    reply = pb.IsWarmReply(is_known=bool(models), is_warm=bool(models) and not stale)
    if stale:
        reply.detail = "the weight files changed since they were loaded"
    client.reply(envelope.id, is_warm_reply=reply)


def _learned(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    client.check_tasks()
    digests = state.weights_of(envelope.learned.model)
    stamps = {
        info.stamp: info
        for info in state.kv.stamps
        if digests is None or info.weights_sha256 in digests
    }
    prefixes = learned.chosen(state.traffic, envelope.learned, stamps)

    async def tell() -> None:
        for reply, more in learned.replies(prefixes, stamps):
            reply.learn = state.config.learn
            client.connection.send(pb.Envelope(id=envelope.id, more=more, learned_reply=reply))
            await asyncio.sleep(0)  # lookups are not to wait for all of it

    client.run(envelope.id, "learned", tell())


def _evict(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    digests = state.weights_of(envelope.evict.model)
    num_blocks, num_bytes, kept = state.kv.evict(
        lambda stamp: digests is None or stamp.weights_sha256 in digests
    )
    if digests is None:
        state.drop_prompts()
    reply = pb.EvictReply(num_blocks=num_blocks, num_bytes=num_bytes, num_kept=kept)
    client.reply(envelope.id, evict_reply=reply)


def _snapshot_save(state: State, client: Client, envelope: pb.Envelope, fds: list[int]) -> bool:
    name = envelope.snapshot_save.name
    client.run(envelope.id, "snapshot_save", _save(state, client, envelope.id, name, fds))
    return True


async def _save(state: State, client: Client, request_id: int, name: str, fds: list[int]) -> None:
    try:
        outcome = await state.snapshots.save(fds[0], name, _teller(client, request_id, thread=True))
    finally:
        protocol.close_all(fds)
    _tell_outcome(client, request_id, outcome)


def _snapshot_load(state: State, client: Client, envelope: pb.Envelope, fds: list[int]) -> bool:
    client.run(envelope.id, "snapshot_load", _load(state, client, envelope.id, fds))
    return True


async def _load(state: State, client: Client, request_id: int, fds: list[int]) -> None:
    try:
        outcome = await state.snapshots.load(fds[0], _teller(client, request_id))
    finally:
        protocol.close_all(fds)
    _tell_outcome(client, request_id, outcome)


def _tell_outcome(client: Client, request_id: int, outcome: Outcome) -> None:
    reply = pb.SnapshotReply(
        num_blocks=outcome.num_blocks,
        num_bytes=outcome.num_bytes,
        num_known=outcome.num_known,
        refused=+outcome.refused,
    )
    client.reply(request_id, snapshot_reply=reply)


def _verify(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    client.run(envelope.id, "verify", _verify_all(state, client, envelope.id))


async def _verify_all(state: State, client: Client, request_id: int) -> None:
    done = scrub.Pass()
    total = sum(block.stamp.block_bytes for block in state.kv.blocks)
    tell = _teller(client, request_id)

    def pause(_num_bytes: int) -> float:
        tell(done.num_bytes, total)
        return _VERIFY_PAUSE_S

    await scrub.verify(state.kv, pause, done)
    reply = pb.VerifyReply(
        num_blocks=done.num_blocks, num_bytes=done.num_bytes, num_failures=done.num_failures
    )
    client.reply(request_id, verify_reply=reply)


def _teller(client: Client, request_id: int, *, thread: bool = False) -> Callable[[int, int], None]:
    """Tells progress, now and then; with `thread` it is called by one, else on the loop."""
    loop = asyncio.get_running_loop()
    last_told = 0.0

    def tell(done: int, total: int) -> None:
        nonlocal last_told
        now = time.monotonic()
        if now - last_told < _TELL_EVERY_S:
            return
        last_told = now
        progress = pb.WorkProgress(done_bytes=done, total_bytes=total)
        envelope = pb.Envelope(id=request_id, more=True, work_progress=progress)
        if thread:
            loop.call_soon_threadsafe(client.connection.send, envelope)
        else:
            client.connection.send(envelope)

    return tell


def _kick(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    wanted = envelope.kick.client_id
    victims = [c for c in state.clients if c.client_id == wanted and not c.connection.is_closed]
    if not victims:
        raise NotFoundError(f"client {wanted} is not connected")
    victim = victims[0]
    _log.warning("client_kicked", client=victim.name, pid=victim.pid, leases=len(victim.leases))
    client.reply(envelope.id, ok=pb.Ok())
    # Before anybody else speaks, but after our own reply has left, should it be ourselves.
    victim.end_with(0, NotPermittedError("an operator ended this connection"))


def _shutdown(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    engines = [c for c in state.clients if c.role == pb.ROLE_ENGINE]
    if envelope.shutdown.only_if_unused and engines:
        raise InvalidRequestError(f"{len(engines)} engine connections are open")
    client.reply(envelope.id, ok=pb.Ok())
    # After the reply has left.
    asyncio.get_running_loop().call_later(0.05, state.stop.set)


def _status(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    if state.placement.policy == "off":
        client.reply(envelope.id, status_reply=status_now(state))
        return
    client.check_tasks()

    async def tell() -> None:
        found = (await state.surveys.fresh()).num_misplaced
        reply = status_now(state)
        if found is not None:
            reply.counters["numa_misplaced_pages"] = found
        client.reply(envelope.id, status_reply=reply)

    client.run(envelope.id, "status", tell())


def _numa(state: State, client: Client, envelope: pb.Envelope, _: list[int]) -> None:
    client.check_tasks()

    async def tell() -> None:
        client.reply(envelope.id, numa_reply=(await state.surveys.fresh()).reply)

    client.run(envelope.id, "numa", tell())


HANDLERS: dict[str, Handler] = {
    **engine_calls.HANDLERS,
    "warmup": _warmup,
    "watch_job": _watch_job,
    "jobs": _jobs,
    "cancel_job": _cancel_job,
    "is_warm": _is_warm,
    "evict": _evict,
    "learned": _learned,
    "pin": pin_calls.pin,
    "unpin": pin_calls.unpin,
    "pins": pin_calls.pins,
    "purge": pin_calls.purge,
    "snapshot_save": _snapshot_save,
    "snapshot_load": _snapshot_load,
    "verify": _verify,
    "kick": _kick,
    "shutdown": _shutdown,
    "status": _status,
    "numa": _numa,
}
