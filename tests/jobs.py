"""Requests and the answers they have when they are computed alone and cold.

The native kernels give the same bits however a request is cut up, so that is what every other way
must give too. That it is right at all is checked roughly here (see `oracle.TOLERANCE`) and closely
where the kernels are compared with other implementations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine import Engine, Generation, make_prompt
from tests.fixtures.oracle import TOLERANCE, leads


@dataclass(frozen=True)
class Job:
    """A request and its answer when it is computed alone and cold."""

    prompt: Sequence[int]
    options: Mapping[str, Any]  # how to sample, and how much
    ids: list[int]
    text: str

    def check(self, answer: Generation) -> None:
        """Same ids, same text, and every index once."""
        assert answer.ids == self.ids
        assert answer.text == self.text
        assert answer.done.completion_tokens == len(self.ids)
        index = 0
        for piece in answer.pieces:
            assert piece.first_output_index == index
            index += piece.num_tokens
        assert index == len(self.ids)


def make_jobs(
    engine: Engine,
    model_dir: Path,
    lengths: Sequence[int],
    salt: int,
    num_tokens: Sequence[int] = (60, 70, 80, 90, 100),
) -> list[Job]:
    """A greedy and a seeded job by turns. `lengths` are those of their prompts.

    Their answers have `num_tokens` by turns. `salt` sets them apart from other tests' prompts.
    """
    jobs = []
    for number, length in enumerate(lengths):
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 2 else {}
        options = {"max_tokens": num_tokens[number % len(num_tokens)], **sampling}
        jobs.append(solo_job(engine, model_dir, make_prompt(length, salt + number), options))
    return jobs


def solo_job(
    engine: Engine, model_dir: Path, prompt: Sequence[int], options: Mapping[str, Any]
) -> Job:
    """The answer of an engine that is idle and reads no cache."""
    solo = engine.generate(prompt, bypass_prefix_cache=True, **options)
    if "temperature" not in options:
        assert leads(model_dir, prompt, solo.ids).min() > -TOLERANCE, "not the greedy answer"
    return Job(prompt, options, solo.ids, solo.text)
