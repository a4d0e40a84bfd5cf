"""Tier L1 in the front: token ids of pieces of prompts, so that a text is not tokenised twice.

A text is cut at places where the ids of the pieces, joined, are the ids of the whole
(``text_cuts``), and each piece is kept under the digest of its text. So a prompt that goes on, or a
document with another question, costs what is new in it; where the document stands does not matter.
No text is kept. Ids are made from prompts, and tell them.
"""

from __future__ import annotations

import hashlib
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

import tokenizers

from cachewarmd.lru2 import Lru2
from engine.text_cuts import TextCuts

PIECE_CHARS = 1024  # between words a piece has at least so many: some 250 tokens
MIN_CHARS = 2 * PIECE_CHARS  # a shorter text is tokenised faster than it is looked up
# Less is tokenised sooner than it is asked for; and less is tokenised on the front's loop.
MIN_SHARED_CHARS = 16 << 10
_ENTRY_BYTES = 300  # of an entry beside its ids


class SharedPrompts(Protocol):
    """Where pieces come from that another front, or an earlier one, has tokenised."""

    def get(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Ids (u32, this host's order) of those that it has, within the time that it allows."""
        ...

    def put(self, pieces: dict[bytes, bytes]) -> None:
        """Keep these; never waits."""
        ...


class PromptCache:
    """Ids of texts, from what is kept where possible; at most ``capacity`` bytes. Thread-safe."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        encode: Callable[[str], list[int]],
        capacity: int,
        piece_chars: int = PIECE_CHARS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cuts = TextCuts(tokenizer)
        self._encode = encode
        self._piece_chars = piece_chars
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: Lru2[bytes, bytes] = Lru2(capacity)
        self.shared: SharedPrompts | None = None
        self.num_tokens = 0  # of texts that were long enough to be looked up
        self.num_hit_tokens = 0  # of these, from here
        self.num_shared_tokens = 0  # from other fronts

    @property
    def is_useful(self) -> bool:
        """Can texts of this tokenizer be cut at all?"""
        return self._cuts.is_any

    @property
    def used_bytes(self) -> int:
        """What is kept, with what an entry takes beside its ids."""
        return self._kept.used

    def forget(self) -> None:
        """Keep nothing of what was; for tests and measurements."""
        with self._lock:
            self._kept = Lru2(self._kept.capacity)

    def encode(self, text: str) -> list[int]:
        """The ids that ``encode`` of the whole text gives. A long text that is new takes seconds.

        ``text`` has no lone surrogate.
        """
        if len(text) < 2 * self._piece_chars:
            return self._encode(text)
        pieces = self._cuts.pieces(text, self._piece_chars)
        if len(pieces) == 1:
            return self._encode(text)
        digests = [hashlib.sha256(piece.encode()).digest() for piece in pieces]
        found = self._get(digests)
        num_local = sum(len(found.get(digest, b"")) for digest in digests)
        missing = {d: p for d, p in zip(digests, pieces, strict=True) if d not in found}
        if self.shared is not None and sum(map(len, missing.values())) >= MIN_SHARED_CHARS:
            found |= (theirs := self.shared.get(list(missing)))
        else:
            theirs = {}
        new = {d: self._tokenise(p) for d, p in missing.items() if d not in theirs}
        found |= new
        self._keep({**theirs, **new})
        # The last piece ends where the text does, so it may never be seen again.
        if self.shared is not None and new:
            self.shared.put(new)
        ids = array("I", b"".join(map(found.__getitem__, digests)))
        with self._lock:
            self.num_tokens += len(ids)
            self.num_hit_tokens += num_local // ids.itemsize
            self.num_shared_tokens += sum(map(len, theirs.values())) // ids.itemsize
        return ids.tolist()

    def _tokenise(self, piece: str) -> bytes:
        return array("I", self._encode(piece)).tobytes()

    def _get(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        now = self._clock()
        with self._lock:
            found = {digest: self._kept.get(digest, now) for digest in digests}
        return {digest: ids for digest, ids in found.items() if ids is not None}

    def _keep(self, pieces: dict[bytes, bytes]) -> None:
        now = self._clock()
        with self._lock:
            for digest, ids in pieces.items():
                self._kept.put(digest, ids, len(ids) + _ENTRY_BYTES, now)
