"""Tier L1 shared: pieces of prompts from cachewarmd, and to it, for the front's own cache.

Keys are bound to the tokenizer and to the secret that the daemon derives for each user.
"""

from __future__ import annotations

import contextlib
import hmac
import queue
import threading
import time
from collections.abc import Callable, Sequence

from cachewarmd.client import Client
from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb

_BUDGET_S = 0.02  # as for a lookup of blocks: later is a miss
_PAUSE_S = 1.0  # after one that was late or refused
_CONNECT_S = 5.0
_MAX_ASKED = 1024
_PUT_AT_ONCE = 128  # pieces: the daemon's loop takes about a millisecond for them
_MAX_WAITING = 64  # messages; what comes meanwhile is not shared


class DaemonPrompts:
    """`connection` gives the front's connection, None while there is none. Thread-safe."""

    def __init__(self, connection: Callable[[], Client | None], tokenizer_id: bytes) -> None:
        self._connection = connection
        self._tokenizer_id = tokenizer_id
        self._silent_until = 0.0
        self._waiting: queue.Queue[dict[bytes, bytes]] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None

    def get(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Ids by digest, of those that the daemon has and tells within 20 ms."""
        client = self._connection()
        if client is None or time.monotonic() < self._silent_until:
            return {}
        asked = digests[:_MAX_ASKED]
        request = pb.GetPrompts(keys=b"".join(self._keys(client, asked)))
        try:
            reply, _ = client.call(pb.Envelope(get_prompts=request), _BUDGET_S)
        except CachewarmError:
            self._silent_until = time.monotonic() + _PAUSE_S
            return {}
        told = reply.get_prompts_reply.ids
        if len(told) != len(asked):
            return {}
        return {d: ids for d, ids in zip(asked, told, strict=True) if ids and not len(ids) % 4}

    def put(self, pieces: dict[bytes, bytes]) -> None:
        """Send these in the background; dropped when too many wait."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._send, name="prompts", daemon=True)
            self._thread.start()
        rows = list(pieces.items())
        with contextlib.suppress(queue.Full):
            for start in range(0, len(rows), _PUT_AT_ONCE):
                self._waiting.put_nowait(dict(rows[start : start + _PUT_AT_ONCE]))

    def _send(self) -> None:
        while True:
            pieces = self._waiting.get()
            client = self._await_connection()
            if client is not None:
                keys = b"".join(self._keys(client, list(pieces)))
                request = pb.PutPrompts(keys=keys, ids=pieces.values())
                with contextlib.suppress(CachewarmError):  # it is known here all the same
                    client.notify(pb.Envelope(put_prompts=request))

    def _await_connection(self) -> Client | None:
        """A front connects a moment after it has begun to tokenise, and again after a loss."""
        end = time.monotonic() + _CONNECT_S
        while (client := self._connection()) is None and time.monotonic() < end:
            time.sleep(_CONNECT_S / 50)
        return client

    def _keys(self, client: Client, digests: Sequence[bytes]) -> list[bytes]:
        root = hmac.digest(client.hello.salt, b"prompts" + self._tokenizer_id, "sha256")
        return [hmac.digest(root, digest, "sha256") for digest in digests]
