"""A real daemon counts what lookups begin with, and `plan` writes it down."""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest

from cachewarmd import plan
from cachewarmd.client import Client
from cachewarmd.ctl.__main__ import main
from cachewarmd.errors import InvalidRequestError, NotPermittedError
from cachewarmd.keys import chain_keys
from cachewarmd.v1 import control_pb2 as pb
from tests.daemon import PATIENCE_S, Daemon
from tests.worker import ROOT, Worker, connect_worker

BLOCK = 4  # tokens, as tests.worker registers it
TEMPLATE = list(range(100, 100 + 5 * BLOCK))


def look_up(
    worker: Worker, tokens: list[int], *, with_ids: bool = True, tenant: str = "", salt: str = ""
) -> None:
    """As an engine's worker does it, with a chain of its own for each domain."""
    root = ROOT if not tenant + salt else (tenant + "/" + salt).encode().ljust(32)
    keys = chain_keys(root, tokens, BLOCK)
    lookup = pb.Lookup(stamp_id=worker.stamp_id, keys=b"".join(keys), tenant=tenant)
    if with_ids:
        lookup.token_ids = array("I", tokens[: len(keys) * BLOCK]).tobytes()
    if salt:
        lookup.cache_salt = salt
    reply = worker.call(pb.Envelope(lookup=lookup))
    worker.release(reply.lookup_reply.lease)


def traffic(worker: Worker, count: int, first: int = 1000) -> None:
    """Requests that are the template and then something of their own."""
    for number in range(count):
        look_up(worker, [*TEMPLATE, *[first + number] * BLOCK, 1, 2])


def ctl(daemon: Daemon, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    capsys.readouterr()
    status = main(["--socket", str(daemon.socket), *args])
    return status, *capsys.readouterr()


def test_a_plan_has_the_prefix_that_lookups_share(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the block: not what each had of its own; in its domain; and the plan's reader takes it."""
    with Daemon(short_dir / "s", extra=["--learn", "ids"]) as daemon:
        with connect_worker(daemon.socket) as worker:
            traffic(worker, 3)
            for _ in range(2):
                look_up(worker, [7] * BLOCK, tenant="someone", salt="pepper")
        status, out, err = ctl(daemon, capsys, "plan", "--top", "10")
        assert (status, err) == (0, "")
        path = short_dir / "plan.jsonl"
        path.write_text(out)
        first, second = plan.load(path).prompts
        assert list(first.token_ids.ids) == TEMPLATE
        assert (first.name, first.tenant, first.HasField("cache_salt")) == ("learned-1", "", False)
        assert list(second.token_ids.ids) == [7] * BLOCK
        assert (second.tenant, second.cache_salt) == ("someone", "pepper")
        assert len(ctl(daemon, capsys, "plan", "--top", "1")[1].splitlines()) == 1
        assert ctl(daemon, capsys, "plan", "--min-count", "4") == (0, "", "")
        assert ctl(daemon, capsys, "plan", "--model", "nobody")[0] == 4


def test_with_digests_the_daemon_keeps_no_tokens_and_says_what_is_missing(
    short_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The default: nobody is asked for ids, and those that come all the same are not kept."""
    with Daemon(short_dir / "s") as daemon:
        with connect_worker(daemon.socket) as worker:
            traffic(worker, 3)
        status, out, err = ctl(daemon, capsys, "plan", "-o", "json")
        assert status == 1
        assert "--learn ids" in err
        told = json.loads(out)
        assert told["learn"] == "digests"
        (prefix,) = told["prefixes"]
        assert prefix["key"] == chain_keys(ROOT, TEMPLATE, BLOCK)[-1].hex()
        assert (prefix["num_tokens"], round(prefix["count"])) == (len(TEMPLATE), 3)
        with daemon.client(pb.ROLE_ADMIN) as client:
            (raw,) = learned(client).prefixes
            assert raw.token_ids == b""


def test_off_counts_nothing(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even digests."""
    with Daemon(short_dir / "s", extra=["--learn", "off"]) as daemon:
        with connect_worker(daemon.socket) as worker:
            traffic(worker, 3)
        assert json.loads(ctl(daemon, capsys, "plan", "-o", "json")[1])["prefixes"] == []


@pytest.mark.parametrize("learn", ["off", "digests", "ids"])
def test_ids_are_asked_for_only_where_they_are_kept(short_dir: Path, learn: str) -> None:
    """RegisterReply says so, on every connection."""
    with (
        Daemon(short_dir / "s", extra=["--learn", learn]) as daemon,
        connect_worker(daemon.socket) as worker,
    ):
        register = pb.Register(stamp=b"x" * 32, slot_bytes=4096, block_size=4, description="x")
        reply = worker.call(pb.Envelope(register=register)).register_reply
        assert reply.wants_token_ids == (learn == "ids")


def test_tokens_that_are_not_those_of_the_keys_are_refused(short_dir: Path) -> None:
    """By their number, with what goes with the keys; nothing is leased and nothing counted."""
    with (
        Daemon(short_dir / "s", extra=["--learn", "ids"]) as daemon,
        connect_worker(daemon.socket) as worker,
    ):
        for _ in range(2):
            lookup = pb.Lookup(stamp_id=worker.stamp_id, keys=bytes(64), token_ids=bytes(28))
            with pytest.raises(InvalidRequestError, match=r"28 bytes.*32 go with"):
                worker.call(pb.Envelope(lookup=lookup))
        with daemon.client(pb.ROLE_ADMIN) as client:
            assert not learned(client).prefixes
            with pytest.raises(InvalidRequestError, match="top 0"):
                learned(client, top=0)
            with pytest.raises(InvalidRequestError, match="min_count nan"):
                learned(client, min_count=float("nan"))


def test_only_operators_may_ask(short_dir: Path) -> None:
    """What is learned is made from prompts of all engines."""
    with (
        Daemon(short_dir / "s") as daemon,
        daemon.client(pb.ROLE_OBSERVER) as client,
        pytest.raises(NotPermittedError),
    ):
        learned(client)


def test_a_large_plan_comes_in_parts(short_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than one message holds, complete and in order."""
    with Daemon(short_dir / "s", extra=["--learn", "ids"]) as daemon:
        with connect_worker(daemon.socket) as worker:
            stem = [5] * (BLOCK * 8000)
            for number in range(20):
                for _ in range(2):
                    look_up(worker, [*stem, *[10 + number] * BLOCK * (20 - number)])
        status, out, _ = ctl(daemon, capsys, "plan")
        items = [json.loads(line)["token_ids"] for line in out.splitlines()]
        assert status == 0
        assert [len(ids) - len(stem) for ids in items] == [BLOCK * n for n in range(20, 0, -1)]
        assert sum(map(len, items)) * 4 > 2 * (1 << 20)


def learned(client: Client, top: int = 10, min_count: float = 2.0) -> pb.LearnedReply:
    """The last part of the answer."""
    request = pb.Learned(top=top, min_count=min_count)
    return client.call(pb.Envelope(learned=request), PATIENCE_S)[0].learned_reply
