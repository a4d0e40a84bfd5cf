"""Messages between the front and the process that renders chat templates.

Frames: u32 little-endian length, msgpack. One `Setup` comes first, answered with `ready`; then a
`Job` at a time, each answered with a `Rendered`.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

LENGTH = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True):
    """What all renders share."""

    templates: dict[str, str]  # source by name
    special_tokens: dict[str, str]  # variables that templates may use, such as bos_token
    max_growth_bytes: int  # of the address space, over what the process has when it is ready


class Job(msgspec.Struct, frozen=True):
    """One conversation to render."""

    template: str
    messages: list[tuple[str, str]]  # (role, content)
    add_generation_prompt: bool
    max_output_chars: int
    alarm_s: float  # after which the process ends itself, should nobody be left to kill it


class Rendered(msgspec.Struct, frozen=True):
    """The text, or why there is none: `error` for this conversation, `unusable` for any."""

    kind: Literal["ready", "text", "error", "unusable"]
    text: str = ""


def encode(message: Setup | Job | Rendered) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
