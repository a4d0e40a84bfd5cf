"""Replays a trace of requests through pools of several sizes and policies, without a daemon.

A trace has one JSON object a line (the Mooncake format): `timestamp` in ms, `input_length` in
tokens, `hash_ids`, one for each block of 512 tokens. As in the daemon, a block is found only
behind its ancestors, only leaves are evicted, and nothing of the request that runs is. Answers are
not in a trace, except as a part of later prompts.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cachewarmd.errors import InvalidRequestError
from cachewarmd.learn import Prefix, choose
from cachewarmd.simulate_policies import POLICIES, Place
from cachewarmd.traffic import Traffic

BLOCK_TOKENS = 512
MAX_REQUESTS = 1_000_000
MAX_BLOCKS = 50_000_000  # references in a trace
# A request counts as a hit from its first token on when so much of what could be there is.
FIRST_RESPONSE_SHARE = 0.9
_KEY = "I"  # blocks are numbers here, where the daemon has digests
_LEARN_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    num_tokens: int
    chain: list[int]

    def tokens_of(self, num_blocks: int) -> int:
        """Prompt tokens in the first blocks; the last one may be short."""
        return min(num_blocks * BLOCK_TOKENS, self.num_tokens)


@dataclass(frozen=True)
class Trace:
    """Blocks are numbered by prefix: the same id after other ids is another block."""

    requests: list[Request]
    parents: list[int]  # by block; 0 is the root
    reusable: list[int]  # by request: leading blocks that any request before it had

    @property
    def num_blocks(self) -> int:
        """Different ones: the pool in which nothing is evicted."""
        return len(self.parents) - 1


@dataclass
class Result:
    """What one replay gave; blocks and tokens of all requests together."""

    num_requests: int = 0
    num_blocks: int = 0
    num_tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    oracle_blocks: int = 0
    oracle_tokens: int = 0
    ghost_hits: int = 0  # blocks missed that went not long ago: a pool twice the size has most
    evictions: int = 0
    with_reusable: int = 0  # requests of which anything could be there
    first_responses: int = 0  # of those, ones that found FIRST_RESPONSE_SHARE of it
    # The same, of requests that reuse what no request since the start has had.
    with_old_reusable: int = 0
    old_first_responses: int = 0

    def row(self) -> dict[str, Any]:
        """Counts, and shares in percent."""
        shares = {
            "hit_tokens_percent": _percent(self.hit_tokens, self.num_tokens),
            "hit_blocks_percent": _percent(self.hit_blocks, self.num_blocks),
            "oracle_tokens_percent": _percent(self.oracle_tokens, self.num_tokens),
            "oracle_blocks_percent": _percent(self.oracle_blocks, self.num_blocks),
            "first_response_percent": _percent(self.first_responses, self.with_reusable),
            "old_first_response_percent": _percent(
                self.old_first_responses, self.with_old_reusable
            ),
        }
        return {**vars(self), **shares}


def _percent(part: int, whole: int) -> float:
    return round(100 * part / whole, 2) if whole else 0.0


def load(path: Path) -> Trace:
    """Raises InvalidRequestError naming file and line, OSError."""
    numbers: dict[tuple[int, int], int] = {}
    parents = [0]
    requests: list[Request] = []
    num_references = 0
    with path.open(encoding="utf-8", errors="strict") as lines:
        for line_number, line in enumerate(lines, 1):
            where = f"{path}, line {line_number}"
            if not line.strip():
                continue
            at_ms, num_tokens, ids = _fields(line, where)
            num_references += len(ids)
            if len(requests) >= MAX_REQUESTS or num_references > MAX_BLOCKS:
                raise InvalidRequestError(
                    f"{where}: at most {MAX_REQUESTS} requests with {MAX_BLOCKS} blocks are allowed"
                )
            chain, parent = [], 0
            for hash_id in ids:
                number = numbers.setdefault((parent, hash_id), len(parents))
                if number == len(parents):
                    parents.append(parent)
                chain.append(number)
                parent = number
            requests.append(Request(at_ms / 1000, num_tokens, chain))
    requests.sort(key=lambda request: request.at_s)
    return Trace(requests, parents, _reusable(requests))


def _fields(line: str, where: str) -> tuple[float, int, list[int]]:
    allowed = "an object with timestamp (ms), input_length (tokens) and hash_ids"
    try:
        told = json.loads(line)
        at_ms, num_tokens, ids = told["timestamp"], told["input_length"], told["hash_ids"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise InvalidRequestError(f"{where}: not a request; allowed: {allowed}") from None
    for name, value, kinds in (
        ("timestamp", at_ms, (int, float)),
        ("input_length", num_tokens, (int,)),
    ):
        if type(value) not in kinds or not 0 <= value < 1 << 53:
            raise InvalidRequestError(f"{where}: {name} is not allowed: a number from 0 on")
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise InvalidRequestError(f"{where}: hash_ids is not allowed: a list of whole numbers")
    if len(ids) != -(-num_tokens // BLOCK_TOKENS):
        raise InvalidRequestError(
            f"{where}: {len(ids)} hash_ids for {num_tokens} tokens are not allowed: "
            f"one for each block of {BLOCK_TOKENS} tokens"
        )
    return at_ms, num_tokens, ids


def _reusable(requests: Iterable[Request]) -> list[int]:
    seen: set[int] = set()
    found = []
    for request in requests:
        new = next((i for i, block in enumerate(request.chain) if block not in seen), None)
        found.append(len(request.chain) if new is None else new)
        seen.update(request.chain)
    return found


class Pool:
    """Resident blocks of a trace, evicted as the daemon does it: leaves, by a policy's order."""

    def __init__(self, parents: Sequence[int], capacity: int, policy: str) -> None:
        self._parents = parents
        self._capacity = capacity
        self._policy = POLICIES[policy](capacity)
        self._places: dict[int, Place] = {}
        self._sizes = [0, 0]  # of the policy's lists
        self._children: dict[int, int] = {}
        self._heaps: tuple[list[tuple[tuple[int, int], int]], ...] = ([], [])
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._tick = 0
        self.evictions = 0
        self.ghost_hits = 0

    def run(self, chain: Sequence[int], now: float) -> int:
        """One request: how many leading blocks it finds. All its blocks are resident then.

        What has no room, because everything else is the request's own, is left out.
        """
        self._tick += 1
        found = next((i for i, b in enumerate(chain) if b not in self._places), len(chain))
        for block in chain[:found]:
            place = self._policy.touched(block, self._places[block], self._tick, now)
            self._put(block, place)
        held = set(chain)
        for block in chain[found:]:
            if block in self._ghosts:
                self.ghost_hits += 1
                del self._ghosts[block]
            if len(self._places) >= self._capacity and not self._evict(held):
                break
            parent = self._parents[block]
            self._children[parent] = self._children.get(parent, 0) + 1
            self._put(block, self._policy.added(block, self._tick, now))
        return found

    def __contains__(self, block: int) -> bool:
        return block in self._places

    def __len__(self) -> int:
        return len(self._places)

    def _put(self, block: int, place: Place) -> None:
        before = self._places.get(block)
        if before is not None:
            self._sizes[before[0]] -= 1
        self._sizes[place[0]] += 1
        self._places[block] = place
        self._offer(block)

    def _offer(self, block: int) -> None:
        if not self._children.get(block):
            where, rank = self._places[block]
            heapq.heappush(self._heaps[where], (rank, block))

    def _evict(self, held: set[int]) -> bool:
        order = self._policy.lists(self._sizes)
        victim = next((b for b in (self._first(i, held) for i in order) if b is not None), None)
        if victim is None:
            return False
        place = self._places.pop(victim)
        self._sizes[place[0]] -= 1
        self._policy.evicted(victim, place)
        parent = self._parents[victim]
        self._children[parent] -= 1
        if parent in self._places:
            self._offer(parent)
        self._ghosts[victim] = None
        if len(self._ghosts) > self._capacity:
            self._ghosts.popitem(last=False)
        self.evictions += 1
        return True

    def _first(self, where: int, held: set[int]) -> int | None:
        heap, kept = self._heaps[where], []
        found = None
        while heap and found is None:
            rank, block = heap[0]
            if self._places.get(block) != (where, rank) or self._children.get(block):
                heapq.heappop(heap)  # it was used since, or is no leaf
            elif block in held:
                kept.append(heapq.heappop(heap))
            else:
                found = block
        for entry in kept:
            heapq.heappush(heap, entry)
        return found


