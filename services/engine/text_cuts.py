"""Where a text may be cut so that the ids of its pieces, joined, are the ids of the whole.

Two kinds of places, each as sure as the other, and none where a tokenizer allows neither:

*Before an added token.* The library takes added tokens out of the text first; what lies on their
two sides never meets. Not of one that takes neighbours along or looks at them (lstrip,
single_word), that is found in normalized text only, or that another one may overlap.

*Between words*, of a byte-level BPE whose pre-tokenizer is known. There no token crosses a border
of pre-tokens, so what is left to show is that a place is such a border, whatever stands further
left and right. Every alternative in ``_KNOWN`` was looked at for the three contexts below: none
matches across the place, none looks ahead across it with another answer than at the end of a text,
and none looks back. A border alone is not enough: ``\\s+(?!\\S)`` ends elsewhere when a letter
follows, and a word goes on. That is why each context holds characters of both sides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# By what they take. With one of each kind no character is left out of every match.
_KINDS = (
    {r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"},
    {r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r" ?\p{N}+"},
    {
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    },
    {r"\s+"},
)
_KNOWN = frozenset().union(*_KINDS) | {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"'(?i:[sdmt]|ll|ve|re)",
    *(r"\s*[\r\n]+", r"\s+(?!\S)"),
}
_NORMALIZERS = frozenset(("NFC", "NFD", "NFKC", "NFKD", "Lowercase"))
_ASCII = frozenset(map(chr, range(0x21, 0x7F)))
_MARKS = frozenset(char for char in _ASCII if not char.isalnum()) - {"_"}
_IDEOGRAPHS, _IDEOGRAPHIC_MARKS = "\u4e00-\u9fff", "\u3001\u3002\uff0c\uff01\uff1f\uff1b\uff1a"
_SEEN_AS_MARKS = frozenset(f"{_IDEOGRAPHIC_MARKS},!?;:")
# An added token that holds such a place, or begins or ends with white space, could lie across one.
_CROSSING = re.compile(rf"[!-~] |\n|[{_IDEOGRAPHS}][{_IDEOGRAPHIC_MARKS}]|\A\s|\s\Z|\A\Z")
_MIN_PIECE = 8  # characters before an added token


class TextCuts:
    """The safe places of one tokenizer's texts."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = list(tokenizer.get_added_tokens_decoder().values())
        self._tokens = _tokens_to_cut_before(added)
        self._between_words = _between_words(tokenizer, added)

    @property
    def is_any(self) -> bool:
        """Can any text be cut at all?"""
        return bool(self._tokens) or self._between_words is not None

    def pieces(self, text: str, min_chars: int) -> list[str]:
        """``text`` in pieces; between words one has ``min_chars`` characters at least.

        Where a piece ends depends on what was before and on one or two characters after it. So the
        pieces of two texts that begin alike are the same, but for the last that they share.
        """
        starts = [0]
        for end in (*self._token_places(text), len(text)):
            if self._between_words is not None:
                place = starts[-1] + min_chars
                while place < end and (found := self._between_words.search(text, place, end)):
                    starts.append(found.start())
                    place = starts[-1] + min_chars
            if end - starts[-1] >= _MIN_PIECE and end < len(text):
                starts.append(end)
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]

    def _token_places(self, text: str) -> list[int]:
        found = chain.from_iterable(pattern.finditer(text) for pattern in self._tokens)
        return sorted(match.start() for match in found)


def _tokens_to_cut_before(added: Sequence[AddedToken]) -> list[re.Pattern[str]]:
    """Added tokens that nothing to their left can change: a pattern for each first character.

    The pattern of a known first character is searched some ten times as fast as that of any.
    """
    # Those found first, in the text as it is; the others are looked for in what is left of it.
    first = [entry for entry in added if not entry.normalized]
    found: dict[str, list[str]] = {}
    for entry in added:
        text = entry.content
        if (
            not (entry.normalized or entry.lstrip or entry.single_word)
            and len(text) > 1
            and not text[0].isspace()
            # Another's ``single_word`` looks at this character.
            and text[0] in _MARKS
            and not any(_may_interfere(other, text) for other in first)
        ):
            found.setdefault(text[0], []).append(re.escape(text[1:]))
    return [re.compile(f"{re.escape(c)}(?:{'|'.join(rest)})") for c, rest in found.items()]


