"""Typed reads of a model directory's JSON: a refusal names file, key, value and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ModelError

_MAX_WHOLE = (1 << 31) - 1
_MAX_NUMBER = 1e30  # far above any length or base; below it a float holds any whole number's size
_MAX_SHOWN = 80


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as exc:
        raise ModelError(f"{path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: not JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return data


class Fields:
    """An object's members. `within` is the object's own key when it is not the file's root."""

    def __init__(self, path: Path, raw: Mapping[str, Any], within: str = "") -> None:
        self.path, self.raw, self._prefix = path, raw, f"{within}." if within else ""

    def refuse(self, key: str, allowed: str) -> ModelError:
        shown = json.dumps(self.raw[key])[:_MAX_SHOWN] if key in self.raw else "nothing"
        return ModelError(
            f"{self.path}: {self._prefix}{key} = {shown} is not supported, only {allowed}"
        )

    def get(self, key: str) -> Any:
        """The value; None when it is null or absent."""
        return self.raw.get(key)

    def inner(self, key: str) -> Fields:
        """The object below a key, empty when there is none."""
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise self.refuse(key, "an object or null")
        return Fields(self.path, value or {}, f"{self._prefix}{key}")

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 0 < value <= _MAX_WHOLE:
            raise self.refuse(key, f"a whole number from 1 to {_MAX_WHOLE}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:
            raise self.refuse(key, f"a number above 0 and up to {_MAX_NUMBER:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        """False when it is null or absent."""
        value = self.get(key)
        if not isinstance(value, bool | None):
            raise self.refuse(key, "true, false or null")
        return value is True

    def must_be(self, key: str, *allowed: Any) -> None:
        """Absent counts as the first of them."""
        if self.raw.get(key, allowed[0]) not in allowed:
            raise self.refuse(key, " or ".join(json.dumps(value) for value in allowed))
