"""The front's HTTP side: health, metrics, version; inside the front's event loop.

`make_app` says what is answered, `HttpServer` how: a uvicorn that takes no signals, configures no
logging, gets a socket that is bound already, and closes connections that send no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cachewarmd.log import get_logger

_log = get_logger()

_MAX_HEAD_BYTES = 16 << 10
_IDLE_TIMEOUT_S = 30  # for the next request's head to be whole
_STOP_TIMEOUT_S = 0.5  # for responses that are under way at the end
_MAX_ECHO = 128  # characters of a client's text in an error


# -- what is answered --------------------------------------------------------------------------


@dataclass(frozen=True)
class NotReady:
    """Why no request is taken now ("warming", "draining"), and when to ask again.

    `percent` of the warm-up that the start waits for, if it does.
    """

    reason: str
    retry_after_s: float
    percent: int | None = None


@dataclass(frozen=True)
class VersionInfo:
    """What /version tells; None = not known before a worker is ready."""

    version: str
    model: str
    model_version: str | None
    weights_sha256: str | None
    backend: str | None


def error_response(
    status: int,
    code: str,
    message: str,
    *,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error in the shape OpenAI's clients read; `type` follows from the status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"type": kind, "code": code, "message": message, "param": param}
    return JSONResponse({"error": error}, status, headers)


def make_app(
    *,
    registry: CollectorRegistry,
    not_ready: Callable[[], NotReady | None],
    is_stopping: Callable[[], bool],
    version: Callable[[], VersionInfo],
    routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The app. The callables are read at each request; `routes` are more of them."""

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    async def health(request: Request) -> Response:
        if is_stopping():
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        why = not_ready()
        if why is None:
            return JSONResponse({"ready": True})
        headers = {"retry-after": str(max(1, math.ceil(why.retry_after_s)))}
        told = {} if why.percent is None else {"percent": why.percent}
        return JSONResponse({"ready": False, "reason": why.reason, **told}, 503, headers)

    async def tell_version(request: Request) -> Response:
        return JSONResponse(asdict(version()))

    app = Starlette(
        routes=[
            Route("/metrics", metrics),
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", tell_version),
            *routes,
        ],
        exception_handlers={HTTPException: _http_error, Exception: _bug},
    )
    app.router.redirect_slashes = False  # an unknown path is an error, not a hint
    return app


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"[:_MAX_ECHO]
    match error.status_code:
        case 404:
            code, message = "not_found", f"unknown path: {what}"
        case 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            code, message = "method_not_allowed", f"{what} is not allowed: {allowed}"
        case _:
            code, message = "invalid_request", error.detail
    return error_response(error.status_code, code, message, headers=error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(500, "internal", "internal error; see the engine's log")


# -- how -----------------------------------------------------------------------------------------


class _Protocol(H11Protocol):
    """Closes connections on which no whole request head arrives in time.

    uvicorn itself limits only the silence after a response; who sends no request, or half of one,
    would keep the connection for ever.
    """

    _timer: asyncio.TimerHandle | None = None

    # uvicorn narrows the transport's type itself.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(_IDLE_TIMEOUT_S, self.transport.close)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the front's."""
        yield


def _at_boundary(app: ASGIApp) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """Our bugs are logged here, once; the client has its error response by then."""

    async def boundary(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except Exception as exc:
            _log.error("bug", path=scope.get("path"), exc_info=exc)

    return boundary


class HttpServer:
    """Serves `app` on a socket that listens already (`address.bind_http`), until `stop`."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        self._socket = sock
        self._server = _Server(
            uvicorn.Config(
                _at_boundary(app),
                # By class: httptools, when installed, has no limit on the head.
                http=_Protocol,
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                # What it would log is what clients do wrong, and bugs that are logged above.
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_IDLE_TIMEOUT_S,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,  # type: ignore[arg-type] # fractions of a second work
            )
        )

    async def run(self) -> None:
        """Until `stop`; when cancelled, it stops in order first."""
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self.stop()
            await serving
            raise
        finally:
            await self._cut()

    async def _cut(self) -> None:
        """End what the time for stopping did not suffice for, as a client that does not read."""
        state = self._server.server_state
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.gather(*state.tasks, return_exceptions=True)

    def stop(self) -> None:
        """Take no more connections, finish responses for a moment, cut the rest; within 1 s."""
        self._server.should_exit = True
