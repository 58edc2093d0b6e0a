"""The page of `holdfast watch` and its server, which only this machine can reach and which changes nothing."""

import hashlib
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from starlette.applications import Starlette

HOST = "127.0.0.1"
FILES = {
    "/": ("live.html", "text/html"),
    "/live.css": ("live.css", "text/css"),
    "/live.js": ("live.js", "text/javascript"),
}
SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
MISSING = "holdfast watch needs starlette and uvicorn; install them with: pip install 'holdfast[live]'"


def application(state: Callable[[], dict[str, Any]]) -> "Starlette":
    """The page, and what it shows as JSON at /state. `state` is called for every request that asks for it.

    Raises HoldfastError if the extra `live` is not installed."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.requests import Request
        from starlette.responses import Response
        from starlette.routing import Route
    except ImportError as error:
        raise HoldfastError(MISSING) from error

    def file(request: Request) -> Response:
        name, kind = FILES[request.url.path]
        return Response((Path(__file__).parent / name).read_bytes(), media_type=kind, headers=SAFE)

    def current(request: Request) -> Response:
        """304 if nothing has changed since the page last asked, which is most of the time."""
        content = json.dumps(state(), allow_nan=False).encode()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={**SAFE, "ETag": tag})
        return Response(content, media_type="application/json", headers={**SAFE, "ETag": tag})

    routes = [*(Route(path, file) for path in FILES), Route("/state", current)]
    # Other names for this address would let a page from elsewhere read this one (DNS rebinding).
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=routes, middleware=[hosts])


def serve(state: Callable[[], dict[str, Any]], port: int, ready: Callable[[str], None]) -> None:
    """Serves the page until the process is interrupted; `ready` is told its address. Port 0 takes a free one."""
    try:
        import uvicorn
    except ImportError as error:
        raise HoldfastError(MISSING) from error
    app = application(state)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
    except OSError as error:
        raise HoldfastError(f"cannot listen on port {port}: {error.strerror}; choose another with --port") from error
    ready(f"http://{HOST}:{listener.getsockname()[1]}")
    with listener:
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")).run([listener])
