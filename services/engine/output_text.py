"""The text of one sample: token ids to text, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.stops import StopMatcher
from engine.tokenizer import IncrementalDetokenizer, Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one call of ``OutputText.feed`` brought."""

    text: str  # may be empty while text is held back
    num_tokens: int  # of this call's that belong to the output, the one that stopped it included
    stop_match: str | None  # the stop that was found in this call


class OutputText:
    """Detokeniser and stop strings of one sample.

    All text joined is what decoding all ids at once gives, cut at the first stop. What is given and
    what is held depends only on the ids fed so far, not on how they were cut into calls: feeding
    the ids of an interrupted stream again, and dropping what comes back, restores its exact state.

    Text that comes with the first ``min_tokens`` tokens is not searched: a stop can neither begin
    nor be complete there. Text comes with the token that made it certain, which for a character of
    several tokens is its last one, and with byte fallback the one after it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """Raises InvalidParameterError for an empty stop."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stop_match: str | None = None

    @property
    def stop_match(self) -> str | None:
        """The stop that was found; also `flush` can find one, in text held for its last byte."""
        return self._stop_match

    def feed(self, token_ids: Iterable[int]) -> Piece:
        """Take new ids; after a stop was found they give nothing."""
        before, num_tokens, parts = self._stop_match, self._num_tokens, []
        for token in token_ids:
            if self._stop_match is not None:
                break
            self._num_tokens += 1
            # One at a time, so that it shows which one completed a stop.
            parts.append(self._search(self._detokenizer.feed([token])))
        found = self._stop_match if before is None else None
        return Piece("".join(parts), self._num_tokens - num_tokens, found)

    def flush(self) -> str:
        """The held rest; call once, after the last id. Look at `stop_match` after it."""
        if self._stop_match is not None:
            return ""
        return self._search(self._detokenizer.flush()) + self._matcher.flush()

    def _search(self, text: str) -> str:
        if self._num_tokens <= self._min_tokens:
            return text
        certain, self._stop_match = self._matcher.feed(text)
        return certain
