"""Every kind of model that loads computes what independent implementations compute.

The whole way from files to tokens, without the processes: config, pack plan, weight files, the
reference executor over KV blocks. Expected tokens are the numpy oracle's, which is itself compared
with transformers where transformers takes the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cachewarmd.client import load_private
from cachewarmd.errors import ModelFilesError
from engine.block_table import BlockTable, PrivatePool
from engine.executor.base import Chunk
from engine.executor.reference import ReferenceExecutor
from engine.models.config import load_config
from engine.models.packing import reference_plan
from engine.tokenizer import Tokenizer
from tests.fixtures.models import (
    FIRST_BYTE,
    M_LONG,
    ROPES,
    VOCAB,
    Head,
    Shape,
    logits_numpy,
    write_m_draft,
    write_m_long,
    write_m_rand,
)
from tests.fixtures.oracle import MARGIN, leads
from tests.fixtures.weight_files import add_old_copy

BLOCK = 16
SHORT = np.random.default_rng(0).integers(3, 512, 21).tolist()
# Three times the original context of the scaled ropes.
LONG = np.random.default_rng(0).integers(3, 512, 192).tolist()
STEPS = 8


class Runner:
    """A model directory in the reference executor, with KV blocks of its own."""

    def __init__(self, folder: Path, capacity: int) -> None:
        config = load_config(folder)
        plan = reference_plan(config)
        self._memory = load_private(folder, "", plan).memory
        self.executor = ReferenceExecutor(config, plan, self._memory, BLOCK)
        size = self.executor.block_bytes
        pool = PrivatePool(np.zeros(-(-capacity // BLOCK) * size, np.uint8), size)
        self._table = BlockTable(pool, BLOCK)
        self._table.make_writable(0, capacity)

    def logits(self, ids: Sequence[int], start: int) -> npt.NDArray[np.float32]:
        """Of the last of these tokens, which stand at `start` and after."""
        (result,) = self.executor.forward([Chunk(ids, start, start, self._table, True)])
        assert result is not None
        return result


def greedy(folder: Path, prompt: Sequence[int], steps: int, chunk: int = 50) -> list[int]:
    """Greedy ids: prefill in chunks, then token by token."""
    runner = Runner(folder, len(prompt) + steps)
    ids = list(prompt)
    for start in range(0, len(prompt), chunk):
        logits = runner.logits(ids[start : start + chunk], start)
    for _ in range(steps):
        ids.append(int(logits.argmax()))
        logits = runner.logits(ids[-1:], len(ids) - 1)
        assert np.isfinite(logits).all()
    return ids[len(prompt) :]


def check(folder: Path) -> list[list[int]]:
    """The executor's answers to both prompts are the oracle's; returns them."""
    answers = []
    for prompt in (SHORT, LONG):
        answers.append(greedy(folder, prompt, STEPS))
        assert leads(folder, prompt, answers[-1]).min() > MARGIN
    return answers


def check_transformers(folder: Path) -> None:
    """The oracle's logits are transformers' at every position."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        theirs = model(torch.tensor([LONG])).logits[0].double().numpy()
    # Its rotary angles are float32 whatever the dtype.
    assert np.abs(logits_numpy(folder, LONG) - theirs).max() < 1e-3


quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


# -- shapes ---------------------------------------------------------------------------------------


def test_h7_head_dim_that_hidden_size_does_not_tell(tmp_path: Path) -> None:
    """Hidden 72, 5 heads of 16, one KV head."""
    folder = write_m_rand(tmp_path / "m", shape=Shape(hidden=72, heads=5, kv_heads=1))
    check(folder)
    assert Runner(folder, 1).executor.block_bytes == 4 * (4 * 2 * 1 * BLOCK * 16)


