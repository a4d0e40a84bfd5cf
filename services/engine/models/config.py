"""HF `config.json` to what our decoder needs. What we can't compute right is refused by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError


@dataclass(frozen=True)
class ModelConfig:
    """Every field that changes the mathematics of a decoder of the Llama family."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context: int
    rms_eps: float
    rope_theta: float
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]

    def digest(self) -> str:
        """Hex SHA-256 of the canonical form; goes into the stamp.

        Length limit and stop ids are left out: they change no KV byte.
        """
        fields = asdict(self)
        del fields["max_context"], fields["eos_token_ids"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @property
    def kv_elements_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: not JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return data


class _Fields:
    """Typed reads of config.json; every refusal names file, key, value and what is allowed."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self._path, self.raw = path, raw

    def refuse(self, key: str, allowed: str) -> ModelError:
        shown = str(self.raw.get(key))[:80]
        return ModelError(f"{self._path}: {key} = {shown} is not supported: {allowed}")

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value < 1 << 31:
            raise self.refuse(key, "a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(key, "a positive number")
        return float(value)

    def must_be(self, key: str, *allowed: Any) -> None:
        if self.raw.get(key, allowed[0]) not in allowed:
            raise self.refuse(key, " or ".join(json.dumps(value) for value in allowed))


def _rope_theta(fields: _Fields) -> float:
    """Both dialects: `rope_theta` beside `rope_scaling`, or inside `rope_parameters`."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.raw.get(key) or {}
        if not isinstance(rope, dict):
            raise fields.refuse(key, "an object or null")
        kinds = {rope.get("type", "default"), rope.get("rope_type", "default")}
        if kinds != {"default"}:
            raise fields.refuse(key, 'rope type "default"')
        if key == "rope_parameters" and "rope_theta" in rope:
            inner = _Fields(fields._path, rope)
            return inner.number("rope_theta")
    return fields.number("rope_theta", 10000.0)


def _eos_token_ids(fields: _Fields, model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json decides when it names some, else config.json."""
    value = fields.raw.get("eos_token_id")
    generation = model_dir / "generation_config.json"
    if generation.exists():
        value = _read_json(generation).get("eos_token_id", value)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise fields.refuse("eos_token_id", f"token ids below {vocab_size}")
    return tuple(ids)


def load_config(model_dir: Path, max_context: int | None = None) -> ModelConfig:
    """Read and check a model directory's config. Raises ModelError.

    `max_context` lowers the model's own limit; a higher one is refused.
    """
    if not model_dir.is_dir():
        raise ModelError(f"model directory {model_dir} does not exist")
    fields = _Fields(model_dir / "config.json", _read_json(model_dir / "config.json"))
    architectures = fields.raw.get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise fields.refuse("architectures", '["LlamaForCausalLM"]')
    fields.must_be("hidden_act", "silu")
    fields.must_be("attention_bias", False, None)
    fields.must_be("mlp_bias", False, None)
    fields.must_be("sliding_window", None)
    fields.must_be("quantization_config", None)
    heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", heads)
    hidden = fields.positive("hidden_size")
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of {heads} attention heads")
    head_dim = fields.positive("head_dim", max(1, hidden // heads))
    if head_dim % 2:
        raise fields.refuse("head_dim", "an even number")
    own_context = fields.positive("max_position_embeddings")
    if max_context is not None and max_context > own_context:
        raise ModelError(f"max-context {max_context} is not allowed: at most {own_context}")
    vocab = fields.positive("vocab_size")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=fields.positive("num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.positive("intermediate_size"),
        vocab_size=vocab,
        max_context=max_context or own_context,
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(fields),
        tie_embeddings=fields.raw.get("tie_word_embeddings") is True,
        eos_token_ids=_eos_token_ids(fields, model_dir, vocab),
    )
