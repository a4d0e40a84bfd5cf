"""Plain data between front and worker: typed messages, nothing else crosses that socket."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """How a token is drawn; the defaults mean greedy with nothing filtered."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


BACKGROUND = 3


class Submit(msgspec.Struct, tag=True, frozen=True):
    """One sample of a request, or the rest of one: all its state derives from this.

    `output_ids` are tokens already sent; they count as output and are not sent again. An `attempt`
    is a number the front never uses again: a message about another than the latest is stale.
    `hand_off` asks for the prefill only: the worker publishes, says "prefilled" when that is
    acknowledged, and keeps its lease until the Abort that tells it of another worker's lease.
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
    min_tokens: int = 0  # of output, before which no stop id is drawn
    bypass_cache: bool = False
    tenant: str = ""  # whom the front authenticated; nobody when it authenticates nobody
    cache_salt: str | None = None  # the client's own; only ever narrows what is shared
    urgency: int = 2  # 1 interactive, 2 normal, BACKGROUND
    priority: int = 0  # within the urgency; lower runs earlier
    hand_off: bool = False

    @property
    def domain(self) -> tuple[str, str | None]:
        """Requests of different domains share no block, whatever tokens they have."""
        return self.tenant, self.cache_salt


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Stop one sample of a request; unknown attempts are no-ops."""

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

    role: str
    model_version: str
    weights_sha256: str
    stamp: str
    backend: str
    backend_reason: str
    dtype: str
    kv_dtype: str
    block_size: int
    num_private_blocks: int
    max_num_seqs: int
    cpus: list[int]
    start_phases_s: dict[str, float]


class WorkerFailed(msgspec.Struct, tag=True, frozen=True):
    """The worker can't start; it exits after this."""

    message: str


class Progress(msgspec.Struct, tag=True, frozen=True):
    """It has a seat and prefill has come so far (positions of prompt and earlier output)."""

    request_id: str
    attempt: int
    sample_index: int
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
    sample_index: int
    reason: str  # stop, length, cancelled, error, prefilled
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    lookup_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    preempted_s: float = 0.0
    num_preemptions: int = 0
    stop_token_id: int | None = None
    error: tuple[str, str] | None = None


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Counts of a worker; those that only grow begin at its start."""

    num_waiting: int
    num_running: int
    num_private_blocks_free: int
    num_shared_blocks_in_use: int
    num_computed_tokens: int
    num_tail_copies: int
    num_preemptions: int
    num_steps: dict[str, int]  # by kind: prefill (alone or with decodes), decode
    step_seconds: dict[str, float]  # by kind
    daemon_epoch: int  # 0 = not connected
    weights_source: str


FromWorker = WorkerHello | WorkerReady | WorkerFailed | Progress | Output | Finished | Stats
