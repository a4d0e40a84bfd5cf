"""Tests of the tokenizer and of piecewise detokenisation."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError
from tests.fixtures.models import EOS, VOCAB, byte_token, write_tokenizer

FAMILY = "👩‍👩‍👧"
TEXTS = [
    "Hello, world! 12345 and 3.14",
    "你好，世界。今天天气很好",
    f"family {FAMILY} and flag 🇫🇷 done",
    "naïve café — Größe",
    "  leading,   inner and trailing  ",
    "\n\n\ttabs\r\n",
    "a\ufffdb\ufffd",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The byte-level tokenizer of the tiny models."""
    folder = tmp_path_factory.mktemp("byte-level")
    write_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A Llama-2-shaped tokenizer: ``▁`` for spaces, byte fallback, first space stripped."""
    folder = tmp_path_factory.mktemp("fallback")
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [
        *specials,
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *"abcdehlorw",
        "你",
        "▁a",
        "he",
    ]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("▁", "a"), ("h", "e")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A unigram-style tokenizer whose Metaspace decoder drops the first space."""
    folder = tmp_path_factory.mktemp("metaspace")
    vocab = [("<unk>", 0.0), *((piece, -1.0) for piece in ["▁", "▁the", "▁a", *"abcdefgt."])]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def stream(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int] | None = None, prompt: Sequence[int] = ()
) -> list[str]:
    """Pieces from feeding ``ids`` one at a time, or cut at the given places, then flushing."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt)
    places = range(len(ids) + 1) if cuts is None else sorted({0, *cuts, len(ids)})
    bounds = list(places)
    pieces = [detokenizer.feed(ids[a:b]) for a, b in pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


def raw_bytes(data: bytes) -> list[int]:
    """Ids of the tiny models' single-byte tokens."""
    return [byte_token(value) for value in data]


def fallback_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Ids of the byte-fallback tokens."""
    ids = [tokenizer.token_to_id(f"<0x{value:02X}>") for value in data]
    return [i for i in ids if i is not None]


# ------------------------------------------------------------------------------------ Tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(byte_level: Tokenizer, text: str) -> None:
    """Decoding the ids of a text gives the text back."""
    assert byte_level.decode(byte_level.encode(text)) == text


def test_special_tokens(byte_level: Tokenizer) -> None:
    """A special token written in the text is one id, and decoding skips it unless told."""
    ids = byte_level.encode("a<|eos|>b")
    assert ids == [byte_token(ord("a")), EOS, byte_token(ord("b"))]
    assert byte_level.decode(ids) == "ab"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<|eos|>b"
    assert byte_level.special_ids == {0, 1, 2}


def test_vocab_size_and_lookup(byte_level: Tokenizer) -> None:
    """The vocabulary's size counts special tokens, and lookups outside it give None."""
    assert byte_level.vocab_size == VOCAB
    assert byte_level.token_to_id("<|eos|>") == EOS
    assert byte_level.token_to_id("no such token") is None
    assert byte_level.id_to_token(VOCAB) is None


def test_post_processor_is_optional(tmp_path: Path) -> None:
    """The post-processor's special tokens come with a plain text and stay out on request."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [0], "tokens": ["<|bos|>"]}},
    }
    path.write_text(json.dumps(data))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("a") == [0, byte_token(ord("a"))]
    assert tokenizer.encode("a", add_special_tokens=False) == [byte_token(ord("a"))]


def test_saved_truncation_and_padding_are_off(tmp_path: Path) -> None:
    """Truncation and padding left in the file by a training run do not touch prompts."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    saved = tokenizers.Tokenizer.from_file(str(path))
    saved.enable_truncation(4)
    saved.enable_padding(length=8)
    saved.save(str(path))
    tokenizer = Tokenizer(tmp_path)
    assert len(tokenizer.encode("x" * 50)) == 50
    assert len(tokenizer.encode("x")) == 1


def test_missing_file(tmp_path: Path) -> None:
    """A directory without tokenizer.json is an error that names the file."""
    with pytest.raises(TokenizerError, match=r"no tokenizer file .*tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": {}}', b"\xff\xfe"])