@quiet
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_h14_any_number_of_kv_heads(kv_heads: int, tmp_path: Path) -> None:
    """MQA, GQA and MHA; blocks have the size that the KV heads need."""
    folder = write_m_rand(tmp_path / "m", shape=Shape(kv_heads=kv_heads))
    check(folder)
    check_transformers(folder)
    assert Runner(folder, 1).executor.block_bytes == 4 * (4 * 2 * kv_heads * BLOCK * 16)


@quiet
@pytest.mark.parametrize(("attention", "mlp"), [(True, False), (False, True), (True, True)])
def test_h8_biases_are_used(attention: bool, mlp: bool, tmp_path: Path) -> None:
    """Of the attention's projections, the MLP's or both; without them the answer is another."""
    shape = Shape(attention_bias=attention, mlp_bias=mlp)
    folder = write_m_rand(tmp_path / "m", shape=shape)
    answers = check(folder)
    check_transformers(folder)
    assert answers != check(write_m_rand(tmp_path / "plain"))


@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias"])
def test_h8_biases_that_the_config_does_not_mention_are_refused(flag: str, tmp_path: Path) -> None:
    """They are not dropped in silence; flags without biases are refused as well."""
    shape = Shape(**{flag: True})
    with_biases = write_m_rand(tmp_path / "biases", shape=shape, config={flag: False})
    with pytest.raises(ModelFilesError, match=r"tensor model.*\.bias is in the weight files, but"):
        Runner(with_biases, 1)
    without = write_m_rand(tmp_path / "none", config={flag: True})
    with pytest.raises(ModelFilesError, match=r"tensor model.*\.bias is missing"):
        Runner(without, 1)


# -- rotary embeddings ----------------------------------------------------------------------------


@quiet
@pytest.mark.parametrize("kind", ROPES)
def test_h9_every_dialect_means_what_transformers_takes_it_for(kind: str, tmp_path: Path) -> None:
    """The frequencies of both are equal, wherever type and base stand."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for number, (layout, changes) in enumerate(ROPES[kind]):
        folder = write_m_rand(tmp_path / str(number), layout=layout, config=changes)
        theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(folder)).inv_freq
        ours = load_config(folder).rope.frequencies(16)
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


@quiet
@pytest.mark.parametrize("kind", ROPES)
def test_h9_tokens_of_both_dialects_are_equal(kind: str, tmp_path: Path) -> None:
    """Up to three times the original context they are the oracle's, and transformers'."""
    older, newer = (
        write_m_rand(tmp_path / layout, layout=layout, config=changes)
        for layout, changes in (ROPES[kind][2], ROPES[kind][-1])
    )
    answers = check(older)
    assert check(newer) == answers
    check_transformers(newer)
    if kind != "default":
        assert answers != check(write_m_rand(tmp_path / "plain"))


# -- heads, dtypes, layouts -----------------------------------------------------------------------

TIED: Mapping[str, Any] = {"tie_word_embeddings": True}


@quiet
@pytest.mark.parametrize("head", ["none", "embedding"])
def test_h1_tied_head_loads_without_a_head_or_with_an_equal_one(head: Head, tmp_path: Path) -> None:
    """Both give the tokens of the embedding as head."""
    folder = write_m_rand(tmp_path / "m", head=head, config=TIED)
    answers = check(folder)
    check_transformers(folder)
    assert answers != check(write_m_rand(tmp_path / "own"))


def test_h1_tied_head_that_differs_is_refused(tmp_path: Path) -> None:
    """Other implementations disagree on which of the two it is, so we don't choose."""
    folder = write_m_rand(tmp_path / "m", config=TIED)
    expected = "model.embed_tokens.weight and lm_head.weight differ, but the model's config ties"
    with pytest.raises(ModelFilesError, match=expected):
        Runner(folder, 1)


def test_h1_head_that_is_neither_there_nor_tied_is_refused(tmp_path: Path) -> None:
    """No head is made up."""
    folder = write_m_rand(tmp_path / "m", head="none")
    with pytest.raises(ModelFilesError, match=r"tensor lm_head.weight is missing"):
        Runner(folder, 1)


