"""Arithmetic, parsing and flags of scripts/bench. tests/e2e/test_bench.py runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.option_table import SERVE_OPTIONS
from engine.v1 import engine_pb2 as pb
from scripts.lib.bench import bandwidth, flags, memory, noise, spread
from scripts.lib.bench.__main__ import parse
from scripts.lib.bench.asking import Answer, Prompts, cut_to_tokens
from scripts.lib.bench.errors import BenchError, UsageError
from scripts.lib.bench.modes import MODES, decode
from scripts.lib.bench.report import Table, as_json

ROOT = Path(__file__).resolve().parents[2]

# Captured on a machine of two CPUs with other work on it.
STAT = """\
cpu  6155 20 3023 159605 972 5 47 8 3 1
cpu0 646 10 683 83538 26 2 10 2 3 0
cpu1 5509 10 2340 76067 946 3 37 6 0 1
intr 1029338 0 9 0
ctxt 2003454
btime 1764536515
processes 5174
procs_running 3
"""
OLD_STAT = "cpu  100 0 50 1000\ncpu0 100 0 50 1000\n"  # columns of Linux 2.4
LOADAVG = "0.17 0.06 0.02 3/92 5174\n"
ROLLUP = """\
55f6dee7c000-7ffe537e1000 ---p 00000000 00:00 0                          [rollup]
Rss:                1760 kB
Pss:                 379 kB
Pss_Dirty:           116 kB
Pss_Anon:            116 kB
Pss_File:            200 kB
Pss_Shmem:            63 kB
Shared_Clean:       1604 kB
SwapPss:               0 kB
"""


# -- statistics ------------------------------------------------------------------------------------


def test_a_spread_of_known_values() -> None:
    """Median, range and MAD, which one outlier does not move."""
    found = spread.Spread.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found == spread.Spread(count=5, median=3.0, min=1.0, max=100.0, mad=1.0)
    assert found.text(1) == "3.0 (1.0-100.0)"
    assert found.text(0, 1e3) == "3000 (1000-100000)"
    assert found.as_json() == {"count": 5, "median": 3.0, "min": 1.0, "max": 100.0, "mad": 1.0}


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_a_spread_is_in_order(values: list[float]) -> None:
    """min <= median <= max, and half of the values are no further off than the MAD."""
    found = spread.Spread.of(values)
    assert found.min <= found.median <= found.max
    near = sum(abs(value - found.median) <= found.mad for value in values)
    assert 2 * near >= len(values)


def test_nothing_has_no_median() -> None:
    """Of no value there is neither spread nor percentile, rather than a zero."""
    with pytest.raises(ValueError, match="no value"):
        spread.Spread.of([])
    with pytest.raises(ValueError, match="no value"):
        spread.percentile([], 50)


def test_percentiles_lie_between_ranks() -> None:
    """Linear between the two nearest ranks."""
    assert spread.percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert spread.percentile([1.0, 2.0], 99) == pytest.approx(1.99)


# -- noise -----------------------------------------------------------------------------------------


def test_cpu_times_of_a_captured_stat() -> None:
    """Idle time and waiting for disks is no work, steal stands apart, guests count once."""
    found = noise.parse_stat(STAT)
    ticks = os.sysconf("SC_CLK_TCK")
    assert found.busy == pytest.approx((6155 + 20 + 3023 + 5 + 47) / ticks)
    assert found.steal == pytest.approx(8 / ticks)
    assert found.num_cpus == 2
    assert noise.parse_stat(OLD_STAT) == noise.CpuTimes(150 / ticks, 0.0, 1)
    with pytest.raises(ValueError, match="no line `cpu`"):
        noise.parse_stat("intr 5\n")


def test_run_queue_of_a_captured_loadavg() -> None:
    """Of three that run one is the reader itself."""
    assert noise.parse_run_queue(LOADAVG) == 2
    assert noise.parse_run_queue("0.00 0.00 0.00 0/92 5174") == 0


def test_this_machines_files_can_be_read() -> None:
    """The real /proc has what is needed."""
    reading = noise.read_counters()
    assert reading.cpu.num_cpus >= 1
    assert reading.cpu.busy > 0
    assert noise.read_run_queue() >= 0


def test_own_cpu_time_has_that_of_ended_children() -> None:
    """What a child used stays counted after it has ended."""
    before = noise.own_cpu_seconds()
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    assert noise.own_cpu_seconds() - before > 0.4


def fake_counters(*readings: tuple[float, float, float, float]) -> Any:
    """Readings of (moment, busy, steal, own) on two CPUs, one after the other."""
    left = [
        noise.Reading(at, noise.CpuTimes(busy, steal, 2), own) for at, busy, steal, own in readings
    ]
    return lambda: left.pop(0)


def test_noise_is_summed_over_what_is_measured() -> None:
    """Shares are of all CPUs' time inside the `with`, and what happens between does not count."""
    lengths = [4, 2]
    meter = noise.NoiseMeter(
        fake_counters((0, 0, 0, 0), (1, 1.5, 0.1, 1.0), (100, 90, 50, 5), (102, 91, 50.1, 5.5)),
        lambda: lengths.pop(0) if lengths else 3,
    )
    assert meter.result()["foreign_cpu_share"] is None
    assert meter.text() == "-"
    for _ in range(2):
        with meter:
            pass
    told = meter.result()
    assert told["wall_s"] == 3.0
    assert told["foreign_cpu_share"] == pytest.approx((0.5 + 0.5) / 6)
    assert told["own_cpu_share"] == pytest.approx(1.5 / 6)
    assert told["steal_share"] == pytest.approx(0.2 / 6)
    assert told["run_queue_max"] == 4
    assert told["num_cpus"] == 2


