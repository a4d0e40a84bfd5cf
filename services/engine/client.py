"""A small typed client of the engine, as `cachewarm-engine generate` uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceStub

_OPTIONS = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
)


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
    """A piece of the answer; "" while a character is unfinished."""

    text: str
    token_ids: tuple[int, ...]
    first_output_index: int
    num_tokens: int


@dataclass(frozen=True)
class Done:
    """The end. `finish_reason` is stop, length or cancelled; durations in seconds."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timings_s: dict[str, float]
    num_failovers: int


Event = Accepted | Text | Done


class EngineClient(AbstractContextManager["EngineClient"]):
    """One channel to an engine at `host:port` or `unix:PATH`; use it with `with`."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        self._stub = EngineServiceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        ignore_eos: bool = False,
        bypass_prefix_cache: bool = False,
        return_token_ids: bool = True,
        model: str = "",
        request_id: str = "",
        timeout: float | None = None,
    ) -> Iterator[Event]:
        """Stream a completion of a text or of token ids. Raises CallError.

        Closing the iterator cancels the request.
        """
        request = pb.GenerateRequest(
            request_id=request_id,
            model=model,
            sampling=pb.SamplingParams(
                temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
            ),
            stopping=pb.StoppingOptions(max_tokens=max_tokens, ignore_eos=ignore_eos),
            response=pb.ResponseOptions(return_token_ids=return_token_ids),
            cache=pb.CacheOptions(bypass_prefix_cache=bypass_prefix_cache),
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        call = self._stub.Generate(request, timeout=timeout)
        try:
            for response in call:
                yield _event(response)
        except grpc.RpcError as exc:
            raise call_error(exc) from exc
        finally:
            call.cancel()

    def tokenize(self, text: str) -> list[int]:
        """Token ids as the server sees them. Raises CallError."""
        try:
            return list(self._stub.Tokenize(pb.TokenizeRequest(text=text)).token_ids)
        except grpc.RpcError as exc:
            raise call_error(exc) from exc

    def abort(self, request_id: str) -> bool:
        """Stop a request; False when no such one is active. Raises CallError."""
        try:
            return bool(self._stub.Abort(pb.AbortRequest(request_id=request_id)).aborted)
        except grpc.RpcError as exc:
            raise call_error(exc) from exc

    def model_info(self) -> pb.GetModelInfoResponse:
        """What is served. Raises CallError."""
        try:
            return self._stub.GetModelInfo(pb.GetModelInfoRequest())
        except grpc.RpcError as exc:
            raise call_error(exc) from exc

    def server_info(self) -> pb.GetServerInfoResponse:
        """What the processes do now. Raises CallError."""
        try:
            return self._stub.GetServerInfo(pb.GetServerInfoRequest())
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
                output.text, tuple(output.token_ids), output.first_output_index, output.num_tokens
            )
        case "finished":
            done, usage = response.finished, response.usage
            names = ("queued", "lookup", "prefill", "decode")
            return Done(
                pb.FinishReason.Name(done.finish_reason).removeprefix("FINISH_REASON_").lower(),
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens,
                {name: getattr(done.timings, name).ToNanoseconds() / 1e9 for name in names},
                done.timings.num_failovers,
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
