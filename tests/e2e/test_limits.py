"""Long messages, long silences and long computations: the front answers all the while."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.client import CallError
from engine.server import SERVER_OPTIONS
from engine.v1 import engine_pb2 as pb
from engine.v1.engine_pb2_grpc import EngineServiceStub
from tests.daemon import PATIENCE_S, environment, wait_until
from tests.e2e.conftest import Oracle
from tests.engine import Engine, command, make_prompt, wait_started
from tests.fixtures.models import write_m_rand
from tests.fixtures.tokenizers import CHATML, write_t_bl

LIMIT = 16 << 20  # bytes of a message
TOO_LONG = ("INVALID_ARGUMENT", "CONTEXT_TOO_LONG")
SENTENCE = "The cache keeps the keys and values of every token that was read. "
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def text_of(num_bytes: int, seed: int = 0) -> str:
    """English words of that many bytes in all; no part of it is there twice."""
    words = random.Random(seed).choices(SENTENCE.split(), k=num_bytes)
    return " ".join(words)[:num_bytes]


@pytest.fixture(scope="module")
def engine(m_rand_dir: Path) -> Iterator[Engine]:
    """M-rand whose context is 4096 tokens."""
    with Engine(m_rand_dir, "off", step_s=0.0) as running:
        yield running


# -- F5: sizes ------------------------------------------------------------------------------------


def test_f5_131072_ids_are_taken_and_answered(engine: Engine) -> None:
    """The message is no problem; that the context is, the numbers tell."""
    with pytest.raises(CallError) as refused:
        engine.generate(make_prompt(131_072, 701), max_tokens=1)
    assert (refused.value.status, refused.value.reason) == TOO_LONG
    for number in ("131072", "4096"):
        assert number in refused.value.message


@pytest.mark.parametrize("num_bytes", [600_000, 5_000_000])
def test_f5_a_long_text_is_taken_and_answered(engine: Engine, num_bytes: int) -> None:
    """It is tokenised as a whole; the message tells how many tokens it has."""
    with pytest.raises(CallError) as refused:
        engine.generate(text_of(num_bytes), max_tokens=1)
    assert (refused.value.status, refused.value.reason) == TOO_LONG
    (told,) = re.findall(r"(\d+) prompt tokens", refused.value.message)
    assert int(told) > num_bytes // 8


def test_f5_a_message_over_the_limit_is_refused_by_name(engine: Engine, oracle: Oracle) -> None:
    """A plain client's is refused by the server; the server lives."""
    with engine.stub(options=(("grpc.max_send_message_length", -1),)) as stub:
        for call in (
            lambda: stub.Tokenize(pb.TokenizeRequest(text="x" * (LIMIT + 1))),
            lambda: list(stub.Generate(pb.GenerateRequest(text="x" * (LIMIT + 1)))),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert str(LIMIT) in refused.value.details()
    prompt = make_prompt(20, 702)
    assert engine.generate(prompt, max_tokens=4).ids == oracle(prompt, 4)


def test_f5_the_command_line_takes_the_same(engine: Engine) -> None:
    """5 MB from stdin are answered, what is over the limit is refused with the limit."""
    for num_bytes, named in ((5_000_000, "CONTEXT_TOO_LONG"), (LIMIT + 1, str(LIMIT))):
        ended = subprocess.run(
            command("generate", "--target", engine.target, "--max-tokens", "1", "-"),
            env=environment(),
            input=text_of(num_bytes),
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE_S,
            check=False,
        )
        assert (ended.returncode, ended.stdout) == (1, "")
        assert named in ended.stderr


def test_a_compressed_request_is_accepted(engine: Engine, oracle: Oracle) -> None:
    """gzip of a whole channel, in both directions."""
    prompt = make_prompt(200, 703)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    request.stopping.max_tokens = 4
    request.response.return_token_ids = True
    with engine.stub(compression=grpc.Compression.Gzip) as stub:
        ids = [t for response in stub.Generate(request) for t in response.output.token_ids]
    assert ids == oracle(prompt, 4)


def test_a_small_message_that_inflates_over_the_limit_is_refused(engine: Engine) -> None:
    """64 MiB that are 64 KiB on the wire."""
    options = (("grpc.max_send_message_length", -1),)
    request = pb.TokenizeRequest(text="x" * (4 * LIMIT))
    compressed = engine.stub(compression=grpc.Compression.Gzip, options=options)
    with compressed as stub, pytest.raises(grpc.RpcError) as refused:
        stub.Tokenize(request)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in refused.value.details()


# -- F4: silences ---------------------------------------------------------------------------------

PING_OPTION = "grpc.http2.min_ping_interval_without_data_ms"
PING_EVERY_S = 10.0  # what clients may do
FASTER = 10.0  # than in earnest, in the test below


async def silent_call(options: list[tuple[str, Any]], until: asyncio.Event) -> grpc.StatusCode:
    """How a stream ends whose server says nothing `until` it may, while its client pings."""

    async def silent(request: bytes, context: Any) -> AsyncIterator[bytes]:
        await until.wait()
        yield b"done"

    server = grpc.aio.server(options=options)
    handler = grpc.unary_stream_rpc_method_handler(silent)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test", {"Silent": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = (
        ("grpc.keepalive_time_ms", int(1000 * PING_EVERY_S / FASTER)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),  # else both would share what they learn
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client) as channel:
            call = channel.unary_stream("/test/Silent")(b"")
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert [reply async for reply in call] == [b"done"]
            return await call.code()
    finally:
        await server.stop(None)


