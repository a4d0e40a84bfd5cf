"""Requests checked against what is served."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from engine import errors
from engine.request import SamplingParams, Submit
from engine.v1 import engine_pb2 as pb
from engine.validate import Limits, check_options, make_submits

SHA = "ab" * 32
LIMITS = Limits(
    model_name="m",
    vocab_size=512,
    max_context=100,
    eos_token_ids=(9, 1),
    max_positions=100,
    weights_sha256=SHA,
)
Request = pb.GenerateRequest


def request(num_prompt: int = 5, **fields: Any) -> Request:
    """`sampling_top_k=1` sets sampling.top_k; a list extends a repeated field."""
    made = Request(token_ids=pb.TokenIds(ids=range(3, 3 + num_prompt)))
    for name, value in fields.items():
        group, _, field = name.partition("_")
        target: Any = made
        if group in ("sampling", "stopping", "cache"):
            target, name = getattr(made, group), field
        if isinstance(value, list):
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return made


def submits(asked: Request, limits: Limits = LIMITS) -> list[Submit]:
    """As the service does it, with the prompt's own ids."""
    sampling = check_options(asked, limits)
    return make_submits(asked, list(asked.token_ids.ids), sampling, limits)


def submit(asked: Request, limits: Limits = LIMITS) -> Submit:
    (made,) = submits(asked, limits)
    return made


def refused(asked: Request, limits: Limits = LIMITS) -> list[tuple[str, str]]:
    with pytest.raises(errors.InvalidParameterError) as caught:
        submits(asked, limits)
    return caught.value.violations


# -- what comes of it ---------------------------------------------------------------------------


def test_defaults_mean_greedy_to_the_end_of_the_context() -> None:
    """What is unset gets the documented default; id and seed are drawn."""
    made = submit(request())
    assert made.sampling == SamplingParams(0.0, 1.0, 0, 0.0)
    assert (made.max_tokens, made.min_tokens, made.stop_token_ids) == (95, 0, [1, 9])
    assert (made.bypass_cache, made.urgency, made.priority) == (False, pb.URGENCY_NORMAL, 0)
    assert (made.attempt, made.output_ids, made.prompt_ids) == (0, [], [3, 4, 5, 6, 7])
    assert (made.sample_index, made.hand_off) == (0, False)
    other = submit(request())
    assert made.request_id != other.request_id
    assert made.resolved_seed != other.resolved_seed


def test_zero_is_not_unset() -> None:
    """max_tokens 0 prefills only, seed 0 is a seed, temperature 0 is greedy."""
    made = submit(request(stopping_max_tokens=0, sampling_seed=0, sampling_temperature=0.0))
    assert (made.max_tokens, made.resolved_seed, made.sampling.temperature) == (0, 0, 0.0)


FIELDS: dict[str, tuple[dict[str, Any], Callable[[Submit], Any], Any]] = {
    "request_id": ({"request_id": "mine"}, lambda s: s.request_id, "mine"),
    "model": ({"model": "m"}, lambda s: len(s.prompt_ids), 5),
    "temperature": ({"sampling_temperature": 0.5}, lambda s: s.sampling.temperature, 0.5),
    "top_p": ({"sampling_top_p": 0.25}, lambda s: s.sampling.top_p, 0.25),
    "top_k": ({"sampling_top_k": 7}, lambda s: s.sampling.top_k, 7),
    "min_p": ({"sampling_min_p": 0.125}, lambda s: s.sampling.min_p, 0.125),
    "seed": ({"sampling_seed": 2**64 - 1}, lambda s: s.resolved_seed, 2**64 - 1),
    "max_tokens": ({"stopping_max_tokens": 4}, lambda s: s.max_tokens, 4),
    "min_tokens": ({"stopping_min_tokens": 4}, lambda s: s.min_tokens, 4),
    "ignore_eos": ({"stopping_ignore_eos": True}, lambda s: s.stop_token_ids, []),
    "stop ids": ({"stopping_stop_token_ids": [7, 9, 7]}, lambda s: s.stop_token_ids, [1, 7, 9]),
    "b8": (
        {"stopping_stop_token_ids": [9], "stopping_ignore_eos": True},
        lambda s: s.stop_token_ids,
        [9],
    ),
    "bypass": ({"cache_bypass_prefix_cache": True}, lambda s: s.bypass_cache, True),
    "cache_salt": ({"cache_cache_salt": "A"}, lambda s: s.domain, ("", "A")),
    "no salt": ({}, lambda s: s.domain, ("", None)),
    "empty salt": ({"cache_cache_salt": ""}, lambda s: s.domain, ("", "")),
    "urgency": ({"urgency": pb.URGENCY_BACKGROUND}, lambda s: s.urgency, 3),
    "priority": ({"priority": -5}, lambda s: s.priority, -5),
}


