"""What of a model's config is understood, what is refused by name, and the plan that follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelError
from engine.models.config import ModelConfig, load_config
from engine.models.packing import EMBEDDING, HEAD, reference_plan
from tests.fixtures.models import LLAMA3, ROPES, VOCAB, Shape, write_m_rand

Changes = Mapping[str, Any]
Load = Callable[..., ModelConfig]


@pytest.fixture
def load(m_rand_dir: Path, tmp_path: Path) -> Load:
    """M-rand's config with other members, read: `load(changes, generation, max_context)`."""
    base = json.loads((m_rand_dir / "config.json").read_text())

    def change_and_load(
        changes: Changes,
        generation: Changes | None = None,
        max_context: int | None = None,
    ) -> ModelConfig:
        config = {key: value for key, value in {**base, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_config(tmp_path, max_context)

    return change_and_load


# -- refusals -------------------------------------------------------------------------------------

WHOLE = "a whole number from 1 to 2147483647"
NUMBER = r"a number above 0 and up to 1e\+30"
REFUSED: Mapping[str, tuple[Changes, str, str]] = {
    "other architecture": (
        {"architectures": ["MistralForCausalLM"]},
        r'architectures = \["MistralForCausalLM"\]',
        r'\["LlamaForCausalLM"\]',
    ),
    "no architecture": ({"architectures": ...}, "architectures = nothing", "Llama"),
    "activation": ({"hidden_act": "gelu"}, 'hidden_act = "gelu"', '"silu"'),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config = ", "null"),
    "absent": ({"hidden_size": ...}, "hidden_size = nothing", WHOLE),
    "null": ({"vocab_size": None}, "vocab_size = null", WHOLE),
    "zero": ({"num_hidden_layers": 0}, "num_hidden_layers = 0", WHOLE),
    "negative": ({"intermediate_size": -1}, "intermediate_size = -1", WHOLE),
    "too large": ({"vocab_size": 1 << 31}, "vocab_size = 2147483648", WHOLE),
    "fraction": ({"hidden_size": 64.0}, "hidden_size = 64.0", WHOLE),
    "boolean for a number": ({"hidden_size": True}, "hidden_size = true", WHOLE),
    "text for a number": ({"hidden_size": "64"}, 'hidden_size = "64"', WHOLE),
    "long text": ({"hidden_size": "x" * 100_000}, "hidden_size = ", WHOLE),
    "NaN": ({"rms_norm_eps": float("nan")}, "rms_norm_eps = NaN", NUMBER),
    "infinite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps = Infinity", NUMBER),
    "huge": ({"rope_theta": 10**400}, "rope_theta = 1000", NUMBER),
    "no eps": ({"rms_norm_eps": 0}, "rms_norm_eps = 0", NUMBER),
    "flag is text": ({"tie_word_embeddings": "yes"}, 'tie_word_embeddings = "yes"', "true, false"),
    "flag is a number": ({"mlp_bias": 1}, "mlp_bias = 1", "true, false or null"),
    "KV heads": ({"num_key_value_heads": 3}, "num_key_value_heads = 3", "a divisor of 4"),
    "odd head": ({"head_dim": 15}, "head_dim = 15", "an even number"),
    "heads don't divide": (
        {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 1},
        "head_dim = null",
        "a number: 5 heads don't divide 64",
    ),
    "window": ({"sliding_window": 32}, "sliding_window = 32", "null, or max-context 4096"),
    "no window": ({"sliding_window": 0}, "sliding_window = 0", WHOLE),
    "stop id": ({"eos_token_id": [1, 512]}, r"eos_token_id = \[1, 512\]", "from 0 to 511"),
    "stop text": ({"eos_token_id": "</s>"}, 'eos_token_id = "</s>"', "from 0 to 511"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusal_names_file_key_value_and_what_is_allowed(case: str, load: Load) -> None:
    """What we can't compute right is an error that says what to look for where."""
    changes, shown, allowed = REFUSED[case]
    with pytest.raises(ModelError, match=f"/config.json: {shown}.* is not supported.*{allowed}"):
        load(changes, {})


def test_long_values_are_cut_in_errors(load: Load) -> None:
    """An error stays readable."""
    with pytest.raises(ModelError) as caught:
        load({"hidden_size": "x" * 100_000})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_file_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    """The error names the file."""
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"/config.json: "):
        load_config(tmp_path)


def test_missing_directory_and_file_are_named(tmp_path: Path) -> None:
    """Each with its path."""
    with pytest.raises(ModelError, match="model directory /nowhere does not exist"):
        load_config(Path("/nowhere"))
    with pytest.raises(ModelError, match=r"/config.json is missing"):
        load_config(tmp_path)


@pytest.mark.parametrize("wanted", [-1, 0, 4097])
def test_context_beyond_the_models_own_is_refused(wanted: int, load: Load) -> None:
    """The error names both, and where the limit stands."""
    expected = f"max-context {wanted} is not allowed: 1 to 4096, .*max_position_embeddings in /"
    with pytest.raises(ModelError, match=expected):
        load({}, max_context=wanted)


# -- sliding windows and stop ids -----------------------------------------------------------------


@pytest.mark.parametrize(("window", "context"), [(4096, None), (9999, None), (32, 32), (64, 63)])
def test_d14_window_that_is_never_left_loads(window: int, context: int | None, load: Load) -> None:
    """Where no prompt can be longer than the window, full attention is exact."""
    config = load({"sliding_window": window}, max_context=context)
    assert config.max_context == (context or 4096)
    assert config.digest() == load({}).digest()


def test_d14_window_smaller_than_the_context_is_refused(load: Load) -> None:
    """One token more than the window is one too many."""
    with pytest.raises(ModelError, match=r"sliding_window = 32 .* max-context 33"):
        load({"sliding_window": 32}, max_context=33)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (None, None, ()),
        (2, {"eos_token_id": [2, 5]}, (2, 5)),
        (2, {"eos_token_id": 5}, (5,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"temperature": 0.6, "top_p": 0.9}, (2,)),
    ],
)
def test_stop_ids_come_from_the_generation_config_where_it_has_some(
    config: Any, generation: Changes | None, expected: tuple[int, ...], load: Load
) -> None:
    """Else from the config; a number is a list of one."""
    assert load({"eos_token_id": config}, generation).eos_token_ids == expected


