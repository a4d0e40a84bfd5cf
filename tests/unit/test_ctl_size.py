"""`size` predicts what the engine's own layout says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cachewarmd import layout
from cachewarmd.ctl import size
from cachewarmd.ctl.__main__ import main
from cachewarmd.errors import ModelFilesError
from engine.executor.backends import backend_named
from engine.models.config import load_config
from tests.fixtures.models import write_m_rand


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_m_rand(folder)
    return folder


@pytest.mark.parametrize(("backend", "dtype"), [("cpu", "bfloat16"), ("reference", "float32")])
@pytest.mark.parametrize("block_size", [32, 64])
def test_a_block_is_as_large_as_the_engine_makes_it(
    model: Path, backend: str, dtype: str, block_size: int
) -> None:
    """Two programs that must not import each other compute the same number."""
    own = backend_named(backend).block_bytes(load_config(model), block_size)
    assert size.read_shape(model).block_bytes(block_size, dtype) == own


def test_every_request_has_blocks_of_its_own(model: Path) -> None:
    """Tokens are rounded up to blocks for each request, blocks to slots, slots to extents."""
    told = size.prediction(size.read_shape(model), 33, 3, 32, "bfloat16")
    assert told["num_blocks"] == 6
    assert told["slot_bytes"] == layout.round_slot_bytes(told["block_bytes"])
    assert told["pool_bytes"] == layout.EXTENT_BYTES
    per_extent = layout.EXTENT_BYTES // told["slot_bytes"]
    more = size.prediction(size.read_shape(model), 32 * (per_extent + 1), 1, 32, "bfloat16")
    assert more["pool_bytes"] == 2 * layout.EXTENT_BYTES


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_attention_heads": true}', "[" * 9999])
def test_a_bad_config_is_named(tmp_path: Path, text: str) -> None:
    """The error has the file's path."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelFilesError, match=str(tmp_path / "config.json")):
        size.read_shape(tmp_path)


def test_what_does_not_fit_is_exit_3(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A context that no machine has memory for."""
    args = ["size", "--model", str(model), "--concurrency", "1000000000", "-o", "json"]
    assert main([*args, "--context", "1000000000"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False
    assert told["needed_bytes"] == told["weights_bytes"] + told["pool_bytes"]
    assert told["weights_bytes"] > 0
