"""Plain data between front and worker: typed messages, nothing else crosses that socket."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """How a token is drawn; the defaults mean greedy with nothing filtered."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A request, or the rest of one: all its state derives from this.

    `output_ids` are tokens already sent; they count as output and are not sent again. A message
    about another `attempt` than the latest is stale.
    """

    request_id: str
    attempt: int
    prompt_ids: list[int]
    output_ids: list[int]
    sampling: SamplingParams
    resolved_seed: int
    max_tokens: int  # of output in all, over every attempt
    stop_token_ids: list[int]
    sample_index: int = 0
    bypass_cache: bool = False
    urgency: int = 2  # 1 interactive, 2 normal, 3 background


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop a request; unknown ids are no-ops."""

    request_id: str
    attempt: int


class StatsRequest(msgspec.Struct, tag=True, frozen=True):
    """Ask for Stats."""


ToWorker = Submit | Abort | StatsRequest


class WorkerHello(msgspec.Struct, tag=True, frozen=True):
    """First message of a worker that dialled in."""

    pid: int
    role: str


class WorkerReady(msgspec.Struct, tag=True, frozen=True):
    """The worker takes requests; what it serves."""

    model_version: str
    weights_sha256: str
    stamp: str
    backend: str
    dtype: str
    kv_dtype: str
    block_size: int
    num_private_blocks: int
    cpus: list[int]


class WorkerFailed(msgspec.Struct, tag=True, frozen=True):
    """The worker can't start; it exits after this."""

    message: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """Prefill has come so far (positions of prompt and earlier output)."""

    request_id: str
    attempt: int
    num_computed: int


class Output(msgspec.Struct, tag=True, frozen=True):
    """New tokens; `first_output_index` counts from the request's first output token."""

    request_id: str
    attempt: int
    sample_index: int
    first_output_index: int
    token_ids: list[int]


class Finished(msgspec.Struct, tag=True, frozen=True):
    """Last message of an attempt. `error` = (class name in engine.errors, text) or None."""

    request_id: str
    attempt: int
    reason: str  # stop, length, cancelled, error
    num_cached_tokens: int
    queued_s: float
    lookup_s: float
    prefill_s: float
    decode_s: float
    error: tuple[str, str] | None = None


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Counts of a worker."""

    num_waiting: int
    num_running: int
    num_private_blocks_free: int
    num_shared_blocks_in_use: int
    num_pending_publishes: int
    num_computed_tokens: int
    num_tail_copies: int
    daemon_epoch: int  # 0 = not connected
    weights_source: str


FromWorker = WorkerHello | WorkerReady | WorkerFailed | Progress | Output | Finished | Stats
