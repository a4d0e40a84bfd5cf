"""Showing a job that is being waited for: bars on a terminal, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from cachewarmd.ctl.outcome import console, shown
from cachewarmd.ctl.views import human_bytes, human_seconds, job_data, weights_text
from cachewarmd.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rich.progress import TaskID

_LINE_EVERY_S = 5.0
_MAX_LISTED = 50  # items that are not done, for people; JSON has all
_OPEN = ("running", "pending")
_NOT_DONE = (pb.ITEM_STATE_FAILED, pb.ITEM_STATE_TIMED_OUT, pb.ITEM_STATE_SKIPPED)
NO_ENGINE = "waiting for an engine that serves this model"


@dataclass
class JobView:
    """A job as told so far: the daemon sends all items once, then only those that changed."""

    job: pb.JobProgress = field(default_factory=pb.JobProgress)
    items: dict[int, pb.JobItem] = field(default_factory=dict)
    weights_s: float | None = None
    num_told: int = 0  # messages

    def take(self, progress: pb.JobProgress, seconds: float) -> None:
        """Merge what was told after so many seconds."""
        was_loading = self.job.job_id and not self.job.weights_done
        if was_loading and progress.weights_done and not progress.weights_already_warm:
            self.weights_s = seconds
        self.num_told += 1
        self.job = progress
        self.items.update((item.index, item) for item in progress.items)

    def counts(self) -> dict[str, int]:
        """Items by state; `already_warm` ones are not in `done`."""
        found: Counter[str] = Counter()
        for item in self.items.values():
            is_warm = item.already_warm and item.state == pb.ITEM_STATE_DONE
            found["already_warm" if is_warm else _state(item)] += 1
        names = ("done", "already_warm", "failed", "timed_out", "skipped", *_OPEN, "cancelled")
        return {"total": len(self.items), **{name: found[name] for name in names}}

    @property
    def num_ended(self) -> int:
        counts = self.counts()
        return counts["total"] - counts["pending"] - counts["running"]

    @property
    def num_tokens(self) -> int:
        return sum(item.done_tokens for item in self.items.values())

    @property
    def lacks_engine(self) -> bool:
        return any(
            item.state == pb.ITEM_STATE_PENDING and item.detail == "no_engine"
            for item in self.items.values()
        )

    def _not_done(self) -> list[pb.JobItem]:
        return [item for _, item in sorted(self.items.items()) if item.state in _NOT_DONE]

    def _shapes(self) -> list[pb.JobItem]:
        return [item for _, item in sorted(self.items.items()) if item.first_us]

    def data(self, seconds: float) -> dict[str, Any]:
        """For JSON: the job, its prompts by state, and how long was waited."""
        failures = [
            {
                "index": item.index,
                "name": item.name,
                "state": _state(item),
                "error": item.detail,
            }
            for item in self._not_done()
        ]
        shapes = [
            {
                "index": item.index,
                "name": item.name,
                "first_us": item.first_us,
                "last_us": item.last_us,
            }
            for item in self._shapes()
        ]
        prompts = {
            **self.counts(),
            "num_tokens": self.num_tokens,
            "failures": failures,
            "shapes": shapes,
        }
        data = {**job_data(self.job), "prompts": prompts, "seconds": round(seconds, 3)}
        if self.weights_s is not None:
            data["weights"]["seconds"] = round(self.weights_s, 3)
        return data

    def summary(self, seconds: float) -> str:
        """For people."""
        lines = [
            f"job {self.job.job_id} {self.job.state} after {human_seconds(seconds)}",
            f"weights: {weights_text(self.job)}",
        ]
        if self.weights_s is not None:
            lines[-1] += f" in {human_seconds(self.weights_s)}"
        counts = self.counts()
        if counts.pop("total"):
            told = ", ".join(
                f"{count} {state.replace('_', ' ')}" for state, count in counts.items()
            )
            lines.append(f"prompts: {told}")
        lines += [
            f"  {_state(item).replace('_', ' ')}: {_name(item)}: {item.detail}"
            for item in self._not_done()[:_MAX_LISTED]
        ]
        lines += [
            f"  {_name(item)}: first {human_seconds(item.first_us / 1e6)}, "
            f"last {human_seconds(item.last_us / 1e6)}"
            for item in self._shapes()
        ]
        return "\n".join(map(shown, lines))


def _state(item: pb.JobItem) -> str:
    return pb.ItemState.Name(item.state).removeprefix("ITEM_STATE_").lower()


def _name(item: pb.JobItem) -> str:
    return item.name or f"item {item.index}"


class Display(Protocol):
    """Draws a JobView on stderr; used as a context manager."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, view: JobView) -> None:
        """Called after each change, and a few times a second."""


