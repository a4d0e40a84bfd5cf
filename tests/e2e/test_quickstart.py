"""The demonstration of the README, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "quickstart.py"


@pytest.mark.slow
def test_the_quickstart_shows_warmth_through_a_kill(demo_model_dir: Path) -> None:
    """Real commands, real kill -9: the warmed prompt hits, and after the kill all but one token."""
    if not Path(sys.executable).with_name("cachewarmd-ctl").exists():
        pytest.skip("needs an install: the console scripts are not beside this python")
    command = [sys.executable, "-P", str(SCRIPT), "--json", "--model", str(demo_model_dir)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stderr[-2000:]
    told = json.loads(result.stdout.splitlines()[-1])
    cold, warm, again = told["answers"]
    assert told["system_prompt_tokens"] >= 1024
    assert cold["cached_tokens"] == 0
    # The whole system prompt, its short last block included.
    assert warm["cached_tokens"] >= told["system_prompt_tokens"] - 1
    assert again["cached_tokens"] == again["prompt_tokens"] - 1
    assert again["text"] == warm["text"]
    assert warm["ttft_s"] < cold["ttft_s"] / 2
    assert again["ttft_s"] < cold["ttft_s"] / 2
