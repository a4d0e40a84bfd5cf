"""Tests of the HTTP side over real sockets: uvicorn in the test's loop, http.client in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import structlog
import uvloop
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from engine import http as engine_http
from engine.address import bind_http
from engine.errors import StartError
from engine.http import HttpServer, NotReady, VersionInfo, error_response, make_app
from engine.metrics import EngineMetrics

PATIENCE_S = 20.0


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    """Both loops: the front's is uvloop."""
    factory: Callable[[], asyncio.AbstractEventLoop] = request.param
    return factory


@dataclass
class Answer:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The parsed body."""
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


def ask(port: int, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers or {})
        with connection.getresponse() as response:
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())


@dataclass
class Served:
    """A running server, and what its app tells."""

    port: int = 0
    not_ready: NotReady | None = None
    is_stopping: bool = False
    version: VersionInfo = field(
        default_factory=lambda: VersionInfo("1.2", "tiny", None, None, None)
    )
    server: HttpServer = field(init=False)
    metrics: EngineMetrics = field(init=False)

    async def ask(self, *arguments: Any, **more: Any) -> Answer:
        """`ask` in a thread, so that the loop serves meanwhile."""
        return await asyncio.to_thread(ask, self.port, *arguments, **more)


@contextlib.asynccontextmanager
async def served(*routes: Route) -> AsyncIterator[Served]:
    """A server on a free port; afterwards it has stopped by itself and left no task."""
    told = Served()
    told.metrics = EngineMetrics(
        num_running=int, num_waiting=int, kv_usage=float, num_failovers=int
    )
    app = make_app(
        registry=told.metrics.registry,
        not_ready=lambda: told.not_ready,
        is_stopping=lambda: told.is_stopping,
        version=lambda: told.version,
        routes=routes,
    )
    before = asyncio.all_tasks()
    with bind_http("127.0.0.1", 0) as sock:
        told.port = sock.getsockname()[1]
        told.server = HttpServer(app, sock)
        running = asyncio.create_task(told.server.run())
        try:
            yield told
        finally:
            told.server.stop()
            async with asyncio.timeout(PATIENCE_S):
                await running
    assert asyncio.all_tasks() == before


# -- what is answered ----------------------------------------------------------------------------


def test_endpoints_on_both_loops(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """All four paths answer over a real socket, on asyncio's loop and on uvloop."""

    async def run() -> None:
        async with served() as server:
            for path in ("/metrics", "/health", "/ready", "/version"):
                assert (await server.ask(path)).status == 200, path

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


async def test_metrics_are_prometheus_text() -> None:
    """What was counted stands in the text format, under prometheus_client's content type."""
    async with served() as server:
        server.metrics.request(17).finished("stop")
        answer = await server.ask("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert b"\nengine_prompt_tokens_total 17.0\n" in answer.body
        accept = {"accept": "application/openmetrics-text;version=1.0.0"}
        answer = await server.ask("/metrics", headers=accept)
        assert answer.headers["content-type"].startswith("application/openmetrics-text;")
        assert answer.body.endswith(b"# EOF\n")


async def test_health_is_liveness() -> None:
    """/health says ok while the process works, warming or draining too, until it stops."""
    async with served() as server:
        server.not_ready = NotReady("draining", 2.0)
        assert (await server.ask("/health")).status == 200
        server.is_stopping = True
        answer = await server.ask("/health")
        assert (answer.status, answer.json()) == (503, {"status": "stopping"})


@pytest.mark.parametrize(("retry_after_s", "header"), [(1.0, "1"), (2.5, "3"), (0.0, "1")])
async def test_ready_tells_why_not_and_when_to_ask_again(retry_after_s: float, header: str) -> None:
    """/ready is 503 with a reason and whole seconds of Retry-After, and 200 once serving."""
    async with served() as server:
        server.not_ready = NotReady("warming", retry_after_s)
        answer = await server.ask("/ready")
        assert (answer.status, answer.json()) == (503, {"ready": False, "reason": "warming"})
        assert answer.headers["retry-after"] == header
        server.not_ready = None
        answer = await server.ask("/ready")
        assert (answer.status, answer.json()) == (200, {"ready": True})


async def test_version_tells_what_is_known() -> None:
    """/version has the same keys before and after a worker is ready."""
    async with served() as server:
        unknown = {"model_version": None, "weights_sha256": None, "backend": None}
        assert (await server.ask("/version")).json() == {
            "version": "1.2",
            "model": "tiny",
            **unknown,
        }
        known = {"model_version": "v1", "weights_sha256": "ab" * 32, "backend": "reference"}
        server.version = replace(server.version, **known)
        assert (await server.ask("/version")).json() == {
            "version": "1.2",
            "model": "tiny",
            **known,
        }


async def test_errors_have_openais_shape() -> None:
    """Unknown paths, a slash too many and wrong methods are JSON errors; HEAD works like GET."""
    async with served() as server:
        answer = await server.ask("/nothing?secret=1")
        assert answer.status == 404
        assert answer.json() == {
            "error": {
                "type": "invalid_request_error",
                "code": "not_found",
                "message": "unknown path: GET /nothing",
                "param": None,
            }
        }
        assert (await server.ask("/health/")).status == 404
        answer = await server.ask("/ready", "POST")
        assert answer.status == 405
        assert answer.json()["error"]["code"] == "method_not_allowed"
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}
        answer = await server.ask("/health", "HEAD")
        assert (answer.status, answer.body) == (200, b"")
        answer = await server.ask("/" + "x" * 5000)
        assert len(answer.json()["error"]["message"]) < 200


