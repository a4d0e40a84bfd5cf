"""Greedy requests of chosen lengths, with the answers they have when they are computed alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests import jobs
from tests.engine import Engine, Generation, Stream, make_prompt
from tests.jobs import Job


def solo_job(engine: Engine, model_dir: Path, prompt: Sequence[int], num_output: int) -> Job:
    """The answer of an engine that is idle and reads no cache."""
    return jobs.solo_job(engine, model_dir, prompt, {"max_tokens": num_output})


def solo_jobs(
    engine: Engine, model_dir: Path, lengths: Sequence[int], num_output: int, salt: int
) -> list[Job]:
    """One for each prompt length; `salt` sets them apart from other prompts of the module."""
    return [
        solo_job(engine, model_dir, make_prompt(length, salt + number), num_output)
        for number, length in enumerate(lengths)
    ]


def begin(engine: Engine, jobs: Sequence[Job], **options: object) -> list[Stream]:
    """All of them, as fast as they can be sent."""
    return [engine.stream(job.prompt, **{**job.options, **options}) for job in jobs]


def begin_together(engine: Engine, jobs: Sequence[Job], **options: object) -> list[Stream]:
    """All of them are there before the first one's prompt is computed, or soon after it."""
    with engine.slowed(0.5):
        streams = begin(engine, jobs, **options)
        for stream in streams:
            stream.wait_accepted()
    return streams


def check_all(jobs: Sequence[Job], streams: Sequence[Stream]) -> list[Generation]:
    """Wait for all, and check every answer."""
    answers = [stream.result() for stream in streams]
    for job, answer in zip(jobs, answers, strict=True):
        job.check(answer)
    return answers
