"""scripts/bench as a user runs it, on a tiny model: what it counts is right and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.daemon import SERVICES, environment

ROOT = SERVICES.parent
LIMIT_S = 540.0
MARK = "CACHEWARM_TEST_MARK"  # inherited by all that the command starts
# On a busy machine the default makes a miss of what is expected to hit.
COMMON = ("--json", "--repeat", "2", "--lookup-budget", "60s", "--pool-bytes", "64MiB")


# Several starts of engines, on a machine that may be busy.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def left_behind(mark: str) -> list[str]:
    """Command lines of processes that carry the mark, this one apart."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {process.cmdline()}")
    return found


class Command:
    """One run. The end of `with` kills what is left of it."""

    def __init__(self, folder: Path, mode: str, *flags: str) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        env = {**environment(), MARK: self.mark, "TMPDIR": str(folder)}
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(ROOT)])
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "scripts.lib.bench", mode, *flags],
            env=env,
            cwd=folder,  # whatever the current directory is
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def wait_for(self, text: str) -> None:
        """Returns when it has said that on stderr."""
        assert self.process.stderr is not None
        end, said = time.monotonic() + LIMIT_S, b""
        while text.encode() not in said:
            fd = self.process.stderr.fileno()
            ready = select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]
            assert ready, f"it never said {text!r}: {said!r}"
            part = os.read(fd, 4096)
            assert part, f"it ended without {text!r}: {said!r}"
            said += part

    def end(self, status: int = 0) -> str:
        """Its stdout, once it has ended with that status, tidily."""
        stdout, stderr = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode == status, stderr.decode()
        assert left_behind(self.mark) == []
        assert list(self.folder.iterdir()) == []
        return stdout.decode()

    def result(self) -> dict[str, Any]:
        """The object that is its last line."""
        found: dict[str, Any] = json.loads(self.end().splitlines()[-1])
        return found

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:
            self.process.kill()
        for line in left_behind(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.fixture
def run(short_dir: Path, m_rand_dir: Path) -> Iterator[Any]:
    """Starts the command with the tiny model; what it leaves of files is seen by `Command.end`."""
    with contextlib.ExitStack() as stack:

        def start(mode: str, *flags: str) -> Command:
            command = Command(short_dir, mode, "--model", str(m_rand_dir), *COMMON, *flags)
            return stack.enter_context(command)

        yield start


def check_spread(found: dict[str, Any], count: int = 2) -> None:
    """`count` positive values in order."""
    assert found["count"] == count
    assert 0 < found["min"] <= found["median"] <= found["max"]
    assert 0 <= found["mad"] <= found["max"] - found["min"]


def check_noise(found: dict[str, Any]) -> None:
    """Shares of a time that passed."""
    assert found["wall_s"] > 0
    assert found["run_queue_max"] >= found["run_queue_mean"] >= 0
    for name in ("foreign_cpu_share", "own_cpu_share", "steal_share"):
        assert 0 <= found[name] <= 1


def check_common(found: dict[str, Any], mode: str) -> None:
    """What every mode tells."""
    assert (found["schema_version"], found["mode"]) == (1, mode)
    assert found["settings"]["seed"] == 0
    assert found["settings"]["repeat"] == 2
    assert found["engine"]["max_context"] == 4096
    assert found["machine"]["num_cpus"] >= 1
    check_noise(found["noise_of_all"])
    assert found["noise_of_all"]["own_cpu_share"] > 0


def test_decode_counts_its_tokens(run: Any) -> None:
    """2 x 2 prompts with 9 tokens are 36; of_limit follows from what is told beside it."""
    flags = ("--tokens", "9", "--prompts", "2", "--prompt-length", "16")
    found = run("decode", *flags).result()
    check_common(found, "decode")
    check_noise(found["noise"])
    assert found["num_tokens"] == 36
    for name in ("tokens_per_s", "read_bytes_per_s", "limit_tokens_per_s", "of_limit"):
        check_spread(found[name])
    assert found["weight_bytes"] > 500_000
    limit = found["read_bytes_per_s"]["max"] / found["weight_bytes"]
    assert found["limit_tokens_per_s"]["max"] == pytest.approx(limit)
    ends = [found["tokens_per_s"][end] for end in ("min", "max")]
    limits = [found["limit_tokens_per_s"][end] for end in ("min", "max")]
    assert found["of_limit"]["min"] >= ends[0] / limits[1] * 0.999
    assert found["of_limit"]["max"] <= ends[1] / limits[0] * 1.001
    assert 0 < found["itl_s"]["p50"] <= found["itl_s"]["p99"]


def test_prefill_is_cold_once_and_then_cached(run: Any) -> None:
    """Each length is measured as often as asked; the second time all but one token is cached."""
    found = run("prefill", "--lengths", "40,70").result()
    check_common(found, "prefill")
    assert [case["length"] for case in found["lengths"]] == [40, 70]
    for case in found["lengths"]:
        check_noise(case["noise"])
        for name in ("cold_s", "again_s", "cold_over_again"):
            check_spread(case[name])
        assert case["prompt_tokens"] == case["length"]
        assert case["again_cached_tokens"]["min"] == case["length"] - 1
        assert case["again_cached_tokens"]["max"] == case["length"] - 1


def test_restart_finds_the_prompt_after_a_kill(run: Any) -> None:
    """Three kinds of start; only after the kill is the prompt cached, all but one token."""
    found = run("restart", "--length", "80").result()
    check_common(found, "restart")
    for name in ("weights_warm", "nothing_running", "killed"):
        case = found[name]
        check_noise(case["noise"])
        check_spread(case["first_token_s"])
        check_spread(case["ready_s"])
        check_spread(case["ttft_s"])
        assert case["ready_s"]["min"] < case["first_token_s"]["min"]
    assert found["weights_warm"]["cached_tokens"]["max"] == 0
    assert found["nothing_running"]["cached_tokens"]["max"] == 0
    num_prompt, num_cached = (found["killed"][f"{name}_tokens"] for name in ("prompt", "cached"))
    assert 70 <= num_prompt["min"] <= num_prompt["max"] <= 80
    assert num_cached["min"] == num_prompt["min"] - 1
    assert num_cached["max"] == num_prompt["max"] - 1
    check_spread(found["killed"]["cold_over_again"])


def test_daemon_finds_all_keys_in_every_setting(run: Any) -> None:
    """A lookup that misses a key would be an error; each call is counted and compared."""
    flags = ("--keys", "3,20", "--calls", "12", "--connections", "8", "--pool-bytes", "128MiB")
    found = run("daemon", *flags).result()
    assert (found["schema_version"], found["mode"]) == (1, "daemon")
    check_noise(found["noise_of_all"])
    for setting in ("alone", "idle", "busy"):
        calls = found[setting]
        counts = {name: call["num_calls"] for name, call in calls.items()}
        assert counts == {"lookup_3": 24, "lookup_20": 24, "release": 24, "publish_1mib": 4}
        for call in calls.values():
            check_noise(call["noise"])
            for name in ("p50_s", "p99_s", "p50_over_alone"):
                check_spread(call[name])
    for call in found["alone"].values():
        assert call["p50_over_alone"]["max"] == 1.0


def test_daemon_kill_loses_no_request_and_no_block(run: Any) -> None:
    """Streams end as without the kill, and all blocks are there. Times are the machine's."""
    flags = ("--streams", "2", "--prompt-length", "20", "--tokens", "30", "--length", "80")
    found = run("daemon-kill", *flags, "--pool-bytes", "128MiB").result()
    check_common(found, "daemon-kill")
    check_noise(found["noise"])
    counts = {name: found[f"num_{name}"] for name in ("requests", "failed", "different")}
    assert counts == {"requests": 4, "failed": 0, "different": 0}
    assert found["integrity_failures"] == 0
    assert found["found_again_share"]["min"] == 1.0
    for name in ("served_again_s", "num_sealed", "ttft_s", "asked_after_s"):
        check_spread(found[name])


def test_throughput_counts_all_streams(run: Any) -> None:
    """2 repetitions of 3 streams with 5 tokens are 30."""
    flags = ("--concurrency", "1,3", "--prompt-length", "8", "--tokens", "5")
    found = run("throughput", *flags).result()
    check_common(found, "throughput")
    counts = [(case["concurrency"], case["num_tokens"]) for case in found["concurrency"]]
    assert counts == [(1, 10), (3, 30)]
    for case in found["concurrency"]:
        check_noise(case["noise"])
        check_spread(case["output_tokens_per_s"])
        for name in ("ttft", "itl"):
            check_spread(case[f"{name}_p50_s"])
            assert case[f"{name}_p50_s"]["min"] <= case[f"{name}_p99_s"]["max"]


def test_pss_sees_both_engines(run: Any) -> None:
    """The second engine adds less than a whole first one, and one copy of weights stays one."""
    found = run("pss", "--prompt-length", "64", "--repeat", "1").result()
    one, two = found["one_engine"], found["two_engines"]
    assert one["pss_total_bytes"]["median"] < two["pss_total_bytes"]["median"]
    added = two["pss_total_bytes"]["median"] - one["pss_total_bytes"]["median"]
    assert found["second_engine_adds_bytes"]["median"] == added
    assert added < one["pss_total_bytes"]["median"]
    assert 500_000 < one["weights_bytes"]["median"] == two["weights_bytes"]["median"]
    assert 0 < one["shared_blocks_bytes"]["median"] <= two["shared_blocks_bytes"]["median"]
    assert one["pool_allocated_bytes"]["median"] == 64 << 20
    check_noise(found["noise"])


@pytest.mark.parametrize(
    ("number", "mode", "said", "status"),
    [
        (signal.SIGINT, "throughput", "throughput: 4 at once", 130),
        (signal.SIGINT, "restart", "restart: repetition 1", 130),
        (signal.SIGTERM, "decode", "decode: repetition 1", 143),
    ],
)
def test_an_interrupted_run_stops_what_it_started(
    run: Any, number: signal.Signals, mode: str, said: str, status: int
) -> None:
    """Ctrl-C and SIGTERM in the middle of a mode leave no process and no file."""
    command = run(mode, "--repeat", "1000")
    command.wait_for(said)
    command.process.send_signal(number)
    assert command.end(status) == ""


def test_the_limit_ends_a_run(run: Any) -> None:
    """A run that takes longer than allowed fails, and is tidied up as well."""
    command = run("decode", "--repeat", "1000", "--limit", "2s")
    assert command.end(1) == ""


def test_a_length_over_the_context_is_a_usage_error(run: Any) -> None:
    """What the model can't take is known before anything is measured: status 2."""
    command = run("prefill", "--lengths", "4096")
    command.wait_for("--lengths: 4096 is not allowed: with 1 new tokens it is over the model's")
    assert command.end(2) == ""