def test_noise_is_never_negative() -> None:
    """Ticks may say less than our own processes know: then nothing foreign ran."""
    meter = noise.NoiseMeter(fake_counters((0, 0, 0, 0), (1, 0.9, 0, 1.0)), lambda: 0)
    with meter:
        pass
    assert meter.result()["foreign_cpu_share"] == 0.0


# -- memory and bandwidth --------------------------------------------------------------------------


def test_pss_of_captured_rollups(tmp_path: Path) -> None:
    """Kinds are summed over processes, in bytes."""
    for pid in (7, 8):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "smaps_rollup").write_text(ROLLUP)
    assert memory.pss([7, 8], tmp_path) == {
        "total": 2 * 379 * 1024,
        "anonymous": 2 * 116 * 1024,
        "file": 2 * 200 * 1024,
        "shared": 2 * 63 * 1024,
    }
    with pytest.raises(ValueError, match="no Pss"):
        memory.parse_rollup("Rss: 5 kB\n")
    with pytest.raises(FileNotFoundError):
        memory.pss([9], tmp_path)


def test_a_memfd_counts_once_by_what_is_allocated() -> None:
    """Two descriptors of one memfd are one copy; pages never touched are none."""
    name = f"test-bench-{os.getpid()}"
    fd = os.memfd_create(name)
    second = os.dup(fd)
    try:
        os.ftruncate(fd, 1 << 20)
        assert memory.memfds([os.getpid()])[name] == 0
        os.pwrite(fd, b"x", 0)
        allocated = memory.memfds([os.getpid()])[name]
        assert 1 <= allocated == os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)
        os.close(second)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_bandwidth_reads_all_of_the_memory(num_threads: int) -> None:
    """Any size can be split among any number of threads, and is a positive number of bytes/s."""
    area = bandwidth.allocate(1_000_003, num_threads)
    assert 1_000_003 <= area.nbytes < 1_000_003 + 8 * num_threads
    assert area.dtype == np.uint8
    assert area.all()
    assert bandwidth.read_bandwidth(area, num_threads, 2) > 0


# -- asking ----------------------------------------------------------------------------------------


def test_an_answers_arithmetic() -> None:
    """Tokens of the first message are not in the time after it."""
    answer = Answer(10.0, [(10.5, 2), (11.0, 1), (11.5, 3)], 7, 0)
    assert answer.ttft_s == 0.5
    assert (answer.num_tokens, answer.num_later_tokens) == (6, 4)
    assert answer.decode_s == 1.0
    assert answer.gaps == [0.5, 0.5]
    assert decode.rate([answer, answer]) == 4.0
    with pytest.raises(BenchError, match="one message"):
        decode.rate([Answer(0.0, [(1.0, 5)], 7, 0)])


