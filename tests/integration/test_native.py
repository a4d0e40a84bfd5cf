"""The native kernels compute what independent implementations do, and the same bits always.

In the tests' process, over weights that the daemon's own code has packed and KV blocks that hold
NaNs before they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelError
from engine.executor.backends import ExecutorOptions, backend_named
from engine.executor.base import Chunk
from engine.kernels import _kernels
from engine.models.config import load_config
from scripts.lib.native import Logits, NativeModel, NativeSequence
from tests.fixtures.models import ROPES, VOCAB, Shape, logits_numpy, write_m_rand

ISAS = _kernels.isas()
# Reaches over two splits of the attention (512 tokens) and ends within a block.
LENGTH = 1061
IDS = np.random.default_rng(3).integers(3, VOCAB, LENGTH).tolist()


@pytest.fixture(scope="module", params=ISAS)
def model(request: pytest.FixtureRequest, m_rand_dir: Path) -> NativeModel:
    return NativeModel.load(m_rand_dir, isa=request.param)


@pytest.fixture(scope="module")
def alone(model: NativeModel) -> list[Logits]:
    """Logits behind every token of IDS, token by token."""
    sequence = model.sequence(LENGTH)
    return [sequence.run([token]) for token in IDS]


# -- right ----------------------------------------------------------------------------------------

SHAPES = {
    "M-rand": Shape(),
    "one KV head": Shape(heads=5, kv_heads=1, hidden=72),
    "no group": Shape(heads=4, kv_heads=4),
    "wide group": Shape(heads=26, kv_heads=2, head_dim=8, hidden=104),
    "head 40": Shape(heads=3, kv_heads=1, head_dim=40, hidden=96, ffn=200),
    "head 128": Shape(heads=2, kv_heads=1, head_dim=128, hidden=64, ffn=100, layers=2),
    "head 256": Shape(heads=2, kv_heads=2, head_dim=256, hidden=40, ffn=72, layers=2),
    "wide MLP": Shape(ffn=2000, layers=2),
    "biases": Shape(attention_bias=True, mlp_bias=True, head_dim=24, hidden=72, ffn=136),
}


def check_right(folder: Path, isa: str, ids: Sequence[int]) -> None:
    """Logits are the oracle's but for what bfloat16 loses (a wrong model differs by about 1.4)."""
    sequence = NativeModel.load(folder, isa=isa).sequence(len(ids))
    logits = np.array([sequence.run([ids[0]]), sequence.run(ids[1:9]), sequence.run(ids[9:])])
    expected = logits_numpy(folder, ids)[[0, 8, len(ids) - 1]]
    assert np.sqrt(((logits - expected) ** 2).mean()) < 0.15 * expected.std()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_computes_what_the_oracle_does(name: str, isa: str, tmp_path: Path) -> None:
    """Heads, groups and sizes that fill no panel, with and without biases."""
    folder = write_m_rand(tmp_path / "m", shape=SHAPES[name], dtype="BF16")
    check_right(folder, isa, IDS[:150])


@pytest.mark.parametrize("name", ROPES)
def test_every_rope_computes_what_the_oracle_does(name: str, tmp_path: Path) -> None:
    """At positions beyond the original context of those that have one."""
    layout, config = ROPES[name][-1]
    folder = write_m_rand(tmp_path / "m", layout=layout, config=config, dtype="BF16")
    check_right(folder, ISAS[0], IDS[:200])


@pytest.mark.parametrize("options", [{"head": "none", "config": {"tie_word_embeddings": True}}])
def test_a_tied_head_is_the_embedding(options: dict[str, Any], tmp_path: Path) -> None:
    """Its panels serve both."""
    check_right(write_m_rand(tmp_path / "m", dtype="BF16", **options), ISAS[0], IDS[:40])


# -- the same bits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [[LENGTH], [1, 2, 3, 4, 5, 6, 40, 1000], [512, 549], [511, 2, 548], [33] * 40, [128] * 9],
    ids=lambda sizes: f"{sizes[0]} and {len(sizes) - 1} more",
)
def test_chunks_of_any_size_give_the_same_bits(
    model: NativeModel, alone: list[Logits], sizes: list[int]
) -> None:
    """Logits and every byte of KV that is written."""
    sequence, start = model.sequence(LENGTH), 0
    for size in sizes:
        ids = IDS[start : start + size]
        start += len(ids)
        if ids:
            assert (sequence.run(ids) == alone[start - 1]).all()
    assert start == LENGTH


@pytest.mark.parametrize("num_sequences", [2, 3, 5, 12, 13, 64])
def test_neighbours_change_no_bit(
    model: NativeModel, alone: list[Logits], num_sequences: int
) -> None:
    """Sequences of all lengths, some in prefill, in one step."""
    rng = np.random.default_rng(num_sequences)
    ends = rng.integers(1, LENGTH + 1, num_sequences).tolist()
    chunks = []
    for end in ends:
        size = min(int(rng.choice([1, 1, 1, 4, 5, 100])), end)
        sequence = model.sequence(LENGTH)
        if end > size:
            sequence.run(IDS[: end - size])
        chunks.append(sequence.chunk(IDS[end - size : end]))
    for end, logits in zip(ends, model.executor.forward(chunks), strict=True):
        assert (logits == alone[end - 1]).all()


