"""A worker's loop without processes: a model that hashes what it reads, and a scripted front.

The model's KV of a position is a digest of the token there and of all KV before it, *as read from
the blocks*; its logits are a digest of all KV. A wrong block, stale KV, a wrong position or a tail
that was not copied changes every token after it. `solo` says what must come out, without blocks.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from engine.block_table import PrivatePool
from engine.channel import BrokenChannelError
from engine.config import WorkerConfig
from engine.executor.base import Chunk
from engine.request import (
    Abort,
    Finished,
    FromWorker,
    Output,
    Progress,
    SamplingParams,
    Stats,
    StatsRequest,
    Submit,
    ToWorker,
)
from engine.sampler import sample
from engine.shared_cache import SharedCache
from engine.worker import Inbox, Worker

BLOCK = 4  # tokens
KV_BYTES = 8  # of one position
_IDLE_S = 0.1  # a worker that sleeps less than this has sequences that can't run
VOCAB = 64  # a token for each byte of the longest digest

Array = npt.NDArray[np.float32]


def _kv(before: Any, token: int, position: int) -> bytes:
    """KV of one position, after the digest of all KV before it."""
    digest = before.copy()
    digest.update(struct.pack("<II", token, position))
    return cast(bytes, digest.digest()[:KV_BYTES])


def _logits(digest: Any) -> Array:
    row = np.frombuffer(digest.digest(), dtype=np.uint8).astype(np.float32) / 32
    return row + np.arange(VOCAB, dtype=np.float32) / 1024  # no ties


def solo(submit: Submit) -> list[int]:
    """The output that a request has when it is computed alone, from its first token to its last."""
    digest = hashlib.blake2b()
    tokens: list[int] = []

    def push(token: int) -> None:
        digest.update(_kv(digest, token, len(tokens)))
        tokens.append(token)

    for token in (*submit.prompt_ids, *submit.output_ids):
        push(token)
    output = list(submit.output_ids)
    while len(output) < submit.max_tokens and not _has_stopped(submit, output):
        row = _logits(digest)
        if len(output) < submit.min_tokens:
            row[submit.stop_token_ids] = -np.inf
        seed, index = submit.resolved_seed, submit.sample_index
        output.append(sample(row, submit.sampling, seed, index, len(output)))
        push(output[-1])
    return output


def _has_stopped(submit: Submit, output: Sequence[int]) -> bool:
    is_held_back = len(output) <= submit.min_tokens
    return bool(output) and not is_held_back and output[-1] in submit.stop_token_ids


class HashModel:
    """Implements `executor.base.Executor`; keeps what it was given: the chunks of every step."""

    name = "hash"
    why = "a test"
    compute_dtype = "hash"
    kv_dtype = "hash"
    block_bytes = BLOCK * KV_BYTES
    kv_layout = "hash"
    numerics = "hash"

    def __init__(self) -> None:
        self.steps: list[list[Chunk]] = []

    def forward(self, chunks: Sequence[Chunk]) -> list[Array | None]:
        """See `executor.base.Executor`."""
        self.steps.append([*chunks])
        written: set[int] = set()
        return [self._run(chunk, written) for chunk in chunks]

    def _run(self, chunk: Chunk, written: set[int]) -> Array | None:
        end = chunk.start + len(chunk.token_ids)
        assert len(chunk.blocks.memories) * BLOCK >= end, "positions without a block"
        digest = hashlib.blake2b(
            b"".join(block.tobytes() for block in chunk.blocks.memories[: -(-end // BLOCK)])[
                : chunk.start * KV_BYTES
            ]
        )
        for position, token in enumerate(chunk.token_ids, chunk.start):
            kv = _kv(digest, token, position)
            if position >= chunk.write_from:
                index, place = divmod(position, BLOCK)
                target = chunk.blocks.memories[index][place * KV_BYTES : (place + 1) * KV_BYTES]
                address = target.__array_interface__["data"][0]
                assert address not in written, "two write to one place"
                written.add(address)
                target[:] = np.frombuffer(kv, dtype=np.uint8)
            digest.update(kv)
        return _logits(digest) if chunk.needs_logits else None


def make_submit(attempt: int, prompt_ids: Iterable[int], **fields: Any) -> Submit:
    """A request named after its attempt, unless told otherwise."""
    defaults: dict[str, Any] = {
        "request_id": f"r{attempt}",
        "output_ids": [],
        "sampling": SamplingParams(),
        "resolved_seed": 7,
        "max_tokens": 5,
        "stop_token_ids": [],
    }
    return Submit(attempt=attempt, prompt_ids=list(prompt_ids), **(defaults | fields))


class ScriptError(AssertionError):
    """The worker does what no script expects: it stalls, or never ends."""


@dataclass
class Script:
    """The front's side: `plan` has what it says at which turn of the loop; keeps what it hears.

    A worker with nothing to do gets the next of the plan at once; behind its end, the front is
    gone. `on_turn` and `on_message` may `say` more.
    """

    plan: list[tuple[int, ToWorker]] = field(default_factory=list)
    on_turn: Callable[[], None] = lambda: None
    on_message: Callable[[FromWorker], None] = lambda message: None
    on_wait: Callable[[], bool] = lambda: False  # it waits for others: did anything happen there?
    max_turns: int = 3000
    turn: int = 0  # jumps ahead while the worker has nothing to do
    num_turns: int = 0
    heard: list[FromWorker] = field(default_factory=list)
    _inbox: deque[ToWorker | None] = field(default_factory=deque)

    def say(self, message: ToWorker | None) -> None:
        """In the worker's inbox by the next turn; None only wakes it up."""
        self._inbox.append(message)

    def hear(self, message: FromWorker) -> None:
        """The worker's `send`."""
        self.heard.append(message)
        self.on_message(message)

    # -- the worker's inbox ---------------------------------------------------------------------

    def get(self, block: bool, timeout: float | None) -> ToWorker | BrokenChannelError | None:
        """Called once each turn."""
        self.turn += 1
        self.num_turns += 1
        if self.num_turns > self.max_turns:
            raise ScriptError(f"still at work after {self.num_turns} turns")
        self.on_turn()
        self._speak()
        if self._inbox:
            return self._inbox.popleft()
        if not block:
            raise queue.Empty
        can_wait = timeout is None or timeout > _IDLE_S
        if timeout is not None and not (can_wait and self.plan):
            if not self.on_wait():
                raise ScriptError("it waits, and nobody will ever wake it")
            raise queue.Empty
        if not self.plan:
            return BrokenChannelError("the script is over")
        self.turn = self.plan[0][0]
        self._speak()
        return self._inbox.popleft()

    def _speak(self) -> None:
        """Say what is due."""
        self.plan.sort(key=lambda entry: entry[0])
        while self.plan and self.plan[0][0] <= self.turn:
            self.say(self.plan.pop(0)[1])

    def get_nowait(self) -> ToWorker | None:
        """Called until it raises."""
        if not self._inbox:
            raise queue.Empty
        return self._inbox.popleft()

    # -- what was heard -------------------------------------------------------------------------

    def outputs(self) -> dict[int, list[int]]:
        """New tokens by attempt; fails for indices with a gap or repetition."""
        found: dict[int, list[int]] = defaultdict(list)
        first: dict[int, int] = {}
        for message in self.heard:
            if isinstance(message, Output):
                start = first.setdefault(message.attempt, message.first_output_index)
                assert message.first_output_index == start + len(found[message.attempt])
                found[message.attempt] += message.token_ids
        return found

    @property
    def finished(self) -> dict[int, Finished]:
        """Last messages by attempt; fails for a second one, or anything after it."""
        found: dict[int, Finished] = {}
        for message in self.heard:
            if isinstance(message, Output | Finished | Progress):
                assert message.attempt not in found, f"{message} after the end"
            if isinstance(message, Finished):
                found[message.attempt] = message
        return found

    @property
    def stats(self) -> list[Stats]:
        return [message for message in self.heard if isinstance(message, Stats)]