@quiet
@pytest.mark.parametrize("dtype", ["BF16", "MIXED"])
def test_h12_files_of_any_mix_of_floats_load(dtype: str, tmp_path: Path) -> None:
    """F16 with F32 norms up to 1e5 and a BF16 embedding give finite logits and right tokens."""
    folder = write_m_rand(tmp_path / "m", dtype=dtype, layout="v5")
    check(folder)


def test_h13_older_and_newer_layout_give_the_same_prompts_and_tokens(tmp_path: Path) -> None:
    """Where a template, a dtype or a rope stands makes no difference."""
    older = write_m_rand(tmp_path / "4", layout="v4")
    newer = write_m_rand(tmp_path / "5", layout="v5")
    assert not (newer / "special_tokens_map.json").exists()
    text = "The cache keeps the keys <|eos|> of é🙂"
    assert Tokenizer(older).encode(text) == Tokenizer(newer).encode(text)
    assert check(older) == check(newer)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_h3_shards_are_one_model(shards: int, tmp_path: Path, m_rand_dir: Path) -> None:
    """However it is cut, and whatever lies beside it, the tokens are the same."""
    folder = write_m_rand(tmp_path / "m", shards=shards)
    (folder / "consolidated.safetensors").write_bytes(b"junk")
    assert leads(m_rand_dir, SHORT, greedy(folder, SHORT, STEPS)).min() > MARGIN


@pytest.mark.parametrize(
    ("name", "shard"), [("lm_head.weight", 1), ("model.embed_tokens.weight", 2)]
)
def test_h3_old_copies_that_the_index_rules_out_do_not_count(
    name: str, shard: int, tmp_path: Path, m_rand_dir: Path
) -> None:
    """Neither before nor after the right one."""
    folder = write_m_rand(tmp_path / "m", shards=2)
    add_old_copy(folder, name, f"model-0000{shard}-of-00002.safetensors")
    assert leads(m_rand_dir, SHORT, greedy(folder, SHORT, STEPS)).min() > MARGIN


# -- special models -------------------------------------------------------------------------------


def test_second_model_and_drafts_answer_as_they_should(tmp_path: Path, m_rand_dir: Path) -> None:
    """M-rand2 otherwise, the equal draft the same, the adversarial one always the next token."""
    answer = check(m_rand_dir)
    assert check(write_m_rand(tmp_path / "2", variant=1)) != answer
    assert check(write_m_draft(tmp_path / "equal")) == answer
    adversary = Runner(write_m_draft(tmp_path / "adversary", adversarial=True), len(SHORT))
    best = logits_numpy(m_rand_dir, SHORT).argmax(axis=1)
    proposed = [int(adversary.logits([token], at).argmax()) for at, token in enumerate(SHORT)]
    assert proposed == [token + 1 if token < VOCAB - 1 else FIRST_BYTE for token in best]


def test_long_context_model_is_right_and_small(tmp_path: Path) -> None:
    """M-long equals the oracle, and a token takes 512 bytes where KV is bfloat16."""
    folder = write_m_long(tmp_path / "long")
    config = load_config(folder)
    assert config.max_context == 131072
    assert 2 * config.kv_elements_per_token == 512
    assert (config.num_layers, config.num_kv_heads) == (M_LONG.layers, M_LONG.kv_heads)
    check(folder)


def test_long_context_model_sees_its_first_token_from_afar(tmp_path: Path) -> None:
    """After 1,500 tokens another beginning still moves the logits well beyond rounding."""
    folder = write_m_long(tmp_path / "long")
    prompt = np.random.default_rng(1).integers(3, 512, 1500).tolist()
    logits = []
    for first in (5, 6):
        runner = Runner(folder, len(prompt))
        prompt[0] = first
        for start in range(0, len(prompt), 500):
            last = runner.logits(prompt[start : start + 500], start)
        logits.append(last)
    assert np.abs(logits[0] - logits[1]).max() > 1e-2
