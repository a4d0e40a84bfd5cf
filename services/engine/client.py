"""A small typed client of the engine, as `cachewarm-engine generate` uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceStub

_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    # A front that is started again is seen soon, not after a back-off that grew meanwhile.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_RESUME_PAUSE_S = 0.1


class CallError(Exception):
    """A call that ended with an error status; `reason` is the server's, "" when it gave none."""

    def __init__(self, status: str, reason: str, message: str) -> None:
        super().__init__(f"{reason or status}: {message}")
        self.status, self.reason, self.message = status, reason, message


@dataclass(frozen=True)
class Accepted:
    """The request is queued."""

    request_id: str
    num_prompt_tokens: int
    resolved_seed: int
    model_version: str
    weights_sha256: str


@dataclass(frozen=True)
class Text:
    """A piece of one sample; "" while a character or a stop is unfinished."""

    text: str
    token_ids: tuple[int, ...]
    first_output_index: int
    num_tokens: int
    sample_index: int = 0


@dataclass(frozen=True)
class Done:
    """The end of one sample. `finish_reason` is stop, length or cancelled; durations in seconds.

    The counts of tokens are the whole request's and stand in its last one only.
    """

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings_s: dict[str, float]
    num_failovers: int
    num_preemptions: int = 0
    sample_index: int = 0
    stop_match: str = ""
    num_resumed: int = 0  # times the stream was taken up again after the front was lost


Event = Accepted | Text | Done


@dataclass
class _Stream:
    """What a client has of one request, enough to go on with it elsewhere."""

    request: pb.GenerateRequest
    wants_ids: bool
    accepted: Accepted | None = None
    ids: list[int] = field(default_factory=list)
    has_flushed: bool = False  # the text held back to the end has come; only Done is missing
    num_resumed: int = 0

    def take(self, response: pb.GenerateResponse) -> Event | None:
        """The event for the caller; None = it has that already."""
        event = _event(response)
        match event:
            case Accepted():
                was_accepted, self.accepted = self.accepted is not None, event
                return None if was_accepted else event
            case Text():
                self.ids.extend(event.token_ids)
                if self.has_flushed and self.num_resumed:
                    return None
                self.has_flushed = not event.num_tokens
                return event if self.wants_ids else replace(event, token_ids=())
            case Done():
                return replace(event, num_resumed=self.num_resumed)

    def rest(self) -> pb.GenerateRequest:
        """The request for what is missing."""
        if self.accepted is None or not self.num_resumed:
            return self.request
        rest = pb.GenerateRequest()
        rest.CopyFrom(self.request)
        rest.request_id = self.accepted.request_id
        rest.sampling.seed = self.accepted.resolved_seed
        rest.expected_weights_sha256 = self.accepted.weights_sha256
        del rest.continue_from[:]
        rest.continue_from.extend([*self.request.continue_from, *self.ids])
        return rest

    def can_resume(self, error: CallError) -> bool:
        """Was the front lost, and may another one go on?"""
        if self.accepted is None or self.request.sampling.n > 1:
            return False
        is_lost = error.status == "UNAVAILABLE"
        # The lost front may not have seen yet that we are gone, if it was only the connection.
        return is_lost or (self.num_resumed > 0 and error.reason == "DUPLICATE_REQUEST_ID")


