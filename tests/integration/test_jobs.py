"""Warm-up jobs of the real daemon: whose turn it is, what is given up, what a restart keeps."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachewarmd import prompt_list
from cachewarmd.errors import InvalidRequestError, UnreachableError
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, wait_until
from tests.integration.test_weight_service import plan_of, write_model

Item = tuple[int, int]


class Engine:
    """A provider that keeps what it is given, and says of it what the test wants."""

    def __init__(self, daemon: Daemon, digest: bytes, *, answers: bool = False) -> None:
        self.items: list[pb.WarmItem] = []
        self.cancelled: list[Item] = []
        self._answers = answers
        self._client = daemon.client(pb.ROLE_ENGINE, on_event=self._on_event)
        provide = pb.Provide(weights_sha256=digest)
        self._client.call(pb.Envelope(provide=provide), PATIENCE_S)

    def _on_event(self, event: pb.Envelope) -> None:
        match event.WhichOneof("body"):
            case "warm_item":
                self.items.append(event.warm_item)
                if self._answers:
                    self.tell(event.warm_item, pb.ITEM_STATE_DONE)
            case "warm_item_cancel":
                told = event.warm_item_cancel
                self.cancelled.append((told.job_id, told.index))

    def tell(self, item: pb.WarmItem, state: pb.ItemState, **more: Any) -> None:
        update = pb.WarmItemUpdate(job_id=item.job_id, index=item.index, state=state, **more)
        with contextlib.suppress(UnreachableError):
            self._client.notify(pb.Envelope(warm_item_update=update))

    def done(self, number: int) -> None:
        """The item it got as that one, counted from 0, once it has it."""
        self.tell(self.got(number + 1)[number], pb.ITEM_STATE_DONE, num_tokens=3, done_tokens=3)

    def got(self, count: int) -> list[pb.WarmItem]:
        wait_until(lambda: len(self.items) >= count, f"{count} items are given")
        return self.items

    @property
    def texts(self) -> list[str]:
        return [item.prompt.text for item in self.items]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def start(daemon: Daemon, folder: Path, *prompts: pb.WarmPrompt, **more: Any) -> int:
    request = pb.Warmup(model_name="m", plan=plan_of(2), prompts=prompts, **more)
    return send(daemon, folder, request).job_id


def send(daemon: Daemon, folder: Path, request: pb.Warmup, *fds: int) -> pb.WarmupReply:
    dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with daemon.client(pb.ROLE_ADMIN) as client:
            envelope = pb.Envelope(warmup=request)
            return client.call(envelope, PATIENCE_S, [dir_fd, *fds])[0].warmup_reply
    finally:
        os.close(dir_fd)


def texts(*names: str, **more: Any) -> list[pb.WarmPrompt]:
    return [pb.WarmPrompt(text=name, name=name, **more) for name in names]


def look(daemon: Daemon, job_id: int) -> pb.JobProgress:
    """The job as it is now, with all items."""
    first: list[pb.JobProgress] = []
    there = threading.Event()

    def on_more(envelope: pb.Envelope) -> None:
        first.append(envelope.job_progress)
        there.set()

    with daemon.client(pb.ROLE_OBSERVER) as client:
        future = client.submit(pb.Envelope(watch_job=pb.WatchJob(job_id=job_id)), on_more=on_more)
        future.add_done_callback(lambda _: there.set())
        assert there.wait(PATIENCE_S)
        return first[0] if first else future.result()[0].job_progress


def ended(daemon: Daemon, job_id: int) -> pb.JobProgress:
    def has_ended() -> bool:
        with contextlib.suppress(UnreachableError):
            return look(daemon, job_id).state in ("done", "failed", "cancelled")
        return False

    wait_until(has_ended, f"job {job_id} has ended")
    return look(daemon, job_id)


def states(job: pb.JobProgress) -> list[str]:
    names = (pb.ItemState.Name(item.state) for item in job.items)
    return [name.removeprefix("ITEM_STATE_").lower() for name in names]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", 1, 2.0)


@pytest.fixture
def digest(daemon: Daemon, model: Path) -> bytes:
    return load(daemon, model)


def load(daemon: Daemon, model: Path) -> bytes:
    """Loads the weights; returns their digest."""
    ended(daemon, start(daemon, model))
    (loaded,) = daemon.status().models
    return bytes.fromhex(loaded.weights_sha256)


def test_an_item_without_an_update_is_timed_out_and_the_job_goes_on(
    daemon: Daemon, model: Path, digest: bytes
) -> None:
    """The engine is told to let go of it; what it says of it later is too late."""
    with Engine(daemon, digest) as engine:
        job = start(daemon, model, *texts("a", "b"), stall_timeout_ms=500)
        engine.got(2)
        assert engine.cancelled == [(job, 0)]
        engine.tell(engine.items[0], pb.ITEM_STATE_DONE)
        engine.done(1)
        told = ended(daemon, job)
    assert (told.state, states(told)) == ("failed", ["timed_out", "done"])
    assert told.items[0].detail == "no progress for 0.5 s"
    assert "warmup_item_stalled" in daemon.log()


def test_running_without_getting_further_is_a_stall_and_waiting_is_not(
    daemon: Daemon, model: Path, digest: bytes
) -> None:
    """Updates alone are no progress, but time in the engine's queue does not count."""
    done = threading.Event()

    def chat(engine: Engine) -> None:
        while not done.wait(0.1):
            for item, state in zip(
                engine.items, (pb.ITEM_STATE_RUNNING, pb.ITEM_STATE_PENDING), strict=False
            ):
                engine.tell(item, state, done_tokens=1)

    with Engine(daemon, digest) as engine:
        thread = threading.Thread(target=chat, args=(engine,))
        thread.start()
        try:
            args = {"stall_timeout_ms": 1500, "max_parallel": 2}
            job = start(daemon, model, *texts("runs", "waits", "next"), **args)
            engine.got(3)  # the first has made room
            assert engine.cancelled == [(job, 0)]
            assert states(look(daemon, job))[:2] == ["timed_out", "pending"]
            engine.done(1)
            engine.done(2)
            assert states(ended(daemon, job)) == ["timed_out", "done", "done"]
        finally:
            done.set()
            thread.join()