def test_broken_file(tmp_path: Path, content: bytes) -> None:
    """A file that is not a tokenizer is an error that names the file."""
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"cannot read the tokenizer file .*tokenizer\.json"):
        Tokenizer(tmp_path)


def test_lone_surrogate(byte_level: Tokenizer) -> None:
    """A text that no UTF-8 can express is refused, not mangled."""
    with pytest.raises(TokenizerError, match="not valid Unicode"):
        byte_level.encode("a\ud800b")


# ----------------------------------------------------------------------- IncrementalDetokenizer


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_no_half_characters(byte_level: Tokenizer, text: str) -> None:
    """Fed byte by byte, no piece holds a replacement character and the pieces make the text."""
    pieces = stream(byte_level, raw_bytes(text.encode()))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_character_comes_with_its_last_byte(byte_level: Tokenizer) -> None:
    """A four-byte character appears at its fourth byte and not before."""
    assert stream(byte_level, raw_bytes("🙂a".encode())) == ["", "", "", "🙂", "a", ""]


def test_unfinished_end_is_flushed(byte_level: Tokenizer) -> None:
    """Output that ends inside a character shows one replacement character, only when flushed."""
    assert stream(byte_level, raw_bytes("a🙂".encode()[:-1])) == ["a", "", "", "", "\ufffd"]


def test_special_and_unknown_ids_add_nothing(byte_level: Tokenizer) -> None:
    """Special tokens and ids beyond the vocabulary pass silently, even inside a character."""
    first, *rest = raw_bytes("é".encode())
    ids = [VOCAB, first, EOS, VOCAB + 1000, *rest, 2_000_000]
    assert "".join(stream(byte_level, ids)) == "é" == byte_level.decode(ids)


def test_prompt_that_ends_inside_a_character(byte_level: Tokenizer) -> None:
    """Output that completes the prompt's last character gives that character whole."""
    first, *rest = raw_bytes("🙂!".encode())
    assert "".join(stream(byte_level, rest, prompt=[first])) == "🙂!"
    assert "".join(stream(byte_level, raw_bytes(b"!"), prompt=[first])) == "!"
    assert "".join(stream(byte_level, [], prompt=[first])) == ""


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ids=st.lists(st.integers(0, VOCAB + 3), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_byte_level_equals_decode(byte_level: Tokenizer, ids: list[int], cuts: list[int]) -> None:
    """For any ids, valid UTF-8 or not, and any cuts, the pieces make what decode gives."""
    places = [cut for cut in cuts if cut <= len(ids)]
    assert "".join(stream(byte_level, ids, places)) == byte_level.decode(ids)
    assert "".join(stream(byte_level, ids)) == byte_level.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=8))
def test_byte_level_text(byte_level: Tokenizer, text: str, cuts: list[int]) -> None:
    """Any text survives encoding and piecewise decoding at any cuts."""
    ids = byte_level.encode(text)
    places = [cut for cut in cuts if cut <= len(ids)]
    # A text may spell a special token; decoding skips that.
    assert "".join(stream(byte_level, ids, places)) == byte_level.decode(ids)


def test_long_invalid_run(byte_level: Tokenizer) -> None:
    """A hundred stray continuation bytes come out as they arrive, none lost."""
    ids = raw_bytes(b"\x80" * 100)
    pieces = stream(byte_level, ids)
    assert "".join(pieces) == "\ufffd" * 100 == byte_level.decode(ids)
    assert sum(map(len, pieces[:20])) >= 19


def test_cost_does_not_grow(byte_level: Tokenizer, fallback: Tokenizer) -> None:
    """The last thousand of many tokens take about as long as the first thousand."""
    for tokenizer, token in ((byte_level, byte_token(0x80)), (fallback, fallback.encode("b")[-1])):
        detokenizer = IncrementalDetokenizer(tokenizer)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(1000):
                detokenizer.feed([token])
            times.append(time.perf_counter() - start)
        assert min(times[10:]) < 5 * min(times[:10])


def test_fallback_leading_space(fallback: Tokenizer) -> None:
    """The first space of a text goes, but the first space of an output after a prompt stays."""
    ids = fallback.encode("a a")
    assert "".join(stream(fallback, ids)) == "a a"
    assert "".join(stream(fallback, ids[-1:])) == "a"
    assert "".join(stream(fallback, ids[-1:], prompt=ids[:-1])) == " a"


