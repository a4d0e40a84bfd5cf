"""Requests checked against what is served."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from engine import errors
from engine.request import SamplingParams
from engine.tokenizer import Tokenizer
from engine.v1 import engine_pb2 as pb
from engine.validate import Limits, make_submit
from tests.fixtures.models import write_tokenizer

LIMITS = Limits(
    model_name="m", vocab_size=512, max_context=100, eos_token_ids=(1,), max_positions=100
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer(folder)


def request(num_prompt: int = 5, **fields: object) -> pb.GenerateRequest:
    """`sampling_top_k=1` sets sampling.top_k."""
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(3, 3 + num_prompt)))
    for name, value in fields.items():
        group, _, field = name.partition("_")
        if group in ("sampling", "stopping", "cache"):
            setattr(getattr(made, group), field, value)
        else:
            setattr(made, name, value)
    return made


def test_defaults_mean_greedy_to_the_end_of_the_context(tokenizer: Tokenizer) -> None:
    """What is unset gets the documented default; id and seed are drawn."""
    submit = make_submit(request(), tokenizer, LIMITS)
    assert submit.sampling == SamplingParams(0.0, 1.0, 0, 0.0)
    assert submit.max_tokens == 95
    assert (submit.stop_token_ids, submit.bypass_cache) == ([1], False)
    assert submit.urgency == pb.URGENCY_NORMAL
    assert (submit.attempt, submit.output_ids, submit.prompt_ids) == (0, [], [3, 4, 5, 6, 7])
    other = make_submit(request(), tokenizer, LIMITS)
    assert submit.request_id != other.request_id
    assert submit.resolved_seed != other.resolved_seed


def test_zero_is_not_unset(tokenizer: Tokenizer) -> None:
    """max_tokens 0 prefills only and seed 0 is a seed."""
    submit = make_submit(request(stopping_max_tokens=0, sampling_seed=0), tokenizer, LIMITS)
    assert (submit.max_tokens, submit.resolved_seed) == (0, 0)


def test_what_is_asked_for_is_taken_over(tokenizer: Tokenizer) -> None:
    """Text is tokenised, flags are carried."""
    asked = pb.GenerateRequest(text="the cache", request_id="mine", model="m")
    asked.sampling.seed = (1 << 64) - 1
    asked.stopping.ignore_eos = True
    asked.cache.bypass_prefix_cache = True
    asked.urgency = pb.URGENCY_BACKGROUND
    submit = make_submit(asked, tokenizer, LIMITS)
    assert submit.prompt_ids == tokenizer.encode("the cache")
    assert (submit.request_id, submit.resolved_seed) == ("mine", (1 << 64) - 1)
    assert (submit.stop_token_ids, submit.bypass_cache) == ([], True)
    assert submit.urgency == pb.URGENCY_BACKGROUND


BOUNDS = [
    ("sampling_temperature", [0.0, 100.0], [-0.001, 100.5, math.nan, math.inf, -math.inf]),
    ("sampling_top_p", [1e-6, 1.0], [0.0, -0.5, 1.001, math.nan]),
    ("sampling_min_p", [0.0, 1.0], [-0.001, 1.001, math.nan]),
    ("sampling_top_k", [0, (1 << 31) - 1], [-1, -(1 << 31)]),
    ("stopping_max_tokens", [0, 95], [-1]),
    ("request_id", ["x" * 128], ["x" * 129]),
    ("urgency", [0, 1, 2, 3], [4, -1]),
]


@pytest.mark.parametrize(("name", "good"), [(n, g) for n, goods, _ in BOUNDS for g in goods])
def test_a_value_on_the_bound_is_allowed(tokenizer: Tokenizer, name: str, good: object) -> None:
    """Both ends of each range belong to it."""
    make_submit(request(**{name: good}), tokenizer, LIMITS)


@pytest.mark.parametrize(("name", "bad"), [(n, b) for n, _, bads in BOUNDS for b in bads])
def test_a_value_beyond_the_bound_is_refused_by_name(
    tokenizer: Tokenizer, name: str, bad: object
) -> None:
    """The error names the field, the value (or its length) and what is allowed."""
    with pytest.raises(errors.InvalidParameterError) as caught:
        make_submit(request(**{name: bad}), tokenizer, LIMITS)
    ((field, text),) = caught.value.violations
    group, _, rest = name.partition("_")
    assert field == (f"{group}.{rest}" if group in ("sampling", "stopping") else name)
    assert "is not allowed: " in text
    shown = f"{len(bad)} characters" if isinstance(bad, str) else str(bad)[:5]
    assert shown in text
    assert (caught.value.status, caught.value.reason) == ("INVALID_ARGUMENT", "INVALID_PARAMETER")


def test_all_bad_fields_are_named_at_once(tokenizer: Tokenizer) -> None:
    """Nobody has to ask again for the next mistake."""
    bad = request(sampling_top_k=-1, sampling_top_p=2.0, stopping_max_tokens=-1)
    with pytest.raises(errors.InvalidParameterError) as caught:
        make_submit(bad, tokenizer, LIMITS)
    fields = [field for field, _ in caught.value.violations]
    assert fields == ["sampling.top_p", "sampling.top_k", "stopping.max_tokens"]
    assert all(field in str(caught.value) for field in fields)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"token_ids": pb.TokenIds()}, "prompt"),
        ({"token_ids": pb.TokenIds(ids=[3, 512])}, "token_ids"),
        ({"token_ids": pb.TokenIds(ids=[(1 << 32) - 1])}, "token_ids"),
    ],
)
def test_a_prompt_must_have_tokens_of_the_vocabulary(
    tokenizer: Tokenizer, prompt: dict[str, object], field: str
) -> None:
    """Unset, empty, or with an id the model does not have: refused."""
    with pytest.raises(errors.InvalidParameterError) as caught:
        make_submit(pb.GenerateRequest(**prompt), tokenizer, LIMITS)
    assert caught.value.violations[0][0] == field


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "fits"),
    [
        (99, 1, True),
        (100, 0, True),
        (100, 1, False),
        (101, 0, False),
        (99, 2, False),
        (99, None, True),
        (100, None, False),
    ],
)
def test_prompt_and_output_must_fit_the_context(
    tokenizer: Tokenizer, num_prompt: int, max_tokens: int | None, fits: bool
) -> None:
    """The sum counts; both lengths and the limit are named."""
    asked = request(num_prompt)
    if max_tokens is not None:
        asked.stopping.max_tokens = max_tokens
    if fits:
        assert len(make_submit(asked, tokenizer, LIMITS).prompt_ids) == num_prompt
        return
    with pytest.raises(errors.ContextTooLongError) as caught:
        make_submit(asked, tokenizer, LIMITS)
    assert str(num_prompt) in str(caught.value)
    assert "100" in str(caught.value)
    assert (caught.value.status, caught.value.reason) == ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG")


@pytest.mark.parametrize(("max_tokens", "fits"), [(0, True), (1, True), (31, True), (32, False)])
def test_what_can_never_fit_the_private_pool_is_refused(
    tokenizer: Tokenizer, max_tokens: int, fits: bool
) -> None:
    """The KV of the last output token is never needed, so it takes no room."""
    limits = Limits("m", 512, 100, (1,), max_positions=40)
    asked = request(10, stopping_max_tokens=max_tokens)
    if fits:
        make_submit(asked, tokenizer, limits)
        return
    with pytest.raises(errors.RequestTooLargeError, match=r"41 positions .* 40") as caught:
        make_submit(asked, tokenizer, limits)
    assert caught.value.status == "RESOURCE_EXHAUSTED"


def test_another_model_is_not_found(tokenizer: Tokenizer) -> None:
    """Both names are told; an overlong one is cut."""
    with pytest.raises(errors.ModelNotFoundError, match="'n' is not served here: 'm' is"):
        make_submit(request(model="n"), tokenizer, LIMITS)
    with pytest.raises(errors.ModelNotFoundError) as caught:
        make_submit(request(model="n" * 100_000), tokenizer, LIMITS)
    assert len(str(caught.value)) < 300