def test_rows_without_logits_leave_the_others_alone(
    model: NativeModel, alone: list[Logits]
) -> None:
    """The last layer goes on with wanted rows only; a step of unwanted ones writes its KV."""
    sequences = [model.sequence(LENGTH) for _ in range(3)]
    chunks = [s.chunk(IDS[:40], needs_logits=n == 1) for n, s in enumerate(sequences)]
    first, second, third = model.executor.forward(chunks)
    assert first is None and third is None
    assert (second == alone[39]).all()
    assert model.executor.forward([sequences[0].chunk(IDS[40:70], needs_logits=False)]) == [None]
    assert (sequences[0].run(IDS[70:90]) == alone[89]).all()


def test_streams_that_share_blocks_read_them_once_and_get_the_same_bits(
    model: NativeModel, alone: list[Logits]
) -> None:
    """They part behind the shared blocks; some see only a part of a shared one."""
    whole = model.sequence(LENGTH)
    whole.run(IDS)
    chunks, ends = [], []
    for end in (LENGTH - 5, 1024 + 8, 1025, 1024, 700, 513, 512, 1060, 1061, 1):
        # What stands there already is read and not written again.
        chunks.append(Chunk(IDS[end - 1 : end], end - 1, end, whole.table, True))
        ends.append(end)
    before = whole.memory.copy()
    for end, logits in zip(ends, model.executor.forward(chunks), strict=True):
        assert (logits == alone[end - 1]).all()
    assert (whole.memory == before).all()


def test_a_prompt_that_is_partly_there_is_computed_on_from_any_position(
    model: NativeModel, alone: list[Logits]
) -> None:
    """As behind a cached prefix of any length, whatever stands behind it."""
    whole = model.sequence(LENGTH)
    whole.run(IDS)
    for start in (1, 31, 32, 33, 500, 512, 1056, 1060):
        sequence = NativeSequence(model, LENGTH)
        sequence.memory[:] = whole.memory
        # Tokens of another text behind the prefix: garbage, but finite.
        end = min(start + 40, LENGTH)
        chunk = Chunk(IDS[start:end], start, start, sequence.table, True)
        assert (model.executor.forward([chunk])[0] == alone[end - 1]).all()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(
    num_threads: int, m_rand_dir: Path, model: NativeModel, alone: list[Logits]
) -> None:
    """Units of work go to whoever is free."""
    isa = model.executor.decoder.isa
    other = NativeModel.load(m_rand_dir, isa=isa, cpus=[0] * num_threads)
    sequence = other.sequence(LENGTH)
    for start, end in ((0, 600), (600, 1000), (1000, LENGTH - 1), (LENGTH - 1, LENGTH)):
        assert (sequence.run(IDS[start:end]) == alone[end - 1]).all()


@pytest.mark.parametrize("block_size", [64, 96, 256])
def test_the_block_size_changes_no_bit(
    block_size: int, m_rand_dir: Path, model: NativeModel, alone: list[Logits]
) -> None:
    """Also one that does not divide a split."""
    isa = model.executor.decoder.isa
    sequence = NativeModel.load(m_rand_dir, isa=isa, block_size=block_size).sequence(LENGTH)
    for start, end in ((0, 100), (100, 1030), (1030, LENGTH)):
        assert (sequence.run(IDS[start:end]) == alone[end - 1]).all()


# -- refused --------------------------------------------------------------------------------------


def test_what_the_kernels_cannot_compute_is_refused_by_name(tmp_path: Path) -> None:
    """With what is allowed; the reference takes it."""
    cpu, reference = backend_named("cpu"), backend_named("reference")
    folder = write_m_rand(tmp_path / "m", shape=Shape(head_dim=512, heads=2, layers=1))
    wide = load_config(folder)
    with pytest.raises(ModelError, match=r"head_dim 512 is not allowed on the cpu backend: up to"):
        cpu.check(wide, 32)
    with pytest.raises(ModelError, match=r"block-size 40 is not allowed .*a multiple of 32"):
        cpu.check(wide, 40)
    reference.check(wide, 40)
    with pytest.raises(ModelError, match=r"backend 'abacus' is not allowed: auto, cpu, reference"):
        backend_named("abacus")


def test_an_instruction_set_that_the_cpu_lacks_is_refused(m_rand_dir: Path) -> None:
    """Never run to see what happens."""
    with pytest.raises(ModelError, match=r"cpu-isa 'sse9' is not allowed on this CPU: .*portable"):
        NativeModel.load(m_rand_dir, isa="sse9")


def test_steps_that_would_read_beyond_their_blocks_are_refused(model: NativeModel) -> None:
    """An error of the caller is an exception and not a crash."""
    sequence = model.sequence(64)
    for chunk in (
        Chunk([5], 64, 64, sequence.table, True),
        Chunk([5] * 65, 0, 0, sequence.table, True),
        Chunk([VOCAB], 0, 0, sequence.table, True),
        Chunk([-1], 0, 0, sequence.table, True),
        Chunk([], 0, 0, sequence.table, True),
    ):
        with pytest.raises(ValueError, match="step: "):
            model.executor.forward([chunk])


def test_an_executor_refuses_weights_that_are_too_short(m_rand_dir: Path) -> None:
    """Offsets of the plan are checked against the memory they point into."""
    config, cpu = load_config(m_rand_dir), backend_named("cpu")
    plan = cpu.pack_plan(config)
    memory = np.zeros(plan.segment_bytes - 64, np.uint8)
    with pytest.raises(ValueError, match="lies outside the weights"):
        cpu.build(config, plan, memory, ExecutorOptions(32, "auto", (0,)))
