"""The packed GEMM of every instruction set that runs here, against float64."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels import _kernels

ISAS = _kernels.isas()
ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 24, 64, 95, 96, 97, 200]
SHAPES = [(32, 32), (64, 576), (96, 64), (160, 1536), (32, 1632)]  # outputs, inputs

Floats = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> _kernels.Threads:
    """All on one CPU, so that they take turns."""
    return _kernels.Threads([0] * request.param)


def to_bf16(values: Floats) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(values: npt.NDArray[np.uint16]) -> Floats:
    return (values.astype(np.uint32) << 16).view(np.float32)


def to_panels(weights: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """[N, K] -> [N/32][K/2][32][2], as `kernels/step.h` draws them."""
    outputs, inputs = weights.shape
    split = weights.reshape(outputs // 32, 32, inputs // 2, 2)
    return np.ascontiguousarray(split.transpose(0, 2, 1, 3)).reshape(-1).view(np.uint8)


def multiply(
    x: Floats, panels: npt.NDArray[np.uint8], outputs: int, isa: str, threads: _kernels.Threads
) -> Floats:
    y = np.full((len(x), outputs), np.nan, dtype=np.float32)
    _kernels.multiply(x, panels, y, isa, threads)
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_right_for_every_number_of_rows(
    isa: str, outputs: int, inputs: int, threads: _kernels.Threads
) -> None:
    """Within what float32 sums lose; inputs are bfloat16 where the CPU multiplies those."""
    rng = np.random.default_rng(outputs + inputs)
    weights = to_bf16(rng.standard_normal((outputs, inputs), dtype=np.float32))
    panels = to_panels(weights)
    for rows in ROWS:
        x = rng.standard_normal((rows, inputs), dtype=np.float32)
        seen = from_bf16(to_bf16(x)) if isa == "avx512_bf16" else x
        exact = seen.astype(np.float64) @ from_bf16(weights).T.astype(np.float64)
        y = multiply(x, panels, outputs, isa, threads)
        assert np.abs(y - exact).max() < 2e-5 * inputs**0.5 * np.abs(exact).max()


@pytest.mark.parametrize("isa", ISAS)
def test_a_rows_product_is_the_same_bits_beside_any_others(
    isa: str, threads: _kernels.Threads
) -> None:
    """Alone, in tiles of every size, at every place in them."""
    rng = np.random.default_rng(5)
    panels = to_panels(to_bf16(rng.standard_normal((96, 1600), dtype=np.float32)))
    x = rng.standard_normal((110, 1600), dtype=np.float32)
    alone = [multiply(row[None], panels, 96, isa, threads)[0] for row in x]
    for rows in range(1, len(x) + 1):
        first = (7 * rows) % (len(x) - rows + 1)
        together = multiply(x[first : first + rows], panels, 96, isa, threads)
        assert (together == alone[first : first + rows]).all()


def test_shapes_that_do_not_fit_are_refused(threads: _kernels.Threads) -> None:
    """Not read beyond their end."""
    x, panels = np.zeros((1, 64), np.float32), np.zeros(2 * 32 * 64, np.uint8)
    with pytest.raises(ValueError, match="do not fit"):
        _kernels.multiply(x, panels[:-2], np.zeros((1, 32), np.float32), "portable", threads)
    with pytest.raises(ValueError, match="do not fit"):
        _kernels.multiply(x, panels, np.zeros((1, 64), np.float32), "portable", threads)
    with pytest.raises(ValueError, match=r"set sse9 is not allowed: .*portable"):
        _kernels.multiply(x, panels, np.zeros((1, 32), np.float32), "sse9", threads)


def test_the_caller_may_run_where_it_could_before() -> None:
    """It is pinned during a step only, and so nothing that it starts is."""
    cpus = sorted(os.sched_getaffinity(0))
    pool = _kernels.Threads(cpus)
    assert pool.count == len(cpus)
    assert _kernels.read_bandwidth(np.ones(1 << 20, np.uint8), pool, 1) > 0
    assert sorted(os.sched_getaffinity(0)) == cpus
