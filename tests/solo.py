"""Greedy requests of chosen lengths, with the answers they have when they are computed alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from tests.engine import Engine, Generation, Stream, make_prompt
from tests.jobs import Job, is_firm


def solo_job(engine: Engine, model_dir: Path, prompt: Sequence[int], num_output: int) -> Job | None:
    """The answer of an engine that is idle and reads no cache; None if it is nearly another."""
    options = {"max_tokens": num_output}
    alone = engine.generate(prompt, bypass_prefix_cache=True, **options)
    if not is_firm(model_dir, prompt, alone.ids, {}):
        return None
    return Job(prompt, options, alone.ids, alone.text)


def solo_jobs(
    engine: Engine, model_dir: Path, lengths: Sequence[int], num_output: int, salt: int
) -> list[Job]:
    """One for each prompt length; `salt` sets them apart from other prompts of the module."""
    salts = count(salt)
    found = []
    for length in lengths:
        jobs = (solo_job(engine, model_dir, make_prompt(length, s), num_output) for s in salts)
        found.append(next(job for job in jobs if job is not None))
    return found


def begin(engine: Engine, jobs: Sequence[Job], **options: object) -> list[Stream]:
    """All of them, as fast as they can be sent."""
    return [engine.stream(job.prompt, **{**job.options, **options}) for job in jobs]


def check_all(jobs: Sequence[Job], streams: Sequence[Stream]) -> list[Generation]:
    """Wait for all, and check every answer."""
    answers = [stream.result() for stream in streams]
    for job, answer in zip(jobs, answers, strict=True):
        job.check(answer)
    return answers
