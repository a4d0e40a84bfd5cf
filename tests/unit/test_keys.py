"""Keys and stamps: what they must tell apart, and what they must not depend on."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachewarmd.keys import Stamp, block_key, chain_keys, peer_salt, root_key, tail_keys
from tests.daemon import environment

STAMP = Stamp("v1", "ab" * 32, "cd" * 32, "f32", "none", "layout", "ref-1")
SALT = b"s" * 32
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def reference_key(parent: bytes, token_ids: list[int]) -> bytes:
    """Written down once more, the slow way."""
    data = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.sha256(parent + data).digest()


@pytest.mark.parametrize("field", Stamp.__dataclass_fields__)
def test_every_field_changes_the_stamp(field: str) -> None:
    """No field of the stamp is left out of its digest."""
    changed = replace(STAMP, **{field: getattr(STAMP, field) + "x"})
    assert changed.digest() != STAMP.digest()


def test_bytes_that_move_between_fields_change_the_stamp() -> None:
    """Joining two fields in another place is another stamp."""
    one = replace(STAMP, compute_dtype="A", kv_layout="BC")
    two = replace(STAMP, compute_dtype="AB", kv_layout="C")
    assert one.digest() != two.digest()


def test_roots_are_injective_in_their_fields() -> None:
    """No two field lists share a root: moved bytes, empty and unset all differ."""
    stamp = STAMP.digest()
    texts = ["", "A", "AB", "BC", "C", "ABC", "\0"]
    roots = [
        root_key(SALT, stamp, tenant, salt, adapter)
        for tenant, salt, adapter in itertools.product(texts, [None, *texts], texts)
    ]
    assert len(set(roots)) == len(roots)


@given(st.text(), st.text())
def test_any_text_is_a_salt_or_a_tenant(tenant: str, salt: str) -> None:
    """Also what UTF-8 can't hold; and it makes another root than none."""
    roots = {root_key(SALT, STAMP.digest(), *domain) for domain in ((tenant, salt), (tenant, None))}
    assert len(roots) == 2
    assert root_key(SALT, STAMP.digest(), "\ud800", "\udfff")


def test_two_users_get_two_salts() -> None:
    """Neither is the pool's own; the same user always gets the same."""
    salts = [peer_salt(SALT, uid) for uid in (0, 1, 65534, 0)]
    assert len({SALT, *salts}) == 4
    assert salts[0] == salts[3]


def test_root_depends_on_the_secret_and_the_stamp() -> None:
    """Another daemon's salt or another stamp gives other roots."""
    stamp = STAMP.digest()
    roots = {
        root_key(SALT, stamp),
        root_key(b"t" * 32, stamp),
        root_key(SALT, replace(STAMP, version="v2").digest()),
    }
    assert len(roots) == 3


def test_root_is_an_hmac_over_length_prefixed_fields() -> None:
    """The bytes that are authenticated are those that the documentation names."""
    stamp = STAMP.digest()
    message = b"".join(
        b"\x01" + len(part).to_bytes(8, "little") + part for part in (stamp, b"tenant")
    )
    message += b"\x00" + b"\x01" + bytes(8)
    assert root_key(SALT, stamp, "tenant") == hmac.digest(SALT, message, "sha256")


@given(tokens=TOKENS, block_size=st.integers(1, 8))
def test_chain_and_tail_keys_equal_a_plain_reference(tokens: list[int], block_size: int) -> None:
    """Full blocks chain in order; the rest gives a key for each of its prefixes, longest first."""
    parent = root_key(SALT, STAMP.digest())
    num_full = len(tokens) // block_size
    expected = []
    for index in range(num_full):
        parent = reference_key(parent, tokens[index * block_size : (index + 1) * block_size])
        expected.append(parent)
    assert chain_keys(root_key(SALT, STAMP.digest()), tokens, block_size) == expected
    rest = tokens[num_full * block_size :]
    tails = [reference_key(parent, rest[:count]) for count in range(len(rest), 0, -1)]
    assert tail_keys(parent, rest) == tails
    if rest:
        assert block_key(parent, rest) == tails[0]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_that_fits_no_u32_is_an_error(token: int) -> None:
    """An id out of range never wraps around to another token's key."""
    with pytest.raises(OverflowError):
        block_key(SALT, [token])


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    """Two processes with different PYTHONHASHSEED agree on stamp and keys."""
    code = (
        "from cachewarmd.keys import *\n"
        f"stamp = {STAMP!r}.digest()\n"
        "print(stamp.hex(), chain_keys(root_key(b's' * 32, stamp), range(9), 2)[-1].hex())"
    )
    told = {
        subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={**environment(), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    stamp = STAMP.digest()
    key = chain_keys(root_key(SALT, stamp), list(range(9)), 2)[-1]
    assert told == {f"{stamp.hex()} {key.hex()}\n"}
