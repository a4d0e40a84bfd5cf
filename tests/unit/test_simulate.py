"""The simulator: what a naive model of the pool gives, and what a learned plan is worth."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cachewarmd import simulate
from cachewarmd.ctl.__main__ import main
from cachewarmd.errors import InvalidRequestError
from cachewarmd.simulate_policies import POLICIES
from scripts.lib import traces


def write(path: Path, *requests: tuple[float, int, list[int]]) -> Path:
    """A trace of (timestamp, input_length, hash_ids)."""
    lines = [
        json.dumps({"timestamp": at, "input_length": length, "output_length": 1, "hash_ids": ids})
        for at, length, ids in requests
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def random_trace(tmp_path: Path) -> simulate.Trace:
    """Few enough different blocks that pools of every size evict and hit."""
    rng = random.Random(5)
    requests = []
    for number in range(400):
        ids = [rng.choice((0, 0, 0, 1, 2, 3)) for _ in range(rng.randint(1, 6))]
        requests.append((1500.0 * number, 512 * len(ids) - 100, ids))
    return simulate.load(write(tmp_path / "trace.jsonl", *requests))


class NaivePool:
    """LRU with lists only: of the leaves that the request does not hold the oldest goes."""

    def __init__(self, parents: list[int], capacity: int) -> None:
        self.parents, self.capacity = parents, capacity
        self.used: dict[int, int] = {}  # block: tick

    def run(self, chain: list[int], tick: int) -> int:
        found = 0
        while found < len(chain) and chain[found] in self.used:
            self.used[chain[found]] = tick
            found += 1
        for block in chain[found:]:
            if len(self.used) == self.capacity:
                parents = {self.parents[b] for b in self.used}
                leaves = [b for b in self.used if b not in parents and b not in chain]
                if not leaves:
                    break
                del self.used[min(leaves, key=lambda b: (self.used[b], b))]
            self.used[block] = tick
        return found


@pytest.mark.parametrize("capacity", [1, 3, 10, 50, 200])
def test_lru_is_that_of_a_naive_pool(random_trace: simulate.Trace, capacity: int) -> None:
    """The same hits, request by request, in pools that evict all the time and in large ones."""
    pool = simulate.Pool(random_trace.parents, capacity, "lru")
    naive = NaivePool(random_trace.parents, capacity)
    for tick, request in enumerate(random_trace.requests):
        expected = naive.run(request.chain, tick)
        assert pool.run(request.chain, request.at_s) == expected
        assert {b for b in range(1, len(random_trace.parents)) if b in pool} == set(naive.used)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("capacity", [1, 7, 40])
def test_the_pool_is_bounded_and_prefix_closed(
    random_trace: simulate.Trace, policy: str, capacity: int
) -> None:
    """Under every policy no block outlives its parent, and no more are there than have room."""
    pool = simulate.Pool(random_trace.parents, capacity, policy)
    for request in random_trace.requests:
        pool.run(request.chain, request.at_s)
        resident = [b for b in range(1, len(random_trace.parents)) if b in pool]
        assert len(pool) == len(resident) <= capacity
        parents = {random_trace.parents[b] for b in resident}
        assert all(parent == 0 or parent in pool for parent in parents)
    assert pool.evictions > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pool_for_all_blocks_is_the_oracle(random_trace: simulate.Trace, policy: str) -> None:
    """What can be reused is, nothing is evicted, and so every first response is a hit."""
    row = simulate.replay(random_trace, random_trace.num_blocks, policy).row()
    assert row["hit_tokens"] == row["oracle_tokens"] > 0
    assert (row["evictions"], row["ghost_hits"]) == (0, 0)
    assert row["first_response_percent"] == 100.0


@pytest.mark.parametrize("policy", ["lru2", "arc"])
def test_a_scan_leaves_what_was_used_again(tmp_path: Path, policy: str) -> None:
    """One-off prompts of twice the pool do not drive out a template; with LRU they do."""
    uses = [(10_000.0 * i, 1024, [1, 2]) for i in range(3)]
    scan = [(60_000.0 + 2000 * i, 1024, [100 + 2 * i, 101 + 2 * i]) for i in range(10)]
    trace = simulate.load(write(tmp_path / "t", *uses, *scan, (99_000.0, 1024, [1, 2])))
    hits = {p: simulate.replay(trace, 10, p).hit_blocks for p in ("lru", policy)}
    assert hits == {"lru": 4, policy: 6}


def test_ghost_hits_are_what_a_larger_pool_would_have_had(tmp_path: Path) -> None:
    """Two prompts take turns in a pool for one: each finds that it has just gone."""
    turns = [(1000.0 * i, 512, [i % 2]) for i in range(6)]
    trace = simulate.load(write(tmp_path / "t", *turns))
    result = simulate.replay(trace, 1, "lru")
    assert (result.hit_blocks, result.ghost_hits, result.evictions) == (0, 4, 5)


def test_a_short_last_block_counts_for_its_tokens(tmp_path: Path) -> None:
    """Rates by tokens are not rates by blocks."""
    trace = simulate.load(write(tmp_path / "t", (0, 600, [1, 2]), (1, 600, [1, 2])))
    result = simulate.replay(trace, 2, "lru")
    assert (result.hit_tokens, result.hit_blocks) == (600, 2)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("nonsense", "not a request"),
        ("[1]", "not a request"),
        ('{"timestamp": 0, "input_length": 512}', "not a request"),
        ('{"timestamp": -1, "input_length": 512, "hash_ids": [1]}', "timestamp"),
        ('{"timestamp": 0, "input_length": true, "hash_ids": [1]}', "input_length"),
        ('{"timestamp": 0, "input_length": 512, "hash_ids": ["a"]}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 513, "hash_ids": [1]}', "1 hash_ids for 513"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, named: str) -> None:
    """File, line, field, and what is allowed."""
    path = write(tmp_path / "t", (0, 512, [1]))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InvalidRequestError, match=f"t, line 2: {named}.*allowed"):
        simulate.load(path)


def test_committed_samples_are_what_their_generator_writes() -> None:
    """Examples that anybody can make anew."""
    assert traces.main(["--check"]) == 0


def test_a_plan_learned_from_half_of_templated_traffic_serves_the_other_half(
    tmp_path: Path,
) -> None:
    """92 % of the requests find 90 % of what they can reuse; cold, none of the old ones does."""
    path = tmp_path / "templates.jsonl"
    path.write_text(traces.text("templates", 4000))
    trace = simulate.load(path)
    own = [1 - trace.reusable[i] / len(r.chain) for i, r in enumerate(trace.requests)]
    assert min(own) > 0.25  # blocks; at least 30 % of the tokens are of the prompt's own
    capacity, start = trace.num_blocks // 10, 2000
    plan = simulate.learn(trace, start, 10_000, capacity, 2.0)
    cold = simulate.replay(trace, capacity, "arc", start=start).row()
    warm = simulate.replay(trace, capacity, "arc", start=start, warmed=plan).row()
    assert warm["first_response_percent"] >= 92.0
    assert warm["first_response_percent"] > cold["first_response_percent"]
    assert cold["old_first_response_percent"] == 0.0 < warm["old_first_response_percent"]


def test_simulate_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Every policy at every size, without a daemon; with a plan each row twice."""
    path = str(traces.FOLDER / "templates.jsonl")
    assert main(["simulate", path]) == 0
    assert capsys.readouterr().out.count("arc") == 5
    flags = ["--policy", "lru", "--pool-bytes", "64GiB", "--learn-from", "0.5", "-o", "json"]
    assert main(["simulate", path, *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["num_planned"] > 0 for row in rows] == [False, True]
    assert rows[1]["hit_tokens"] > rows[0]["hit_tokens"]


def test_bytes_per_token_come_from_a_models_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Grouped heads count once; what can't be told is named."""
    trace = write(tmp_path / "t", (0, 512, [1]))
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    flags = ["simulate", str(trace), "--model", str(tmp_path), "-o", "json"]
    assert main(flags) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["footprint_bytes"] == 512 * 2 * 3 * 2 * 8 * 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(flags) == 2
    assert "num_hidden_layers" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--learn-from=1.5", "--min-count=0.5", "--pool-bytes=1KiB"])
def test_a_value_that_is_not_allowed_is_named(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Usage, with the flag and what is allowed."""
    extra = ["--learn-from=0.5"] if "min" in flag else []
    assert main(["simulate", str(write(tmp_path / "t", (0, 512, [1]))), flag, *extra]) == 2
    assert f"{flag.partition('=')[0]} " in capsys.readouterr().err
