"""Text to token ids and back, including piecewise while tokens are still being generated."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from itertools import islice
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders

from engine.prompt_cache import PromptCache
from engine.tokenizer_config import TokenizerConfig, TokenizerError, read_tokenizer_config

__all__ = ["IncrementalDetokenizer", "Tokenizer", "TokenizerError", "encode_plainly"]

_REPLACEMENT = "\ufffd"
# Emitted tokens that later ones are decoded after: decoders look back one token at most.
_CONTEXT_TOKENS = 32
# Tokens held back while they do not yet decode to whole characters.
_MAX_HELD = 16


class Tokenizer:
    """The tokenizer of a model directory, read from its ``tokenizer.json``.

    Ids are those of the tokenizers library on the whole text, with one rule of our own: a text gets
    one BOS id in front. ``add_bos_token`` in tokenizer_config.json says whether; where it is silent
    the post-processor in tokenizer.json does. None is added to a text that begins with one itself.
    """

    def __init__(self, model_dir: Path) -> None:
        """Load ``model_dir``/tokenizer.json and the two files beside it.

        Raises:
            TokenizerError: a file is missing, unreadable or not what it should be.
        """
        config = read_tokenizer_config(model_dir)
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"there is no tokenizer file {path}")
        try:
            data = path.read_bytes()  # once: what it is known by must be what is used
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        # The library raises bare Exception for every kind of bad file.
        except Exception as error:
            raise TokenizerError(f"cannot read the tokenizer file {path}: {error}") from error
        # Files saved from a training run may carry either; a server must see whole prompts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._digest = hashlib.sha256(data).digest()
        self.prompt_cache: PromptCache | None = None
        self._bytes_by_id: dict[int, bytes] = {}
        self._make_special(config.special_tokens.values())
        self.special_tokens = config.special_tokens
        self._set_frame(config)

    def _make_special(self, texts: Iterable[str]) -> None:
        """Tokens that the configuration names are special, as in transformers.

        Only those in the vocabulary: any other would get an id that the model does not have.
        """
        added = {entry.content for entry in self._tokenizer.get_added_tokens_decoder().values()}
        named = [t for t in texts if t not in added and self._tokenizer.token_to_id(t) is not None]
        self._tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in named])

    def _set_frame(self, config: TokenizerConfig) -> None:
        """Find the ids that go before and after a text, and the BOS among them."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        # What the post-processor adds belongs to no sequence of the input.
        inside = [i for i, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        first, last = (inside[0], inside[-1] + 1) if inside else (len(encoding), len(encoding))
        prefix, suffix = encoding.ids[:first], encoding.ids[last:]
        named = config.special_tokens.get("bos_token")
        bos = None if named is None else self._tokenizer.token_to_id(named)
        if named is None and prefix:
            bos = prefix[-1]
        if config.add_bos_token is False:
            prefix = [token for token in prefix if token != bos]
        elif config.add_bos_token and bos not in prefix:
            if bos is None:
                raise TokenizerError(
                    f"{config.path}: add_bos_token is true, but bos_token is {named!r}, which is "
                    "no token of the vocabulary"
                )
            prefix = [bos, *prefix]
        self._prefix, self._suffix, self.bos_id = prefix, suffix, bos

    @property
    def adds_bos(self) -> bool:
        """Whether a text gets a BOS in front when it does not begin with one."""
        return self.bos_id is not None and self.bos_id in self._prefix

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, to be read only."""
        return self._tokenizer

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's logits may have more columns."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which decode to nothing by default."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Special tokens written out in the text become their ids. ``add_special_tokens`` adds what
        the tokenizer's post-processor puts around a text, and one BOS as the class says; pass False
        for a rendered chat template, which has them already. A long text takes seconds: call this
        in a thread then, it lets others run.

        Raises:
            TokenizerError: ``text`` holds a lone surrogate, which no UTF-8 text can.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text is not valid Unicode: {error.reason}") from error
        ids = self._encode(text)
        if not add_special_tokens:
            return ids
        has_bos = self.adds_bos and ids[:1] == [self.bos_id]
        prefix = [token for token in self._prefix if not has_bos or token != self.bos_id]
        return [*prefix, *ids, *self._suffix]

    def _encode(self, text: str) -> list[int]:
        if self.prompt_cache is not None:
            return self.prompt_cache.encode(text)
        return encode_plainly(self._tokenizer, text)

    @cached_property
    def identity(self) -> bytes:
        """Equal for tokenizers that give a text the same ids, without what is put around it."""
        named = "\0".join(sorted(self.special_tokens.values()))
        return hashlib.sha256(self._digest + f"{tokenizers.__version__}\0{named}".encode()).digest()

    def keep_prompts(self, capacity: int) -> None:
        """Remember the ids of texts from here on, in at most so many bytes; the ids are the same.

        Nothing is kept for a tokenizer whose texts can't be cut anywhere.
        """
        cache = PromptCache(self._tokenizer, partial(encode_plainly, self._tokenizer), capacity)
        if capacity and cache.is_useful:
            self.prompt_cache = cache

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary decode to nothing."""
        if skip_special_tokens:
            # Not by the library, which knows them by text and misses one that is normalized.
            ids = [token for token in ids if token not in self.special_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        """Id of the token spelt ``token`` in the vocabulary, or None."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def id_to_token(self, token: int) -> str | None:
        """Spelling of a token in the vocabulary, or None for an id outside it."""
        found = self._tokenizer.id_to_token(token)
        return None if found is None else str(found)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether text is the tokens' bytes strung together and read as UTF-8."""
        return isinstance(self._tokenizer.decoder, decoders.ByteLevel)

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token of a byte-level tokenizer stands for; empty outside the vocabulary."""
        known = self._bytes_by_id.get(token)
        if known is None:
            known = self._bytes_by_id[token] = _spelling_bytes(self.id_to_token(token) or "")
        return known

    @cached_property
    def fallback_bytes(self) -> dict[int, int]:
        """Byte value by id of the tokens ``<0x00>`` to ``<0xFF>``; empty without byte fallback."""
        probe = self.token_to_id("<0x41>")
        # Only the decoder gives the spelling its meaning.
        if probe is None or self.decode([probe, probe], skip_special_tokens=False) != "AA":
            return {}
        ids = ((self.token_to_id(f"<0x{value:02X}>"), value) for value in range(256))
        return {token: value for token, value in ids if token is not None}


def encode_plainly(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    """The library's ids of a text, with nothing put around it.

    As a batch of one: unlike ``encode`` that releases the interpreter lock. "fast" leaves out
    offsets, which nobody here reads and which cost more than the ids.
    """
    [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoding.ids
    return ids


def _byte_of_char() -> dict[str, int]:
    """Byte by the character that spells it in a byte-level vocabulary (the GPT-2 table).

    Printable Latin-1 bytes spell themselves; the others take code points from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [value for value in range(256) if value not in printable]
    spare = {chr(0x100 + index): value for index, value in enumerate(rest)}
    return {chr(value): value for value in printable} | spare


_BYTE_OF_CHAR = _byte_of_char()


def _spelling_bytes(spelling: str) -> bytes:
    """Bytes of a byte-level token; an added token is spelt in plain text instead."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in spelling)
    except KeyError:
        return spelling.encode()


def _common_length(left: str, right: str) -> int:
    """Number of characters two texts share at their start."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


class IncrementalDetokenizer:
    """Turns a stream of token ids into a stream of text.

    The pieces returned by ``feed`` and ``flush`` joined are what decoding all ids at once gives
    (with ``prompt_ids``: what decoding prompt and output gives after the prompt's own text). A
    character whose bytes are spread over several tokens comes out when its last byte arrives.
    Special tokens and ids outside the vocabulary add nothing. The cost of a token does not grow
    with the length of the text.

    Tokenizers with byte fallback decode a whole run of byte tokens to U+FFFD if any of it is not
    UTF-8, so a run is held until it ends. A run longer than 16 tokens is released early, character
    by character; if it then turns out not to be UTF-8, what was released stays as it was.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._impl: _Utf8Stream | _Window
        # A chat prompt may end with many special tokens; the text before them still counts.
        context = list(islice(filter(self._is_visible, reversed(prompt_ids)), _CONTEXT_TOKENS))
        context.reverse()
        if tokenizer.is_byte_level:
            self._impl = _Utf8Stream(tokenizer, context)
        else:
            self._impl = _Window(tokenizer, context)

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that became certain with ``token_ids``, possibly empty."""
        return self._impl.feed(list(filter(self._is_visible, token_ids)))

    def flush(self) -> str:
        """The held rest, with U+FFFD for an unfinished character; call once, after the last id."""
        return self._impl.flush()

    def _is_visible(self, token: int) -> bool:
        return token not in self._special and self._tokenizer.id_to_token(token) is not None


class _Utf8Stream:
    """Byte-level tokenizers: the tokens' bytes through an incremental UTF-8 decoder."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(map(self._bytes_of, context)))
        # A prompt may end inside a character, which its own text shows as one U+FFFD.
        self._prompt_is_cut = bool(self._decoder.getstate()[0])

    def feed(self, ids: list[int]) -> str:
        return self._without_prompt(self._decoder.decode(b"".join(map(self._bytes_of, ids))))

    def flush(self) -> str:
        return self._without_prompt(self._decoder.decode(b"", final=True))

    def _without_prompt(self, text: str) -> str:
        if not text or not self._prompt_is_cut:
            return text
        self._prompt_is_cut = False
        return text.removeprefix(_REPLACEMENT)


class _Window:
    """Any other tokenizer: decode new tokens after a few old ones and keep what is new.

    Old tokens are needed because decoders treat the first token of a text apart (its leading space
    goes). Byte-fallback tokens are collected in a run, see ``IncrementalDetokenizer``.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._decode = tokenizer.decode
        self._fallback = tokenizer.fallback_bytes
        self._context: list[int] = []
        self._context_text = ""
        self._set_context(context)
        self._pending: list[int] = []
        self._run: list[int] = []
        self._run_is_bad = False

    def feed(self, ids: list[int]) -> str:
        parts: list[str] = []
        for token in ids:
            if token in self._fallback:
                parts.append(self._feed_byte(token))
            else:
                parts.append(self._end_run())
                self._pending.append(token)
        parts.append(self._emit_pending(final=False))
        return "".join(parts)

    def flush(self) -> str:
        return self._emit_pending(final=True) + self._end_run()

    def _emit_pending(self, final: bool) -> str:
        if not self._pending:
            return ""
        text = self._after_context(self._pending)
        # Without knowing the decoder, a replacement character at the end may be half a character.
        if text.endswith(_REPLACEMENT) and not final and len(self._pending) <= _MAX_HELD:
            return ""
        self._set_context(self._pending if text else [*self._context, *self._pending])
        self._pending = []
        return text

    def _feed_byte(self, token: int) -> str:
        before = self._emit_pending(final=True)
        self._run.append(token)
        if self._run_is_bad:
            self._run.clear()
            return before + _REPLACEMENT
        data = bytes(self._fallback[i] for i in self._run)
        try:
            whole = codecs.utf_8_decode(data, "strict", False)[1]
        except UnicodeDecodeError:
            self._run_is_bad = True
            return before + self._emit_bad_run()
        if len(data) <= _MAX_HELD:
            return before
        return before + self._emit_run(whole)

    def _end_run(self) -> str:
        self._run_is_bad = False
        if not self._run:
            return ""
        try:
            bytes(self._fallback[i] for i in self._run).decode()
        except UnicodeDecodeError:
            return self._emit_bad_run()
        return self._emit_run(len(self._run))

    def _emit_run(self, count: int) -> str:
        """Emit the first ``count`` tokens of the run, which are whole characters."""
        ready, self._run = self._run[:count], self._run[count:]
        text = self._after_context(ready)
        self._set_context(ready)
        return text

    def _emit_bad_run(self) -> str:
        """Emit the run as the decoder shows one that is not UTF-8: a U+FFFD for every byte."""
        run, self._run = self._run, []
        self._set_context(run)
        return _REPLACEMENT * len(run)

    def _after_context(self, ids: list[int]) -> str:
        """Text that ``ids`` add after the context."""
        text = self._decode([*self._context, *ids])
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # The context's last character was half of one that is whole now (a prompt may end so).
        return text[_common_length(text, self._context_text) :]

    def _set_context(self, ids: list[int]) -> None:
        self._context = ids[-_CONTEXT_TOKENS:]
        self._context_text = self._decode(self._context)