async def test_f4_a_client_may_ping_through_a_long_silence() -> None:
    """With our server's options a stream outlives one without that which counts, by two pings.

    All times are divided by ten.
    """
    options = dict(SERVER_OPTIONS)
    faster = {**options, PING_OPTION: int(options.pop(PING_OPTION) / FASTER)}
    is_over = asyncio.Event()
    ours = asyncio.create_task(silent_call(list(faster.items()), is_over))
    async with asyncio.timeout(PATIENCE_S):
        without = await silent_call(list(options.items()), asyncio.Event())
    assert without is grpc.StatusCode.UNAVAILABLE
    await asyncio.sleep(2 * PING_EVERY_S / FASTER)
    is_over.set()
    assert await ours is grpc.StatusCode.OK


async def idle_channel_breaks(options: list[tuple[str, Any]]) -> bool:
    """Does a connection without calls end within six of the client's pings?"""
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = (
        ("grpc.keepalive_time_ms", int(1000 * PING_EVERY_S / FASTER)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=client) as channel:
            await channel.channel_ready()
            with contextlib.suppress(TimeoutError):
                change = channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
                await asyncio.wait_for(change, 6 * PING_EVERY_S / FASTER)
                return True
            return False
    finally:
        await server.stop(None)


async def test_f4_an_idle_channel_may_ping_too() -> None:
    """The connection is the same after a minute without calls; without the option it is not."""
    options = dict(SERVER_OPTIONS)
    options[PING_OPTION] = int(options[PING_OPTION] / FASTER)
    without = {k: v for k, v in options.items() if k != "grpc.keepalive_permit_without_calls"}
    with_it, without_it = await asyncio.gather(
        idle_channel_breaks(list(options.items())), idle_channel_breaks(list(without.items()))
    )
    assert (with_it, without_it) == (False, True)


@pytest.mark.slow
def test_f4_a_silent_prefill_survives_a_pinging_client(m_rand_dir: Path, oracle: Oracle) -> None:
    """24 s without a word, and four pings: a server with gRPC's own limits ends that."""
    prompt = make_prompt(20, 704)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
    request.stopping.max_tokens = 4
    request.response.return_token_ids = True
    options = (("grpc.keepalive_time_ms", 5_500), ("grpc.http2.max_pings_without_data", 0))
    with Engine(m_rand_dir, "off", extra=["--watchdog", "90s"]) as engine:
        worker = engine.worker_pids(1)[0]
        with engine.stub(options=options) as stub:
            os.kill(worker, signal.SIGSTOP)
            try:
                responses = stub.Generate(request)
                assert next(responses).HasField("accepted")
                time.sleep(24)  # the silence is what is tested
            finally:
                os.kill(worker, signal.SIGCONT)
            ids = [t for response in responses for t in response.output.token_ids]
    assert ids == oracle(prompt, 4)


# -- F10: the loop is never blocked ---------------------------------------------------------------

EVERY_S = 0.05
P99_S = 0.3


class HealthProbe:
    """Asks for the health every 50 ms while its `with` runs; `seconds` is how long each took."""

    def __init__(self, target: str) -> None:
        self.seconds: list[float] = []
        self.told: list[int] = []
        self._target = target
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        with grpc.insecure_channel(self._target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._is_over.wait(EVERY_S):
                began = time.monotonic()
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
                self.seconds.append(time.monotonic() - began)
                self.told.append(reply.status)

    def __enter__(self) -> HealthProbe:
        self._thread.start()
        wait_until(lambda: len(self.seconds) > 0, "a first answer")
        self.seconds.clear()
        self.told.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(PATIENCE_S)

    @property
    def p99(self) -> float:
        return statistics.quantiles(self.seconds, n=100, method="inclusive")[-1]


def check_prompt_answers(attempt: Callable[[], HealthProbe]) -> None:
    """Nearly every check of the health was answered at once.

    Five attempts: a machine that is busy with other things may delay the answers of one, a blocked
    loop delays those of all.
    """
    probes: list[HealthProbe] = []
    while not probes or (probes[-1].p99 >= P99_S and len(probes) < 5):
        probes.append(attempt())
        seconds = probes[-1].seconds
        assert len(seconds) >= 5, "too short to tell"
        print(f"{len(seconds)} checks: p99 {probes[-1].p99:.3f} s, longest {max(seconds):.3f} s")
    assert probes[-1].p99 < P99_S


def test_f10_health_is_told_while_the_engine_starts(short_dir: Path, m_rand_dir: Path) -> None:
    """From the first moment on, and NOT_SERVING until the worker is there."""
    path = short_dir / "e"

    def attempt() -> HealthProbe:
        engine = Engine(m_rand_dir, "off", extra=["--listen", f"unix:{path}"], step_s=0.0)
        with contextlib.ExitStack() as stack:
            with engine.held():
                engine.launch()
                stack.enter_context(engine)
                wait_until(path.exists, "the socket")
                probe = stack.enter_context(HealthProbe(f"unix:{path}"))
                wait_until(lambda: len(probe.told) >= 10, "ten answers")
            engine.wait_ready()
            wait_until(lambda: SERVING in probe.told, "it serves")
        first = probe.told.index(SERVING)
        assert set(probe.told[:first]) == {NOT_SERVING}
        assert set(probe.told[first:]) == {SERVING}
        return probe

    check_prompt_answers(attempt)


def test_f10_a_long_prefill_blocks_nobody(engine: Engine) -> None:
    """Health, a new stream and a cancel act at once while 4000 tokens are computed."""
    prompt = make_prompt(4000, 705)

    def attempt() -> HealthProbe:
        with HealthProbe(engine.target) as probe:
            with engine.slowed(0.5):
                events = engine.client().generate(prompt, max_tokens=10, request_id="long")
                next(events)
                other = engine.stream(make_prompt(20, 706), max_tokens=2, ignore_eos=True)
                other.wait_accepted()
                had = engine.worker().num_computed_tokens
                wait_until(lambda: engine.worker().num_computed_tokens > had, "a prefill step")
                began = time.monotonic()
                assert engine.client().abort("long")
                (end,) = list(events)
            took = time.monotonic() - began
            assert end.finish_reason == "cancelled", "the prefill went on to its end"
            print(f"cancelled after {took:.3f} s")
            assert took < 10.0
            assert engine.generate(prompt, max_tokens=1).ids
            assert len(other.result().ids) == 2
        return probe

    check_prompt_answers(attempt)


def test_f10_tokenising_a_long_text_blocks_nobody(engine: Engine, oracle: Oracle) -> None:
    """5 MB of text: health and a running stream go on, and a cancel acts at once."""
    prompt = make_prompt(20, 707)
    texts = (text_of(5_000_000, seed) for seed in itertools.count())

    def attempt() -> HealthProbe:
        with (
            ThreadPoolExecutor(1) as pool,
            engine.slowed(0.01),
            HealthProbe(engine.target) as probe,
        ):
            stream = engine.stream(prompt, max_tokens=4000, ignore_eos=True, request_id="other")
            stream.wait_for_tokens(1)
            # Another one each time: a text that is known is not tokenised again.
            tokenising = pool.submit(engine.client().tokenize, next(texts))
            before = len(stream.pieces)
            wait_until(lambda: len(stream.pieces) > before + 20, "the stream goes on")
            stream.check_running()
            assert engine.client().abort("other")
            stream.join()
            were_beside.append(not tokenising.done())
            assert tokenising.result(4 * PATIENCE_S)
        assert stream.ids[:20] == oracle(prompt, 20)
        return probe

    were_beside: list[bool] = []
    check_prompt_answers(attempt)
    # On a busy machine a text may be over before others have done anything.
    while not any(were_beside) and len(were_beside) < 5:
        attempt()
    assert any(were_beside), "nothing went on while a text was tokenised"


def test_f10_a_long_conversation_blocks_nobody(tmp_path: Path) -> None:
    """A chat of 2 MB, whose special tokens are looked for beside all else."""
    model = write_t_bl(write_m_rand(tmp_path / "m", context=1 << 16), CHATML)
    turn = pb.ChatMessage(role="user", content=text_of(2_000_000))
    request = pb.GenerateRequest(chat=pb.Chat(messages=[turn]))
    with Engine(model, "off") as engine:

        def attempt() -> HealthProbe:
            with HealthProbe(engine.target) as probe, pytest.raises(CallError) as refused:
                engine.call(request)
            assert (refused.value.status, refused.value.reason) == TOO_LONG
            assert "65536" in refused.value.message
            return probe

        check_prompt_answers(attempt)


# -- F11: processes -------------------------------------------------------------------------------


def test_f11_workers_come_and_go_beside_tokenising(short_dir: Path, m_rand_dir: Path) -> None:
    """Two workers, killed twice each, under 300 requests: no hang, and no word about forks."""
    path = short_dir / "e"
    extra = ["--listen", f"unix:{path}", "--workers", "unified=2"]
    engine = Engine(m_rand_dir, "off", extra=extra, step_s=0.0)
    engine.launch()
    with engine:
        wait_until(path.exists, "the socket")
        with grpc.insecure_channel(f"unix:{path}") as channel:
            stub = EngineServiceStub(channel)
            for num_bytes in (100, 100_000):
                request = pb.TokenizeRequest(text=text_of(num_bytes))
                assert stub.Tokenize(request, timeout=PATIENCE_S).token_ids
        engine.wait_ready()

        def fresh_workers() -> set[int]:
            """Those that nobody has killed yet."""
            return {worker.pid for worker in engine.info().workers} - killed

        def ask(number: int) -> int:
            prompt = text_of(40 + number) + str(number)
            return len(engine.generate(prompt, max_tokens=8, ignore_eos=True).ids)

        killed: set[int] = set()
        with ThreadPoolExecutor(8) as pool:
            answers = []
            for _ in range(2):
                wait_started(lambda: len(fresh_workers()) == 2, "both workers")
                victims = fresh_workers()
                with engine.slowed(0.05):
                    answers += [pool.submit(ask, number) for number in range(150)]
                    wait_until(answers[-150].done, "the first of them is answered")
                    for pid in victims:
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
                    assert not all(answer.done() for answer in answers), "nobody was there"
            assert [answer.result(4 * PATIENCE_S) for answer in answers] == [8] * 300
        assert len(killed) == 4
        wait_started(lambda: len(fresh_workers()) == 2, "both workers")
        engine.client().tokenize(text_of(100_000))
        assert engine.stop() == 0
        log = engine.log()
        assert "worker_lost" in log
        for complaint in ("fork", "PARALLELISM", "BlockingIOError", "Traceback", '"bug"'):
            assert complaint not in log
