"""Which weights each model name stands for, now and before."""

from __future__ import annotations

MAX_NAMES = 4096


class Versions:
    """Model names and the digests of their weights.

    The weights that an engine attached last under a name are *current* for it. Weights are
    *superseded* when a name stood for them once and no name does now: attaching them again, a
    rollback, makes them current again.
    """

    def __init__(self) -> None:
        self._current: dict[str, bytes] = {}
        self._all: dict[str, set[bytes]] = {}

    def serve(self, name: str, digest: bytes) -> None:
        """The name stands for these weights now; without a name nothing is superseded."""
        if not name:
            return
        self._current.pop(name, None)
        if len(self._current) >= MAX_NAMES:
            oldest = next(iter(self._current))
            del self._current[oldest], self._all[oldest]
        self._current[name] = digest
        self._all.setdefault(name, set()).add(digest)

    def is_current_of(self, name: str, digest: bytes) -> bool:
        """Does the name stand for these weights, or can it stand for none?"""
        return not name or self._current.get(name) == digest

    def to_json(self) -> dict[str, list[str]]:
        """By name, in their order: the weights it stands for, then all others it has stood for."""
        return {
            name: [digest.hex(), *(other.hex() for other in self._all[name] - {digest})]
            for name, digest in self._current.items()
        }

    def restore(self, told: dict[str, list[str]]) -> None:
        """Back from `to_json`."""
        for name, digests in told.items():
            for digest in reversed(digests):
                self.serve(name, bytes.fromhex(digest))

    def of(self, name: str) -> set[bytes]:
        """All weights that the name has stood for."""
        return set(self._all.get(name, ()))

    def is_current(self, digest: bytes) -> bool:
        return digest in self._current.values()

    @property
    def superseded(self) -> frozenset[bytes]:
        return frozenset().union(*self._all.values()).difference(self._current.values())