@pytest.mark.parametrize(("fields", "look", "expected"), FIELDS.values(), ids=FIELDS)
def test_what_is_asked_for_is_taken_over(
    fields: dict[str, Any], look: Callable[[Submit], Any], expected: object
) -> None:
    """Every field has its effect on the Submit; an id that is asked for stops without EOS too."""
    assert look(submit(request(**fields))) == expected


def test_b4_samples_share_all_but_their_number() -> None:
    """One prompt, one seed, one id; each sample has its own index."""
    made = submits(request(sampling_n=3))
    assert [one.sample_index for one in made] == [0, 1, 2]
    assert len({(one.request_id, one.resolved_seed) for one in made}) == 1


# -- bounds -------------------------------------------------------------------------------------

BOUNDS: list[tuple[str, list[Any], list[Any]]] = [
    ("sampling_temperature", [0.0, 100.0], [-0.001, 100.5, math.nan, math.inf, -math.inf]),
    ("sampling_top_p", [1e-6, 1.0], [0.0, -0.5, 1.001, math.nan]),
    ("sampling_min_p", [0.0, 1.0], [-0.001, 1.001, math.nan]),
    ("sampling_top_k", [0, (1 << 31) - 1], [-1, -(1 << 31)]),
    ("sampling_n", [1, 64], [0, -1, 65]),
    ("stopping_max_tokens", [0, 95], [-1, -(1 << 31)]),
    ("stopping_min_tokens", [0, 95], [-1]),
    ("stopping_stop", [["a"] * 64, ["x" * 4096]], [["a"] * 65, ["x" * 4097], ["a", ""]]),
    ("stopping_stop_token_ids", [[0, 511], [5] * 1024], [[512], [(1 << 32) - 1], [5] * 1025]),
    ("request_id", ["x" * 128], ["x" * 129]),
    ("cache_cache_salt", ["", "x" * 256], ["x" * 257]),
    ("urgency", [0, 1, 2, 3], [4, -1]),
    ("priority", [-(1 << 31), (1 << 31) - 1], []),
]


def _id(value: object) -> str:
    return str(value)[:20]


@pytest.mark.parametrize(
    ("name", "good"), [(n, good) for n, goods, _ in BOUNDS for good in goods], ids=_id
)
def test_a_value_on_the_bound_is_allowed(name: str, good: object) -> None:
    """Both ends of each range belong to it."""
    assert submits(request(**{name: good}))


@pytest.mark.parametrize(
    ("name", "bad"), [(n, bad) for n, _, bads in BOUNDS for bad in bads], ids=_id
)
def test_a_value_beyond_the_bound_is_refused_by_name(name: str, bad: Any) -> None:
    """The error names the field, the value (or its length) and what is allowed."""
    with pytest.raises(errors.InvalidParameterError) as caught:
        submits(request(**{name: bad}))
    ((field, text),) = caught.value.violations
    group, _, rest = name.partition("_")
    assert field == (f"{group}.{rest}" if group in ("sampling", "stopping", "cache") else name)
    shown, _, allowed = text.partition(" is not allowed: ")
    assert allowed
    if isinstance(bad, str):
        assert shown == f"{len(bad)} characters"
    elif not isinstance(bad, list):
        assert str(bad)[:5] in shown
    assert len(text) < 100, "no value is quoted at length"
    assert (caught.value.status, caught.value.reason) == ("INVALID_ARGUMENT", "INVALID_PARAMETER")


