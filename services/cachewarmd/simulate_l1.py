"""What tier L1 would save on a trace: tokens whose ids are kept, and time spent on tokenising.

A trace's block stands for a piece of text. `none` tokenises everything; `lru` and `lru2` keep ids
of so many tokens; with `prefill` the beginning that most requests share is there from the start.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from cachewarmd.lru2 import BURST_S, Lru2
from cachewarmd.simulate import BLOCK_TOKENS, Request, Trace

POLICIES = {"none": math.nan, "lru": math.inf, "lru2": BURST_S}  # seconds of a burst
_STATIC_SHARE = 0.5  # of all requests: what more of them begin with is a template's


def rows(trace: Trace, capacities: Sequence[int], us_per_token: float) -> list[dict[str, Any]]:
    """One for each capacity (in tokens), policy, and without and with prefill."""
    found = []
    for capacity in capacities:
        for policy, burst_s in POLICIES.items():
            for prefill in (False, True) if policy != "none" else (False,):
                size = 0 if policy == "none" else capacity
                hit_tokens, first = _replay(trace, size, burst_s, prefill)
                found.append(
                    {
                        "capacity_tokens": capacity,
                        "policy": policy,
                        "prefill": prefill,
                        **_outcome(trace, hit_tokens, us_per_token),
                        "first_request_ms": first * us_per_token / 1000,
                    }
                )
    return found


def _outcome(trace: Trace, hit_tokens: int, us_per_token: float) -> dict[str, Any]:
    num_tokens = sum(request.num_tokens for request in trace.requests)
    missed = num_tokens - hit_tokens
    return {
        "num_tokens": num_tokens,
        "hit_tokens": hit_tokens,
        "hit_tokens_percent": 100 * hit_tokens / max(1, num_tokens),
        "mean_ms": missed * us_per_token / 1000 / max(1, len(trace.requests)),
    }


def _replay(trace: Trace, capacity: int, burst_s: float, prefill: bool) -> tuple[int, int]:
    """Tokens found, and tokens that the first request misses."""
    cache: Lru2[int, int] = Lru2(capacity, burst_s)
    for block in static_prefix(trace.requests) if prefill else ():
        cache.put(block, block, BLOCK_TOKENS, trace.requests[0].at_s)
    hit_tokens = first = 0
    for number, request in enumerate(trace.requests):
        found = 0
        for index, block in enumerate(request.chain):
            size = request.tokens_of(index + 1) - request.tokens_of(index)
            if cache.get(block, request.at_s) is not None:
                found += size
            else:
                cache.put(block, block, size, request.at_s)
        hit_tokens += found
        first = request.num_tokens - found if number == 0 else first
    return hit_tokens, first


def static_prefix(requests: Sequence[Request]) -> list[int]:
    """Blocks that more than half of the requests begin with."""
    prefix: list[int] = []
    while True:
        at = len(prefix)
        following = Counter(r.chain[at] for r in requests if len(r.chain) > at)
        block, count = max(following.items(), key=lambda item: item[1], default=(0, 0))
        # Blocks are numbered by prefix, so those that share this one share all before it.
        if count <= _STATIC_SHARE * len(requests):
            return prefix
        prefix.append(block)
