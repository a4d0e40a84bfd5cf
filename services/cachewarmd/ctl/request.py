"""What `warmup` sends: the plan of the installed engine, and the prompts of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from cachewarmd import protocol
from cachewarmd.ctl.outcome import UsageError
from cachewarmd.errors import CachewarmError, ModelFilesError
from cachewarmd.v1 import control_pb2 as pb

PLAN_GROUP = "cachewarm.pack_plan"
_ALLOWED = 'one JSON value a line: {"text": "..."}, {"token_ids": [1, 2, ...]} or "text"'


def pack_plan(model_dir: Path) -> pb.PackPlan:
    """The plan that the installed engine makes for this model.

    Found by entry point: this package must not know the engine.
    """
    found = list(entry_points(group=PLAN_GROUP, name="default"))
    if not found:
        raise CachewarmError(
            "no engine is installed here that could say how to lay out the weights "
            f"(entry point {PLAN_GROUP}: default)"
        )
    try:
        plan_for = found[0].load()
    except (ImportError, AttributeError) as exc:
        raise CachewarmError(f"the engine's {found[0].value} can't be loaded: {exc}") from exc
    try:
        plan = pb.PackPlan.FromString(plan_for(model_dir))
    except DecodeError as exc:
        raise CachewarmError(f"{found[0].value} gave no pack plan") from exc
    except ValueError as exc:
        raise ModelFilesError(str(exc)) from exc
    return plan


def read_prompts(path: Path) -> Iterator[pb.WarmPrompt]:
    """Prompts of a JSONL file, in order. Raises UsageError naming file and line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield _prompt(json.loads(line))
            except (ValueError, RecursionError) as exc:
                raise UsageError(f"{path}:{number}: {exc}; allowed is {_ALLOWED}") from exc


def _prompt(value: Any) -> pb.WarmPrompt:
    if isinstance(value, str):
        value = {"text": value}
    if not isinstance(value, dict) or value.keys() not in ({"text"}, {"token_ids"}):
        raise ValueError("not a prompt")
    if "text" in value:
        text = value["text"]
        if not isinstance(text, str) or not text:
            raise ValueError("text must be a string that is not empty")
        return pb.WarmPrompt(text=text)
    ids = value["token_ids"]
    if not isinstance(ids, list) or not ids or not all(map(_is_token_id, ids)):
        raise ValueError("token_ids must be a list, not empty, of whole numbers from 0 to 2^32-1")
    return pb.WarmPrompt(token_ids=pb.TokenIds(ids=ids))


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def build(model_dir: Path, model_name: str, version: str, prompts_file: Path | None) -> pb.Envelope:
    """The whole request. Raises UsageError for prompts, also when they are too many for a frame."""
    prompts = [] if prompts_file is None else list(read_prompts(prompts_file))
    if not model_dir.is_dir():
        raise ModelFilesError(f"{model_dir}: no such model directory")
    request = pb.Warmup(
        model_name=model_name or model_dir.resolve().name,
        version=version,
        plan=pack_plan(model_dir),
        prompts=prompts,
    )
    envelope = pb.Envelope(warmup=request)
    # Some bytes are left for the id and the number of descriptors.
    size = envelope.ByteSize() + 32
    if size > protocol.MAX_FRAME_BYTES:
        raise UsageError(
            f"{prompts_file}: {len(prompts)} prompts make a request of {size} bytes, at most "
            f"{protocol.MAX_FRAME_BYTES} are allowed: split the file"
        )
    return envelope