async def test_a_bug_is_a_500_without_details_and_logged_once() -> None:
    """An exception in a handler is told as `internal`, its text goes to the log only."""

    async def broken(request: Request) -> Response:
        raise RuntimeError("/secret/path")

    async with served(Route("/broken", broken)) as server:
        with structlog.testing.capture_logs() as logs:
            answer = await server.ask("/broken")
            assert (await server.ask("/health")).status == 200
    assert answer.status == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert b"secret" not in answer.body
    assert [(entry["event"], entry["path"]) for entry in logs] == [("bug", "/broken")]


async def test_routes_can_be_added() -> None:
    """Further routes are served beside ours and can use the error shape."""

    async def chat(request: Request) -> Response:
        return error_response(429, "queue_full", "later", headers={"retry-after": "1"})

    async with served(Route("/v1/chat/completions", chat, methods=["POST"])) as server:
        answer = await server.ask("/v1/chat/completions", "POST")
        assert (answer.status, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        assert (await server.ask("/health")).status == 200


# -- sockets ---------------------------------------------------------------------------------------


def test_an_address_in_use_is_named() -> None:
    """Whether it is taken is known at bind, and the error names address and remedy."""
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(StartError, match=rf"127\.0\.0\.1:{other.getsockname()[1]}.*--http-port"),
        bind_http("127.0.0.1", other.getsockname()[1]),
    ):
        pass


def test_a_wildcard_does_not_hide_behind_a_taken_port() -> None:
    """0.0.0.0 can't be bound over somebody's 127.0.0.1 of the same port."""
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(StartError, match="in use"),
        bind_http("0.0.0.0", other.getsockname()[1]),
    ):
        pass


def test_a_host_that_is_none_is_named() -> None:
    """A host name that can't be resolved is a StartError too."""
    with (
        pytest.raises(StartError, match=r"no\.such\.host\.invalid:0"),
        bind_http("no.such.host.invalid", 0),
    ):
        pass


async def _nothing(scope: object, receive: object, send: object) -> None:
    """An app that is never called."""


async def test_signals_are_left_alone() -> None:
    """The handlers that the front has set are still there while the server runs."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with served() as server:
        assert (await server.ask("/health")).status == 200
        assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


async def _closed_by_server(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes."""
    async with asyncio.timeout(PATIENCE_S):
        return await reader.read()


async def test_a_head_over_the_limit_is_refused() -> None:
    """More than 16 KiB of header ends the connection with a 400."""
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.closing(writer):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * (20 << 10))
            assert (await _closed_by_server(reader)).startswith(b"HTTP/1.1 400 ")
        assert (await server.ask("/health")).status == 200


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"],
    ids=["nothing", "half a head", "half a head after a request"],
)
async def test_a_connection_without_a_whole_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Who sends no request, or half of one, does not keep the connection."""
    monkeypatch.setattr(engine_http, "_IDLE_TIMEOUT_S", 0.1)
    async with served() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.closing(writer):
            writer.write(sent)
            answer = await _closed_by_server(reader)
            assert answer.count(b"HTTP/1.1 200 OK") == sent.count(b"\r\n\r\n")


async def test_the_limit_for_heads_leaves_responses_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response that takes longer than a head may is sent to its end."""
    monkeypatch.setattr(engine_http, "_IDLE_TIMEOUT_S", 0.05)

    async def slow() -> AsyncIterator[bytes]:
        for _ in range(4):
            await asyncio.sleep(0.05)
            yield b"x"

    async def handler(request: Request) -> Response:
        return StreamingResponse(slow())

    async with served(Route("/slow", handler)) as server:
        assert (await server.ask("/slow")).body == b"xxxx"


# -- stopping --------------------------------------------------------------------------------------


async def test_stop_takes_less_than_a_second_whatever_clients_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Idle, half-sent and endless connections that nobody reads end with the server, silently."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * (64 << 10)

    async def handler(request: Request) -> Response:
        return StreamingResponse(endless())

    with structlog.testing.capture_logs() as logs, contextlib.ExitStack() as stack:
        async with served(Route("/endless", handler)) as server:
            port = server.port
            for sent in (b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                stack.callback(writer.close)
                writer.write(sent)
            # A small limit: more is not read, so the server's buffer stays full.
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            stack.callback(writer.close)
            writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readline()
            started = time.monotonic()
    assert time.monotonic() - started < 1.5  # 1 s, and what a busy machine adds
    assert (logs, caplog.records) == ([], [])


async def test_stop_lets_a_short_response_finish() -> None:
    """A response that is under way when the server stops arrives whole."""
    is_begun, may_end = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        is_begun.set()
        await may_end.wait()
        return Response("whole")

    async with served(Route("/short", handler)) as server:
        asking = asyncio.create_task(server.ask("/short"))
        async with asyncio.timeout(PATIENCE_S):
            await is_begun.wait()
        server.server.stop()
        may_end.set()
        answer = await asking
        assert (answer.status, answer.body) == (200, b"whole")


async def test_cancelling_run_stops_in_order() -> None:
    """A cancelled `run` closes listener and connections before it ends."""
    with bind_http("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        running = asyncio.create_task(HttpServer(_nothing, sock).run())
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            running.cancel()
            assert await _closed_by_server(reader) == b""
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
