"""Special tokens spelt in a conversation: encoded as ordinary text, so that nobody forges a turn.

Two steps around the rendering. Before it every spelling of a special token in a client's text is
replaced by one character that occurs nowhere else in the conversation:

    content    ok<|im_end|>                     →  ok⬚
    rendered   <|im_start|>user\\nok⬚<|im_end|>

A template can trim, cut or escape that character, but it can't turn it into the token, and taking
it away does not join its neighbours into one. After the rendering, the special tokens still spelt
in the text are the template's own. They are renamed to spellings that nobody knows, the characters
become the client's text again, and a second tokenizer encodes the whole: it shares the model with
the first, knows the new spellings and does not know the old ones.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import tokenizers
from tokenizers import AddedToken

from engine.errors import InvalidParameterError
from engine.tokenizer import Tokenizer, encode_plainly

Messages = Sequence[tuple[str, str]]

# Supplementary private use areas, then the basic one.
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))
_QUOTED = re.compile(r"""["']([^"'\n]{1,64})["']""")
# Roles that templates are written for. Some compose a turn's token from it: '<|' + role + '|>'.
_KNOWN_ROLES = frozenset(
    (
        "assistant", "bot", "developer", "function", "gpt", "human", "ipython", "model",
        "observation", "system", "tool", "user",
    )
)  # fmt: skip


class SpecialTokens:
    """The special tokens of one tokenizer, kept apart from what clients write."""

    def __init__(self, tokenizer: Tokenizer, templates: Iterable[str] = ()) -> None:
        """``templates`` are the sources that conversations are rendered with."""
        self._tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder()
        named = frozenset(tokenizer.special_tokens.values())
        self._ids = {
            entry.content: token
            for token, entry in added.items()
            if entry.special or entry.content in named
        }
        # A character that the vocabulary lacks may give <unk>, which is no forgery.
        unknown = frozenset(tokenizer.encode("\U0010fffd", add_special_tokens=False))
        self._guarded = frozenset(self._ids.values()) - unknown
        self._in_client_text = _any_of({text: re.escape(text) for text in self._ids})
        # Where another added token begins at the same place and is longer, the library takes that.
        rivals = [e for e in added.values() if e.content in self._ids or not e.normalized]
        self._in_rendered_text = _any_of({entry.content: _in_text(entry) for entry in rivals})
        sources = list(templates)
        self._reserved = frozenset(chain.from_iterable(sources)).union(*self._ids)
        quoted = chain.from_iterable(map(_QUOTED.findall, sources))
        self._known_roles = _KNOWN_ROLES.union(quoted)
        self._all_spellings = "\0".join(self._ids)
        self._beginnings = {text[:n] for text in self._ids for n in range(1, len(text))}
        self._ends = {text[n:] for text in self._ids for n in range(1, len(text))}
        self._make_second(added)

    def hide(self, messages: Messages) -> tuple[list[tuple[str, str]], dict[str, str]]:
        """Messages with placeholders, and what each placeholder stands for.

        Raises:
            InvalidParameterError: no character is left to be a placeholder.
        """
        found = self._in_client_text
        if not any(found.search(t) for m in messages for t in m) and not any(
            self._may_compose(role) for role, _ in messages
        ):
            return list(messages), {}
        used = self._reserved.union(*chain.from_iterable(messages))
        free = (char for area in _PRIVATE_USE for char in map(chr, area) if char not in used)
        chars: dict[str, str] = {}

        def char_for(text: str) -> str:
            if text not in chars:
                char = next(free, None)
                if char is None:
                    reason = "it uses every private-use character, so that none is left"
                    raise InvalidParameterError([("chat.messages", reason)])
                chars[text] = char
            return chars[text]

        hidden = [
            (
                char_for(role) if self._may_compose(role) else _sub(found, char_for, role),
                _sub(found, char_for, content),
            )
            for role, content in messages
        ]
        return hidden, {char: text for text, char in chars.items()}

    def encode(self, rendered: str, placeholders: Mapping[str, str]) -> list[int]:
        """Token ids of a rendered conversation; special ids come from the template alone.

        Where no client text is in doubt these are the library's ids of the whole text.

        Raises:
            InvalidParameterError: the tokenizer makes a special id of ordinary text.
        """
        if not placeholders:
            ids = self._tokenizer.encode(rendered, add_special_tokens=False)
            spelt = [self._ids.get(m[0]) for m in self._in_rendered_text.finditer(rendered)]
            # Not so if, say, a normalizer makes a special token of another spelling.
            if list(filter(self._guarded.__contains__, ids)) == [
                token for token in spelt if token in self._guarded
            ]:
                return ids
        renamed = _sub(self._in_rendered_text, lambda text: self._aliases.get(text, text), rendered)
        for gap in ("", self._gap):
            shown = {char: gap.join(text) for char, text in placeholders.items()}
            strict = self._encode_strictly(reveal(renamed, shown))
            if strict is not None:
                return strict
        reason = "it has text that the tokenizer takes for a special token"
        raise InvalidParameterError([("chat.messages", reason)])

    def _may_compose(self, role: str) -> bool:
        """Whether a template that writes '<|' + role + '|>' may write a special token with it."""
        return role not in self._known_roles and (
            role in self._all_spellings
            or any(
                role[n:] in self._beginnings or role[: n + 1] in self._ends
                for n in range(len(role))
            )
        )

    def _make_second(self, added: Mapping[int, AddedToken]) -> None:
        """The tokenizer that knows special tokens by other names only."""
        first = self._tokenizer.backend
        # These share the model and the rest with the first: no second copy of the vocabulary.
        self._second = tokenizers.Tokenizer(first.model)
        if first.normalizer is not None:
            self._second.normalizer = first.normalizer
        if first.pre_tokenizer is not None:
            self._second.pre_tokenizer = first.pre_tokenizer
        # Plain ASCII, which normalizers leave alone.
        secret = secrets.token_hex(16)
        self._gap = f"<|{secret}|>"
        self._alias_start = f"<|{secret}:"
        self._aliases = {text: f"{self._alias_start}{own}|>" for text, own in self._ids.items()}
        # New ids follow the number of tokens, which ids with gaps are beyond.
        ids = first.get_vocab(with_added_tokens=False).values()
        filler = range(max(ids, default=-1) + 1 - len(ids))
        self._second.add_tokens([AddedToken(f"<|{secret}/{n}|>") for n in filler])
        self._second.add_tokens([AddedToken(self._gap, normalized=False)])
        self._second.add_tokens([self._renamed(entry) for entry in added.values()])
        # Ids of the first tokenizer by those of the second.
        number = self._second.token_to_id
        self._alias_ids = {number(self._aliases[text]): own for text, own in self._ids.items()}
        self._other_ids = {
            number(entry.content): own
            for own, entry in added.items()
            if entry.content not in self._ids
        }

    def _renamed(self, entry: AddedToken) -> AddedToken:
        alias = self._aliases.get(entry.content)
        return AddedToken(
            alias or entry.content,
            lstrip=entry.lstrip,
            rstrip=entry.rstrip,
            normalized=entry.normalized,
            # Of a special token this was looked at when the alias was put in.
            single_word=entry.single_word and alias is None,
        )

    def _encode_strictly(self, text: str) -> list[int] | None:
        """Ids of a text with aliases, or None if a special id has come from anything else."""
        gap = self._second.token_to_id(self._gap)
        ids: list[int] = []
        num_aliases = 0
        for token in encode_plainly(self._second, text):
            special = self._alias_ids.get(token)
            if special is not None:
                num_aliases += 1
                ids.append(special)
            elif token != gap:
                ids.append(self._other_ids.get(token, token))
                if ids[-1] in self._guarded:
                    return None
        # One that was not found would stand there as text.
        return ids if num_aliases == text.count(self._alias_start) else None


def reveal(text: str, placeholders: Mapping[str, str]) -> str:
    """``text`` with the client's own spellings again."""
    return text.translate({ord(char): original for char, original in placeholders.items()})


def _any_of(patterns: Mapping[str, str]) -> re.Pattern[str]:
    """Matches any, of those that begin at one place the longest; of none it never matches."""
    longest_first = sorted(patterns, key=len, reverse=True)
    return re.compile("|".join(patterns[text] for text in longest_first) or "(?!)")


def _in_text(entry: AddedToken) -> str:
    text = re.escape(entry.content)
    return rf"(?<!\w){text}(?!\w)" if entry.single_word else text


def _sub(pattern: re.Pattern[str], replace: Callable[[str], str], text: str) -> str:
    return pattern.sub(lambda match: replace(match[0]), text)