class EngineClient(AbstractContextManager["EngineClient"]):
    """One channel to an engine at `host:port` or `unix:PATH`; use it with `with`."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = EngineServiceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int] = "",
        *,
        chat: Sequence[tuple[str, str]] | None = None,
        template: str = "",
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        n: int | None = None,
        ignore_eos: bool = False,
        bypass_prefix_cache: bool = False,
        cache_salt: str | None = None,
        return_token_ids: bool = True,
        model: str = "",
        request_id: str = "",
        urgency: pb.Urgency = pb.URGENCY_UNSPECIFIED,
        priority: int | None = None,
        continue_from: Sequence[int] = (),
        expected_weights_sha256: str = "",
        timeout: float | None = None,
        resume_s: float = 0.0,
    ) -> Iterator[Event]:
        """Stream a completion of a text, of token ids, or of a chat of (role, content).

        `template` names one of the model's chat templates; "" is its default.

        When the front is lost in mid-stream, the same stream is taken up again from where it was,
        for `resume_s` seconds at most after each loss (n = 1 only). Raises CallError. Closing the
        iterator cancels the request.
        """
        request = pb.GenerateRequest(
            request_id=request_id,
            model=model,
            sampling=pb.SamplingParams(
                temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, n=n
            ),
            stopping=pb.StoppingOptions(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop=stop,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
            ),
            response=pb.ResponseOptions(return_token_ids=return_token_ids or resume_s > 0),
            cache=pb.CacheOptions(bypass_prefix_cache=bypass_prefix_cache, cache_salt=cache_salt),
            urgency=urgency,
            priority=priority,
            continue_from=continue_from,
            expected_weights_sha256=expected_weights_sha256,
        )
        if chat is not None:
            messages = [pb.ChatMessage(role=role, content=content) for role, content in chat]
            request.chat.CopyFrom(pb.Chat(messages=messages, template=template))
        elif isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
        yield from self._follow(_Stream(request, return_token_ids), timeout, resume_s)

    def _follow(self, stream: _Stream, timeout: float | None, resume_s: float) -> Iterator[Event]:
        end = None if timeout is None else time.monotonic() + timeout
        give_up, lost = 0.0, None
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            call = self._stub.Generate(stream.rest(), timeout=left)
            try:
                for response in call:
                    give_up, lost = 0.0, None
                    if (event := stream.take(response)) is not None:
                        yield event
                return
            except grpc.RpcError as exc:
                error = call_error(exc)
                lost = lost or error  # that is what happened; the next ones are of the search
                give_up = give_up or time.monotonic() + resume_s
                if not stream.can_resume(error):
                    raise error from exc
                if time.monotonic() >= give_up:
                    raise lost from exc
            finally:
                call.cancel()
            stream.num_resumed += 1
            time.sleep(_RESUME_PAUSE_S)

    def _ask(self, name: str, request: Any) -> Any:
        """A unary call. Raises CallError."""
        try:
            return getattr(self._stub, name)(request)
        except grpc.RpcError as exc:
            raise call_error(exc) from exc

    def tokenize(self, text: str) -> list[int]:
        """Token ids as the server sees them. Raises CallError."""
        return list(self._ask("Tokenize", pb.TokenizeRequest(text=text)).token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text as the server would stream it. Raises CallError."""
        return str(self._ask("Detokenize", pb.DetokenizeRequest(token_ids=token_ids)).text)

    def abort(self, request_id: str) -> bool:
        """Stop a request; False when no such one is active. Raises CallError."""
        return bool(self._ask("Abort", pb.AbortRequest(request_id=request_id)).aborted)

    def model_info(self) -> pb.GetModelInfoResponse:
        """What is served. Raises CallError."""
        return self._ask("GetModelInfo", pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        """What the processes do now. Raises CallError."""
        return self._ask("GetServerInfo", pb.GetServerInfoRequest())

    def load(self) -> pb.GetLoadResponse:
        """How busy it is. Raises CallError."""
        return self._ask("GetLoad", pb.GetLoadRequest())

    def flush_cache(self) -> pb.FlushCacheResponse:
        """Drop the model's shared blocks that nobody uses. Raises CallError."""
        return self._ask("FlushCache", pb.FlushCacheRequest())

    def drain(self) -> Iterator[int]:
        """Stop admitting for good; yields how many requests are left, at last 0.

        Raises CallError.
        """
        try:
            for response in self._stub.Drain(pb.DrainRequest()):
                yield response.num_active
        except grpc.RpcError as exc:
            raise call_error(exc) from exc

    def close(self) -> None:
        """End the channel."""
        self._channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _event(response: pb.GenerateResponse) -> Event:
    match response.WhichOneof("event"):
        case "accepted":
            told = response.accepted
            return Accepted(
                response.request_id,
                told.num_prompt_tokens,
                told.resolved_seed,
                told.model_version,
                told.weights_sha256,
            )
        case "output":
            output = response.output
            return Text(
                output.text,
                tuple(output.token_ids),
                output.first_output_index,
                output.num_tokens,
                output.sample_index,
            )
        case "finished":
            done, usage = response.finished, response.usage
            names = ("queued", "lookup", "prefill", "decode", "preempted", "failover")
            return Done(
                pb.FinishReason.Name(done.finish_reason).removeprefix("FINISH_REASON_").lower(),
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
                {name: getattr(done.timings, name).ToNanoseconds() / 1e9 for name in names},
                done.timings.num_failovers,
                done.timings.num_preemptions,
                done.sample_index,
                done.stop_match,
            )
    raise CallError("INTERNAL", "", "the server sent an event this client does not know")


def call_error(exc: grpc.RpcError) -> CallError:
    """Status, reason and text of a failed call."""
    status, reason = exc.code().name, ""
    details = rpc_status.from_call(exc)
    for packed in details.details if details is not None else ():
        info = error_details_pb2.ErrorInfo()
        if packed.Unpack(info):
            reason = info.reason
    return CallError(status, reason, exc.details() or "")
