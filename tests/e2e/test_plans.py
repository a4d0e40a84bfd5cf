"""Plans that an engine computes: all kinds of items, through the operator's command."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cachewarmd.ctl.__main__ import main
from tests.daemon import Daemon, wait_until
from tests.engine import Engine, make_prompt

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(
    m_rand_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Daemon, Engine, Path]]:
    """A daemon, an engine that is slow when asked to be, and the model."""
    extra = ["--max-context", "512", "--prefill-chunk", "16"]
    with (
        tempfile.TemporaryDirectory(prefix="cw-", dir="/tmp") as folder,
        Daemon(Path(folder) / "s", "128MiB") as daemon,
        Engine(m_rand_dir, daemon.socket, extra=extra, step_s=0.0) as engine,
    ):
        yield daemon, engine, m_rand_dir


def warmup(
    site: tuple[Daemon, Engine, Path], capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[int, dict[str, Any]]:
    daemon, _, model = site
    arguments = ["--socket", str(daemon.socket), "-o", "json", "warmup", "--model", str(model)]
    status = main([*arguments, *flags])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, found


def write(path: Path, *items: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def test_items_of_every_kind_are_computed_and_hit(
    site: tuple[Daemon, Engine, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ids and a text; the second time all is warm already."""
    _, engine, _ = site
    ids = make_prompt(100, 1)
    (tmp_path / "doc.txt").write_text("a longer text " * 20)
    plan = write(
        tmp_path / "plan.jsonl",
        {"token_ids": ids, "name": "ids"},
        {"text": "hello there " * 10, "name": "text", "urgency": "normal"},
        {"file": "doc.txt", "name": "file"},
    )
    status, found = warmup(site, capsys, "--plan", str(plan), "--jobs", "2")
    assert (status, found["job"]["state"]) == (0, "done")
    assert engine.generate([*ids, 3], max_tokens=1).done.cached_tokens == len(ids)
    text = "hello there " * 10
    answer = engine.generate(text, max_tokens=1)
    assert answer.done.cached_tokens == answer.done.prompt_tokens - 1
    status, found = warmup(site, capsys, "--plan", str(plan))
    assert status == 0
    assert found["job"]["prompts"]["already_warm"] == 3


def test_what_is_to_be_pinned_stays_when_everything_is_evicted(
    site: tuple[Daemon, Engine, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """To the last token, until it is unpinned; also when it was warm before."""
    daemon, engine, _ = site
    ids = make_prompt(100, 31)
    plan = write(tmp_path / "plan.jsonl", {"token_ids": ids, "pin": True, "ttl": "1h"})
    for _ in range(2):
        assert warmup(site, capsys, "--plan", str(plan))[0] == 0
    control = ["--socket", str(daemon.socket), "-o", "json"]
    assert main([*control, "evict"]) == 0
    capsys.readouterr()
    assert engine.generate([*ids, 3], max_tokens=1).done.cached_tokens == len(ids)
    engine.wait_idle()
    assert main([*control, "unpin", "--all"]) == 0
    assert main([*control, "evict"]) == 0
    capsys.readouterr()
    assert engine.generate([*ids, 3], max_tokens=1).done.cached_tokens == 0


def test_a_pin_that_is_over_the_budget_fails_its_item(
    short_dir: Path, m_rand_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Named with its reason; what it computed is there all the same."""
    with (
        Daemon(short_dir / "s", "64MiB", ["--pin-bytes", "1%"]) as daemon,
        Engine(m_rand_dir, daemon.socket) as engine,
    ):
        large = make_prompt(engine.client().model_info().max_context - 10, 41)
        plan = write(tmp_path / "plan.jsonl", {"token_ids": large, "pin": True, "name": "large"})
        site = daemon, engine, m_rand_dir
        status, found = warmup(site, capsys, "--plan", str(plan))
        (failure,) = found["job"]["prompts"]["failures"]
        assert (status, failure["name"]) == (1, "large")
        assert "not pinned" in failure["error"]


def test_shapes_are_timed_and_leave_nothing_behind(
    site: tuple[Daemon, Engine, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the whole context; a longer one is skipped by its name; no block is published."""
    daemon, engine, _ = site
    before = daemon.status().counters["published"]
    status, found = warmup(site, capsys, "--shapes", "1,64,512,4096", "--iterations", "3")
    shapes = {shape["name"]: shape for shape in found["job"]["prompts"]["shapes"]}
    assert set(shapes) == {"shape-1", "shape-64", "shape-512"}
    assert all(shape["first_us"] > 0 and shape["last_us"] > 0 for shape in shapes.values())
    assert status == 0
    assert any("shape-4096" in json.dumps(item) for item in found["job"]["prompts"]["failures"])
    engine.wait_idle()
    assert daemon.status().counters["published"] == before


def test_what_is_cancelled_is_not_computed_any_more(
    site: tuple[Daemon, Engine, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The engine hears of it and is idle soon, far from the item's end."""
    daemon, engine, _ = site
    plan = write(tmp_path / "plan.jsonl", {"token_ids": make_prompt(400, 7)})
    with engine.slowed(1.0):
        status, found = warmup(site, capsys, "--plan", str(plan), "--no-wait")
        assert status == 0
        wait_until(lambda: engine.worker().num_running == 1, "it runs")
        before = engine.worker().num_computed_tokens
        job = str(found["job_id"])
        assert main(["--socket", str(daemon.socket), "cancel", job]) == 0
        wait_until(lambda: engine.worker().num_running == 0, "it is stopped")
        assert engine.worker().num_computed_tokens - before < 200
    capsys.readouterr()


def test_a_prompt_that_waits_for_others_is_not_timed_out(
    site: tuple[Daemon, Engine, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Beside streams it gets little, yet always something."""
    _, engine, _ = site
    plan = write(tmp_path / "plan.jsonl", {"token_ids": make_prompt(60, 11)})
    with engine.slowed(0.05):
        streams = [engine.stream(make_prompt(8, n), max_tokens=300) for n in (21, 22)]
        for stream in streams:
            stream.wait_for_tokens(2)
        status, found = warmup(site, capsys, "--plan", str(plan), "--stall-timeout", "2s")
        streams[0].check_running()
        for stream in streams:
            stream.cancel()
    assert (status, found["job"]["state"]) == (0, "done")
    for stream in streams:
        stream.join()
