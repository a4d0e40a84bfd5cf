"""The front's end of the process that renders chat templates."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process

import msgspec

from engine import errors
from engine.chat_messages import LENGTH, Job, Rendered, Setup, encode

# Python and jinja2 on a machine that is busy loading a model.
_START_TIMEOUT_S = 30.0
_MAX_BYTES_PER_CHAR = 4
_HEADER_BYTES = 1 << 12  # the reason of a refusal, and the fields around the text


class RenderProcess:
    """Starts the process at the first render; one that takes too long is killed and replaced.

    Renders run one at a time, the others wait in order. Only the time in the process counts.
    """

    def __init__(self, setup: Setup, max_output_chars: int, limit_s: float) -> None:
        self._setup = setup
        self._max_output_chars = max_output_chars
        self._limit_s = limit_s
        self._turn = asyncio.Lock()
        self._process: Process | None = None
        self._decoder = msgspec.msgpack.Decoder(Rendered)

    @property
    def pid(self) -> int:
        """Of the process that the last render left; 0 when there is none."""
        return 0 if self._process is None else self._process.pid

    async def render(
        self, template: str, messages: list[tuple[str, str]], add_generation_prompt: bool
    ) -> str:
        """The rendered text.

        Raises:
            InvalidParameterError: the template refuses the messages, or takes too much time, text
                or memory over them.
            NoChatTemplateError: the template is not one.
        """
        job = Job(
            template=template,
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            max_output_chars=self._max_output_chars,
            # Our own limit comes first, unless nobody is left to keep it.
            alarm_s=self._limit_s + 5.0,
        )
        async with self._turn:
            answer = await self._answer(job)
        match answer.kind:
            case "text":
                return answer.text
            case "unusable":
                raise errors.NoChatTemplateError(
                    f"chat template {template!r} can't be compiled: {answer.text}"
                )
            case _:
                raise errors.InvalidParameterError([("chat", answer.text)])

    async def _answer(self, job: Job) -> Rendered:
        process = await self._started()
        try:
            async with asyncio.timeout(self._limit_s):
                return await self._exchange(process, job)
        except TimeoutError:
            await self.close()
            reason = f"rendering took longer than {self._limit_s:g} s"
        except (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError):
            await self.close()
            reason = "rendering crashed, which too much memory or recursion can do"
        except BaseException:  # cancelled: the next request must not get this one's answer
            await self.close()
            raise
        return Rendered("error", reason)

    async def _started(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        # A new interpreter, never a fork: the front has threads.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "engine.chat_renderer", stdin=PIPE, stdout=PIPE
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                ready = await self._exchange(self._process, self._setup)
            if ready.kind != "ready":
                raise msgspec.ValidationError(f"{ready.kind} instead of ready")
            return self._process
        except (OSError, TimeoutError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
            await self.close()
            raise errors.InternalError("the chat renderer does not start") from error
        except BaseException:
            await self.close()
            raise

    async def _exchange(self, process: Process, message: Setup | Job) -> Rendered:
        if process.stdin is None or process.stdout is None:
            raise errors.InternalError("the chat renderer has no pipes")
        process.stdin.write(encode(message))
        await process.stdin.drain()
        (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        if size > self._max_output_chars * _MAX_BYTES_PER_CHAR + _HEADER_BYTES:
            raise msgspec.ValidationError(f"a frame of {size} bytes")
        return self._decoder.decode(await process.stdout.readexactly(size))

    async def close(self) -> None:
        """End the process; the next render would start another."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        # Not `wait`, which never returns while unread output keeps the pipe open.
        await process.communicate()
