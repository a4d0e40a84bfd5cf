"""Blocks that are reused under a running request are noticed before a wrong token is sent."""

from __future__ import annotations

from pathlib import Path

from tests.daemon import Daemon, wait_until
from tests.engine import Engine, evict_all, make_prompt
from tests.worker import connect_worker

NUM_OUTPUT = 1200
# One extent, so that what is published after an eviction lies where the old blocks lay.
POOL = "64MiB"
# The lease ends soon, and the worker that comes back gets none of it again.
SHORT_QUARANTINE = (
    "import cachewarmd.server as s; s.QUARANTINE_S = 0.2\n"
    "import cachewarmd.kv as k; k.BlockStore.claim = lambda *a: None\n"
)


def test_a_stream_whose_shared_blocks_were_reused_computes_them_again(
    short_dir: Path, m_rand_dir: Path
) -> None:
    """Lease lost while both live, quarantine over, blocks evicted and overwritten: same tokens."""
    prompt = make_prompt(200, 61)
    with (
        Daemon(short_dir / "s", POOL, prelude=SHORT_QUARANTINE) as daemon,
        Engine(m_rand_dir, daemon.socket, step_s=0.0) as engine,
    ):
        whole = engine.generate(prompt, max_tokens=NUM_OUTPUT, bypass_prefix_cache=True).ids
        engine.generate(prompt, max_tokens=0)
        with engine.slowed(0.05):
            stream = engine.stream(prompt, max_tokens=NUM_OUTPUT)
            stream.wait_for_tokens(5)
            daemon.sigstop()
            try:
                # A publish that is owed for two seconds ends the worker's patience, and the link.
                wait_until(lambda: not engine.worker().daemon_connected, "the link is given up")
            finally:
                daemon.sigcont()
            wait_until(lambda: daemon.status().counters["leases"] == 0, "the leases are revoked")
            evict_all(daemon)
            with connect_worker(daemon.socket) as other:
                labels = [f"b{number}" for number in range(8)]
                assert not other.publish(other.lookup("b0").lease, *labels).refused
            stream.check_running()
        answer = stream.result()
        assert answer.done.cached_tokens == 0, "what was reused was computed again"
        assert answer.ids == whole
        assert "shared_blocks_lost" in engine.log()
