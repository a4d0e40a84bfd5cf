"""HF `config.json` to what our decoder needs. What we can't compute right is refused by name."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.models.fields import Fields, read_object
from engine.models.rope import Rope, read_rope

PANEL = 32  # outputs of a panel of packed weights; kPanel of the kernels


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
    rope: Rope
    attention_bias: bool  # of the q, k, v and o projections
    mlp_bias: bool  # of the gate, up and down projections
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


def _eos_token_ids(config: Fields, model_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """generation_config.json decides when it names some, else config.json."""
    fields = config
    path = model_dir / "generation_config.json"
    if path.exists():
        generation = Fields(path, read_object(path))
        if generation.get("eos_token_id") is not None:
            fields = generation
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        raise fields.refuse("eos_token_id", f"token ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _heads(fields: Fields, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, KV heads and the size of each."""
    heads = fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.refuse("num_key_value_heads", f"a divisor of {heads} attention heads")
    if fields.get("head_dim") is None and hidden_size % heads:
        raise fields.refuse("head_dim", f"a number: {heads} heads don't divide {hidden_size}")
    head_dim = fields.positive("head_dim", hidden_size // heads)
    if head_dim % 2:
        raise fields.refuse("head_dim", "an even number")
    return heads, kv_heads, head_dim


def _context(fields: Fields, wanted: int | None) -> int:
    own = fields.positive("max_position_embeddings")
    if wanted is not None and not 0 < wanted <= own:
        raise ModelError(
            f"max-context {wanted} is not allowed: 1 to {own}, "
            f"which is max_position_embeddings in {fields.path}"
        )
    context = own if wanted is None else wanted
    # Within its first window a token sees all earlier ones, so full attention is exact there.
    window = fields.positive("sliding_window", context)
    if window < context:
        raise fields.refuse("sliding_window", f"null, or max-context {context} and above")
    return context


def load_config(model_dir: Path, max_context: int | None = None) -> ModelConfig:
    """Read and check a model directory's config. Raises ModelError.

    `max_context` lowers the model's own limit; a higher one is refused.
    """
    if not model_dir.is_dir():
        raise ModelError(f"model directory {model_dir} does not exist")
    fields = Fields(model_dir / "config.json", read_object(model_dir / "config.json"))
    if fields.get("architectures") != ["LlamaForCausalLM"]:
        raise fields.refuse("architectures", '["LlamaForCausalLM"]')
    fields.must_be("hidden_act", "silu")
    fields.must_be("quantization_config", None)
    hidden_size = fields.positive("hidden_size")
    heads, kv_heads, head_dim = _heads(fields, hidden_size)
    vocab_size = fields.positive("vocab_size")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=fields.positive("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.positive("intermediate_size"),
        vocab_size=vocab_size,
        max_context=_context(fields, max_context),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=_eos_token_ids(fields, model_dir, vocab_size),
    )
