"""Pins and purge on a real daemon: both verbs' roles, a restart, an operator's command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachewarmd.ctl.__main__ import main
from cachewarmd.errors import (
    InvalidRequestError,
    LimitError,
    NotFoundError,
    NotPermittedError,
)
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon, wait_until
from tests.worker import BLOCK_BYTES, Worker, connect_worker, key

POOL_BLOCKS = (64 << 20) // BLOCK_BYTES


@pytest.fixture
def worker(daemon: Daemon) -> Iterator[Worker]:
    with connect_worker(daemon.socket) as connected:
        yield connected


def ask(daemon: Daemon, role: pb.Role = pb.ROLE_ADMIN, **body: object) -> pb.Envelope:
    with daemon.client(role) as client:
        return client.call(pb.Envelope(**body), PATIENCE_S)[0]  # type: ignore[arg-type]


def ctl(daemon: Daemon, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:  # type: ignore[type-arg]
    capsys.readouterr()
    status = main([*words, "--socket", str(daemon.socket), "-o", "json"])
    return status, json.loads(capsys.readouterr().out)


def seal(worker: Worker, *labels: str) -> None:
    lease = worker.lookup(*labels).lease
    assert not worker.publish(lease, *labels).refused
    worker.release(lease)


def flood(worker: Worker, num_blocks: int, name: str = "flood") -> None:
    for number in range(num_blocks):
        seal(worker, f"{name}{number}")


def hits(worker: Worker, *labels: str) -> int:
    found = worker.lookup(*labels)
    worker.release(found.lease)
    return len(found.blocks)


def test_what_is_pinned_outlives_a_flood_and_a_killed_daemon(short_dir: Path) -> None:
    """By an engine's lease or an operator's key; afterwards an unpinned chain goes."""
    with Daemon(short_dir / "s", "64MiB", ["--holder", "--l2-policy", "lru"]) as daemon:
        with connect_worker(daemon.socket) as worker:
            seal(worker, "a0", "a1")
            lease = worker.lookup("a0", "a1").lease
            pin = worker.call(pb.Envelope(pin=pb.Pin(lease=lease, label="mine"))).pin_reply
            assert pin.num_bytes == 2 * BLOCK_BYTES
            worker.release(lease)
            seal(worker, "b0")
            ask(daemon, pin=pb.Pin(key=key("b0"), ttl_ms=3_600_000))
            flood(worker, POOL_BLOCKS + 8)
            assert (hits(worker, "a0", "a1"), hits(worker, "b0")) == (2, 1)
        before = ask(daemon, pins=pb.Pins()).pins_reply
        daemon.kill_under_holder()
        wait_until(lambda: not daemon.status().counters["quarantined"], "nothing is held")
        after = ask(daemon, pb.ROLE_OBSERVER, pins=pb.Pins()).pins_reply
        assert [(p.pin_id, p.label, p.key, p.num_blocks) for p in after.pins] == [
            (1, "mine", key("a1"), 2),
            (2, "", key("b0"), 1),
        ]
        assert after.num_bytes == before.num_bytes == 3 * BLOCK_BYTES
        assert abs(after.pins[1].expires_unix_ms - before.pins[1].expires_unix_ms) < 1000
        status = daemon.status()
        assert (status.num_pins, status.pinned_bytes) == (2, 3 * BLOCK_BYTES)
        assert status.max_pinned_bytes == 16 << 20
        with connect_worker(daemon.socket) as worker:
            flood(worker, POOL_BLOCKS + 8, "again")
            assert hits(worker, "a0", "a1") == 2
            assert ask(daemon, unpin=pb.Unpin(pin_ids=[1])).unpin_reply.num_pins == 1
            flood(worker, 2 * POOL_BLOCKS, "last")
            assert (hits(worker, "a0", "a1"), hits(worker, "b0")) == (0, 1)


def test_a_pin_ends_by_itself(daemon: Daemon, worker: Worker) -> None:
    """Once its time is over."""
    seal(worker, "a0")
    ask(daemon, pin=pb.Pin(key=key("a0"), ttl_ms=100))
    wait_until(lambda: not daemon.status().num_pins, "the pin ends")


def test_who_may_pin_what(daemon: Daemon, worker: Worker) -> None:
    """Engines their own leases, operators keys, observers nothing; all are typed errors."""
    seal(worker, "a0")
    empty = worker.lookup("nothing").lease
    refused: list[tuple[type[Exception], pb.Pin]] = [
        (NotFoundError, pb.Pin(lease=9999)),
        (NotFoundError, pb.Pin(lease=empty)),
        (InvalidRequestError, pb.Pin(key=key("a0"))),
        (InvalidRequestError, pb.Pin()),
    ]
    for error, request in refused:
        with pytest.raises(error):
            worker.call(pb.Envelope(pin=request))
    with pytest.raises(NotFoundError):
        ask(daemon, pin=pb.Pin(key=key("unknown")))
    with pytest.raises(InvalidRequestError):
        ask(daemon, pin=pb.Pin(key=b"short"))
    with pytest.raises(InvalidRequestError):
        ask(daemon, unpin=pb.Unpin())
    with pytest.raises(NotFoundError):
        ask(daemon, unpin=pb.Unpin(pin_ids=[77]))
    for body in ({"pin": pb.Pin(key=key("a0"))}, {"unpin": pb.Unpin()}, {"purge": pb.Purge()}):
        with pytest.raises(NotPermittedError):
            ask(daemon, pb.ROLE_OBSERVER, **body)
    assert daemon.status().num_pins == 0


def test_the_budget_is_a_share_of_the_pool(daemon: Daemon, worker: Worker) -> None:
    """A quarter of 64 MiB is 16 blocks; the 17th is refused."""
    for number in range(17):
        seal(worker, f"p{number}")
    for number in range(16):
        ask(daemon, pin=pb.Pin(key=key(f"p{number}")))
    with pytest.raises(LimitError, match=str(16 << 20)):
        ask(daemon, pin=pb.Pin(key=key("p16")))


def test_an_operator_pins_lists_unpins_and_purges(
    daemon: Daemon, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    """All four verbs of the command line; evict keeps what is pinned, purge does not."""
    seal(worker, "a0", "a1")
    seal(worker, "b0")
    status, told = ctl(daemon, capsys, "pin", key("a1").hex(), "--label", "x", "--ttl", "1h")
    assert (status, told["pin_id"], told["num_bytes"]) == (0, 1, 2 * BLOCK_BYTES)
    assert ctl(daemon, capsys, "evict")[1]["num_kept"] == 2
    (shown,) = ctl(daemon, capsys, "pins")[1]["pins"]
    assert (shown["label"], shown["key"], shown["num_blocks"]) == ("x", key("a1").hex(), 2)
    assert ctl(daemon, capsys, "purge", "--model", "unknown")[0] == 4
    status, told = ctl(daemon, capsys, "purge")
    assert (status, told["num_blocks"], told["num_kept"]) == (0, 2, 0)
    assert ctl(daemon, capsys, "pins")[1]["pins"] == []
    seal(worker, "b0")
    ctl(daemon, capsys, "pin", key("b0").hex(), "--label", "y")
    assert ctl(daemon, capsys, "unpin", "--label", "y")[1]["num_pins"] == 1
    assert ctl(daemon, capsys, "unpin")[0] == 2
    assert ctl(daemon, capsys, "pin", "abc")[0] == 2
    assert main(["pins", "--socket", str(daemon.socket)]) == 0
    assert "none" in capsys.readouterr().out
