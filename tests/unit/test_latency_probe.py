"""Tests of scripts/latency_probe.py against a fake engine whose times are known."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import math
import os
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import (
    EngineServiceServicer,
    add_EngineServiceServicer_to_server,
)

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "scripts" / "latency_probe.py"
PATIENCE_S = 30.0
VOCAB_SIZE, END_IDS, MAX_CONTEXT = 50, (0, 7, 49), 256

_spec = importlib.util.spec_from_file_location("latency_probe", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
probe = importlib.util.module_from_spec(_spec)
sys.modules["latency_probe"] = probe  # dataclasses look their module up
_spec.loader.exec_module(probe)


# -- a fake engine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What the fake does with one request. `error`: a status' name, or QUEUE_FULL with details."""

    first_s: float = 0.0
    num_tokens: int = 5
    gap_s: float = 0.0
    cached: int = 0
    error: str = ""
    hangs: bool = False


def accepted() -> pb.GenerateResponse:
    """The first message of every stream."""
    return pb.GenerateResponse(accepted=pb.Accepted(num_prompt_tokens=10))


def output(num_tokens: int = 1, text: str = "x") -> pb.GenerateResponse:
    """Tokens, or with 0 of them and no text an empty chunk."""
    return pb.GenerateResponse(output=pb.TokenOutput(num_tokens=num_tokens, text=text))


def finished(
    cached: int = 0, reason: pb.FinishReason = pb.FINISH_REASON_LENGTH
) -> pb.GenerateResponse:
    """The last message."""
    return pb.GenerateResponse(
        finished=pb.Finished(finish_reason=reason),
        usage=pb.Usage(prompt_tokens=10, completion_tokens=5, cached_tokens=cached),
    )


def queue_full() -> Any:
    """A status with google.rpc details, as the engine sends."""
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="cachewarm"))
    code = code_pb2.Code.Value("RESOURCE_EXHAUSTED")
    return rpc_status.to_status(status_pb2.Status(code=code, message="full", details=[packed]))


@dataclass
class FakeEngine(EngineServiceServicer):
    """Answers requests in the order of their arrival; the last answer is given again and again."""

    answers: Sequence[Answer]
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    target: str = ""

    async def GetModelInfo(self, request: object, context: object) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model="fake",
            model_version="v1",
            vocab_size=VOCAB_SIZE,
            max_context=MAX_CONTEXT,
            eos_token_ids=END_IDS,
        )

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        answer = self.answers[min(len(self.requests), len(self.answers) - 1)]
        async with self.arrived:
            self.requests.append(request)
            self.arrived.notify_all()
        if answer.error == "QUEUE_FULL":
            await context.abort_with_status(queue_full())
        elif answer.error:
            await context.abort(grpc.StatusCode[answer.error], "no")
        yield accepted()
        yield output(0, "")  # an empty first chunk is no first token
        if answer.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(answer.first_s)
        for index in range(answer.num_tokens):
            if index:
                await asyncio.sleep(answer.gap_s)
            yield output()
        yield finished(answer.cached)

    async def wait_for(self, count: int) -> None:
        """Until that many requests have come."""
        async with asyncio.timeout(PATIENCE_S), self.arrived:
            await self.arrived.wait_for(lambda: len(self.requests) >= count)


@contextlib.asynccontextmanager
async def fake(*answers: Answer) -> AsyncIterator[FakeEngine]:
    """A fake engine on a free port, in the test's loop."""
    engine = FakeEngine(answers)
    server = grpc.aio.server()
    add_EngineServiceServicer_to_server(engine, server)
    engine.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield engine
    finally:
        await server.stop(None)


def settings(engine: FakeEngine, *flags: str) -> Any:
    """What the flags mean."""
    return probe.settings_from(["--target", engine.target, "--context-length", "10", *flags])


