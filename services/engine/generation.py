"""One Generate call: what its samples say becomes the messages of its stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.output_text import OutputText
from engine.request import Finished, Output
from engine.router import ActiveRequest
from engine.v1 import engine_pb2 as pb

_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
}


@dataclass(eq=False)
class _Sample:
    """One sample's text and how far it came."""

    active: ActiveRequest
    text: OutputText
    num_tokens: int = 0  # of output, those of an interrupted stream before included
    finished: Finished | None = None

    @property
    def stop_match(self) -> str | None:
        return self.text.stop_match

    @property
    def reason(self) -> str:
        """How it ended for the client; the worker may have been stopped because of a stop text."""
        assert self.finished is not None
        return "stop" if self.stop_match is not None else self.finished.reason


class Generation:
    """`active` are the samples of one request, `texts` their detokenisers, which know the stops.

    Text is held back until it is whole characters and no stop. Tokens that `continue_from` brought
    are replayed one by one, so that text which was held back then still comes.
    """

    def __init__(
        self, active: Sequence[ActiveRequest], texts: Sequence[OutputText], return_token_ids: bool
    ) -> None:
        self._samples = [_Sample(*pair) for pair in zip(active, texts, strict=True)]
        self._return_token_ids = return_token_ids
        for sample in self._samples:
            for token in sample.active.submit.output_ids:
                self._feed(sample, [token])

    @property
    def samples_to_stop(self) -> list[ActiveRequest]:
        """Those whose stop text has come while their worker goes on."""
        return [s.active for s in self._samples if s.stop_match is not None and not s.finished]

    def reason_of(self, sample_index: int) -> str:
        """How a sample that has ended did so, for the client."""
        return self._samples[sample_index].reason

    @property
    def is_done(self) -> bool:
        return all(sample.finished is not None for sample in self._samples)

    @property
    def usage(self) -> pb.Usage:
        first = self._samples[0]
        return pb.Usage(
            prompt_tokens=len(first.active.submit.prompt_ids),
            completion_tokens=sum(sample.num_tokens for sample in self._samples),
            cached_tokens=first.finished.num_cached_tokens if first.finished else 0,
        )

    def _message(self, **event: Any) -> pb.GenerateResponse:
        return pb.GenerateResponse(request_id=self._samples[0].active.submit.request_id, **event)

    def _feed(self, sample: _Sample, token_ids: Sequence[int]) -> str:
        piece = sample.text.feed(token_ids)
        sample.num_tokens += piece.num_tokens
        return piece.text

    def output(self, event: Output) -> Iterator[pb.GenerateResponse]:
        """New tokens; the text may be empty while a character or a stop is unfinished."""
        sample = self._samples[event.sample_index]
        if sample.stop_match is not None:
            return  # drawn before the worker heard of the stop
        before = sample.num_tokens
        text = self._feed(sample, event.token_ids)
        count = sample.num_tokens - before
        yield self._message(
            output=pb.TokenOutput(
                sample_index=event.sample_index,
                first_output_index=event.first_output_index,
                text=text,
                token_ids=event.token_ids[:count] if self._return_token_ids else (),
                num_tokens=count,
            )
        )

    def finish(self, event: Finished) -> Iterator[pb.GenerateResponse]:
        """The end of one sample: text that was held back, how it ended, and at last the usage."""
        sample = self._samples[event.sample_index]
        sample.finished = event
        index = event.sample_index
        if sample.stop_match is None and (text := sample.text.flush()):
            yield self._message(
                output=pb.TokenOutput(
                    sample_index=index, first_output_index=sample.num_tokens, text=text
                )
            )
        is_stop_id = sample.stop_match is None and event.stop_token_id is not None
        end = pb.Finished(
            sample_index=index,
            finish_reason=_REASONS[sample.reason],
            timings=_timings(sample.active, event),
            stop_match=sample.stop_match or "",
            stop_token_id=event.stop_token_id if is_stop_id else None,
        )
        yield self._message(finished=end, usage=self.usage if self.is_done else None)


def _timings(active: ActiveRequest, event: Finished) -> pb.Timings:
    timings = pb.Timings(num_failovers=active.num_failovers, num_preemptions=event.num_preemptions)
    seconds = {
        "queued": event.queued_s,
        "lookup": event.lookup_s,
        "prefill": event.prefill_s,
        "decode": event.decode_s,
        "preempted": event.preempted_s,
        "failover": active.failover_s,
    }
    for name, value in seconds.items():
        getattr(timings, name).FromNanoseconds(int(1e9 * value))
    return timings