def test_bad_stop_id_names_the_file_that_has_it(load: Load) -> None:
    """Not the one whose ids are fine."""
    with pytest.raises(ModelError, match=r"generation_config.json: eos_token_id = 600 "):
        load({"eos_token_id": 1}, {"eos_token_id": 600})


# -- rotary embeddings ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROPES)
def test_h9_dialects_of_one_rope_are_one_model(kind: str, tmp_path: Path) -> None:
    """Wherever the type and the base stand, the digest is the same."""
    configs = []
    for number, (layout, changes) in enumerate(ROPES[kind]):
        folder = write_m_rand(tmp_path / str(number), layout=layout, config=changes)
        configs.append(load_config(folder))
    assert {config.rope.kind for config in configs} == {kind}
    assert len({config.rope for config in configs}) == 1
    assert len({config.digest() for config in configs}) == 1


def test_h9_every_member_of_a_rope_is_in_digest_and_label(load: Load) -> None:
    """A change of any of them is another model and another KV layout."""
    ropes: list[Changes] = [{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}]
    ropes += [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", **LLAMA3}]
    ropes += [
        {"rope_type": "llama3", **LLAMA3, key: value * 1.5}
        for key, value in LLAMA3.items()
    ]  # fmt: skip
    configs = [load({"rope_scaling": rope}) for rope in ropes]
    configs.append(load({"rope_theta": 20000.0}))
    for one, two in combinations(configs, 2):
        assert one.digest() != two.digest()
        assert one.rope.label != two.rope.label


def test_h9_null_and_empty_ropes_are_the_default(load: Load) -> None:
    """As is one without a base, which is 10,000 then."""
    for changes in (
        {"rope_scaling": ...},
        {"rope_scaling": {}},
        {"rope_scaling": {"type": None, "factor": None}},
        {"rope_theta": ...},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 10000}},
        {"partial_rotary_factor": 1.0},
    ):
        assert load(changes).rope == load({}).rope