async def measure(engine: FakeEngine, *flags: str) -> dict[str, Any]:
    """The report of a probe in this process."""
    async with asyncio.timeout(PATIENCE_S):
        report: dict[str, Any] = await probe.probe(settings(engine, *flags), asyncio.Event())
    return report


@dataclass
class Ended:
    """A probe process that has ended."""

    status: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        """What it printed; NaN and Infinity are no JSON."""
        parsed: dict[str, Any] = json.loads(self.stdout, parse_constant=pytest.fail)
        return parsed


async def start(*flags: str) -> asyncio.subprocess.Process:
    """The real script as a process."""
    path = os.pathsep.join(
        [str(REPOSITORY / "services"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(SCRIPT),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


async def end_of(process: asyncio.subprocess.Process) -> Ended:
    """Its status and output; killed, and the test failed, when it does not end."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return Ended(process.returncode, stdout.decode(), stderr.decode())


# -- arithmetic ------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1e4, allow_nan=False), min_size=2, max_size=300))
def test_summaries_agree_with_statistics(values: list[float]) -> None:
    """Percentiles and spread are those of Python's statistics module, for any values."""
    found = probe.summarise(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    near = {"rel_tol": 1e-9, "abs_tol": 1e-9}
    assert found.count == len(values)
    assert math.isclose(found.mean, statistics.fmean(values), **near)
    assert math.isclose(found.sd, statistics.pstdev(values), rel_tol=1e-6, abs_tol=1e-6)
    assert math.isclose(found.p50, statistics.median(values), **near)
    assert math.isclose(found.p90, cuts[89], **near)
    assert math.isclose(found.p99, cuts[98], **near)
    assert found.max == max(values)


def test_summaries_of_few_values() -> None:
    """No value is no number, not 0; one value has no spread."""
    assert probe.summarise([]) == probe.Summary(0, None, None, None, None, None, None)
    assert probe.summarise([0.25]) == probe.Summary(1, 0.25, 0.0, 0.25, 0.25, 0.25, 0.25)


async def read(*messages: tuple[float, pb.GenerateResponse]) -> Any:
    """What is made of messages at these times; the request went out at 10."""
    clock = [10.0]

    async def stream() -> AsyncIterator[pb.GenerateResponse]:
        for clock[0], message in messages:
            yield message

    return await probe.read_stream(stream(), 10.0, lambda: clock[0])


async def test_times_of_a_stream() -> None:
    """TTFT ends with the first token, TPOT spreads the rest over the other tokens."""
    sample = await read(
        (10.1, accepted()),
        (10.2, output(0, "")),
        (10.5, output(1, "")),  # a token whose character is unfinished
        (10.75, output(2)),
        (11.5, output(1)),
        (11.625, output(0, "rest")),  # held-back text is no token
        (12.5, finished(cached=4)),
    )
    assert sample.error == ""
    assert (sample.ttft, sample.e2e) == (0.5, 2.5)
    assert sample.gaps == [0.25, 0.75]
    assert sample.num_tokens == 4
    assert sample.tpot == pytest.approx(2.0 / 3)
    assert (sample.num_prompt_tokens, sample.num_cached_tokens) == (10, 4)


async def test_text_without_a_count_is_a_first_token() -> None:
    """A message that bears only text, or only ids, counts for TTFT."""
    sample = await read((10.5, output(0, "text")), (11.0, output(1)), (12.0, finished()))
    assert (sample.error, sample.ttft, sample.tpot) == ("", 0.5, None)
    ids = pb.GenerateResponse(output=pb.TokenOutput(token_ids=[4, 5]))
    sample = await read((10.5, ids), (12.0, finished()))
    assert (sample.ttft, sample.num_tokens) == (0.5, 2)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "TRUNCATED"),
        ([(10.5, accepted()), (11.0, output())], "TRUNCATED"),
        ([(10.5, accepted()), (11.0, finished())], "EMPTY"),
        ([(10.5, output(0, "")), (11.0, finished())], "EMPTY"),
        ([(10.5, output()), (11.0, finished(reason=pb.FINISH_REASON_CANCELLED))], "CANCELLED"),
    ],
)
async def test_streams_that_are_no_answer(
    messages: list[tuple[float, pb.GenerateResponse]], error: str
) -> None:
    """Empty, cut and cancelled streams are failures, each under its own reason."""
    assert (await read(*messages)).error == error


# -- measuring -------------------------------------------------------------------------------------


async def test_i2_failures_and_empty_answers_stay_out_of_the_percentiles() -> None:
    """30 % errors, empty streams, empty first chunks: TTFT is that of the known good answers."""
    good = [Answer(first_s, gap_s=0.02) for first_s in (0.1, 0.3, 0.9)]
    answers = [
        *(Answer(error="UNAVAILABLE"), Answer(error="QUEUE_FULL")) * 3,
        *(Answer(num_tokens=0),) * 2,
        *good * 4,
    ]
    answers = answers[::3] + answers[1::3] + answers[2::3]  # mixed
    async with fake(*answers) as engine:
        found = await measure(engine, "--requests", str(len(answers)), "--concurrency", "5")
    assert len(answers) == 20
    assert found["requests"] == {
        "total": 20,
        "ok": 12,
        "failed": 8,
        "errors": {"EMPTY": 2, "QUEUE_FULL": 3, "UNAVAILABLE": 3},
    }
    known = [0.1] * 4 + [0.3] * 4 + [0.9] * 4
    expected = {"mean": 1.3 / 3, "p50": 0.3, "p90": 0.9, "p99": 0.9, "max": 0.9}
    ttft, late_s = found["ttft_s"], 0.1
    assert ttft["count"] == found["e2e_s"]["count"] == found["tpot_s"]["count"] == 12
    for name, value in expected.items():
        assert value - 0.005 < ttft[name] < value + late_s, name
    assert ttft["sd"] == pytest.approx(statistics.pstdev(known), abs=0.05)
    assert found["itl_s"]["count"] == 12 * 4
    assert 0.015 < found["tpot_s"]["p50"] < 0.02 + late_s
    assert found["e2e_s"]["p50"] == pytest.approx(ttft["p50"] + 0.08, abs=late_s)
    assert found["output_tokens"] == 60
    assert found["output_tokens_per_s"] == pytest.approx(60 / found["wall_s"])


async def test_cached_answers_are_told_from_others() -> None:
    """The cached share is of prompt tokens, and TTFT is also given apart for hits and misses."""
    answers = [Answer(0.2), Answer(cached=8), Answer(cached=8), Answer(cached=8)]
    async with fake(*answers) as engine:
        found = await measure(engine, "--requests", "4")
    assert found["prompt_tokens"] == 40
    assert found["cached_tokens"] == 24
    assert found["cached_ratio"] == 0.6
    assert (found["ttft_uncached_s"]["count"], found["ttft_cached_s"]["count"]) == (1, 3)
    assert found["ttft_cached_s"]["max"] < 0.2 <= found["ttft_uncached_s"]["p50"]


async def test_warm_up_is_not_measured_and_shares_no_prefix() -> None:
    """Warm-up requests come first, with prompts of their own, and are in none of the numbers."""
    async with fake(Answer(0.3), Answer(0.3), Answer()) as engine:
        found = await measure(
            engine, "--requests", "3", "--warmup-requests", "2", "--shared-prefix", "8"
        )
    assert found["warmup"]["requests"]["ok"] == 2
    assert found["requests"]["total"] == found["ttft_s"]["count"] == 3
    assert found["ttft_s"]["max"] < 0.3
    prompts = [list(request.token_ids.ids) for request in engine.requests]
    warm_up, measured = prompts[:2], prompts[2:]
    assert len({tuple(ids[:8]) for ids in measured}) == 1
    assert all(ids[:8] != measured[0][:8] for ids in warm_up)


async def test_prompts_follow_from_the_seed() -> None:
    """Prompts have the asked length and prefix, no end ids, and are drawn again by their seed."""

    async def prompts(*flags: str) -> list[tuple[int, ...]]:
        async with fake(Answer()) as engine:
            await measure(engine, "--requests", "4", *flags)
        assert {r.stopping.max_tokens for r in engine.requests} == {3}
        assert all(r.stopping.ignore_eos for r in engine.requests)
        return [tuple(request.token_ids.ids) for request in engine.requests]

    flags = ("--context-length", "200", "--max-tokens", "3", "--shared-prefix", "150")
    first = await prompts(*flags, "--seed", "1")
    assert {len(ids) for ids in first} == {200}
    assert len({ids[:150] for ids in first}) == 1
    assert len({ids[150:] for ids in first}) == 4
    used = {token for ids in first for token in ids}
    assert used == set(range(VOCAB_SIZE)) - set(END_IDS)
    assert await prompts(*flags, "--seed", "1") == first
    assert not set(await prompts(*flags, "--seed", "2")) & set(first)


async def test_a_silent_stream_ends_by_its_deadline() -> None:
    """A request that gets no answer in time is a failure and not waited for any longer."""
    async with fake(Answer(hangs=True)) as engine:
        found = await measure(engine, "--requests", "1", "--timeout", "0.2")
    assert found["requests"]["errors"] == {"DEADLINE_EXCEEDED": 1}


async def test_the_load_ends_with_its_duration() -> None:
    """After the duration no request begins; what runs then is waited for and counted."""
    num_running = most = 0

    async def one(index: int) -> Any:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await asyncio.sleep(0.03)
        num_running -= 1
        return probe.Sample()

    async with asyncio.timeout(PATIENCE_S):
        run = await probe.run_load(one, 3, None, 0.2, asyncio.Event())
    assert (num_running, most) == (0, 3)
    assert 3 <= len(run.samples) <= 3 * 7
    assert run.wall_s >= 0.2


async def test_a_refusing_server_is_not_asked_in_a_busy_loop() -> None:
    """Between a failure and the next request of a loop there is a pause."""

    async def one(index: int) -> Any:
        return probe.Sample(error="QUEUE_FULL")

    run = await probe.run_load(one, 1, 5, None, asyncio.Event())
    assert len(run.samples) == 5
    assert run.wall_s > 0.2


# -- the command -----------------------------------------------------------------------------------


async def test_json_and_table_of_the_command() -> None:
    """The script prints one stable JSON object, or a table, and exits with 0."""
    async with fake(Answer(cached=8)) as engine:
        flags = ("--target", engine.target, "--context-length", "10", "--requests", "3")
        told = await end_of(await start(*flags, "--output-format", "json"))
        table = await end_of(await start(*flags))
    assert (told.status, told.stderr) == (0, "")
    found = told.json()
    assert found["schema_version"] == 1
    assert found["model"] == "fake"
    assert found["interrupted"] is False
    assert found["settings"]["requests"] == 3
    assert set(found["ttft_s"]) == {"count", "mean", "sd", "p50", "p90", "p99", "max"}
    assert table.status == 0
    rows = [line.split()[0] for line in table.stdout.splitlines() if line.strip()]
    assert rows[-6:] == ["TTFT", "uncached", "cached", "ITL", "TPOT", "E2E"]
    assert "80.0% of prompt tokens" in table.stdout


async def test_i2_nothing_succeeded_is_exit_status_1() -> None:
    """Without one good answer the report is still valid JSON, without numbers, and fails."""
    async with fake(Answer(error="UNAVAILABLE"), Answer(num_tokens=0)) as engine:
        flags = ("--context-length", "10", "--requests", "3", "--output-format", "json")
        told = await end_of(await start("--target", engine.target, *flags))
    found = told.json()
    assert told.status == 1
    assert found["requests"]["errors"] == {"EMPTY": 2, "UNAVAILABLE": 1}
    assert found["ttft_s"]["count"] == 0
    assert found["ttft_s"]["p50"] is None
    assert found["cached_ratio"] is None


async def test_ctrl_c_prints_what_is_there() -> None:
    """SIGINT ends the load at once, with status 130 and the answers so far."""
    answers = [Answer(), Answer(), Answer(hangs=True)]
    async with fake(*answers) as engine:
        flags = ("--context-length", "10", "--requests", "9", "--output-format", "json")
        process = await start("--target", engine.target, *flags)
        await engine.wait_for(3)
        process.send_signal(signal.SIGINT)
        told = await end_of(process)
    found = told.json()
    assert told.status == 130
    assert found["interrupted"] is True
    assert found["requests"] == {"total": 2, "ok": 2, "failed": 0, "errors": {}}


async def test_an_engine_that_is_not_there() -> None:
    """Nobody listening is one line on stderr and status 1."""
    told = await end_of(await start("--target", "127.0.0.1:1"))
    assert (told.status, told.stdout) == (1, "")
    assert told.stderr.startswith("latency_probe: 127.0.0.1:1: UNAVAILABLE")
    assert told.stderr.count("\n") == 1


async def test_a_context_over_the_models_is_refused() -> None:
    """Prompt and answer that can't fit are a usage error before any load."""
    async with fake(Answer()) as engine:
        with pytest.raises(probe.ProbeError, match=f"context of {MAX_CONTEXT}") as raised:
            await measure(engine, "--context-length", "250", "--max-tokens", "7")
        assert engine.requests == []
    assert raised.value.status == 2


async def test_missing_packages_are_one_line() -> None:
    """An interpreter without our packages says what to do."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-E", str(SCRIPT), stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.count(b"\n") == 1
    assert b"scripts/quickstart" in stderr


@pytest.mark.parametrize(
    ("target", "is_local"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("unix:/run/x.sock", True),
        ("10.0.0.1:50051", False),
        ("0.0.0.0:50051", False),
        ("[2001:db8::1]:50051", False),
        ("example.org:50051", False),
        ("localhost.example.org:50051", False),
        ("dns:///localhost:50051", False),
        ("127.0.0.1", False),
    ],
)
def test_only_local_targets_without_a_word(
    target: str, is_local: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine is put under load only with --allow-remote."""
    if is_local:
        assert probe.settings_from(["--target", target]).target == target
    else:
        with pytest.raises(SystemExit) as raised:
            probe.settings_from(["--target", target])
        assert raised.value.code == 2
        assert "--allow-remote" in capsys.readouterr().err
    assert probe.settings_from(["--target", target, "--allow-remote"]).allow_remote


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--context-length", "0"], "--context-length: '0' is not allowed: 1 to"),
        (["--concurrency", "many"], "--concurrency: 'many' is not allowed: 1 to 1024"),
        (["--duration", "-1"], "--duration: '-1' is not allowed"),
        (["--duration", "nan"], "--duration: 'nan' is not allowed"),
        (["--shared-prefix", "11", "--context-length", "10"], "at most --context-length (10)"),
    ],
)
def test_bad_flags_are_named(
    flags: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad value ends with status 2 and a message that names flag, value and what is allowed."""
    with pytest.raises(SystemExit) as raised:
        probe.settings_from(flags)
    assert raised.value.code == 2
    assert named in capsys.readouterr().err


def test_duration_is_bounded_by_default() -> None:
    """Without limits it ends after 30 s; with --requests only their number counts."""
    assert probe.settings_from([]).duration == 30.0
    assert probe.settings_from(["--requests", "5"]).duration is None
    both = probe.settings_from(["--requests", "5", "--duration", "2s"])
    assert (both.requests, both.duration) == (5, 2.0)