def test_all_bad_fields_are_named_at_once() -> None:
    """Nobody has to ask again for the next mistake."""
    bad = request(
        sampling_top_k=-1,
        sampling_top_p=2.0,
        stopping_max_tokens=-1,
        stopping_stop=[""],
        urgency=9,
        continue_from=[512],
    )
    with pytest.raises(errors.InvalidParameterError) as caught:
        submits(bad)
    fields = {field for field, _ in caught.value.violations}
    assert fields == {
        "sampling.top_p",
        "sampling.top_k",
        "stopping.max_tokens",
        "stopping.stop",
        "urgency",
        "continue_from",
        "expected_weights_sha256",
    }
    assert all(field in str(caught.value) for field in fields)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({}, "prompt"),
        ({"token_ids": pb.TokenIds()}, "prompt"),
        ({"token_ids": pb.TokenIds(ids=[3, 512])}, "token_ids"),
        ({"token_ids": pb.TokenIds(ids=[(1 << 32) - 1])}, "token_ids"),
    ],
)
def test_b9_a_prompt_must_have_tokens_of_the_vocabulary(prompt: Any, field: str) -> None:
    """Unset, empty, or with an id the model does not have: refused."""
    assert refused(Request(**prompt))[0][0] == field


@pytest.mark.parametrize("prompt", [{"text": "x"}, {"chat": pb.Chat()}])
def test_b10_a_prompt_that_becomes_no_token_is_refused(prompt: Any) -> None:
    """A text or chat is fine until it turns out to be empty; with one token it is a prompt."""
    asked = Request(**prompt)
    sampling = check_options(asked, LIMITS)
    with pytest.raises(errors.InvalidParameterError, match="prompt: no token"):
        make_submits(asked, [], sampling, LIMITS)
    assert make_submits(asked, [0], sampling, LIMITS)[0].max_tokens == 99


def test_another_model_is_not_found() -> None:
    """Both names are told; an overlong one is cut."""
    with pytest.raises(errors.ModelNotFoundError, match="'n' is not served here: 'm' is"):
        submits(request(model="n"))
    with pytest.raises(errors.ModelNotFoundError) as caught:
        submits(request(model="n" * 100_000))
    assert len(str(caught.value)) < 300


# -- lengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [
        (99, 1, 1),
        (100, 0, 0),
        (100, 1, None),
        (101, 0, None),
        (99, 2, None),
        (98, None, 2),
        (99, None, 1),
        (100, None, None),
        (1, (1 << 31) - 1, None),
    ],
)
def test_b11_prompt_and_output_must_fit_the_context(
    num_prompt: int, max_tokens: int | None, expected: int | None
) -> None:
    """The sum counts; both lengths and the limit are named; unset fills the rest."""
    asked = request(num_prompt)
    if max_tokens is not None:
        asked.stopping.max_tokens = max_tokens
    if expected is not None:
        assert submit(asked).max_tokens == expected
        return
    with pytest.raises(errors.ContextTooLongError) as caught:
        submits(asked)
    for number in (num_prompt, max_tokens or 0, 100):
        assert str(number) in str(caught.value)
    assert (caught.value.status, caught.value.reason) == ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG")


SMALL = Limits("m", 512, 100, (1,), max_positions=40, weights_sha256=SHA)


@pytest.mark.parametrize(("max_tokens", "fits"), [(0, True), (1, True), (31, True), (32, False)])
def test_e1_what_can_never_fit_the_private_pool_is_refused(max_tokens: int, fits: bool) -> None:
    """The KV of the last output token is never needed, so it takes no room."""
    asked = request(10, stopping_max_tokens=max_tokens)
    if fits:
        assert submit(asked, SMALL).max_tokens == max_tokens
        return
    with pytest.raises(errors.RequestTooLargeError, match=r"41 positions .* 40") as caught:
        submits(asked, SMALL)
    assert caught.value.status == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize(("num_prompt", "expected"), [(10, 31), (40, 1), (41, None)])
