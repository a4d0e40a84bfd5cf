"""A GenerateRequest checked against what is served: one clear error that names every bad field."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine import errors
from engine.request import SamplingParams, Submit
from engine.v1 import engine_pb2 as pb

_MAX_REQUEST_ID = 128
_MAX_SAMPLES = 64
_MAX_STOPS = 64
_MAX_STOP_LENGTH = 4096
_MAX_STOP_IDS = 1024
_MAX_CACHE_SALT = 256


@dataclass(frozen=True)
class Limits:
    """What the served model and worker allow."""

    model_name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    max_positions: int  # that the private pool can hold
    weights_sha256: str


class _Checker:
    def __init__(self) -> None:
        self.violations: list[tuple[str, str]] = []

    def check(self, is_ok: bool, field: str, value: object, allowed: str) -> None:
        if not is_ok:
            self.violations.append((field, f"{value} is not allowed: {allowed}"))

    def ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        worst = max(ids, default=0)
        self.check(worst < vocab_size, field, worst, f"ids below {vocab_size}")

    def done(self) -> None:
        if self.violations:
            raise errors.InvalidParameterError(self.violations)


def _sampling(message: pb.SamplingParams, checker: _Checker) -> SamplingParams:
    def value(name: str, default: float) -> float:
        return float(getattr(message, name)) if message.HasField(name) else default

    temperature = value("temperature", 0.0)
    top_p, min_p, top_k = value("top_p", 1.0), value("min_p", 0.0), int(value("top_k", 0))
    is_finite = math.isfinite(temperature)
    checker.check(
        is_finite and 0 <= temperature <= 100, "sampling.temperature", temperature, "0 to 100"
    )
    checker.check(0 < top_p <= 1, "sampling.top_p", top_p, "above 0, at most 1")
    checker.check(0 <= min_p <= 1, "sampling.min_p", min_p, "0 to 1")
    checker.check(top_k >= 0, "sampling.top_k", top_k, "0 (off) or more")
    n = num_samples(message)
    checker.check(1 <= n <= _MAX_SAMPLES, "sampling.n", n, f"1 to {_MAX_SAMPLES}")
    return SamplingParams(temperature, top_p, top_k, min_p)


def num_samples(message: pb.SamplingParams) -> int:
    """`n`, which is 1 when unset."""
    return int(message.n) if message.HasField("n") else 1


def _stopping(message: pb.StoppingOptions, vocab_size: int, checker: _Checker) -> None:
    if message.HasField("max_tokens"):
        checker.check(message.max_tokens >= 0, "stopping.max_tokens", message.max_tokens, ">= 0")
    checker.check(message.min_tokens >= 0, "stopping.min_tokens", message.min_tokens, "0 or more")
    if message.HasField("max_tokens") and message.max_tokens >= 0:
        checker.check(
            message.min_tokens <= message.max_tokens,
            "stopping.min_tokens",
            message.min_tokens,
            f"at most max_tokens, which is {message.max_tokens}",
        )
    count = len(message.stop)
    checker.check(count <= _MAX_STOPS, "stopping.stop", f"{count} texts", f"at most {_MAX_STOPS}")
    longest = max(map(len, message.stop), default=1)
    checker.check("" not in message.stop, "stopping.stop", "an empty text", "texts of characters")
    checker.check(
        longest <= _MAX_STOP_LENGTH,
        "stopping.stop",
        f"{longest} characters",
        f"at most {_MAX_STOP_LENGTH}",
    )
    count = len(message.stop_token_ids)
    checker.check(
        count <= _MAX_STOP_IDS, "stopping.stop_token_ids", f"{count} ids", f"<= {_MAX_STOP_IDS}"
    )
    checker.ids("stopping.stop_token_ids", message.stop_token_ids, vocab_size)


def _continuation(request: pb.GenerateRequest, limits: Limits, checker: _Checker) -> None:
    """What an interrupted stream needs to go on with the very tokens it would have had."""
    ids = request.continue_from
    if ids:
        n = num_samples(request.sampling)
        checker.check(n == 1, "continue_from", f"n = {n}", "only a request of one sample goes on")
        checker.ids("continue_from", ids, limits.vocab_size)
        needs_seed = request.sampling.temperature > 0 and not request.sampling.HasField("seed")
        checker.check(not needs_seed, "sampling.seed", "unset", "the seed that Accepted told")
        checker.check(
            bool(request.expected_weights_sha256),
            "expected_weights_sha256",
            "unset",
            "the digest that Accepted told",
        )
    expected = request.expected_weights_sha256
    if expected and expected != limits.weights_sha256:
        raise errors.WeightsChangedError(
            f"weights {limits.weights_sha256} are served, the request is for {expected[:64]}"
        )


def check_options(request: pb.GenerateRequest, limits: Limits) -> SamplingParams:
    """Everything that can be checked before the prompt is tokenised.

    Raises InvalidParameterError, ModelNotFoundError, WeightsChangedError.
    """
    if request.model not in ("", limits.model_name):
        raise errors.ModelNotFoundError(
            f"model {request.model[:128]!r} is not served here: {limits.model_name!r} is"
        )
    checker = _Checker()
    length = len(request.request_id)
    checker.check(
        length <= _MAX_REQUEST_ID, "request_id", f"{length} characters", f"<= {_MAX_REQUEST_ID}"
    )
    sampling = _sampling(request.sampling, checker)
    _stopping(request.stopping, limits.vocab_size, checker)
    length = len(request.cache.cache_salt)
    checker.check(
        length <= _MAX_CACHE_SALT,
        "cache.cache_salt",
        f"{length} characters",
        f"<= {_MAX_CACHE_SALT}",
    )
    checker.check(
        request.urgency in pb.Urgency.values(), "urgency", request.urgency, "a value of Urgency"
    )
    kind = request.WhichOneof("prompt")
    checker.check(kind is not None, "prompt", "nothing", "text, token_ids or chat")
    if kind == "token_ids":
        checker.ids("token_ids", request.token_ids.ids, limits.vocab_size)
    _continuation(request, limits, checker)
    checker.done()
    return sampling


def make_submits(
    request: pb.GenerateRequest, ids: list[int], sampling: SamplingParams, limits: Limits
) -> list[Submit]:
    """The first Submit of each sample; id and seed are drawn here when the client gave none.

    Raises InvalidParameterError, ContextTooLongError, RequestTooLargeError.
    """
    checker = _Checker()
    checker.check(bool(ids), "prompt", "no token", "at least one token")
    checker.done()
    stopping = request.stopping
    if stopping.HasField("max_tokens"):
        max_tokens = stopping.max_tokens
    else:
        # Unset fills what there is; at least one token is wanted, so a full prompt is too long.
        most = min(limits.max_context, limits.max_positions + 1)
        max_tokens = max(1, most - len(ids), stopping.min_tokens)
    _check_lengths(len(ids), max_tokens, limits)
    count = len(request.continue_from)
    allowed = f"at most max_tokens, which is {max_tokens}"
    checker.check(count <= max_tokens, "continue_from", f"{count} ids", allowed)
    ends = [] if stopping.ignore_eos else list(limits.eos_token_ids)
    stops = sorted({*ends, *stopping.stop_token_ids})
    checker.check(
        not stopping.min_tokens or len(stops) < limits.vocab_size,
        "stopping.min_tokens",
        stopping.min_tokens,
        "0 when every id stops",
    )
    checker.done()
    has_seed = request.sampling.HasField("seed")
    submit = Submit(
        request_id=request.request_id or secrets.token_hex(8),
        attempt=0,
        prompt_ids=ids,
        output_ids=list(request.continue_from),
        sampling=sampling,
        resolved_seed=request.sampling.seed if has_seed else secrets.randbits(64),
        max_tokens=max_tokens,
        min_tokens=stopping.min_tokens,
        stop_token_ids=stops,
        bypass_cache=request.cache.bypass_prefix_cache,
        cache_salt=request.cache.cache_salt if request.cache.HasField("cache_salt") else None,
        urgency=request.urgency or pb.URGENCY_NORMAL,
        priority=request.priority,
    )
    count = num_samples(request.sampling)
    return [msgspec.structs.replace(submit, sample_index=index) for index in range(count)]


def _check_lengths(num_prompt: int, max_tokens: int, limits: Limits) -> None:
    if num_prompt + max_tokens > limits.max_context:
        raise errors.ContextTooLongError(
            [
                (
                    "prompt",
                    f"{num_prompt} prompt tokens and max_tokens {max_tokens} are over the "
                    f"context of {limits.max_context}",
                )
            ]
        )
    positions = num_prompt + max(max_tokens, 1) - 1
    if positions > limits.max_positions:
        raise errors.RequestTooLargeError(
            f"{positions} positions are needed, the worker's private pool holds "
            f"{limits.max_positions}"
        )
