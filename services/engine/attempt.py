"""What a worker keeps of an attempt beside the scheduler's view of it: lease, times, warmth."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.request import Finished
from engine.scheduler import Sequence
from engine.shared_cache import CachedPrefix, Lookup


@dataclass
class Clock:
    """When a sequence reached what; seconds of the monotonic clock, 0 = not yet."""

    submitted: float
    admitted: float = 0.0
    looked_up: float = 0.0
    first_token: float = 0.0
    preempted_at: float = 0.0
    preempted_s: float = 0.0


@dataclass
class AttemptState:
    """One attempt's; `prefix` is its claim on the daemon's pool."""

    clock: Clock
    prefix: CachedPrefix | None = None
    lookup: Lookup | None = None  # under way
    is_looked_up: bool = False
    num_cached_tokens: int = 0


def finished(
    sequence: Sequence, state: AttemptState, reason: str, error: tuple[str, str] | None = None
) -> Finished:
    """What the front is told at the end."""
    submit, clock, now = sequence.submit, state.clock, time.monotonic()
    admitted = clock.admitted or now
    looked_up = clock.looked_up or admitted
    first_token = clock.first_token or now
    return Finished(
        request_id=submit.request_id,
        attempt=submit.attempt,
        sample_index=submit.sample_index,
        reason=reason,
        num_cached_tokens=state.num_cached_tokens,
        queued_s=admitted - clock.submitted,
        lookup_s=looked_up - admitted,
        prefill_s=first_token - looked_up,
        decode_s=now - first_token,
        preempted_s=clock.preempted_s,
        num_preemptions=sequence.num_preemptions,
        stop_token_id=sequence.tokens[-1] if reason == "stop" else None,
        error=error,
    )
