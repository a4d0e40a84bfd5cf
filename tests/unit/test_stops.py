"""Tests of stop strings in text that arrives in pieces."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidParameterError
from engine.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All text that comes out, and the stop that was found."""
    matcher = StopMatcher(stops)
    out, found = "", None
    for piece in pieces:
        text, stop = matcher.feed(piece)
        out += text
        found = found or stop
    return out + matcher.flush(), found


def oracle(stops: list[str], text: str) -> tuple[str, str | None]:
    """The same from the whole text: shortest beginning that ends with a stop, longest such stop."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_chunking_equals_the_whole_text(data: st.DataObject) -> None:
    """Over any cuts, text and stop are those that a look at the whole text gives."""
    stops = data.draw(st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=5))
    text = data.draw(st.text("ab\n", max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    bounds = sorted({0, *cuts, len(text)})
    assert run(stops, [text[a:b] for a, b in pairwise(bounds)]) == oracle(stops, text)
    assert run(stops, list(text)) == oracle(stops, text)


@settings(max_examples=150, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=5),
    text=st.text("ab", max_size=20),
)
def test_held_text_is_what_can_become_a_stop(stops: list[str], text: str) -> None:
    """As long as no stop is found, exactly the longest end that begins a stop is held back."""
    matcher = StopMatcher(stops)
    out = ""
    for index, char in enumerate(text):
        piece, stop = matcher.feed(char)
        if stop is not None:
            return
        out += piece
        seen = text[: index + 1]
        held = max((n for s in stops for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert out == seen[: len(seen) - held]


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["aab"], "aaab", ("a", "aab")),
        (["abab"], "aabaabab", ("aaba", "abab")),
        (["ab", "abcd"], "xabcd", ("x", "ab")),  # one begins the other: the one complete first
        (["xcd", "cd"], "abxcdz", ("ab", "xcd")),  # complete together: the one that starts first
        (["abcdef", "cd"], "abcdef", ("ab", "cd")),  # inside: complete first
        (["abcdX", "bc"], "abce", ("a", "bc")),
        (["the end"], "the en", ("the en", None)),
        (["é"], "caf\u00e9", ("caf", "é")),
        ([], "anything", ("anything", None)),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    """The stop that is complete first wins, then the one that starts first."""
    assert run(stops, list(text)) == expected
    assert run(stops, [text]) == expected


def test_a4_no_part_of_a_found_stop_comes_out() -> None:
    """A stop over several pieces: the pieces before it come out whole, none of it does."""
    matcher = StopMatcher(["own fox"])
    out = [matcher.feed(piece) for piece in (" quick", " br", "own f", "ox", " jumps")]
    assert out == [(" quick", None), (" br", None), ("", None), ("", "own fox"), ("", None)]
    assert matcher.flush() == ""


def test_a6_a_long_stop_that_cannot_match_delays_nothing() -> None:
    """A stop of 200 characters holds back nothing while the text does not begin it."""
    matcher = StopMatcher(["x" * 200])
    assert [matcher.feed(piece)[0] for piece in ("the", " fox", " ran")] == ["the", " fo", "x ran"]


def test_a6_an_empty_stop_is_refused() -> None:
    """An empty stop is an error that names the field, not an instant stop."""
    with pytest.raises(InvalidParameterError, match=r"stopping\.stop: an empty text"):
        StopMatcher(["a", ""])


def test_cost_is_linear() -> None:
    """Text that always nearly matches long stops takes time in proportion to its length."""
    stops = ["a" * n + "b" for n in range(100, 1000, 100)]

    def seconds(length: int) -> float:
        matcher = StopMatcher(stops)
        start = time.perf_counter()
        matcher.feed("a" * length)
        return time.perf_counter() - start

    assert min(seconds(80_000) for _ in range(5)) < 40 * min(seconds(8_000) for _ in range(5))
