"""``tokenizer_config.json`` and ``special_tokens_map.json`` of a model directory.

Keys and precedence are those of transformers, so that a directory means the same in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STANDARD = frozenset(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class TokenizerError(Exception):
    """A tokenizer cannot be loaded, or a text cannot be encoded; the message says which."""


@dataclass(frozen=True)
class TokenizerConfig:
    """What the two files say; a missing file says nothing."""

    path: Path  # of tokenizer_config.json, for messages
    special_tokens: Mapping[str, str]  # text by name: "bos_token", "eos_token", ...
    add_bos_token: bool | None  # None: the tokenizer's post-processor decides
    chat_template: object  # as it stands there: str, list of {name, template}, or None


def read_tokenizer_config(model_dir: Path) -> TokenizerConfig:
    """Read both files of ``model_dir``.

    Raises:
        TokenizerError: one is not a JSON object, or a key has a value of the wrong kind.
    """
    path = model_dir / "tokenizer_config.json"
    config = _read_object(path)
    add_bos = config.get("add_bos_token")
    if not isinstance(add_bos, bool | None):
        raise TokenizerError(f"{path}: add_bos_token is {add_bos!r}, allowed are true and false")
    return TokenizerConfig(
        path=path,
        special_tokens=_special_tokens(model_dir, config),
        add_bos_token=add_bos,
        chat_template=config.get("chat_template"),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return value


def _special_tokens(model_dir: Path, config: dict[str, Any]) -> dict[str, str]:
    path = model_dir / "special_tokens_map.json"
    # Savers that write added_tokens_decoder write every name beside it; the map is older.
    named = config if "added_tokens_decoder" in config else {**config, **_read_object(path)}
    extra = named.get("extra_special_tokens")
    own = {name: value for name, value in named.items() if name.endswith("_token")}
    found: dict[str, str] = {}
    for name, value in {**own, **(extra if isinstance(extra, dict) else {})}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
        elif name in _STANDARD and value is not None:
            raise TokenizerError(
                f"{model_dir}: special token {name} is {value!r}, allowed are a string, an object "
                "with a string `content`, and null"
            )
    return found