ROPES_REFUSED: Mapping[str, tuple[Changes, str]] = {
    "dynamic": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        'rope_scaling.type = "dynamic" .* "default", "linear", "llama3"',
    ),
    "yarn": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 'rope_scaling.rope_type = "yarn"',
    ),
    "yarn, newer": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        'rope_parameters.rope_type = "yarn"',
    ),
    "type is a list": ({"rope_scaling": {"type": ["linear"]}}, r"rope_scaling.type = \["),
    "not an object": ({"rope_scaling": 4.0}, "rope_scaling = 4.0 .* an object or null"),
    "types contradict": (
        {"rope_scaling": {"type": "linear", "rope_type": "llama3", **LLAMA3}},
        'rope_scaling.type = "linear" .* "llama3", as rope_type says',
    ),
    "a type contradicts": (
        {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
        'rope_scaling.type = "yarn" .* "linear", as rope_type says',
    ),
    "dialects contradict": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
        "rope_scaling = .* the same as rope_parameters",
    ),
    "bases contradict": (
        {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500000.0}},
        "rope_theta = 10000.0 .* 500000, as it says elsewhere",
    ),
    "lengths contradict": (
        {
            "original_max_position_embeddings": 32,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3},
        },
        "original_max_position_embeddings = 32 .* 64, as",
    ),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor = nothing .* number"),
    "factor below 1": (
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        "rope_scaling.factor = 0.5 .* from 1 on",
    ),
    "bands the wrong way": (
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
        "rope_scaling.high_freq_factor = 4.0 .* above low_freq_factor = 4",
    ),
    "no original length": (
        {
            "rope_scaling": {
                "rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None,
            }
        },
        "rope_scaling.original_max_position_embeddings = null",
    ),
    "unknown member": (
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}},
        "rope_scaling.beta_fast = 32 .* null",
    ),
    "factor without a type": ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor = 2.0 "),
    "part of the head": (
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor = 0.5 .* 1 or null",
    ),
    "part of the head, older": (
        {"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25 .* 1 or null",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ROPES_REFUSED)
def test_h9_rope_that_is_unknown_or_contradicts_itself_is_refused(case: str, load: Load) -> None:
    """By its full name; none is computed as if it were the default."""
    changes, expected = ROPES_REFUSED[case]
    with pytest.raises(ModelError, match=f"/config.json: {expected}"):
        load(changes)


def test_h9_llama3_slows_long_waves_only(load: Load) -> None:
    """Short ones keep their frequency, long ones are divided, and between lies a blend."""
    plain = load({}).rope.frequencies(16)
    scaled = load({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}).rope.frequencies(16)
    ratio = scaled / plain
    waves = 2 * np.pi / plain
    assert ratio[waves < 64 / 4].tolist() == [1.0]
    np.testing.assert_allclose(ratio[waves > 64], 1 / 8, rtol=1e-6)
    blended = ratio[(waves >= 64 / 4) & (waves <= 64)]
    assert len(blended) == 2
    assert np.all((blended > 1 / 8) & (blended < 1))


# -- plans ----------------------------------------------------------------------------------------


def test_h13_older_and_newer_layout_are_one_model(tmp_path: Path) -> None:
    """`torch_dtype` or `dtype`, rope beside or inside: same config, same plan."""
    older = load_config(write_m_rand(tmp_path / "4", layout="v4"))
    newer = load_config(write_m_rand(tmp_path / "5", layout="v5"))
    assert older == newer
    assert reference_plan(older) == reference_plan(newer)


def test_h12_dtype_keys_change_nothing(load: Load) -> None:
    """The weight files say what they hold, and all is computed in float32."""
    for changes in ({"torch_dtype": "float16"}, {"dtype": "bfloat16"}, {"torch_dtype": ...}):
        assert load(changes) == load({})


@pytest.mark.parametrize("shape", [Shape(kv_heads=1), Shape(), Shape(kv_heads=4)])
def test_h14_kv_bytes_follow_the_kv_heads(shape: Shape, tmp_path: Path) -> None:
    """Not the query heads."""
    config = load_config(write_m_rand(tmp_path / "m", shape=shape))
    assert config.kv_elements_per_token == 4 * 2 * shape.kv_heads * 16


def test_h7_head_dim_is_what_the_config_says(tmp_path: Path) -> None:
    """Hidden size and heads say nothing about it."""
    shape = Shape(hidden=72, heads=5, kv_heads=1)
    config = load_config(write_m_rand(tmp_path / "m", shape=shape))
    assert config.head_dim == 16
    shapes = {item.name: list(item.shape) for item in reference_plan(config).tensors}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == [80, 72]
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == [16, 72]
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == [72, 80]


def test_h8_each_bias_flag_adds_its_tensors(load: Load) -> None:
    """To plan and digest, for the projections that it speaks of."""
    plain, attention, mlp = (
        load(changes) for changes in ({}, {"attention_bias": True}, {"mlp_bias": True})
    )
    assert len({config.digest() for config in (plain, attention, mlp)}) == 3

    def biases(config: ModelConfig) -> dict[str, list[int]]:
        return {
            item.name.removeprefix("model.layers.0."): list(item.shape)
            for item in reference_plan(config).tensors
            if item.name.startswith("model.layers.0.") and item.name.endswith(".bias")
        }

    assert biases(plain) == {}
    assert biases(attention) == {
        "self_attn.q_proj.bias": [64],
        "self_attn.k_proj.bias": [32],
        "self_attn.v_proj.bias": [32],
        "self_attn.o_proj.bias": [64],
    }
    assert biases(mlp) == {
        "mlp.gate_proj.bias": [128], "mlp.up_proj.bias": [128], "mlp.down_proj.bias": [64],
    }  # fmt: skip


def test_h1_tied_head_has_the_embeddings_place(load: Load) -> None:
    """One matrix under two names, so the segment is smaller by one."""
    tied, own = (
        reference_plan(load({"tie_word_embeddings": flag})) for flag in (True, None)
    )  # fmt: skip
    places = {item.name: (item.offset, item.num_bytes) for item in tied.tensors}
    assert places[HEAD] == places[EMBEDDING]
    assert {item.name for item in tied.tensors} == {item.name for item in own.tensors}
    assert own.segment_bytes - tied.segment_bytes == 4 * VOCAB * 64
