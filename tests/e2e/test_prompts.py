"""Tier L1 end to end: the ids of a text outlive the engine that tokenised it."""

from __future__ import annotations

import re
from pathlib import Path

from tests.daemon import Daemon, wait_until
from tests.engine import Engine

TEXT = "".join(f"{n}. The quick brown fox's own words, {n * 7919}.\n" for n in range(2000))
HTTP = ["--http-port", "0"]


def num_hits(engine: Engine, source: str) -> int:
    """Tokens of texts that this engine did not tokenise."""
    _, _, body = engine.http("/metrics")
    pattern = rf'engine_prompt_cache_hits_tokens_total{{source="{source}"}} (\S+)'
    found = re.search(pattern, body)
    assert found
    return int(float(found[1]))


def test_the_next_engine_need_not_tokenise(m_rand_dir: Path, short_dir: Path) -> None:
    """What an engine that was killed has tokenised the next one gets from the daemon."""
    with Daemon(short_dir / "s", extra=["--holder"]) as daemon:
        with Engine(m_rand_dir, daemon.socket, extra=HTTP) as engine:
            with engine.client() as client:
                ids = client.tokenize(TEXT)
                assert num_hits(engine, "front") == 0
                assert client.tokenize(TEXT) == ids
                assert num_hits(engine, "front") >= len(ids) - 1  # all but a BOS
            wait_until(lambda: daemon.status().counters["prompt_pieces"] > 50, "they are kept")
            engine.kill_all()
        daemon.kill_under_holder()
        # A front that keeps next to nothing asks each time.
        extra = [*HTTP, "--prompt-cache-bytes", "4KiB"]
        with Engine(m_rand_dir, daemon.socket, extra=extra) as engine, engine.client() as client:

            def is_shared() -> bool:
                assert client.tokenize(TEXT) == ids
                return num_hits(engine, "daemon") > 0

            wait_until(is_shared, "the daemon answers in time, once the front has connected")
