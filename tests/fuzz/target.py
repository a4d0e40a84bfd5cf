"""What a target of the fuzzer is, and the form of the inputs that most of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Target:
    """`check` takes one input and raises when something is wrong; documented errors it catches.

    `seeds` are valid inputs, made by the project's own encoders. `plant` breaks the code under
    test in a rare branch while it is entered: a fuzzer that does not find that is no good.
    """

    check: Callable[[bytes], None]
    seeds: Sequence[bytes]
    plant: Callable[[], AbstractContextManager[object]]


def replaced(where: Any, name: str, value: Any) -> AbstractContextManager[object]:
    """A plant: another value, until the context is left."""
    return mock.patch.object(where, name, value)
