"""From traffic to a plan to a fresh pool that is warm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from cachewarmd import plan
from cachewarmd.ctl.__main__ import main
from cachewarmd.v1 import control_pb2
from engine.models.config import load_config
from engine.models.packing import panel_plan
from tests.daemon import PATIENCE_S, Daemon
from tests.engine import Engine, make_prompt

BLOCK = 32


def cached(engine: Engine, prompt: Sequence[int]) -> int:
    """Tokens of it that it found."""
    return int(engine.generate(prompt, max_tokens=1).done.cached_tokens)


def warm(daemon: Daemon, model_dir: Path, prompts: Sequence[control_pb2.WarmPrompt]) -> None:
    """Returns when all is computed."""
    folder = os.open(model_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with daemon.client(control_pb2.ROLE_ADMIN) as client:
            layout = panel_plan(load_config(model_dir, None))
            request = control_pb2.Warmup(model_name="m", plan=layout, prompts=prompts)
            reply, _ = client.call(control_pb2.Envelope(warmup=request), PATIENCE_S, [folder])
            watch = control_pb2.WatchJob(job_id=reply.warmup_reply.job_id)
            last, _ = client.call(control_pb2.Envelope(watch_job=watch), PATIENCE_S)
            assert last.job_progress.state == "done"
    finally:
        os.close(folder)


def test_a_fresh_pool_is_warm_after_a_plan_made_from_traffic(
    short_dir: Path, m_rand_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt that was never sent finds the template that others began with, to the block."""
    template = make_prompt(3 * BLOCK, 1)
    asked = [[*template, *make_prompt(20, 10 + number)] for number in range(3)]
    with (
        Daemon(short_dir / "a", extra=["--learn", "ids"]) as daemon,
        Engine(m_rand_dir, daemon.socket) as engine,
    ):
        for prompt in asked:
            cached(engine, prompt)
        assert main(["--socket", str(daemon.socket), "plan"]) == 0
    path = short_dir / "plan.jsonl"
    path.write_text(capsys.readouterr().out)
    prompts = plan.load(path).prompts
    assert [list(prompt.token_ids.ids) for prompt in prompts] == [template]
    with Daemon(short_dir / "b") as daemon, Engine(m_rand_dir, daemon.socket) as engine:
        warm(daemon, m_rand_dir, prompts)
        assert cached(engine, [*template, *make_prompt(20, 99)]) == len(template)


def test_warming_up_teaches_nothing(
    short_dir: Path, m_rand_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a plan would confirm itself."""
    prompt = make_prompt(3 * BLOCK, 1)
    items = [control_pb2.WarmPrompt(token_ids=control_pb2.TokenIds(ids=prompt))]
    with (
        Daemon(short_dir / "a", extra=["--learn", "ids"]) as daemon,
        Engine(m_rand_dir, daemon.socket) as engine,
    ):
        for _ in range(3):
            warm(daemon, m_rand_dir, items)
        assert main(["--socket", str(daemon.socket), "plan"]) == 0
        assert "token_ids" not in capsys.readouterr().out
        for _ in range(3):
            cached(engine, prompt)
        assert main(["--socket", str(daemon.socket), "plan"]) == 0
        assert "token_ids" in capsys.readouterr().out
