"""A real engine computes items of the daemon's warm-up jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachewarmd.v1 import control_pb2 as pb
from engine.models.config import load_config
from engine.models.packing import panel_plan
from tests.daemon import PATIENCE_S, Daemon, wait_until
from tests.engine import Engine, make_prompt
from tests.integration.test_jobs import ended, look, send


@pytest.fixture(scope="module")
def daemon(module_daemon: Daemon) -> Daemon:
    """The module's daemon, which no test ends."""
    return module_daemon


@pytest.fixture(scope="module")
def engine(daemon: Daemon, m_rand_dir: Path) -> Iterator[Engine]:
    with Engine(m_rand_dir, daemon.socket, step_s=0.0) as running:
        yield running


def ids(prompt: list[int]) -> pb.TokenIds:
    return pb.TokenIds(ids=prompt)


def begin(daemon: Daemon, model: Path, *prompts: pb.WarmPrompt, parallel: int = 1) -> int:
    plan = panel_plan(load_config(model, None))
    request = pb.Warmup(model_name=model.name, plan=plan, prompts=prompts, max_parallel=parallel)
    return send(daemon, model, request).job_id


def test_items_are_warm_afterwards_for_their_tenant_and_salt_alone(
    daemon: Daemon, engine: Engine, m_rand_dir: Path
) -> None:
    """Several at a time; a salted one is found with its salt only; no user's metric moves."""
    plain, salted = make_prompt(200, 901), make_prompt(200, 902)
    finished = engine.info().num_requests_finished
    job = begin(
        daemon,
        m_rand_dir,
        pb.WarmPrompt(token_ids=ids(plain)),
        pb.WarmPrompt(token_ids=ids(salted), cache_salt="s"),
        parallel=2,
    )
    told = ended(daemon, job)
    assert told.state == "done", told
    assert [item.done_tokens for item in told.items] == [200, 200]
    assert engine.info().num_requests_finished == finished
    assert engine.generate(plain, max_tokens=1).done.cached_tokens == 199
    assert engine.generate(salted, max_tokens=1).done.cached_tokens == 0
    assert engine.generate(salted, max_tokens=1, cache_salt="s").done.cached_tokens == 199


def test_bad_items_fail_by_name_and_too_long_ones_are_skipped(
    daemon: Daemon, engine: Engine, m_rand_dir: Path
) -> None:
    """Each with what is wrong, and the engine serves on."""
    too_long = load_config(m_rand_dir, None).max_context + 1
    chat = pb.ChatPrompt(messages_json=json.dumps([{"role": "user", "content": 7}]))
    job = begin(
        daemon,
        m_rand_dir,
        pb.WarmPrompt(token_ids=ids([5] * too_long)),
        pb.WarmPrompt(token_ids=ids([1 << 30])),
        pb.WarmPrompt(chat=chat),
    )
    skipped, foreign, bad_chat = ended(daemon, job).items
    assert skipped.state == pb.ITEM_STATE_SKIPPED
    assert str(too_long) in skipped.detail
    assert foreign.state == bad_chat.state == pb.ITEM_STATE_FAILED
    assert "token_ids" in foreign.detail
    assert "messages[0]" in bad_chat.detail
    assert len(engine.generate([5, 6], max_tokens=1).ids) == 1


def test_a_cancelled_item_is_computed_no_further(
    daemon: Daemon, engine: Engine, m_rand_dir: Path
) -> None:
    """The worker lets go of it; nothing waits or runs afterwards."""
    with engine.held():
        job = begin(daemon, m_rand_dir, pb.WarmPrompt(token_ids=ids(make_prompt(900, 903))))
        given = pb.ITEM_STATE_PENDING
        wait_until(lambda: look(daemon, job).items[0].state >= given, "the item is given")
        with daemon.client(pb.ROLE_ADMIN) as client:
            client.call(pb.Envelope(cancel_job=pb.CancelJob(job_id=job)), PATIENCE_S)
    assert ended(daemon, job).state == "cancelled"
    after = engine.wait_idle()
    assert (after.num_running, after.num_waiting) == (0, 0)