def display() -> Display:
    """Bars on a terminal, lines elsewhere."""
    return _Bars() if sys.stderr.isatty() else Lines(lambda line: print(line, file=sys.stderr))


class Lines:
    """A line when the kind of work changes, and every few seconds."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._clock = clock
        self._kind = ""
        self._next = 0.0
        self._began, self._began_at, self._tokens = 0, 0.0, 0

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, view: JobView) -> None:
        kind, done, total, text = _now(view)
        now = self._clock()
        if kind != self._kind:
            self._kind, self._began, self._began_at = kind, done, now
            self._tokens = view.num_tokens
        elif now < self._next:
            return
        self._next = now + _LINE_EVERY_S
        if not text:
            return
        speed = (done - self._began) / max(now - self._began_at, 1e-9)
        if speed > 0:
            if view.job.weights_done:
                tokens = (view.num_tokens - self._tokens) / max(now - self._began_at, 1e-9)
                text += f", {tokens:.0f} tokens/s"
            else:
                text += f", {human_bytes(speed)}/s"
            text += f", {human_seconds((total - done) / speed)} left"
        self._write(shown(text))


def _now(view: JobView) -> tuple[str, int, int, str]:
    """What is being worked on: (kind, done, total, line); an empty line for nothing to tell."""
    weights = view.job.weights
    if not view.job.weights_done:
        text = f"weights: {weights_text(view.job)}" if weights.phase else ""
        return weights.phase, weights.done_bytes, weights.total_bytes, text
    total, done = len(view.items), view.num_ended
    if done == total:
        return "ended", done, total, ""
    if view.lacks_engine:
        return "no_engine", done, total, f"prompts: {done} of {total}, {NO_ENGINE}"
    return "prompts", done, total, f"prompts: {done} of {total}, {view.num_tokens} tokens"


class _Bars:
    """A bar for each phase of the weights, one for the prompts."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeRemainingColumn(),
            console=console(stderr=True),
        )
        self._bars: dict[str, TaskID] = {}

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, view: JobView) -> None:
        kind, done, total, _ = _now(view)
        if not total:
            return
        is_weights = not view.job.weights_done
        name = f"weights: {kind}" if is_weights else "prompts"
        if name not in self._bars:
            for task in self._progress.tasks:  # the phase before is over
                self._progress.update(task.id, completed=task.total)
            self._bars[name] = self._progress.add_task(shown(name), detail="")
        if is_weights:
            detail = f"{human_bytes(done)} of {human_bytes(total)}"
            detail += f", {human_bytes(self._progress.tasks[-1].speed or 0)}/s"
        else:
            detail = f"{done} of {total}, {view.num_tokens} tokens"
            detail += f", {NO_ENGINE}" if kind == "no_engine" else ""
        self._progress.update(self._bars[name], completed=done, total=total, detail=detail)


@contextlib.contextmanager
def work(name: str) -> Iterator[Callable[[pb.Envelope], None]]:
    """Shows work that tells bytes done and in all; yields what takes each of its messages."""
    if sys.stderr.isatty():
        from rich.progress import Progress

        with Progress(console=console(stderr=True)) as bars:
            bar = bars.add_task(name, total=None)

            def draw(told: pb.Envelope) -> None:
                done, total = told.work_progress.done_bytes, told.work_progress.total_bytes
                bars.update(bar, completed=done, total=total)

            yield draw
        return
    next_line = 0.0

    def write(told: pb.Envelope) -> None:
        nonlocal next_line
        if time.monotonic() < next_line:
            return
        next_line = time.monotonic() + _LINE_EVERY_S
        done, total = told.work_progress.done_bytes, told.work_progress.total_bytes
        print(f"{name}: {human_bytes(done)} of {human_bytes(total)}", file=sys.stderr)

    yield write
