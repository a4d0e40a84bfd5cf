"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.errors import InvalidParameterError


class StopMatcher:
    """Finds the first stop to be complete, however the text is cut into pieces.

    The stop whose last character comes first wins: nothing is gained by waiting for a longer one
    around it. Of two that end with the same character the one that starts first wins. Text that can
    still become a stop is held back and no other, so a long stop delays nothing by being long.

    The automaton is the one of Aho and Corasick (1975): a state stands for the longest end of the
    text that is the start of a stop. A character costs constant time whatever the stops are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidParameterError for an empty stop, which would be found everywhere."""
        if not all(stops):
            raise InvalidParameterError(
                [("stopping.stop", "an empty text is not allowed: at least one character")]
            )
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._stop: list[str | None] = [None]  # the longest stop that ends here
        for stop in stops:
            self._add(stop)
        self._fallback = [0] * len(self._next)  # where to go on when no character fits
        self._link()
        self._state = 0
        self._held = ""
        self._is_done = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """(Text that belongs to no stop for certain, the stop that was found or None).

        The stop and what follows it are dropped; after that every call gives ("", None).
        """
        if self._is_done:
            return "", None
        text, start = self._held + text, len(self._held)
        for end in range(start, len(text)):
            self._state = self._step(self._state, text[end])
            stop = self._stop[self._state]
            if stop is not None:
                self._is_done = True
                self._held = ""
                return text[: end + 1 - len(stop)], stop
        certain = len(text) - self._depth[self._state]
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """The held text, at the end: no stop came of it."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self._next[state].get(char)
            if following is None:
                following = self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
            state = following
        self._stop[state] = stop

    def _link(self) -> None:
        """Set fallbacks, shallow states first: each is found through its parent's."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                if state:
                    self._fallback[following] = self._step(self._fallback[state], char)
                if self._stop[following] is None:
                    self._stop[following] = self._stop[self._fallback[following]]
                queue.append(following)
