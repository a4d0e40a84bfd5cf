"""Makes traces of requests in the Mooncake format, from fixed seeds.

    python -m scripts.lib.traces              write examples/traces anew
    python -m scripts.lib.traces --check      fail if what is committed differs
    python -m scripts.lib.traces templates 4000 > big.jsonl

One JSON object a line: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`
(one for each block of 512 tokens; the same id is the same block after the same ones).
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

BLOCK_TOKENS = 512
FOLDER = Path(__file__).resolve().parents[2] / "examples/traces"
_SAMPLE_REQUESTS = 400

_NUM_TEMPLATES, _ZIPF, _TEMPLATE_BLOCKS = 100, 1.0, (2, 40)
_OWN_SHARE = (0.3, 0.7)  # of a prompt: tokens that no other prompt has
_REQUESTS_PER_S = 4.0
_NUM_SESSIONS, _TURN_TOKENS, _SYSTEM_TOKENS = 40, (50, 3000), 1536


def templates(num_requests: int, seed: int = 1) -> Iterator[dict[str, Any]]:
    """Prompts that are a template, drawn by Zipf's law, and then text of their own."""
    rng = random.Random(seed)
    ids = itertools.count()
    lengths = [
        rng.randint(*_TEMPLATE_BLOCKS) * BLOCK_TOKENS + rng.randrange(BLOCK_TOKENS)
        for _ in range(_NUM_TEMPLATES)
    ]
    shared = [[next(ids) for _ in range(length // BLOCK_TOKENS)] for length in lengths]
    weights = [1 / (rank + 1) ** _ZIPF for rank in range(_NUM_TEMPLATES)]
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(_REQUESTS_PER_S)
        which = rng.choices(range(_NUM_TEMPLATES), weights)[0]
        share = rng.uniform(*_OWN_SHARE)
        length = int(lengths[which] / (1 - share)) + 1
        own = [next(ids) for _ in range(-(-length // BLOCK_TOKENS) - len(shared[which]))]
        yield _request(now, length, rng.randint(10, 500), shared[which] + own)


def sessions(num_requests: int, seed: int = 2) -> Iterator[dict[str, Any]]:
    """Conversations that grow by a turn each: one system prompt, then what was said so far."""
    rng = random.Random(seed)
    ids = itertools.count()
    system = [next(ids) for _ in range(_SYSTEM_TOKENS // BLOCK_TOKENS)]
    running: list[tuple[int, list[int]]] = []
    now = 0.0
    for _ in range(num_requests):
        now += rng.expovariate(_REQUESTS_PER_S)
        if len(running) < _NUM_SESSIONS or rng.random() < 0.2:
            length, blocks = _SYSTEM_TOKENS, system
        else:
            length, blocks = running.pop(rng.randrange(len(running)))
        length += rng.randint(*_TURN_TOKENS)
        # A block that was not full has another content now, and so another id.
        kept = blocks[: max(len(system), (length - _TURN_TOKENS[1]) // BLOCK_TOKENS)]
        blocks = kept + [next(ids) for _ in range(-(-length // BLOCK_TOKENS) - len(kept))]
        running.append((length, blocks))
        yield _request(now, length, rng.randint(10, 500), blocks)


def _request(now: float, length: int, output: int, blocks: list[int]) -> dict[str, Any]:
    return {
        "timestamp": round(1000 * now),
        "input_length": length,
        "output_length": output,
        "hash_ids": blocks,
    }


SHAPES: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "sessions": sessions,
    "templates": templates,
}


def text(shape: str, num_requests: int) -> str:
    """A trace as its file has it."""
    return "".join(json.dumps(request) + "\n" for request in SHAPES[shape](num_requests))


def main(argv: Sequence[str]) -> int:
    match argv:
        case [("sessions" | "templates") as shape, number]:
            sys.stdout.write(text(shape, int(number)))
            return 0
        case [] | ["--check"]:
            pass
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    stale = [
        path
        for path, content in (
            (FOLDER / f"{shape}.jsonl", text(shape, _SAMPLE_REQUESTS)) for shape in SHAPES
        )
        if not path.exists() or path.read_text() != content
    ]
    if argv:
        for path in stale:
            print(f"{path}: not what its generator writes", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in stale:
        path.write_text(text(path.stem, _SAMPLE_REQUESTS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