def replay(
    trace: Trace,
    capacity: int,
    policy: str,
    *,
    start: int = 0,
    warmed: Sequence[Sequence[int]] = (),
) -> Result:
    """Requests from `start` on, in a pool that has nothing but what `warmed` brought in."""
    pool = Pool(trace.parents, capacity, policy)
    requests = trace.requests[start:]
    began = requests[0].at_s if requests else 0.0
    # The best last: it is what was used last.
    for chain in reversed(warmed):
        pool.run(chain, began)
    before = pool.evictions, pool.ghost_hits
    result = Result(num_requests=len(requests))
    seen: set[int] = set()
    for request, reusable in zip(requests, trace.reusable[start:], strict=True):
        found = pool.run(request.chain, request.at_s)
        result.num_blocks += len(request.chain)
        result.num_tokens += request.num_tokens
        result.hit_blocks += found
        result.hit_tokens += request.tokens_of(found)
        result.oracle_blocks += reusable
        result.oracle_tokens += request.tokens_of(reusable)
        if reusable:
            enough = FIRST_RESPONSE_SHARE * request.tokens_of(reusable)
            is_hit, is_old = (
                request.tokens_of(found) >= enough,
                request.chain[reusable - 1] not in seen,
            )
            result.with_reusable += 1
            result.first_responses += is_hit
            result.with_old_reusable += is_old
            result.old_first_responses += is_hit and is_old
        seen.update(request.chain)
    result.evictions, result.ghost_hits = pool.evictions - before[0], pool.ghost_hits - before[1]
    return result


def learn(trace: Trace, end: int, top: int, max_blocks: int, min_count: float) -> list[list[int]]:
    """What the requests before `end` say should be warm, the best first: chains for `replay`."""
    traffic = Traffic(_LEARN_BYTES, key_bytes=array(_KEY).itemsize)
    requests = trace.requests[:end]
    for request in requests:
        traffic.saw(None, array(_KEY, request.chain).tobytes(), request.at_s)
    now = requests[-1].at_s if requests else 0.0
    return [_chain(prefix) for prefix in choose(traffic, now, top, min_count, max_blocks)]


def _chain(prefix: Prefix) -> list[int]:
    return list(array(_KEY, prefix.keys))
