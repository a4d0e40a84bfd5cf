"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.demo_model import write_demo_model
from tests.fixtures.models import write_m_rand

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def m_rand_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the tiny random model M-rand."""
    return write_m_rand(tmp_path_factory.mktemp("models") / "m-rand")


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """Directory of the demo model, kept between runs because writing it takes about ten seconds."""
    cache = os.environ.get("CACHEWARM_TEST_CACHE") or REPOSITORY / ".cache" / "test"
    return write_demo_model(Path(cache) / "demo-model")
