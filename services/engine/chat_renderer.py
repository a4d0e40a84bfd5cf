"""The process that renders chat templates: one request at a time, in bounded memory.

Started as ``python -m engine.chat_renderer`` by ``chat_process``, which kills it when a render
takes too long. It talks over stdin and stdout (``chat_messages``).

The Jinja environment gives what ``apply_chat_template`` of transformers gives: the same options,
extensions, globals and filters.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, BinaryIO

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.chat_messages import LENGTH, Job, Rendered, Setup, encode

# Reasons travel in gRPC trailers, which hold few KiB.
_MAX_REASON_CHARS = 300


class _TooLongError(Exception):
    pass


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}``: a scope of its own, for training; else nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` in a template: the constructor without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` in a template, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may pass self=
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes what is special in HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def make_environment() -> ImmutableSandboxedEnvironment:
    """The environment that chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


class Renderer:
    """Compiles each template when it is first used, and renders."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._environment = make_environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(self, job: Job) -> Rendered:
        """Never raises for what a template or a conversation does."""
        try:
            template = self._template(job.template)
        except jinja2.TemplateSyntaxError as error:
            return Rendered("unusable", f"line {error.lineno}: {_reason(error)}")
        except (Exception, MemoryError) as error:
            return Rendered("unusable", _reason(error))
        try:
            return Rendered("text", self._run(template, job))
        except MemoryError:
            limit = self._setup.max_growth_bytes >> 20
            return Rendered("error", f"rendering needs more than {limit} MiB of memory")
        except _TooLongError:
            return Rendered("error", f"the rendered text is over {job.max_output_chars} characters")
        except Exception as error:
            return Rendered("error", f"the chat template refused it: {_reason(error)}")

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            source = self._setup.templates[name]
            self._compiled[name] = self._environment.from_string(source)
        return self._compiled[name]

    def _run(self, template: jinja2.Template, job: Job) -> str:
        variables: Mapping[str, Any] = {
            "messages": [{"role": role, "content": content} for role, content in job.messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": job.add_generation_prompt,
            **self._setup.special_tokens,
        }
        parts: list[str] = []
        left = job.max_output_chars
        for part in template.generate(variables):
            left -= len(part)
            if left < 0:
                raise _TooLongError
            parts.append(part)
        text = "".join(parts)
        text.encode()  # a template may write half a character, which no answer can carry
        return text


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    # A template's own refusal needs no class name in front, an accident does.
    if not isinstance(error, jinja2.TemplateError):
        text = f"{type(error).__name__}: {text}"
    return text[:_MAX_REASON_CHARS]


def _limit_growth(max_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + max_bytes,) * 2)


def _read(file: BinaryIO) -> bytes | None:
    """The next frame's body, or None at the end."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = file.read(size)
    return body if len(body) == size else None


def _write(file: BinaryIO, message: Rendered) -> None:
    file.write(encode(message))
    file.flush()


def main() -> None:
    """Serve stdin until it is closed."""
    # Ctrl-C goes to the whole foreground group; who started this process ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    body = _read(requests)
    if body is None:
        return
    setup = msgspec.msgpack.decode(body, type=Setup)
    renderer = Renderer(setup)
    _limit_growth(setup.max_growth_bytes)
    _write(answers, Rendered("ready"))
    decoder = msgspec.msgpack.Decoder(Job)
    while (body := _read(requests)) is not None:
        job = decoder.decode(body)
        signal.setitimer(signal.ITIMER_REAL, job.alarm_s)
        _write(answers, renderer.render(job))
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
