"""Tests of the tiny models and of the numpy oracle that other tests trust."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from tests.fixtures.models import (
    BOS,
    EOS,
    PAD,
    VOCAB,
    byte_token,
    chain_successor,
    greedy_numpy,
    load_weights,
    logits_numpy,
    plan_script,
    read_safetensors,
    to_bf16_bytes,
    token_bytes,
    write_m_chain,
    write_m_draft,
    write_m_long,
    write_m_rand,
    write_safetensors,
)
from tests.fixtures.oracle import leads
from tests.fixtures.weight_files import add_old_copy

PROMPTS = ["The cache keeps the keys", "What is 2+2?", "token " * 20, "é🙂"]
STEPS = 24
GOLDEN_IDS = [374, 149, 374, 374, 423, 389, 389, 316]
GOLDEN_TOKENIZER = "f7fcb277403960e43843f9be3234d3ceeb833f1fb56dba94d6091dd17ecfcf0d"


def ids_of(folder: Path, text: str) -> list[int]:
    """Token ids of a text by the model directory's own tokenizer."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return list(tokenizer.encode(text).ids)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("text", PROMPTS)
def test_oracle_matches_transformers(m_rand_dir: Path, text: str) -> None:
    """Logits and greedy ids of the oracle are transformers', and margins leave room for error."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(m_rand_dir, dtype=torch.float64)
    prompt = ids_of(m_rand_dir, text)
    ids, margins = greedy_numpy(m_rand_dir, prompt, STEPS)
    ours = logits_numpy(m_rand_dir, prompt + ids)
    with torch.no_grad():
        theirs = model(torch.tensor([prompt + ids])).logits[0].double().numpy()
    assert np.abs(ours - theirs).max() < 1e-4
    assert theirs[len(prompt) - 1 : -1].argmax(-1).tolist() == ids
    assert min(margins) > 1e-2
    assert not {BOS, EOS, PAD} & set(ids)


def test_same_arguments_same_bytes(tmp_path: Path, m_rand_dir: Path) -> None:
    """Writing M-rand twice gives identical files."""
    other = write_m_rand(tmp_path / "again")
    for path in m_rand_dir.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()


def test_weights_do_not_drift(m_rand_dir: Path) -> None:
    """The weights are those that recorded expectations were made with."""
    weights = load_weights(m_rand_dir)
    ids, _ = greedy_numpy(m_rand_dir, ids_of(m_rand_dir, PROMPTS[0]), 8)
    assert weights["lm_head.weight"].shape == (VOCAB, 64)
    assert ids == GOLDEN_IDS
    tokenizer = hashlib.sha256((m_rand_dir / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer == GOLDEN_TOKENIZER


def test_variants_differ_in_weights_only(tmp_path: Path, m_rand_dir: Path) -> None:
    """The second variant has the same files of the same size, and other weights throughout."""
    other = write_m_rand(tmp_path / "v1", variant=1)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (other / name).read_bytes() == (m_rand_dir / name).read_bytes()
    sizes = [(d / "model.safetensors").stat().st_size for d in (m_rand_dir, other)]
    assert sizes[0] == sizes[1]
    left, right = load_weights(m_rand_dir), load_weights(other)
    assert all(not np.array_equal(left[name], right[name]) for name in left)


def test_early_tokens_matter(m_rand_dir: Path) -> None:
    """Changing the first token of a long prompt changes what is generated."""
    prompt = ids_of(m_rand_dir, PROMPTS[2])
    changed = [byte_token(ord("Q")), *prompt[1:]]
    assert greedy_numpy(m_rand_dir, prompt, 16)[0] != greedy_numpy(m_rand_dir, changed, 16)[0]


def test_shards(tmp_path: Path, m_rand_dir: Path) -> None:
    """Two shards and their index hold the same tensors as the single file."""
    folder = write_m_rand(tmp_path / "sharded", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        assert name in read_safetensors(folder / file)
    whole = load_weights(m_rand_dir)
    assert index["metadata"]["total_size"] == 4 * sum(array.size for array in whole.values())
    assert all(np.array_equal(array, whole[n]) for n, array in load_weights(folder).items())


def test_bf16_option(tmp_path: Path) -> None:
    """Stored as bfloat16 the weights are half the size and within its precision."""
    folder = write_m_rand(tmp_path / "bf16", dtype="BF16")
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    exact = load_weights(write_m_rand(tmp_path / "f32"))
    for name, array in load_weights(folder).items():
        assert np.allclose(array, exact[name], rtol=2**-8, atol=0)


def test_leads_tell_the_greedy_answer_from_any_other(m_rand_dir: Path) -> None:
    """They are the margins for the right tokens, and below zero for a wrong one."""
    prompt = ids_of(m_rand_dir, PROMPTS[0])
    ids, margins = greedy_numpy(m_rand_dir, prompt, 5)
    assert np.allclose(leads(m_rand_dir, prompt, ids), margins, rtol=1e-6)
    ids[2] += 1
    found = leads(m_rand_dir, prompt, ids)
    assert np.allclose(found[:2], margins[:2], rtol=1e-6)
    assert found[2] < 0


def test_oracle_follows_the_index(tmp_path: Path, m_rand_dir: Path) -> None:
    """A copy that the index rules out is not what the oracle computes with."""
    folder = write_m_rand(tmp_path / "sharded", shards=2)
    add_old_copy(folder, "lm_head.weight", "model-00001-of-00002.safetensors")
    add_old_copy(folder, "model.embed_tokens.weight", "model-00002-of-00002.safetensors")
    right = load_weights(m_rand_dir)
    assert all(np.array_equal(array, right[n]) for n, array in load_weights(folder).items())


def test_newer_layout_has_other_files_and_the_same_weights(
    tmp_path: Path, m_rand_dir: Path
) -> None:
    """The template is a file of its own, and what newer savers leave out is not there."""
    folder = write_m_rand(tmp_path / "v5", layout="v5")
    config, tokenizer = (
        json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json")
    )
    assert not {"rope_theta", "rope_scaling", "torch_dtype"} & set(config)
    assert not {"add_bos_token", "chat_template"} & set(tokenizer)
    older = json.loads((m_rand_dir / "tokenizer_config.json").read_text())
    assert (folder / "chat_template.jinja").read_text() == older["chat_template"]
    weights = [(d / "model.safetensors").read_bytes() for d in (folder, m_rand_dir)]
    assert weights[0] == weights[1]


def test_long_model_and_drafts_are_the_same_each_time(tmp_path: Path) -> None:
    """Writing them twice gives identical files."""
    for write in (write_m_long, lambda dest: write_m_draft(dest, adversarial=True)):
        one, two = (write(tmp_path / f"{write.__name__}-{number}") for number in (1, 2))
        for path in one.iterdir():
            assert path.read_bytes() == (two / path.name).read_bytes()


def test_safetensors_round_trip(tmp_path: Path) -> None:
    """Arrays and raw triples come back as written, also through the safetensors package."""
    from safetensors.numpy import load_file

    values = np.array([[1.5, -2.0], [0.0, 3.25]], dtype=np.float32)
    path = tmp_path / "x.safetensors"
    assert write_safetensors(path, {"a": values, "b": np.array([7, 8], np.int64)}) == 32
    loaded = load_file(path)
    assert np.array_equal(loaded["a"], values) and loaded["b"].tolist() == [7, 8]
    write_safetensors(path, {"a": ("BF16", (2, 2), to_bf16_bytes(values))})
    assert np.array_equal(read_safetensors(path)["a"], values)


def test_chain_follows_its_successors(tmp_path: Path) -> None:
    """M-chain's greedy path is the successor function whatever comes before, by a wide margin."""
    folder = write_m_chain(tmp_path / "chain")
    successor = chain_successor()
    assert sorted(successor[3:]) == list(range(3, VOCAB))
    for prompt in ([40], [7, 300, 40]):
        ids, margins = greedy_numpy(folder, prompt, 20)
        assert ids == [successor[token] for token in [40, *ids[:-1]]]
        assert min(margins) > 10


def test_chain_script(tmp_path: Path) -> None:
    """A script makes M-chain emit given pieces, also half characters, and then stop."""
    text = "👩‍💻 the end"
    data = text.encode()
    chunks = [data[:2], data[2:5], data[5:9], data[9:11], b" the", b" ", b"e", b"nd"]
    assert b"".join(chunks) == data
    script, extra = plan_script(byte_token(10), chunks)
    folder = write_m_chain(tmp_path / "chain", script, extra)
    ids, margins = greedy_numpy(folder, [50, byte_token(10)], len(chunks) + 1)
    assert ids[-1] == EOS and min(margins) > 1
    assert [token_bytes(token, extra) for token in ids[:-1]] == chunks
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(ids) == text


def test_chain_script_refuses_repetition() -> None:
    """A chunk that would need two successors is an error."""
    with pytest.raises(ValueError, match="differ from each other"):
        plan_script(5, [b"a", b"b", b"a"])