def test_fallback_space_tokens(fallback: Tokenizer) -> None:
    """Runs of spaces, in single-space tokens or at the start, lose only the very first one."""
    space, letter = fallback.token_to_id("▁"), fallback.token_to_id("▁a")
    assert space is not None and letter is not None
    for ids in (
        [space, letter],
        [space] * 5,
        [letter, space, space, letter],
        [space, space, letter],
    ):
        assert "".join(stream(fallback, ids)) == fallback.decode(ids)


def test_fallback_characters(fallback: Tokenizer) -> None:
    """Characters made of byte tokens come out whole once their run of byte tokens ends."""
    data = fallback_bytes(fallback, f"é{FAMILY[0]}".encode())
    letter = fallback.token_to_id("b")
    assert letter is not None
    pieces = stream(fallback, [letter, *data, letter])
    assert "".join(pieces) == f"bé{FAMILY[0]}b"
    assert not any("\ufffd" in piece for piece in pieces)


def test_fallback_long_run(fallback: Tokenizer) -> None:
    """A run of byte tokens longer than the held tail streams in whole characters."""
    text = "éあ🙂" * 20
    ids = fallback_bytes(fallback, text.encode())
    pieces = stream(fallback, ids)
    assert "".join(pieces) == text == fallback.decode(ids)
    assert max(map(len, pieces)) < 20
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    "data", [b"\x80", b"\xe4\xbd", b"a\xff\x41", b"\xff" * 40, b"\x80" + b"a" * 40]
)
def test_fallback_invalid_run(fallback: Tokenizer, data: bytes) -> None:
    """A run of byte tokens that is not UTF-8 shows a replacement character for each byte."""
    letter = fallback.token_to_id("b")
    assert letter is not None
    for ids in (
        [*fallback_bytes(fallback, data)],
        [letter, *fallback_bytes(fallback, data), letter],
        [letter, *fallback_bytes(fallback, data), 2, *fallback_bytes(fallback, data), letter],
    ):
        assert "".join(stream(fallback, ids)) == fallback.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_fallback_equals_decode(fallback: Tokenizer, data: st.DataObject) -> None:
    """With byte fallback, pieces make what decode gives, also after a prompt."""
    words = fallback.vocab_size - 259
    normal = st.integers(259, 259 + words + 3).map(lambda i: [i])
    special = st.integers(0, 2).map(lambda i: [i])
    text = st.text("é你🙂\u200d a", min_size=1, max_size=5)
    whole = text.map(lambda t: fallback_bytes(fallback, t.encode()))
    broken = st.binary(min_size=1, max_size=6).map(lambda b: fallback_bytes(fallback, b))
    parts = data.draw(st.lists(normal | special | whole | broken, max_size=12))
    # Runs past the held tail are released before they are known to be UTF-8.
    ids: list[int] = []
    run = 0
    for part in parts:
        # Neither a special token nor an id outside the vocabulary ends a run: both are nothing.
        if part[0] in fallback.fallback_bytes:
            run += len(part)
        elif part[0] >= 3 and fallback.id_to_token(part[0]) is not None:
            run = 0
        if run <= 16:
            ids += part
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    prompt = fallback.encode("hello a")
    assert "".join(stream(fallback, ids, cuts)) == fallback.decode(ids)
    assert "".join(stream(fallback, ids)) == fallback.decode(ids)
    after = "".join(stream(fallback, ids, cuts, prompt))
    assert fallback.decode(prompt) + after == fallback.decode(prompt + ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_metaspace_equals_decode(metaspace: Tokenizer, data: st.DataObject) -> None:
    """With a Metaspace decoder, pieces make what decode gives, also after a prompt."""
    token = st.integers(0, metaspace.vocab_size + 1)
    ids = data.draw(st.lists(token, max_size=30))
    prompt = data.draw(st.lists(token, max_size=40))
    assert "".join(stream(metaspace, ids)) == metaspace.decode(ids)
    after = "".join(stream(metaspace, ids, prompt=prompt))
    assert metaspace.decode(prompt) + after == metaspace.decode(prompt + ids)
