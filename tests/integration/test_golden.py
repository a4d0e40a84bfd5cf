"""The reference executor against transformers in float32, on the demo model and fixed prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from cachewarmd.client import load_private
from engine.models import packing
from engine.models.config import load_config
from engine.models.decoder import Decoder
from engine.tokenizer import Tokenizer

GOLDEN = Path(__file__).resolve().parents[1] / "fixtures" / "golden"
MAX_RELATIVE_ERROR = 1e-3
MAX_EXCLUDED = 0.1


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """What make_golden.py wrote."""
    data: dict[str, Any] = json.loads((GOLDEN / "golden.json").read_text())
    return data


@pytest.fixture(scope="module")
def ours(golden: dict[str, Any], demo_model_dir: Path) -> list[npt.NDArray[np.float32]]:
    """Our logits for each prompt, from its last token on, given transformers' answer as prefix."""
    config = load_config(demo_model_dir)
    plan = packing.reference_plan(config)
    views = packing.views(plan, load_private(demo_model_dir, "", plan).memory)
    # A copy: this is about numbers, and torch warns of read-only memory.
    decoder = Decoder(config, {name: torch.tensor(view) for name, view in views.items()})
    results = []
    with torch.inference_mode():
        for entry in golden["prompts"]:
            prompt, ids = entry["prompt_ids"], entry["ids"][: entry["compare"] - 1]
            hidden = decoder.forward(torch.tensor([*prompt, *ids]), 0, lambda _, k, v: (k, v))
            results.append(decoder.logits(hidden[len(prompt) - 1 :]).numpy())
    return results


def test_prompts_become_the_token_ids_transformers_was_given(
    golden: dict[str, Any], demo_model_dir: Path
) -> None:
    """Our tokenizer gives the prompt ids that the golden run used, for every prompt."""
    tokenizer = Tokenizer(demo_model_dir)
    prompts = json.loads((GOLDEN / "prompts.json").read_text())
    assert len(prompts) == len(golden["prompts"]) == 50
    for prompt, entry in zip(prompts, golden["prompts"], strict=True):
        assert tokenizer.encode(prompt["text"]) == entry["prompt_ids"], entry["name"]


def test_near_ties_exclude_few_prompts(golden: dict[str, Any]) -> None:
    """At most a tenth of the prompts is cut short by a near tie, and each is listed."""
    excluded = [entry for entry in golden["prompts"] if entry["near_ties"]]
    assert len(excluded) <= MAX_EXCLUDED * len(golden["prompts"])
    for entry in golden["prompts"]:
        ties = [step for step, margin in enumerate(entry["margins"]) if margin < 1e-2]
        assert entry["near_ties"] == ties
        assert entry["compare"] == (ties[0] if ties else len(entry["ids"]))


def test_greedy_tokens_equal_transformers(
    golden: dict[str, Any], ours: list[npt.NDArray[np.float32]]
) -> None:
    """Given the same prefix, our argmax is transformers' token at each of 64 steps × 50 prompts.

    By induction that is greedy decoding; one pass over prompt and answer shows all steps at once.
    """
    compared = 0
    for entry, logits in zip(golden["prompts"], ours, strict=True):
        count = entry["compare"]
        assert logits.argmax(-1).tolist() == entry["ids"][:count], entry["name"]
        compared += count
    assert compared >= 0.9 * 50 * 64


def test_logits_equal_transformers(
    golden: dict[str, Any], ours: list[npt.NDArray[np.float32]], record_property: Any
) -> None:
    """At each prompt's end the largest error is at most 1e-3 of the largest logit."""
    worst = 0.0
    for entry, logits in zip(golden["prompts"], ours, strict=True):
        error = np.abs(logits[0][golden["sample"]] - np.array(entry["logits"])).max()
        assert error <= MAX_RELATIVE_ERROR * entry["max_logit"], f"{entry['name']}: {error}"
        worst = max(worst, error / entry["max_logit"])
    record_property("worst_relative_error", float(worst))
