"""Conversations to token ids, with the chat template of the model directory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.chat_messages import Setup
from engine.chat_process import RenderProcess
from engine.chat_specials import SpecialTokens, reveal
from engine.errors import EngineError, InvalidParameterError, NoChatTemplateError
from engine.prompt_cache import MIN_CHARS
from engine.tokenizer import Tokenizer
from engine.tokenizer_config import TokenizerConfig, TokenizerError, read_tokenizer_config

MAX_MESSAGES = 1024
MAX_ROLE_CHARS = 64
DEFAULT_LIMIT_S = 1.0
# Over what the renderer has when idle: some copies of the largest message, and the rendered text.
DEFAULT_MAX_GROWTH_BYTES = 256 << 20

_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"


@dataclass(frozen=True)
class ChatTemplates:
    """The templates of a model directory, possibly none."""

    sources: dict[str, str]  # by name; the unnamed one is "default"
    special_tokens: dict[str, str]  # variables that templates use, such as bos_token

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplates:
        """Find the templates where transformers does.

        ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``; without either file
        ``chat_template`` in tokenizer_config.json, a string or a list of {name, template}.

        Raises:
            TokenizerError: a file can't be read, or ``chat_template`` is neither.
        """
        config = read_tokenizer_config(model_dir)
        sources = _from_files(model_dir) or _from_config(config)
        return cls(sources, dict(config.special_tokens))

    @property
    def names(self) -> tuple[str, ...]:
        """What `template` of a request may name; empty when there is no template."""
        return tuple(self.sources)

    def resolve(self, name: str) -> str:
        """The name of the template that a request with this one means ("" is the default).

        Raises:
            NoChatTemplateError: there is none.
        """
        wanted = name or "default"
        if not self.sources:
            raise NoChatTemplateError(
                f"the model has no chat template: neither {_FILE} nor chat_template in "
                "tokenizer_config.json; text and token_ids work"
            )
        if wanted not in self.sources:
            raise NoChatTemplateError(
                f"the model has no chat template named {wanted[:64]!r}: it has "
                f"{', '.join(map(repr, self.sources))}"
            )
        return wanted


def _from_files(model_dir: Path) -> dict[str, str]:
    paths = {path.stem: path for path in sorted((model_dir / _FOLDER).glob("*.jinja"))}
    if (model_dir / _FILE).is_file():
        paths = {"default": model_dir / _FILE, **paths}
    return {name: _read(path) for name, path in paths.items()}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read the chat template {path}: {error}") from error


def _from_config(config: TokenizerConfig) -> dict[str, str]:
    value = config.chat_template
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list():
            named = [
                (entry.get("name"), entry.get("template"))
                if isinstance(entry, dict)
                else (None,) * 2
                for entry in value
            ]
        case _:
            named = [(None, None)]
    sources = {n: t for n, t in named if isinstance(n, str) and isinstance(t, str)}
    if len(sources) != len(named):
        raise TokenizerError(
            f"{config.path}: chat_template is neither a string nor a list of objects, each with "
            "its own string `name` and a string `template`"
        )
    return sources


class ChatEncoder:
    """Renders conversations in a process of its own and encodes the text.

    ``max_output_chars`` bounds the rendered text, ``limit_s`` the time that one render may take and
    ``max_growth_bytes`` the memory. Nothing is started before the first conversation.

    Ids are those of ``apply_chat_template`` in transformers, with two exceptions: special tokens
    spelt in roles and contents are ordinary text, and where texts get a BOS and the template writes
    none, it is added.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: ChatTemplates,
        max_output_chars: int,
        limit_s: float = DEFAULT_LIMIT_S,
        max_growth_bytes: int = DEFAULT_MAX_GROWTH_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._special = SpecialTokens(tokenizer, templates.sources.values())
        setup = Setup(templates.sources, templates.special_tokens, max_growth_bytes)
        self._process = RenderProcess(setup, max_output_chars, limit_s)

    @property
    def renderer_pid(self) -> int:
        """Of the process; 0 before the first conversation, and after it was ended."""
        return self._process.pid

    async def encode(
        self,
        messages: Sequence[tuple[str, str]],
        *,
        template: str = "",
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of (role, content) pairs.

        Raises:
            NoChatTemplateError: the model has no such template, or it is broken.
            InvalidParameterError: too many messages, a bad role, or the template refuses them or
                needs too much time, text or memory.
        """
        name = self._templates.resolve(template)
        _check(messages)
        hidden, placeholders = self._special.hide(messages)
        try:
            text = await self._process.render(name, hidden, add_generation_prompt)
        except InvalidParameterError as error:
            raise InvalidParameterError(
                [(field, reveal(reason, placeholders)) for field, reason in error.violations]
            ) from error
        # A long text takes seconds; the library lets other threads run meanwhile.
        ids = await asyncio.to_thread(self._special.encode, text, placeholders)
        return self._with_bos(text, ids)

    async def prefill(self) -> None:
        """Tokenise what long templates write into every conversation, so that it is kept.

        Text that a template has is in its source: a short one is not worth a process yet.
        """
        for name, source in self._templates.sources.items():
            if len(source) > MIN_CHARS:
                # A template that refuses this conversation may take others.
                with contextlib.suppress(EngineError):
                    await self.encode([("user", "?")], template=name)

    async def close(self) -> None:
        """End the process."""
        await self._process.close()

    def _with_bos(self, text: str, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_id
        if bos is None or not self._tokenizer.adds_bos or ids[:1] == [bos]:
            return ids
        # A template may write it after a line break of its own.
        spelt = self._tokenizer.id_to_token(bos)
        return ids if spelt and text.lstrip().startswith(spelt) else [bos, *ids]


def _check(messages: Sequence[tuple[str, str]]) -> None:
    violations: list[tuple[str, str]] = []
    if not 1 <= len(messages) <= MAX_MESSAGES:
        violations.append(
            ("chat.messages", f"{len(messages)} messages are not allowed: 1 to {MAX_MESSAGES}")
        )
    for index, (role, content) in enumerate(messages[:MAX_MESSAGES]):
        field = f"chat.messages[{index}]"
        if not 1 <= len(role) <= MAX_ROLE_CHARS:
            violations.append(
                (
                    f"{field}.role",
                    f"{len(role)} characters are not allowed: 1 to {MAX_ROLE_CHARS}",
                )
            )
        for name, text in (("role", role), ("content", content)):
            if not _is_unicode(text):
                violations.append((f"{field}.{name}", "it is not valid Unicode"))
    if violations:
        raise InvalidParameterError(violations)


def _is_unicode(text: str) -> bool:
    """Whether it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