def test_the_most_urgent_item_goes_first_and_no_more_than_asked_for(
    daemon: Daemon, model: Path, digest: bytes
) -> None:
    """Order of the plan among equals."""
    prompts = [*texts("late", "later"), *texts("normal", urgency=2), *texts("now", urgency=1)]
    job = start(daemon, model, *prompts, max_parallel=2)
    wait_until(lambda: look(daemon, job).weights_done, "the weights are there")
    with Engine(daemon, digest) as engine:
        engine.got(2)
        assert engine.texts == ["now", "normal"]
        for number in range(4):
            engine.done(number)
        assert ended(daemon, job).state == "done"
        assert engine.texts == ["now", "normal", "late", "later"]


def test_jobs_take_turns(daemon: Daemon, model: Path, digest: bytes) -> None:
    """A long one does not keep a short one waiting."""
    long = start(daemon, model, *texts("a0", "a1", "a2"))
    short = start(daemon, model, *texts("b0", "b1"))
    wait_until(lambda: look(daemon, short).weights_done, "the weights are there")
    wait_until(lambda: look(daemon, long).weights_done, "the weights are there")
    with Engine(daemon, digest, answers=True) as engine:
        ended(daemon, long)
        ended(daemon, short)
        assert engine.texts == ["a0", "b0", "a1", "b1", "a2"]


def test_late_and_too_long_items_are_skipped_and_fail_nothing(
    daemon: Daemon, model: Path, digest: bytes
) -> None:
    """Each with its reason; also while no engine is there."""
    late = texts("late", deadline_ms=1)
    job = start(daemon, model, *late, *texts("long"))
    wait_until(lambda: states(look(daemon, job))[0] == "skipped", "it is skipped")
    with Engine(daemon, digest) as engine:
        engine.got(1)
        engine.tell(engine.items[0], pb.ITEM_STATE_SKIPPED, error="9 tokens, 8 are allowed")
        told = ended(daemon, job)
    assert (told.state, states(told)) == ("done", ["skipped", "skipped"])
    assert "deadline" in told.items[0].detail
    assert told.items[1].detail == "9 tokens, 8 are allowed"


def test_a_cancel_reaches_the_engine(daemon: Daemon, model: Path, digest: bytes) -> None:
    """What it computes is called off at once, and it is free for another job."""
    with Engine(daemon, digest) as engine:
        job = start(daemon, model, *texts("a", "b"))
        engine.got(1)
        with daemon.client(pb.ROLE_ADMIN) as client:
            client.call(pb.Envelope(cancel_job=pb.CancelJob(job_id=job)), PATIENCE_S)
        wait_until(lambda: engine.cancelled == [(job, 0)], "the engine is told")
        assert states(ended(daemon, job)) == ["cancelled", "cancelled"]
        other = start(daemon, model, *texts("c"))
        engine.done(1)
        assert ended(daemon, other).state == "done"


def test_a_failed_item_that_is_optional_fails_no_job(
    daemon: Daemon, model: Path, digest: bytes
) -> None:
    """It is told all the same."""
    with Engine(daemon, digest) as engine:
        job = start(daemon, model, *texts("a", is_optional=True))
        engine.tell(engine.got(1)[0], pb.ITEM_STATE_FAILED, error="no")
        told = ended(daemon, job)
    assert (told.state, states(told), told.items[0].name) == ("done", ["failed"], "a")


