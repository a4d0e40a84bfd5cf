"""A decoder of the Llama family in plain torch float32: slow, short and obviously right.

Shapes: T tokens of the chunk, C tokens before it, H query heads, G KV heads, D head_dim.
Source: the public Llama architecture (RMSNorm, rotary in half-split order, GQA, SwiGLU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from engine.models.config import ModelConfig
from engine.models.packing import EMBEDDING, FINAL_NORM, HEAD

# (layer, new keys [G, T, D], new values [G, T, D]) -> all keys and values [G, C + T, D]
KVCache = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Decoder:
    """Weights by their HF names, float32, used in place; a tied head stands there too."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self._config = config
        self._weights = weights
        self._frequencies = torch.from_numpy(config.rope.frequencies(config.head_dim))

    def forward(self, token_ids: torch.Tensor, start: int, kv_cache: KVCache) -> torch.Tensor:
        """Run a chunk of T tokens at positions start…; their last hidden states [T, hidden]."""
        config = self._config
        hidden = F.embedding(token_ids, self._weights[EMBEDDING])
        rotary = self._rotary(start, len(token_ids))
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            normed = self._norm(hidden, prefix + "input_layernorm.weight")
            hidden = hidden + self._attention(layer, normed, start, rotary, kv_cache)
            normed = self._norm(hidden, prefix + "post_attention_layernorm.weight")
            gate = F.silu(self._linear(normed, prefix + "mlp.gate_proj"))
            up = self._linear(normed, prefix + "mlp.up_proj")
            hidden = hidden + self._linear(gate * up, prefix + "mlp.down_proj")
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[…, hidden] as `forward` returns it -> […, vocab]."""
        return F.linear(self._norm(hidden, FINAL_NORM), self._weights[HEAD])

    def _attention(
        self,
        layer: int,
        normed: torch.Tensor,
        start: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
    ) -> torch.Tensor:
        config = self._config
        prefix = f"model.layers.{layer}.self_attn."
        num_tokens = normed.shape[0]

        def project(name: str, heads: int) -> torch.Tensor:
            flat = self._linear(normed, f"{prefix}{name}_proj")
            return flat.view(num_tokens, heads, config.head_dim).transpose(0, 1)

        query = _rotate(project("q", config.num_heads), rotary)
        new_keys = _rotate(project("k", config.num_kv_heads), rotary)
        keys, values = kv_cache(layer, new_keys, project("v", config.num_kv_heads))
        group = config.num_heads // config.num_kv_heads
        query = query.reshape(config.num_kv_heads, group * num_tokens, config.head_dim)
        scores = query @ keys.transpose(1, 2) * config.head_dim**-0.5
        scores = scores.view(config.num_kv_heads, group, num_tokens, start + num_tokens)
        future = torch.ones(num_tokens, start + num_tokens, dtype=torch.bool).triu(start + 1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        mixed = weights.view(config.num_kv_heads, group * num_tokens, -1) @ values
        mixed = mixed.view(config.num_heads, num_tokens, config.head_dim).transpose(0, 1)
        return self._linear(mixed.reshape(num_tokens, -1), prefix + "o_proj")

    def _linear(self, inputs: torch.Tensor, name: str) -> torch.Tensor:
        # The pack plan has a bias exactly where the config asks for one.
        weight, bias = self._weights[name + ".weight"], self._weights.get(name + ".bias")
        return F.linear(inputs, weight, bias)

    def _norm(self, hidden: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self._config.rms_eps)
        return hidden * scale * self._weights[name]

    def _rotary(self, start: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, start + num_tokens, dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding, half-split: dimension i pairs with i + D/2."""
    cos, sin = rotary
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
