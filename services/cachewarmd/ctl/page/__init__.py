"""The status page: files beside this one, each at an address of its own."""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# All that can be asked for: no part of an address is ever the name of a file.
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
}

# The page shows names that clients chose: whatever they are, nothing but our own files runs.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",  # after an upgrade an old script would read new answers
}


def routes() -> list[Route]:
    """Of the page and what it loads; the files are read now."""
    return [_route(address, *file) for address, file in _FILES.items()]


def _route(address: str, name: str, content_type: str) -> Route:
    content = (resources.files(__package__) / name).read_bytes()

    async def answer(_: Request) -> Response:
        return Response(content, headers={"content-type": content_type, **HEADERS})

    return Route(address, answer)