def test_unset_max_tokens_fills_what_the_private_pool_holds(
    num_prompt: int, expected: int | None
) -> None:
    """A pool smaller than the context is no reason to refuse what says nothing of its length."""
    if expected is None:
        with pytest.raises(errors.RequestTooLargeError):
            submits(request(num_prompt), SMALL)
    else:
        assert submit(request(num_prompt), SMALL).max_tokens == expected


def test_min_tokens_stay_below_max_tokens() -> None:
    """More than max_tokens is refused; where that is unset the context is what bounds it."""
    assert submit(request(stopping_min_tokens=6, stopping_max_tokens=6)).min_tokens == 6
    ((field, text),) = refused(request(stopping_min_tokens=7, stopping_max_tokens=6))
    assert (field, "at most max_tokens, which is 6" in text) == ("stopping.min_tokens", True)
    with pytest.raises(errors.ContextTooLongError):
        submits(request(stopping_min_tokens=96))
    with pytest.raises(errors.RequestTooLargeError):
        submits(request(10, stopping_min_tokens=32), SMALL)


# Not refused yet: the sampler then draws an id that the model does not have, or a stop id.
def test_min_tokens_need_an_id_that_does_not_stop() -> None:
    """Of a small vocabulary every id can be a stop id; then no token may come before."""
    every = request(stopping_stop_token_ids=list(range(512)))
    assert submit(every).stop_token_ids == list(range(512))
    every.stopping.min_tokens = 1
    assert refused(every)[0][0] == "stopping.min_tokens"


# -- interrupted streams ------------------------------------------------------------------------


def continued(**fields: Any) -> Request:
    defaults: dict[str, Any] = {"continue_from": [5, 6], "expected_weights_sha256": SHA}
    return request(**(defaults | fields))


def test_a_stream_goes_on_with_what_it_had() -> None:
    """Its ids count as output: max_tokens is of the whole."""
    made = submit(continued(stopping_max_tokens=4, sampling_seed=3, sampling_temperature=1.0))
    assert (made.output_ids, made.max_tokens, made.resolved_seed) == ([5, 6], 4, 3)
    assert submit(continued(stopping_max_tokens=2)).output_ids == [5, 6], "all of it was there"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling_n": 2}, "continue_from"),
        ({"continue_from": [512]}, "continue_from"),
        ({"stopping_max_tokens": 1}, "continue_from"),
        ({"stopping_max_tokens": 0}, "continue_from"),
        ({"sampling_temperature": 0.5}, "sampling.seed"),
        ({"expected_weights_sha256": ""}, "expected_weights_sha256"),
    ],
)
def test_what_a_continuation_lacks_is_refused(fields: dict[str, Any], field: str) -> None:
    """One sample, ids of the vocabulary within max_tokens, the seed if it draws, the weights."""
    assert [name for name, _ in refused(continued(**fields))] == [field]


def test_a_greedy_stream_needs_no_seed() -> None:
    """Nothing is drawn, so nothing depends on it."""
    assert submit(continued(sampling_temperature=0.0)).output_ids == [5, 6]


@pytest.mark.parametrize("ids", [[], [5, 6]])
def test_other_weights_than_expected_are_refused(ids: list[int]) -> None:
    """For a continuation and for any request that names them; a long digest is cut."""
    assert submit(request(expected_weights_sha256=SHA))
    with pytest.raises(errors.WeightsChangedError, match=SHA) as caught:
        submits(request(continue_from=ids, expected_weights_sha256="cd" * 1000))
    assert (caught.value.status, caught.value.reason) == ("FAILED_PRECONDITION", "WEIGHTS_CHANGED")
    assert len(str(caught.value)) < 300


def test_a_continuation_over_the_context_is_refused() -> None:
    """Unset max_tokens bounds it too: no stream of ours had so many."""
    assert submit(continued(continue_from=[5] * 95)).max_tokens == 95
    assert refused(continued(continue_from=[5] * 96))[0][0] == "continue_from"
