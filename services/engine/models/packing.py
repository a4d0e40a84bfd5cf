"""Pack plans: which tensors a decoder wants, in what form, and where in the segment.

0                     64-byte aligned
+---------------------+------------------+----  one tensor after the other
| embed_tokens.weight | layers.0.…       | …
+---------------------+------------------+----
  lm_head.weight too, where it is tied

The reference has everything as float32, row-major. The native kernels have vectors as float32 and
matrices as bfloat16 panels (`kernels/step.h`); each head is padded to whole panels, in the rows of
q, k and v and in the columns of o.

Plans follow from the config alone: no weight file is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cachewarmd.v1 import control_pb2 as pb
from engine.models.config import PANEL, ModelConfig, load_config

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
_ALIGNMENT = 64


def _tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield EMBEDDING, (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield from _linear(attention + "q_proj", q_size, hidden, config.attention_bias)
        yield from _linear(attention + "k_proj", kv_size, hidden, config.attention_bias)
        yield from _linear(attention + "v_proj", kv_size, hidden, config.attention_bias)
        yield from _linear(attention + "o_proj", hidden, q_size, config.attention_bias)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        yield from _linear(mlp + "gate_proj", ffn, hidden, config.mlp_bias)
        yield from _linear(mlp + "up_proj", ffn, hidden, config.mlp_bias)
        yield from _linear(mlp + "down_proj", hidden, ffn, config.mlp_bias)
    yield FINAL_NORM, (hidden,)
    if not config.tie_embeddings:
        yield HEAD, (config.vocab_size, hidden)


def _linear(
    name: str, rows: int, columns: int, has_bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield name + ".weight", (rows, columns)
    if has_bias:
        yield name + ".bias", (rows,)


def reference_plan(config: ModelConfig) -> pb.PackPlan:
    """All tensors as float32."""
    return _plan("reference float32", config, _as_float32)


def panel_plan(config: ModelConfig) -> pb.PackPlan:
    """Matrices as bfloat16 panels, vectors as float32: for the native kernels."""

    def item(name: str, shape: tuple[int, ...]) -> pb.PackTensor:
        if len(shape) == 1:
            return _as_float32(name, shape)
        is_head_rows = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
        row_group = config.head_dim if is_head_rows else 0
        column_group = config.head_dim if name.endswith("o_proj.weight") else 0
        return pb.PackTensor(
            name=name,
            op=pb.PACK_OP_PANELS,
            shape=shape,
            dtype="BF16",
            num_bytes=2 * _padded(shape[0], row_group) * _padded(shape[1], column_group),
            row_group=row_group,
            column_group=column_group,
        )

    return _plan("bfloat16 panels", config, item)


def _padded(size: int, group: int) -> int:
    """Each group fills whole panels; 0 = all of it is one group."""
    group = group or size
    return size // group * -(-group // PANEL) * PANEL


def _as_float32(name: str, shape: tuple[int, ...]) -> pb.PackTensor:
    return pb.PackTensor(
        name=name, op=pb.PACK_OP_CAST, shape=shape, dtype="F32", num_bytes=4 * prod(shape)
    )


def _plan(
    description: str,
    config: ModelConfig,
    make_item: Callable[[str, tuple[int, ...]], pb.PackTensor],
) -> pb.PackPlan:
    """A tied head has the embedding's place. Whoever packs then takes what the files have of the
    two and refuses two that differ.
    """
    plan = pb.PackPlan(description=description)
    offset = 0
    for name, shape in _tensors(config):
        item = make_item(name, shape)
        item.offset = offset
        plan.tensors.append(item)
        offset += -(-item.num_bytes // _ALIGNMENT) * _ALIGNMENT
    if config.tie_embeddings:
        plan.tensors.add().CopyFrom(plan.tensors[0])
        plan.tensors[-1].name = HEAD
    plan.segment_bytes = offset
    return plan


def views(plan: pb.PackPlan, memory: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors of a float32 plan in place, by name; read-only where the segment is."""
    return {
        item.name: memory[item.offset : item.offset + item.num_bytes]
        .view(np.float32)
        .reshape(tuple(item.shape))
        for item in plan.tensors
    }


def plan_for_model_dir(model_dir: Path) -> bytes:
    """Serialised plan of the default backend, for `cachewarmd-ctl warmup`. Raises ModelError."""
    return panel_plan(load_config(model_dir)).SerializeToString(deterministic=True)