@dataclass
class Bench:
    """A worker with all that belongs to it."""

    num_blocks: int = 64
    max_num_seqs: int = 8
    prefill_chunk: int = 16
    lookup_budget: float = 0.02
    model: HashModel = field(default_factory=HashModel)

    def __post_init__(self) -> None:
        memory = np.zeros(self.num_blocks * HashModel.block_bytes, dtype=np.uint8)
        self.pool = PrivatePool(memory, HashModel.block_bytes)
        self.memory = memory
        self.worker: Worker | None = None

    def run(self, script: Script, cache: SharedCache | None = None) -> Script:
        """The loop from the first message to the end of the script; checks it every turn."""
        config = WorkerConfig(
            role="unified",
            backend="hash",
            cpu_isa="auto",
            log_level="info",
            model=Path("hash"),
            model_name="hash",
            model_version="",
            cachewarmd=None,
            cpus=(),
            private_pool_bytes=len(self.memory),
            block_size=BLOCK,
            prefill_chunk=self.prefill_chunk,
            max_num_seqs=self.max_num_seqs,
            max_context=None,
            lookup_budget=self.lookup_budget,
        )
        inbox = cast(Inbox, script)
        self.worker = worker = Worker(
            script.hear, inbox, config, self.model, self.pool, cache, "private"
        )
        on_turn = script.on_turn

        def checked() -> None:
            worker._scheduler.check_invariants()
            on_turn()

        script.on_turn = checked
        with contextlib.suppress(BrokenChannelError):
            worker.run()
        return script

    def check_idle(self) -> None:
        """Nothing is left of anybody: no block, no sequence, no state."""
        assert self.worker is not None
        self.pool.check_invariants()
        assert self.pool.num_free == self.num_blocks, "blocks are lost"
        assert not self.worker._states, "a request's state is left"
        assert not self.worker._hand_offs.num_open, "a hand-off is left"
        scheduler = self.worker._scheduler
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def abort(submit: Submit) -> Abort:
    """The message that stops it."""
    return Abort(submit.attempt)


STATS = StatsRequest()