def _may_interfere(other: AddedToken, token: str) -> bool:
    """Can ``other`` lie across a place where ``token`` stands, or be there and look to the left?"""
    text = other.content
    if text.startswith(token) and (other.lstrip or other.single_word):
        return True
    ends = (text[n:] for n in range(1, len(text)))
    return any(token.startswith(end) or end.startswith(token) for end in ends)


def _between_words(
    tokenizer: tokenizers.Tokenizer, added: Sequence[AddedToken]
) -> re.Pattern[str] | None:
    """What matches, without any width, at the safe places; None when there are none."""
    model = tokenizer.model
    if not isinstance(model, models.BPE) or model.dropout:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    if not all(part["type"] in _NORMALIZERS for part in _parts(tokenizer.normalizer)):
        return None
    if not _is_known(list(_parts(tokenizer.pre_tokenizer))):
        return None
    normalizer = tokenizer.normalizer
    spellings = [
        (entry, text)
        for entry in added
        for text in {
            entry.content,
            entry.content if normalizer is None else normalizer.normalize_str(entry.content),
        }
    ]
    if any(_CROSSING.search(text) for _, text in spellings):
        return None
    # One that begins with such a mark, or what NFKC makes of it, would look to its left.
    if any(entry.single_word and text[0] in _SEEN_AS_MARKS for entry, text in spellings):
        return None
    # White space beside these belongs to them. "/" follows a line break within one known match.
    before = _ASCII - _both_cases(text[-1] for entry, text in spellings if entry.rstrip)
    after = _ASCII - _both_cases(text[0] for entry, text in spellings if entry.lstrip) - {"/"}
    return re.compile(
        rf"(?<=[{_set(before)}])(?= [!-~])|(?<=[!-~]\n)(?=[{_set(after)}])"
        rf"|(?<=[{_IDEOGRAPHS}])(?=[{_IDEOGRAPHIC_MARKS}])"
    )


def _both_cases(chars: Iterable[str]) -> set[str]:
    return {case for char in chars for case in (char.lower(), char.upper())}


def _set(chars: frozenset[str]) -> str:
    return re.escape("".join(sorted(chars))) or "\0"


def _parts(component: Any) -> Iterator[dict[str, Any]]:
    """What a normalizer or pre-tokenizer does, one step after the other."""
    if component is None:
        return
    waiting = [json.loads(component.__getstate__())]
    while waiting:
        part = waiting.pop(0)
        if part["type"] == "Sequence":
            waiting[:0] = chain(part.get("normalizers", ()), part.get("pretokenizers", ()))
        else:
            yield part


def _is_known(steps: Sequence[dict[str, Any]]) -> bool:
    """Is each step known, one of them byte-level, and do they cut words apart?"""
    is_byte_level = False
    seen: set[str] = set()
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": bool(has_regex)}:
                is_byte_level = True
                pattern = _GPT2 if has_regex else ""
            case {"type": "Digits"}:
                pattern = r"\p{N}+"
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated"}:
                if step["invert"]:
                    return False
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed"}:
                if not step["invert"]:
                    return False
            case _:
                return False
        seen.update(_alternatives(pattern) if pattern else ())
    return is_byte_level and seen <= _KNOWN and all(kind & seen for kind in _KINDS)


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between the bars that stand in no parenthesis."""
    found, depth = [""], 0
    for char in pattern:
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "|" and not depth:
            found.append("")
        else:
            found[-1] += char
    return found
