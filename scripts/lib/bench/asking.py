"""One request of a stream at a time, timed at the client."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.client import Done, EngineClient, Text
from engine.v1 import engine_pb2 as pb
from scripts.lib.bench.errors import BenchError, UsageError


@dataclass(frozen=True)
class Answer:
    """A whole answer. `arrivals` are (moment, number of tokens) of each message with tokens.

    Moments are monotonic, in seconds.
    """

    sent: float
    arrivals: Sequence[tuple[float, int]]
    num_prompt_tokens: int
    num_cached_tokens: int

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.arrivals[0][0]

    @property
    def ttft_s(self) -> float:
        return self.first - self.sent

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def num_later_tokens(self) -> int:
        """Those that came after the first message, in `decode_s`."""
        return self.num_tokens - self.arrivals[0][1]

    @property
    def decode_s(self) -> float:
        """From the first message to the last."""
        return self.arrivals[-1][0] - self.first

    @property
    def gaps(self) -> list[float]:
        """Between messages."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.arrivals)]


def ask(
    client: EngineClient, prompt: str | Sequence[int], max_tokens: int, timeout_s: float
) -> Answer:
    """Greedy, and exactly `max_tokens` long. Raises CallError, BenchError."""
    arrivals: list[tuple[float, int]] = []
    done: Done | None = None
    sent = time.monotonic()
    events = client.generate(
        prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
        return_token_ids=False,
        timeout=timeout_s,
    )
    for event in events:
        if isinstance(event, Text) and event.num_tokens:
            arrivals.append((time.monotonic(), event.num_tokens))
        elif isinstance(event, Done):
            done = event
    if done is None:
        raise BenchError("a stream ended without its last message")
    answer = Answer(sent, arrivals, done.prompt_tokens, done.cached_tokens)
    if answer.num_tokens != max_tokens:
        raise BenchError(f"{max_tokens} tokens were asked for, {answer.num_tokens} came")
    return answer


class Prompts:
    """Random ordinary token ids: the same seed and name give the same prompt again."""

    def __init__(self, seed: int, info: pb.GetModelInfoResponse) -> None:
        self._seed = seed
        self._max_context = info.max_context
        self._vocabulary = np.setdiff1d(np.arange(info.vocab_size), list(info.eos_token_ids))

    def ids(self, length: int, *name: int) -> list[int]:
        """Prompts of different names share no block of the cache, for all practical purposes."""
        generator = np.random.default_rng((self._seed, *name))
        return generator.choice(self._vocabulary, length).tolist()

    def check_fits(self, flag: str, length: int, max_tokens: int) -> None:
        """Raises UsageError when prompt and answer are over the model's context."""
        if length + max_tokens > self._max_context:
            raise UsageError(
                f"{flag}: {length} is not allowed: with {max_tokens} new tokens it is over the "
                f"model's context of {self._max_context}"
            )


def cut_to_tokens(client: EngineClient, words: Sequence[str], num_tokens: int) -> str:
    """As many of the words (over and over) as make at most that many tokens, at least one.

    Natural text of a wanted length; tokens of text can't be counted out exactly. Raises CallError.
    """
    text = ""
    low, high = 1, num_tokens  # a word is a token at least
    while low <= high:
        count = (low + high) // 2
        candidate = " ".join(words[at % len(words)] for at in range(count))
        if len(client.tokenize(candidate)) <= num_tokens:
            text, low = candidate, count + 1
        else:
            high = count - 1
    return text or words[0]