def test_a_key_stands_for_one_job(daemon: Daemon, model: Path) -> None:
    """Asked again, the job that is known is the answer."""
    request = pb.Warmup(model_name="m", plan=plan_of(2), key="k", prompts=texts("a"))
    first, again = (send(daemon, model, request) for _ in range(2))
    assert (first.is_known, again.is_known) == (False, True)
    assert first.job_id == again.job_id
    request.key = "other"
    assert send(daemon, model, request).job_id != first.job_id


def test_other_weights_than_asked_for_are_refused(daemon: Daemon, tmp_path: Path) -> None:
    """At once when they are loaded, else once they are: as a failed job."""
    model = write_model(tmp_path / "m", 1, 2.0)
    told = ended(daemon, start(daemon, model, version="v1", if_version="v2"))
    assert told.state == "failed"
    assert "if_version: 'v2': the weights are version 'v1'" in told.error
    with pytest.raises(InvalidRequestError, match="if_version: 'v2'"):
        start(daemon, model, if_version="v2")
    (loaded,) = daemon.status().models
    for right in ("v1", loaded.weights_sha256[:8]):
        assert ended(daemon, start(daemon, model, if_version=right)).state == "done"


def test_a_plan_beside_the_frame_must_be_sealed_and_whole(
    daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    """Bytes that could still change, or are cut, are refused with a reason."""
    request = pb.Warmup(model_name="m", plan=plan_of(2))
    (tmp_path / "f").write_bytes(b"")
    with open(tmp_path / "f", "rb") as file, pytest.raises(InvalidRequestError, match="sealed"):
        send(daemon, model, request, file.fileno())
    fd = os.memfd_create("cut", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, b"\x09\0\0\0abc")
        prompt_list.segment.seal_forever(fd)
        job = send(daemon, model, request, fd).job_id
        assert "item 1 ends before its end" in ended(daemon, job).error
    finally:
        os.close(fd)


@pytest.fixture
def held(short_dir: Path) -> Iterator[Daemon]:
    """A daemon under a holder."""
    with Daemon(short_dir / "s", "64MiB", ["--holder"]) as daemon:
        yield daemon


def test_a_killed_daemon_goes_on_with_its_jobs(held: Daemon, model: Path) -> None:
    """Finished items stay done, the one in flight is computed again, the rest follows."""
    digest = load(held, model)
    with Engine(held, digest) as engine:
        request = pb.Warmup(model_name="m", plan=plan_of(2), key="k", max_parallel=1)
        request.prompts.extend(texts("a", "b", "c", "d"))
        job = send(held, model, request).job_id
        engine.done(0)
        engine.done(1)
        engine.got(3)
        first = list(engine.texts)
        held.kill_under_holder()
        told = look(held, job)
        assert states(told)[:2] == ["done", "done"] or not told.items
    assert send(held, model, request).job_id == job
    with Engine(held, digest) as engine:  # the one before died with its connection
        for number in range(2):
            engine.done(number)
        told = ended(held, job)
        assert first + engine.texts == ["a", "b", "c", "c", "d"]
    assert (told.state, states(told)) == ("done", ["done"] * 4)
    assert told.items[0].num_tokens == 3
    assert told.items[0].name == "a"
    held.kill_under_holder()
    assert states(look(held, job)) == ["done"] * 4
    assert start(held, model) > job


def test_an_engine_that_dies_gives_its_items_to_the_next(
    daemon: Daemon, model: Path, digest: bytes
) -> None:
    """Each is done once."""
    with Engine(daemon, digest) as engine:
        job = start(daemon, model, *texts("a", "b", "c"), max_parallel=2)
        engine.done(0)
        engine.got(3)
        before = engine.texts
    with Engine(daemon, digest, answers=True) as engine:
        assert states(ended(daemon, job)) == ["done"] * 3
        assert before + engine.texts == ["a", "b", "c", "b", "c"]


def test_old_records_make_room(short_dir: Path, model: Path) -> None:
    """The fd store's places are few: the oldest ended job's goes first."""
    prelude = "import cachewarmd.job_records as j; j.MAX_KEPT = 2"
    with Daemon(short_dir / "s", "64MiB", ["--holder"], prelude=prelude) as daemon:
        numbers = [start(daemon, model) for _ in range(4)]
        assert {ended(daemon, number).state for number in numbers} == {"done"}
        last = start(daemon, model)
        ended(daemon, last)
        daemon.kill_under_holder()
        with daemon.client(pb.ROLE_OBSERVER) as client:
            told = client.call(pb.Envelope(jobs=pb.Jobs()), PATIENCE_S)[0].jobs_reply.jobs
        assert len(told) == 2
        assert told[-1].job_id == last
