"""Requests whose answers are known, and would be the same whatever rounding a run has.

A request that goes on elsewhere is computed in other chunks, and torch rounds by shape. So each
answer is checked with float64 logits: no token of it may hang on less than rounding can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from engine.request import SamplingParams
from engine.sampler import sample
from tests.engine import Engine, Generation, make_prompt
from tests.fixtures.oracle import MARGIN, leads, logits_numpy

_NOISE = 2e-4  # in logits; some twenty times what float32 loses here
_TRIALS = 4
MAX_TRIES = 20  # prompts until one has a firm answer; most have


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
    salts, jobs = count(salt), []
    for number, length in enumerate(lengths):
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": number} if number % 2 else {}
        options = {"max_tokens": num_tokens[number % len(num_tokens)], **sampling}
        prompts = (make_prompt(length, next(salts)) for _ in range(MAX_TRIES))
        tries = (_firm_job(engine, model_dir, prompt, options) for prompt in prompts)
        found = next((job for job in tries if job is not None), None)
        assert found is not None, "no answer is firm: are they right?"
        jobs.append(found)
    return jobs


def _firm_job(
    engine: Engine, model_dir: Path, prompt: Sequence[int], options: Mapping[str, Any]
) -> Job | None:
    """None = another rounding could change the answer."""
    solo = engine.generate(prompt, bypass_prefix_cache=True, **options)
    is_good = is_firm(model_dir, prompt, solo.ids, options)
    return Job(prompt, options, solo.ids, solo.text) if is_good else None


def is_firm(
    model_dir: Path, prompt: Sequence[int], ids: list[int], options: Mapping[str, Any]
) -> bool:
    """Is this the answer of any right implementation? False for one that is nearly another.

    Also False for a drawn answer that is wrong, so don't try for ever; a greedy one fails here.
    """
    if "temperature" not in options:
        firm = leads(model_dir, prompt, ids)
        assert firm.min() > -MARGIN, "not the greedy answer"
        return bool(firm.min() > MARGIN)
    params = SamplingParams(options["temperature"], options["top_p"])
    seed = options["seed"]
    rows = logits_numpy(model_dir, [*prompt, *ids[:-1]])[len(prompt) - 1 :]
    rng = np.random.default_rng(seed)
    for _ in range(_TRIALS):
        noisy = (rows + rng.uniform(-_NOISE, _NOISE, rows.shape)).astype(np.float32)
        drawn = [sample(row, params, seed, 0, index) for index, row in enumerate(noisy)]
        if drawn != ids:
            return False
    return True
