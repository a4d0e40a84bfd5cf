"""A GenerateRequest checked against what is served: one clear error that names every bad field."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass

from engine import errors
from engine.request import SamplingParams, Submit
from engine.tokenizer import Tokenizer, TokenizerError
from engine.v1 import engine_pb2 as pb

_MAX_REQUEST_ID = 128


@dataclass(frozen=True)
class Limits:
    """What the served model and worker allow."""

    model_name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    max_positions: int  # that the private pool can hold


class _Checker:
    def __init__(self) -> None:
        self.violations: list[tuple[str, str]] = []

    def check(self, is_ok: bool, field: str, value: object, allowed: str) -> None:
        if not is_ok:
            self.violations.append((field, f"{value} is not allowed: {allowed}"))

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
    return SamplingParams(temperature, top_p, top_k, min_p)


def _prompt(request: pb.GenerateRequest, tokenizer: Tokenizer, limits: Limits) -> list[int]:
    kind = request.WhichOneof("prompt")
    checker = _Checker()
    checker.check(kind is not None, "prompt", "nothing", "text or token_ids")
    checker.done()
    if kind == "text":
        try:
            ids = tokenizer.encode(request.text)
        except TokenizerError as exc:
            raise errors.InvalidParameterError([("text", str(exc))]) from exc
    else:
        ids = list(request.token_ids.ids)
        worst = max(ids, default=0)
        checker.check(
            worst < limits.vocab_size, "token_ids", worst, f"ids below {limits.vocab_size}"
        )
    checker.check(bool(ids), "prompt", "no token", "at least one token")
    checker.done()
    return ids


def make_submit(request: pb.GenerateRequest, tokenizer: Tokenizer, limits: Limits) -> Submit:
    """The first Submit of a request; id and seed are drawn here when the client gave none.

    Raises InvalidParameterError, ContextTooLongError, ModelNotFoundError, RequestTooLargeError.
    """
    if request.model not in ("", limits.model_name):
        raise errors.ModelNotFoundError(
            f"model {request.model[:128]!r} is not served here: {limits.model_name!r} is"
        )
    checker = _Checker()
    checker.check(
        len(request.request_id) <= _MAX_REQUEST_ID,
        "request_id",
        f"{len(request.request_id)} characters",
        f"at most {_MAX_REQUEST_ID}",
    )
    sampling = _sampling(request.sampling, checker)
    stopping = request.stopping
    has_max = stopping.HasField("max_tokens")
    if has_max:
        checker.check(
            stopping.max_tokens >= 0, "stopping.max_tokens", stopping.max_tokens, "0 or more"
        )
    checker.check(
        request.urgency in pb.Urgency.values(), "urgency", request.urgency, "a value of Urgency"
    )
    checker.done()
    ids = _prompt(request, tokenizer, limits)
    # Unset fills the context; at least one token is wanted, so a full prompt is too long.
    max_tokens = stopping.max_tokens if has_max else max(1, limits.max_context - len(ids))
    _check_lengths(len(ids), max_tokens, limits)
    has_seed = request.sampling.HasField("seed")
    return Submit(
        request_id=request.request_id or secrets.token_hex(8),
        attempt=0,
        prompt_ids=ids,
        output_ids=[],
        sampling=sampling,
        resolved_seed=request.sampling.seed if has_seed else secrets.randbits(64),
        max_tokens=max_tokens,
        stop_token_ids=[] if stopping.ignore_eos else list(limits.eos_token_ids),
        bypass_cache=request.cache.bypass_prefix_cache,
        urgency=request.urgency or pb.URGENCY_NORMAL,
    )


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
