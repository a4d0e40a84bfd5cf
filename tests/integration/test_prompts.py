"""Tier L1 in the real daemon: pieces of prompts that fronts share, and what outlives the daemon."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from cachewarmd.client import Client
from cachewarmd.errors import CachewarmError
from cachewarmd.prompts import SEGMENT_BYTES, Prompts
from cachewarmd.v1 import control_pb2 as pb
from engine.shared_prompts import DaemonPrompts
from engine.tokenizer import Tokenizer, encode_plainly
from tests.daemon import Daemon, wait_until
from tests.fixtures.models import write_tokenizer

TEXT = "".join(f"{n}. The quick brown fox's own words, {n * 7919}.\n" for n in range(2000))


def front(tmp_path: Path, client: Client | None) -> Tokenizer:
    """What a front has: a tokenizer that keeps prompts and shares them."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    tokenizer.keep_prompts(1 << 20)
    assert tokenizer.prompt_cache is not None
    tokenizer.prompt_cache.shared = DaemonPrompts(lambda: client, tokenizer.identity)
    return tokenizer


def num_pieces(daemon: Daemon) -> int:
    """Pieces that the daemon has."""
    return daemon.status().counters["prompt_pieces"]


def ask_again(daemon: Daemon, tmp_path: Path) -> None:
    """Another front gets most ids from the daemon, and they are right."""
    with daemon.client(pb.ROLE_ENGINE) as client:
        tokenizer = front(tmp_path, client)
        cache = tokenizer.prompt_cache
        assert cache is not None

        def is_shared() -> bool:
            cache.shared = DaemonPrompts(lambda: client, tokenizer.identity)
            cache.forget()
            assert tokenizer.encode(TEXT, False) == encode_plainly(tokenizer.backend, TEXT)
            return cache.num_shared_tokens > 0

        wait_until(is_shared, "the daemon answers in time")


def test_another_front_gets_the_ids_of_a_text(tmp_path: Path, short_dir: Path) -> None:
    """What one front has tokenised the next one asks for, and gets."""
    with Daemon(short_dir / "s") as daemon:
        with daemon.client(pb.ROLE_ENGINE) as client:
            front(tmp_path, client).encode(TEXT)
            wait_until(lambda: num_pieces(daemon) > 50, "the pieces have come")
        ask_again(daemon, tmp_path)


def test_ids_outlive_a_killed_daemon(tmp_path: Path, short_dir: Path) -> None:
    """The next daemon, which the holder starts, has what the killed one had."""
    with Daemon(short_dir / "s", extra=["--holder"]) as daemon:
        with daemon.client(pb.ROLE_ENGINE) as client:
            front(tmp_path, client).encode(TEXT)
            wait_until(lambda: num_pieces(daemon) > 50, "the pieces have come")
        before = num_pieces(daemon)
        daemon.kill_under_holder()
        wait_until(lambda: num_pieces(daemon) == before, "the pieces are found again")
        ask_again(daemon, tmp_path)


def test_evict_without_a_model_drops_all_ids(tmp_path: Path, short_dir: Path) -> None:
    """Nothing is left, also not for the next daemon; and new pieces are kept again."""
    with Daemon(short_dir / "s", extra=["--holder"]) as daemon:
        with daemon.client(pb.ROLE_ENGINE) as client:
            front(tmp_path, client).encode(TEXT)
            wait_until(lambda: num_pieces(daemon) > 50, "the pieces have come")
        with daemon.client(pb.ROLE_ADMIN) as admin:
            admin.call(pb.Envelope(evict=pb.Evict()), 10.0)
        assert num_pieces(daemon) == 0
        daemon.kill_under_holder()
        with daemon.client(pb.ROLE_ENGINE) as client:
            assert num_pieces(daemon) == 0
            put = pb.PutPrompts(keys=bytes(32), ids=[b"1234"])
            client.notify(pb.Envelope(put_prompts=put))
            wait_until(lambda: num_pieces(daemon) == 1, "the piece has come")


def test_a_front_without_a_daemon_tokenises_itself(tmp_path: Path) -> None:
    """No connection, no wait, and the same ids."""
    tokenizer = front(tmp_path, None)
    assert tokenizer.encode(TEXT, False) == encode_plainly(tokenizer.backend, TEXT)


@pytest.mark.parametrize(
    "body",
    [
        pb.Envelope(get_prompts=pb.GetPrompts(keys=b"x" * 31)),
        pb.Envelope(get_prompts=pb.GetPrompts(keys=bytes(32 * 1025))),
        pb.Envelope(put_prompts=pb.PutPrompts(keys=bytes(32))),
        pb.Envelope(put_prompts=pb.PutPrompts(keys=bytes(32), ids=[b"abc"])),
    ],
)
def test_bad_requests_are_refused(short_dir: Path, body: pb.Envelope) -> None:
    """A typed error for each, and nothing is kept."""
    with Daemon(short_dir / "s") as daemon, daemon.client(pb.ROLE_ENGINE) as client:
        with pytest.raises(CachewarmError):
            client.call(body, 10.0)
        assert num_pieces(daemon) == 0


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def ids(number: int) -> bytes:
    return key(number) * 1000


def restored(prompts: Prompts) -> Prompts:
    """As a later daemon finds it."""
    after = Prompts(2 * SEGMENT_BYTES, lambda _: True, os.dup(prompts.fd))
    while after.restore_some():
        pass
    return after


def test_the_oldest_goes_and_what_was_asked_for_again_stays() -> None:
    """A flood of new pieces drops those asked for once; a later daemon finds the same ones."""
    prompts = Prompts(2 * SEGMENT_BYTES, lambda _: True)
    for number in range(20):
        prompts.put(key(number), ids(number), 0.0)
    for now in (1.0, 2.0):
        assert prompts.get(key(3), now) == ids(3)  # a burst
    assert prompts.get(key(7), 100.0) == ids(7)
    for number in range(20, 75):
        prompts.put(key(number), ids(number), 200.0)
    after = restored(prompts)
    for each in (prompts, after):
        assert each.get(key(7), 300.0) == ids(7)
        assert each.get(key(3), 300.0) == b""
        assert each.get(key(74), 300.0) == ids(74)


def test_a_doubtful_piece_is_dropped() -> None:
    """Another byte than was written, or a record that was written in part: a miss, no more."""
    prompts = Prompts(2 * SEGMENT_BYTES, lambda _: True)
    for number in range(10):
        prompts.put(key(number), ids(number), 0.0)
    place = os.pread(prompts.fd, SEGMENT_BYTES, 0).index(ids(4))
    os.pwrite(prompts.fd, b"\0", place + 100)
    last = os.pread(prompts.fd, SEGMENT_BYTES, 0).index(ids(9))
    os.pwrite(prompts.fd, bytes(len(ids(9)) - 8), last + 8)
    after = restored(prompts)
    found = [number for number in range(10) if after.get(key(number), 1.0) == ids(number)]
    assert found == [0, 1, 2, 3, 5, 6, 7, 8]
    assert after.num_doubtful == 2


def test_a_cache_without_memory_keeps_nothing() -> None:
    """No room is no error."""
    prompts = Prompts(2 * SEGMENT_BYTES, lambda _: False)
    assert not prompts.put(key(1), ids(1), 0.0)
    assert prompts.get(key(1), 0.0) == b""
    assert not Prompts(0, lambda _: True).put(key(1), ids(1), 0.0)
