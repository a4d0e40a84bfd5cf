"""Loaded weights across daemons: what the catalog says of them, and their segments again.

A segment is sealed against writing before it is stored, so its bytes need no second look: the
kernel vouches for them.
"""

from __future__ import annotations

import base64
import fcntl
import os
from typing import Annotated, Any

import msgspec
from google.protobuf.message import DecodeError

from cachewarmd import segment
from cachewarmd.fdstore import WEIGHTS, FdStore
from cachewarmd.log import get_logger
from cachewarmd.v1 import control_pb2 as pb
from cachewarmd.weight_files import FileIdentity
from cachewarmd.weight_store import DirKey, Model, WeightStore
from cachewarmd.weights import Segment, layout_id

_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]

_log = get_logger()


class _Told(msgspec.Struct):
    """All that `to_json` says; an item at a time, as each stands for itself."""

    models: list[Any]
    versions: dict[str, Annotated[list[_Digest], msgspec.Meta(min_length=1)]]


class _ToldModel(msgspec.Struct):
    """Of one model."""

    dir_key: tuple[int, int]
    path: str
    plan: bytes
    name: str
    version: str
    identities: list[FileIdentity]
    loaded_unix_ms: int
    follow_links: bool
    weights_sha256: _Digest
    segment_bytes: int
    inode: int


def segment_name(segment: Segment) -> str:
    """What it is stored under."""
    return f"{WEIGHTS}{segment.weights_sha256.hex()[:32]}-{segment.layout_id[:32]}"


def store_new(store: WeightStore, kept: FdStore) -> None:
    """Segments that are loaded are stored; before the catalog names them."""
    for loaded in store.segments:
        if segment_name(loaded) not in kept.names:
            kept.keep(segment_name(loaded), loaded.fd)


def forget_old(store: WeightStore, kept: FdStore) -> None:
    """Segments that were dropped are not stored; once the catalog names them no more."""
    loaded = {segment_name(segment) for segment in store.segments}
    for name in kept.names - loaded:
        if name.startswith(WEIGHTS):
            kept.forget(name)


def to_json(store: WeightStore) -> dict[str, Any]:
    """Models with what is loaded for them, and what their names stand for."""
    return {
        "models": [_model_to_json(model, model.segment) for model in store.models if model.segment],
        "versions": store.versions.to_json(),
    }


def restore(store: WeightStore, told: dict[str, Any], kept: FdStore) -> None:
    """Fill an empty store. What does not fit together is left out: it is read when asked for."""
    if not told:
        return
    try:
        whole = msgspec.convert(told, _Told)
    except msgspec.ValidationError as exc:
        _log.warning("catalog_of_weights_malformed", reason=str(exc))
        return
    segments: dict[str, Segment] = {}
    for told_model in whole.models:
        try:
            item = msgspec.convert(told_model, _ToldModel)
            plan = pb.PackPlan.FromString(item.plan)
        except (msgspec.ValidationError, DecodeError) as exc:
            _log.warning("weights_not_adopted", reason=str(exc))
            continue
        digest = bytes.fromhex(item.weights_sha256)
        loaded = Segment(digest, layout_id(plan), item.segment_bytes, -1)
        name = segment_name(loaded)
        if name not in segments:
            fd = kept.take(name)
            if fd is None or not _is_what_was_sealed(fd, item):
                _log.warning("weights_not_adopted", model=item.name, stored=fd is not None)
                if fd is not None:
                    os.close(fd)
                continue
            segments[name] = Segment(digest, loaded.layout_id, loaded.size, fd)
        model = Model(
            item.dir_key,
            reopen(item.path, item.dir_key),
            plan,
            item.name,
            item.version,
            segment=segments[name],
            identities=item.identities,
            loaded_unix_ms=item.loaded_unix_ms,
            follow_links=item.follow_links,
        )
        store.put_back(model)
        _log.info("weights_adopted", model=model.name, weights_sha256=digest.hex())
    store.versions.restore(whole.versions)


def _model_to_json(model: Model, loaded: Segment) -> dict[str, Any]:
    return {
        "dir_key": model.dir_key,
        "path": path_of(model.dir_fd),
        "plan": base64.b64encode(model.plan.SerializeToString(deterministic=True)).decode(),
        "name": model.name,
        "version": model.version,
        "identities": model.identities,
        "loaded_unix_ms": model.loaded_unix_ms,
        "follow_links": model.follow_links,
        "weights_sha256": loaded.weights_sha256.hex(),
        "segment_bytes": loaded.size,
        "inode": os.fstat(loaded.fd).st_ino,
    }


def _is_what_was_sealed(fd: int, item: _ToldModel) -> bool:
    info = os.fstat(fd)
    seals = fcntl.fcntl(fd, segment.F_GET_SEALS)
    is_sealed = seals & segment.F_SEAL_WRITE and seals & segment.F_SEAL_SHRINK
    return bool(is_sealed) and (info.st_ino, info.st_size) == (item.inode, item.segment_bytes)


def path_of(dir_fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd >= 0 else ""


def reopen(path: str, dir_key: DirKey) -> int:
    """The model's directory again; -1 = not there, until somebody attaches and brings it."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError):  # a name that can't be is a ValueError
        return -1
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) != dir_key:
        os.close(fd)
        return -1
    return fd
