"""Tests of the tokenizer and of piecewise detokenisation."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from engine.tokenizer import IncrementalDetokenizer, Tokenizer, TokenizerError
from tests.fixtures.models import EOS, VOCAB, byte_token, write_tokenizer
from tests.fixtures.tokenizers import T_ADD_TOKENS, write_t_add, write_t_bf, write_t_bl

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


@pytest.fixture(scope="module")
def t_bf(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte fallback, BOS in front."""
    return Tokenizer(write_t_bf(tmp_path_factory.mktemp("t-bf")))


@pytest.fixture(scope="module")
def t_bl(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level, ids with gaps, BOS in front."""
    return Tokenizer(write_t_bl(tmp_path_factory.mktemp("t-bl")))


@pytest.fixture(scope="module")
def t_add(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Added tokens of every flag."""
    return Tokenizer(write_t_add(tmp_path_factory.mktemp("t-add")))


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
    (tmp_path / "tokenizer_config.json").unlink()  # it has add_bos_token = false
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


def configure(folder: Path, **keys: object) -> Tokenizer:
    """The tokenizer of ``folder`` with keys of tokenizer_config.json set, or removed by None."""
    path = folder / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return Tokenizer(folder)


@pytest.mark.parametrize("write", [write_t_bf, write_t_bl])
def test_a7_one_bos_for_raw_text(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """A text gets one BOS, also one that begins with it spelt out; further ones are the text's."""
    tokenizer = Tokenizer(write(tmp_path))
    bos = tokenizer.special_tokens["bos_token"]
    assert tokenizer.encode("the fox").count(0) == 1
    assert tokenizer.encode(f"{bos}the fox") == [0, *tokenizer.encode(f"{bos}the fox", False)[1:]]
    assert tokenizer.encode(f"{bos}the fox").count(0) == 1
    assert tokenizer.encode(f"{bos}{bos}the").count(0) == 2
    assert tokenizer.encode("") == [0] == tokenizer.encode(bos)


@pytest.mark.parametrize("as_object", [False, True])
def test_a7_add_bos_token(tmp_path: Path, as_object: bool) -> None:
    """add_bos_token takes the post-processor's BOS away or adds the one it does not write."""
    bos = {"content": "<s>", "lstrip": False} if as_object else "<s>"
    with_bos = Tokenizer(write_t_bf(tmp_path / "with")).encode("the fox")
    without = configure(tmp_path / "with", add_bos_token=False, bos_token=bos)
    assert without.encode("the fox") == with_bos[1:]
    assert without.encode("<s>the") == [0, *with_bos[1:2]]
    assert not without.adds_bos

    path = write_t_bf(tmp_path / "plain") / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    assert configure(tmp_path / "plain", bos_token=bos).encode("the fox") == with_bos[1:]
    added = configure(tmp_path / "plain", add_bos_token=True)
    assert added.encode("the fox") == with_bos
    assert added.encode("<s>the fox").count(0) == 1
    assert added.encode("the fox", add_special_tokens=False) == with_bos[1:]


def test_special_tokens_map_names_the_bos(tmp_path: Path) -> None:
    """Names in special_tokens_map.json count as those in tokenizer_config.json do."""
    write_t_bf(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "</s>"}}')
    assert Tokenizer(tmp_path).bos_id == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes', allowed are true and false"),
        ({"bos_token": 3}, "bos_token is 3, allowed are a string"),
        ({"add_bos_token": True, "bos_token": "<gone>"}, "no token of the vocabulary"),
    ],
)
def test_bad_tokenizer_config(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    """A value of the wrong kind is an error that names the key and what is allowed."""
    write_t_bf(tmp_path)
    with pytest.raises(TokenizerError, match=message):
        configure(tmp_path, **keys)


def test_unreadable_tokenizer_config(tmp_path: Path) -> None:
    """A tokenizer_config.json that is no JSON object is an error that names the file."""
    write_t_bf(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(content)
        with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
            Tokenizer(tmp_path)


def test_named_special_token_of_the_vocabulary_alone(tmp_path: Path) -> None:
    """A token that only the configuration calls special is one id, as in transformers."""
    path = write_t_bf(tmp_path) / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"] = []
    path.write_text(json.dumps(data))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("the</s>")[-1] == 1
    assert tokenizer.special_ids == {0, 1, 2}


def test_a_normalized_special_token_decodes_to_nothing(t_add: Tokenizer) -> None:
    """A special token whose normalised text differs from its own is skipped like any other."""
    ids = t_add.encode("a<|WIDE|>b")
    assert t_add.token_to_id("<|WIDE|>") in ids
    assert t_add.decode(ids) == "ab"
    assert t_add.decode(ids, skip_special_tokens=False) != "ab"


def test_ids_with_gaps(t_bl: Tokenizer) -> None:
    """Unused ids below the highest and ids beyond it decode to nothing; ignore_merges is kept."""
    assert t_bl.id_to_token(300) is None
    [bos, zebra] = t_bl.encode("zebra")
    assert (bos, t_bl.decode([zebra, 300, 511, zebra])) == (0, "zebrazebra")
    assert "".join(stream(t_bl, [zebra, 300, 511, zebra])) == "zebrazebra"


ADDED_TEXT = st.lists(
    st.sampled_from(
        [
            *T_ADD_TOKENS,
            *("stop", "stopwatch", "<NORM>", "<exact>", "<|im_end|>", "<|wide|>", "sword", "Ë"),
            *("a", " ", "  ", "\n", "the watch", "!", "<", "é", "🙂"),
        ]
    ),
    max_size=12,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=ADDED_TEXT)
def test_a12_ids_are_the_library_s(t_add: Tokenizer, text: str) -> None:
    """Beside words, spaces and line breaks, added tokens of every flag give the library's ids."""
    assert t_add.encode(text) == t_add_library().encode(text).ids


@lru_cache
def t_add_library() -> tokenizers.Tokenizer:
    """The library's own tokenizer of T-add."""
    with tempfile.TemporaryDirectory() as folder:
        return tokenizers.Tokenizer.from_file(str(write_t_add(Path(folder)) / "tokenizer.json"))


# ----------------------------------------------------------------------- IncrementalDetokenizer


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a12_added_tokens_stream(t_add: Tokenizer, data: st.DataObject) -> None:
    """With added tokens the pieces make what decode gives, over any cuts and after a prompt."""
    token = st.integers(0, 410) | st.integers(400, 408)
    ids = data.draw(st.lists(token, max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    assert "".join(stream(t_add, ids, cuts)) == t_add.decode(ids)
    prompt = t_add.encode("the watch")
    after = "".join(stream(t_add, ids, cuts, prompt))
    assert t_add.decode(prompt) + after == t_add.decode(prompt + ids)


@pytest.mark.parametrize("text", ["é", "語", "😀", FAMILY])
def test_a1_one_byte_at_a_time(t_bf: Tokenizer, t_bl: Tokenizer, text: str) -> None:
    """One byte a token, no piece has half a character and the pieces make decode's text."""
    for tokenizer in (t_bf, t_bl):
        prompt = tokenizer.encode("the fox")
        ids = raw_bytes(text.encode())
        pieces = stream(tokenizer, ids, prompt=prompt)
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) == text == tokenizer.decode(prompt + ids)[len("the fox") :]


@pytest.mark.parametrize("output", ["▁fox", "▁▁ ▁fox", "▁▁ ▁▁", "in g ▁a", "lo ▁▁"])
def test_a11_first_space(t_bf: Tokenizer, output: str) -> None:
    """Output that begins with spaces, or inside a word, is decode of all less the prompt's."""
    ids = [token for piece in output.split() if (token := t_bf.token_to_id(piece)) is not None]
    assert len(ids) == len(output.split())
    for prompt in ([], t_bf.encode("the quick"), [0], [*t_bf.encode("the"), *[2] * 40]):
        text = "".join(stream(t_bf, ids, prompt=prompt))
        assert text == t_bf.decode(prompt + ids)[len(t_bf.decode(prompt)) :]


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
