"""`snapshot save|load|list`: hot KV blocks to a file and back."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from cachewarmd import snapshot_format
from cachewarmd.ctl import progress, views
from cachewarmd.ctl.outcome import EXIT_FAILED, EXIT_OK, Output
from cachewarmd.ctl.verbs import connect, directory
from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb


def snapshot(args: argparse.Namespace, output: Output) -> int:
    """Write the hot KV blocks to a file, restore one, or list a directory's."""
    path: Path = args.path
    match args.action:
        case "save":
            envelope = pb.Envelope(snapshot_save=pb.SnapshotSave(name=path.name))
            with directory(path.absolute().parent) as fd:
                return _run(args, output, "saved", envelope, fd)
        case "load":
            # Opened here: the daemon reads only what its operator may read.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                envelope = pb.Envelope(snapshot_load=pb.SnapshotLoad())
                return _run(args, output, "restored", envelope, fd)
            finally:
                os.close(fd)
        case _:
            return _list(path, output)


def _run(
    args: argparse.Namespace, output: Output, what: str, envelope: pb.Envelope, fd: int
) -> int:
    with connect(args, pb.ROLE_ADMIN) as client, progress.work(args.action) as show:
        told = client.stream(envelope, show, None, [fd])[0].snapshot_reply
    refused = {reason: count for reason, count in sorted(told.refused.items()) if count}
    text = f"{told.num_blocks} blocks {what} ({views.human_bytes(told.num_bytes)})"
    if told.num_known:
        text += f", {told.num_known} were there already"
    if refused:
        text += ", left out: " + ", ".join(f"{n} {why}" for why, n in refused.items())
    output.answer(views.plain(told), lambda console: console.print(text))
    return EXIT_OK


def _list(folder: Path, output: Output) -> int:
    found = [entry for path in sorted(folder.iterdir()) if (entry := _entry(path)) is not None]
    rows = [
        (e["name"], e["created"], e["num_blocks"], views.human_bytes(e["bytes"]), e["error"])
        for e in found
    ]
    columns = ("name", "created", "blocks", "size", "error")
    output.answer({"snapshots": found}, views.table("snapshots", columns, rows))
    return EXIT_FAILED if any(e["error"] for e in found) else EXIT_OK


def _entry(path: Path) -> dict[str, Any] | None:
    """What a file's header says; None for other files and those that are being written."""
    if not path.is_file() or path.is_symlink() or path.name.startswith("."):
        return None
    with path.open("rb") as file:
        raw = file.read(snapshot_format.HEADER_BYTES)
    if raw[:8] != snapshot_format.MAGIC:
        return None
    entry: dict[str, Any] = {"name": path.name, "created": "", "num_blocks": 0, "bytes": 0}
    entry["bytes"] = path.stat().st_size
    try:
        header = snapshot_format.parse_header(raw)
    except CachewarmError as exc:
        return {**entry, "error": str(exc)}
    created = time.gmtime(header.created_unix_ms / 1000)
    entry["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", created)
    entry["num_blocks"] = header.num_blocks
    is_short = entry["bytes"] < header.file_bytes
    return {**entry, "error": f"{header.file_bytes} bytes were written" if is_short else ""}
