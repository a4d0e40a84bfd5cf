"""Block keys and stamps: what a cached byte is bound to.

Key of block i = SHA-256(key of block i-1 || token ids as u32 little-endian). The root is an HMAC
over length-prefixed fields, so no two field lists can spell the same bytes. 256-bit keys stand for
the tokens: no token comparison is needed on a hit.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


def _length_prefixed(fields: Sequence[bytes | None]) -> bytes:
    """Injective encoding: presence byte, 8-byte length, bytes. None differs from empty."""
    out = bytearray()
    for field in fields:
        if field is None:
            out += b"\x00"
        else:
            out += b"\x01" + len(field).to_bytes(8, "little") + field
    return bytes(out)


@dataclass(frozen=True)
class Stamp:
    """Everything that changes the mathematics of a KV byte. Two engines share iff stamps equal."""

    version: str
    weights_sha256: str  # hex
    config_sha256: str  # hex, canonical config
    compute_dtype: str
    weight_quantisation: str
    kv_layout: str  # order, dtype, block size, rope parameters
    numerics: str  # backend, ISA class, kernel version

    def digest(self) -> bytes:
        """32 bytes, independent of field order in memory and of PYTHONHASHSEED."""
        fields = [part.encode() for item in sorted(asdict(self).items()) for part in item]
        return hashlib.sha256(_length_prefixed(fields)).digest()


def peer_salt(salt: bytes, uid: int) -> bytes:
    """What an engine of this user gets of the pool's secret.

    Roots of two users never meet, because neither knows what the other derives its own from.
    """
    return hmac.digest(salt, b"uid" + uid.to_bytes(8, "little"), "sha256")


def root_key(
    salt: bytes,
    stamp: bytes,
    tenant: str = "",
    cache_salt: str | None = None,
    adapter: str = "",
) -> bytes:
    """Key before the first block. `salt` is the daemon's secret, so keys can't be guessed.

    `tenant` is whom the server authenticated, `cache_salt` what the client chose: it can only
    narrow what is shared. Text may hold anything, also lone surrogates.
    """
    fields = [
        stamp,
        _encoded(tenant),
        None if cache_salt is None else _encoded(cache_salt),
        _encoded(adapter),
    ]
    return hmac.digest(salt, _length_prefixed(fields), "sha256")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<u4").tobytes()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a block (full or short) that follows `parent`."""
    return hashlib.sha256(parent + _token_bytes(token_ids)).digest()


def chain_keys(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of all full blocks of `token_ids`, in order."""
    data = _token_bytes(token_ids)
    step = 4 * block_size
    keys = []
    parent = root
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.sha256(parent + data[start : start + step]).digest()
        keys.append(parent)
    return keys


def tail_keys(parent: bytes, token_ids: Sequence[int]) -> list[bytes]:
    """Keys of every prefix of the unfilled last block, longest first (one hash state copied)."""
    state = hashlib.sha256(parent)
    keys = []
    data = _token_bytes(token_ids)
    for start in range(0, len(data), 4):
        state.update(data[start : start + 4])
        keys.append(state.copy().digest())
    keys.reverse()
    return keys
