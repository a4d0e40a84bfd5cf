"""Tests of the text of one sample: detokeniser and stop strings together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.output_text import OutputText, Piece
from engine.tokenizer import Tokenizer
from tests.fixtures.models import byte_token, plan_script, write_tokenizer
from tests.fixtures.tokenizers import write_t_add, write_t_bf, write_t_bl

WRITERS: dict[str, Callable[[Path], Path]] = {
    "byte fallback": write_t_bf,
    "byte level": write_t_bl,
    "added tokens": write_t_add,
}


@pytest.fixture(scope="module")
def all_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A tokenizer of each kind."""
    return {name: Tokenizer(write(tmp_path_factory.mktemp("t"))) for name, write in WRITERS.items()}


@pytest.fixture(scope="module")
def tokenizer(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """A byte-level one."""
    return all_tokenizers["byte level"]


def ids_of(text: str) -> list[int]:
    """One token a byte."""
    return [byte_token(value) for value in text.encode()]


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """``text`` up to the stop that is complete first, and that stop."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, length, stop = min(ends)
    return text[: end + length], stop


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_is_decode_cut_at_the_stop(
    all_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Over any cuts, the pieces make decode of all ids up to the first stop; counts add up."""
    tokenizer = all_tokenizers[kind]
    words = st.sampled_from(
        ["the", " fox", "é", "😀", " ", "  own", "\n", "ab", "aab", "stopwatch"]
    )
    text = "".join(data.draw(st.lists(words, max_size=8)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    # Special tokens, ids without a token, and bytes that are no UTF-8 (few: runs stay short).
    odd = data.draw(st.lists(st.sampled_from([0, 1, 511, 900, byte_token(0xC3)]), max_size=3))
    for token in odd:
        ids.insert(data.draw(st.integers(0, len(ids))), token)
    stops = data.draw(
        st.lists(st.sampled_from(["fox", "o", "é", "😀", "aab", " \n", "ab", "\ufffd"]), max_size=3)
    )
    prompt = tokenizer.encode("the", add_special_tokens=False)
    whole = tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
    expected, stop = cut(whole, stops)

    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    output = OutputText(tokenizer, prompt, stops)
    bounds = sorted({0, *cuts, len(ids)})
    pieces = [output.feed(ids[a:b]) for a, b in pairwise(bounds)]
    text = "".join(piece.text for piece in pieces) + output.flush()
    assert (text, output.stop_match) == (expected, stop)

    single = OutputText(tokenizer, prompt, stops)
    one_by_one = [single.feed([token]) for token in ids]
    assert "".join(piece.text for piece in one_by_one) + single.flush() == expected
    total = sum(piece.num_tokens for piece in one_by_one)
    assert sum(piece.num_tokens for piece in pieces) == total
    found = [index for index, piece in enumerate(one_by_one) if piece.stop_match is not None]
    assert total == (found[0] + 1 if found else len(ids))


@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_replay_restores_the_state(
    all_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Ids fed again one at a time, with their text dropped: the rest comes out as it would have."""
    tokenizer = all_tokenizers[kind]
    text = data.draw(st.text("the fox😀é\n", max_size=20))
    ids = tokenizer.encode(text, add_special_tokens=False)
    at = data.draw(st.integers(0, len(ids)))
    options = {"stop": ["fox", "e\n", "😀é"], "min_tokens": data.draw(st.integers(0, 4))}
    first, second = (OutputText(tokenizer, [0], **options) for _ in range(2))
    first.feed(ids[:at])
    for token in ids[:at]:
        second.feed([token])
    assert second.feed(ids[at:]) == first.feed(ids[at:])
    assert (second.flush(), second.stop_match) == (first.flush(), first.stop_match)


def test_a4_scripted_stop_over_tokens(tmp_path: Path) -> None:
    """Tokens " quick", " br", "own f", "ox", a stop over two of them: none of it comes out."""
    chunks = [b" quick", b" br", b"own f", b"ox"]
    script, extra = plan_script(byte_token(ord("e")), chunks)
    write_tokenizer(tmp_path, extra)
    ids, token = [], byte_token(ord("e"))
    for _ in chunks:
        token = script[token]
        ids.append(token)
    output = OutputText(Tokenizer(tmp_path), [byte_token(ord("e"))], ["own fox"])
    assert [output.feed([token]) for token in [*ids, byte_token(ord("!"))]] == [
        Piece(" quick", 1, None),
        Piece(" br", 1, None),
        Piece("", 1, None),
        Piece("", 1, "own fox"),
        Piece("", 0, None),
    ]
    assert output.flush() == ""


def test_tokens_after_the_stop_do_not_count(tokenizer: Tokenizer) -> None:
    """In one call with more, the tokens up to the one that completed the stop count."""
    output = OutputText(tokenizer, [0], ["cd"])
    assert output.feed(ids_of("abcdef")) == Piece("ab", 4, "cd")
    assert output.feed(ids_of("g")) == Piece("", 0, None)
    assert output.stop_match == "cd"


def test_min_tokens(tokenizer: Tokenizer) -> None:
    """A stop neither begins nor ends within the first min_tokens tokens; a later one is found."""
    for length, expected in ((0, ("", "ab")), (1, ("abx", "ab")), (2, ("abx", "ab"))):
        output = OutputText(tokenizer, [0], ["ab"], min_tokens=length)
        assert (output.feed(ids_of("abxab")).text, output.stop_match) == expected
    output = OutputText(tokenizer, [0], ["ab"], min_tokens=5)
    assert output.feed(ids_of("abxab")) == Piece("abxab", 5, None)
    assert output.flush() == ""


def test_text_within_min_tokens_is_not_held(tokenizer: Tokenizer) -> None:
    """What could begin a stop comes out at once where none may begin."""
    output = OutputText(tokenizer, [0], ["ab"], min_tokens=1)
    assert output.feed(ids_of("a")).text == "a"
    assert output.feed(ids_of("a")).text == ""
    assert output.flush() == "a"


def test_a_stop_in_the_last_held_text(all_tokenizers: dict[str, Tokenizer]) -> None:
    """With byte fallback the last character is known at the end only, and can be a stop still."""
    tokenizer = all_tokenizers["byte fallback"]
    prompt = tokenizer.encode("the")
    for min_tokens, expected in ((0, ("a", "é")), (3, ("aé", None))):
        output = OutputText(tokenizer, prompt, ["é"], min_tokens)
        text = output.feed([*tokenizer.encode("a", False)[-1:], *ids_of("é")]).text
        assert output.stop_match is None
        assert ((text + output.flush()).strip(), output.stop_match) == expected
