"""`serve`: the daemon's numbers over HTTP, for Prometheus and for people. It may only ask."""

from __future__ import annotations

import argparse
import ipaddress
import socket
import sys
from typing import TYPE_CHECKING, Any

from cachewarmd import options
from cachewarmd.ctl import views
from cachewarmd.ctl.arguments import Add, argument
from cachewarmd.ctl.outcome import EXIT_OK, SCHEMA_VERSION, Output, UsageError, error_object
from cachewarmd.ctl.verbs import connect
from cachewarmd.errors import CachewarmError
from cachewarmd.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from starlette.applications import Starlette

_CALL_TIMEOUT_S = 5.0


def add_verbs(add: Add) -> None:
    verb = add("serve", serve)
    verb.add_argument("--host", default="127.0.0.1", help="an IPv4 address (default: 127.0.0.1)")
    verb.add_argument(
        "--port", type=argument(options.integer(0, 65535)), default=0, help="default: any free one"
    )
    verb.add_argument(
        "--insecure", action="store_true", help="allow an address that others can reach"
    )


def _check_host(host: str, is_insecure: bool) -> None:
    try:
        is_loopback = ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        raise UsageError(f"--host {options.shown(host)} is not allowed: an IPv4 address") from None
    if not is_loopback and not is_insecure:
        raise UsageError(f"--host {host} is not allowed without --insecure: others can reach it")


def make_app(args: argparse.Namespace) -> Starlette:
    """Asks the daemon anew for each request: after its restart there is nothing to repair."""
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from cachewarmd.ctl import page
    from cachewarmd.ctl.families import down, families

    def ask() -> tuple[pb.StatusReply, list[pb.JobProgress]]:
        with connect(args, pb.ROLE_OBSERVER, _CALL_TIMEOUT_S) as client:
            status = client.call(pb.Envelope(status=pb.Status()), _CALL_TIMEOUT_S)[0]
            jobs = client.call(pb.Envelope(jobs=pb.Jobs()), _CALL_TIMEOUT_S)[0]
        return status.status_reply, list(jobs.jobs_reply.jobs)

    class Told(Collector):
        def collect(self) -> list[Metric]:
            try:
                return list(families(*ask()))
            except (CachewarmError, OSError):
                return list(down())

    # Not coroutines: they wait for the daemon, and starlette runs such functions in a thread.
    def metrics(request: Request) -> Response:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Told())
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    def status(request: Request) -> Response:
        try:
            told, jobs = ask()
        except (CachewarmError, OSError) as exc:
            return JSONResponse({"error": error_object(exc)}, 503, page.HEADERS)
        data: dict[str, Any] = views.plain(told)
        data["jobs"] = [views.job_data(job) for job in jobs]
        return JSONResponse({"schema_version": SCHEMA_VERSION, **data}, headers=page.HEADERS)

    # A page of somebody else's, whose name leads here (DNS rebinding), must not read it.
    allowed = ["*"] if args.insecure else ["localhost", "127.0.0.1", args.host]
    return Starlette(
        routes=[Route("/metrics", metrics), Route("/status.json", status), *page.routes()],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed, www_redirect=False)],
    )


def serve(args: argparse.Namespace, output: Output) -> int:
    """Answer / (a status page), /metrics (Prometheus) and /status.json until interrupted."""
    import uvicorn

    _check_host(args.host, args.insecure)
    # Listens before its address is told; an address in use is an error of ours, not a log line.
    listening = socket.create_server((args.host, args.port))
    config = uvicorn.Config(make_app(args), log_config=None, access_log=False)
    port = listening.getsockname()[1]
    url = f"http://{args.host}:{port}"
    output.answer({"url": url}, lambda console: console.print(f"serving {url}/"))
    sys.stdout.flush()
    try:
        uvicorn.Server(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass  # how it ends
    finally:
        listening.close()
    return EXIT_OK