def test_prompts_follow_from_seed_and_name() -> None:
    """No end ids; another name or seed is another prompt; what can't fit is a usage error."""
    info = pb.GetModelInfoResponse(vocab_size=50, eos_token_ids=[0, 7, 49], max_context=100)
    prompts = Prompts(5, info)
    ids = prompts.ids(500, 1, 2)
    assert set(ids) == set(range(50)) - {0, 7, 49}
    assert prompts.ids(500, 1, 2) == ids == Prompts(5, info).ids(500, 1, 2)
    assert ids not in (prompts.ids(500, 1, 3), Prompts(6, info).ids(500, 1, 2))
    prompts.check_fits("--lengths", 99, 1)
    with pytest.raises(UsageError, match=r"--lengths: 100 is not allowed: .* context of 100"):
        prompts.check_fits("--lengths", 100, 1)


class LetterClient:
    """Tokenises into letters and spaces."""

    def tokenize(self, text: str) -> Sequence[str]:
        return list(text)


@pytest.mark.parametrize(
    ("num_tokens", "text"),
    [(1, "ab"), (2, "ab"), (4, "ab"), (5, "ab cd"), (8, "ab cd ab"), (10, "ab cd ab")],
)
def test_texts_are_cut_to_tokens(num_tokens: int, text: str) -> None:
    """As many words as fit, over and over, and never none."""
    client: Any = LetterClient()
    assert cut_to_tokens(client, ["ab", "cd"], num_tokens) == text


# -- the command -----------------------------------------------------------------------------------


def test_tables_are_aligned() -> None:
    """Names to the left, cells to the right."""
    table = Table("title", ("", "ms"), [("a", "1.0"), ("long name", "10.0")])
    assert str(table).splitlines() == [
        "title",
        "             ms",
        "a           1.0",
        "long name  10.0",
    ]


def test_json_has_no_nan() -> None:
    """What is no number is a bug and not an answer."""
    assert as_json({"a": 1.5}) == '{"a": 1.5}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json({"a": float("nan")})


def test_flags_and_defaults() -> None:
    """Defaults of the modes, lists of numbers, and what is passed on as it was written."""
    mode, found = parse(["prefill"])
    assert (mode.name, found.lengths) == ("prefill", (512, 2048, 7000))
    assert (found.repeat, found.seed, found.model, found.json) == (3, 0, None, False)
    assert flags.serve_flags(found) == []
    _, found = parse(["throughput", "--concurrency", "2,1", "--lookup-budget", "2s", "--json"])
    assert found.concurrency == (2, 1)
    assert found.json
    assert flags.serve_flags(found) == ["--lookup-budget", "2s"]
    _, found = parse(["decode", "--timeout", "2m", "--limit", "1.5"])
    assert (found.timeout, found.limit) == (120.0, 1.5)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([], "required: MODE"),
        (["fly"], "'fly'"),
        (["decode", "--tokens", "1"], "--tokens: '1' is not allowed: a whole number from 2 to"),
        (["prefill", "--lengths", "5,x"], "--lengths: '5,x' is not allowed: different whole"),
        (["prefill", "--lengths", ""], "--lengths: '' is not allowed"),
        (["throughput", "--concurrency", "4,4"], "--concurrency: '4,4' is not allowed: different"),
        (["throughput", "--concurrency", "0"], "'0' is not allowed: different whole numbers"),
        (["decode", "--repeat", "0"], "--repeat: '0' is not allowed: a whole number from 1"),
        (["decode", "--backend", "gpt"], "--backend: 'gpt' is not allowed: auto"),
        (["decode", "--limit", "0"], "--limit: '0' is not allowed: above 0"),
        (["decode", "--lengths", "5"], "unrecognized arguments: --lengths"),
        (["decode", "--model", "/no/such"], "--model: '/no/such' is not allowed"),
    ],
)
def test_bad_flags_are_named(
    given: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and one line that names flag, value and what is allowed."""
    with pytest.raises(SystemExit) as raised:
        parse(given)
    assert raised.value.code == 2
    told = capsys.readouterr().err
    assert named in told
    assert told.count("\n") == 1


def test_only_options_of_the_engine_are_passed_on() -> None:
    """A flag is offered as soon as `serve` has it, and not before."""
    known = {option.name for option in SERVE_OPTIONS}
    offered = {option.name for option in flags.PASSED_OPTIONS}
    assert "backend" in offered <= known
    assert ("threads" in offered) == ("threads" in known)


def test_every_mode_is_documented() -> None:
    """docs/benchmarks.md has a heading for each mode; names are unique."""
    names = [mode.name for mode in MODES]
    assert len(set(names)) == len(names)
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in names:
        assert f"\n## {name}\n" in text
