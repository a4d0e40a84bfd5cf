"""The catalog of the daemon before: torn, of another format, or with anything in it.

An input is a byte of flags, a byte for the place in the first half's head that is overwritten, 8
bytes that overwrite it, and the JSON of that half. With flag 1 the head is left as it was written,
so that what reads the content is reached; with flag 2 the other half has an older, good catalog.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from cachewarmd import catalog, log, segment, weight_catalog
from cachewarmd.block import StampInfo, stamps_from_json
from cachewarmd.budget import Budget
from cachewarmd.catalog import Catalog
from cachewarmd.fdstore import FdStore
from cachewarmd.notify import Notifier
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_store import WeightStore
from cachewarmd.weights import Segment, layout_id
from tests.fuzz.target import Target, replaced

_IS_WHOLE, _HAS_OLDER = 1, 2
_HEAD_BYTES = catalog._HEAD.size
_DIGEST = b"\xab" * 32
_PLAN = pb.PackPlan(description="d", segment_bytes=4096)
_budget = Budget(Path("/nowhere"))


def _sealed() -> int:
    fd = segment.create_memfd("fuzz-weights", 4096)
    segment.seal_forever(fd)
    return fd


_SEGMENT_FD = _sealed()
_SEGMENT_NAME = weight_catalog.segment_name(Segment(_DIGEST, layout_id(_PLAN), 4096, -1))
_catalog_fd = Catalog().fd
_OLDER = {"pool_id": "older", "stamps": [], "weights": {}}


def check(data: bytes) -> None:
    """What was written, what was before that, or nothing; and what reads it leaves out the rest."""
    flags, at, edit, payload = data[:1], data[1:2], data[2:10], data[10:]
    bits = flags[0] if flags else 0
    for half in (0, 1):
        os.pwrite(_catalog_fd, bytes(_HEAD_BYTES), half * catalog._HALF_BYTES)
    if bits & _HAS_OLDER:
        _write(1, json.dumps({**_OLDER, "format": catalog.FORMAT}).encode())
    _write(2, payload)
    if not bits & _IS_WHOLE and at:
        os.pwrite(_catalog_fd, edit, at[0] % _HEAD_BYTES)
    content = Catalog(_catalog_fd).content
    assert isinstance(content, dict)
    if not bits & _IS_WHOLE and content and content["format"] != catalog.FORMAT:
        raise AssertionError("a format that is not known")
    _restore(content)


def _write(number: int, payload: bytes) -> None:
    """As `Catalog.write`, but of any bytes."""
    head = catalog._HEAD.pack(number, len(payload), catalog._digest(number, payload))
    os.pwrite(_catalog_fd, head + payload, number % 2 * catalog._HALF_BYTES)


def _restore(content: dict[str, Any]) -> None:
    with suppress(ValueError):
        for info in stamps_from_json(content.get("stamps")):
            assert info.slot_bytes >= info.block_bytes > 0
    passed = os.dup(_SEGMENT_FD)
    kept = FdStore(Notifier(), {_SEGMENT_NAME: passed})
    store = WeightStore(_budget)
    try:
        weight_catalog.restore(store, content.get("weights", {}), kept)
        for model in store.models:
            assert model.segment is not None
            seals = fcntl.fcntl(model.segment.fd, segment.F_GET_SEALS)
            assert seals & segment.F_SEAL_WRITE
            assert os.fstat(model.segment.fd).st_size == model.segment.size
        json.dumps(weight_catalog.to_json(store))
    finally:
        for model in store.models:
            if model.dir_fd >= 0:
                os.close(model.dir_fd)
        for loaded in store.segments:
            os.close(loaded.fd)
        kept.forget_rest()


def _read_half(self: Catalog, which: int) -> tuple[int, dict[str, Any]] | None:
    """As the catalog's own, but the head is believed to tell how long the content is."""
    offset = which * catalog._HALF_BYTES
    number, size, digest = catalog._HEAD.unpack(os.pread(self.fd, _HEAD_BYTES, offset))
    if not number:
        return None
    payload = os.pread(self.fd, size, offset + _HEAD_BYTES)
    if digest != catalog._digest(number, payload):
        return None
    with suppress(ValueError, RecursionError):
        content = json.loads(payload)
        return (number, content) if isinstance(content, dict) else None
    return None


def plant() -> AbstractContextManager[object]:
    """An unchecked length."""
    return replaced(Catalog, "_read_half", _read_half)


def make() -> Target:
    """Whole and torn, with and without an older one."""
    log.configure("fuzz", "error")
    info = os.fstat(_SEGMENT_FD)
    root = os.stat("/")
    model = {
        "dir_key": [root.st_dev, root.st_ino],
        "path": "/",
        "plan": base64.b64encode(_PLAN.SerializeToString(deterministic=True)).decode(),
        "name": "m",
        "version": "",
        "identities": [["model.safetensors", 1, 2, 3, 4, 5]],
        "loaded_unix_ms": 1,
        "follow_links": False,
        "weights_sha256": _DIGEST.hex(),
        "segment_bytes": 4096,
        "inode": info.st_ino,
    }
    stamp = StampInfo(0, b"s" * 32, 16384, 5000, 16, "stamp", b"w" * 32)
    content = {
        "pool_id": "00" * 16,
        "stamps": [stamp.to_json()],
        "weights": {"models": [model], "versions": {"m": [_DIGEST.hex()]}},
        "format": catalog.FORMAT,
    }
    _check_seed(content)
    payload = json.dumps(content).encode()
    heads = [bytes((flags, 8)) + bytes(8) for flags in range(4)]
    seeds = [head + payload for head in heads]
    seeds += [heads[1] + b"[1]", heads[1] + b"[" * 3000, heads[3] + b"{}"]
    return Target(check, seeds, plant)


def _check_seed(content: dict[str, Any]) -> None:
    store = WeightStore(_budget)
    kept = FdStore(Notifier(), {_SEGMENT_NAME: os.dup(_SEGMENT_FD)})
    weight_catalog.restore(store, content["weights"], kept)
    assert stamps_from_json(content["stamps"])
    assert len(store.models) == 1
    os.close(store.models[0].dir_fd)
    os.close(store.segments[0].fd)
