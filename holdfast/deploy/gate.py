"""What stands between the network and the server: it lets sites reach Flower's Fleet API and nothing else.

A SuperLink serves its Fleet, Runtime and Control APIs on one port, and whoever reaches the last two can run an app on
every node. So the SuperLink listens on this machine only, and this gate forwards the Fleet API's paths. It also takes
in sites: a site shows the certificate that the coordinator's CA has given it, and its key is registered."""

import asyncio
import json
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from cryptography import x509

from holdfast import __version__
from holdfast.deploy.certificates import check_certificate, load_certificate, number_of, public_pem, role_of
from holdfast.errors import HoldfastError
from holdfast.files import parse_json

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

FLEET = "/v1/fleet/"
JOIN = "/holdfast/join"
MAX_JOIN = 16_384  # bytes of a certificate
HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-authorization"}

log = logging.getLogger("holdfast.deploy")
Admit = Callable[[str, int, bytes], int]  # name, number, public key -> node id


@dataclass
class Meter:
    """Bytes of message bodies that have gone through the gate."""

    up: int = 0
    down: int = 0


@dataclass
class Gate:
    """An HTTPS server in a thread of its own."""

    listen: tuple[str, int]
    upstream: str  # host:port of the SuperLink
    certificate: Path
    key: Path
    authority: Path
    admit: Admit
    max_bytes: int  # of one request
    meter: Meter = field(default_factory=Meter)

    def start(self) -> None:
        config = uvicorn.Config(
            self._app,
            host=self.listen[0],
            port=self.listen[1],
            ssl_certfile=str(self.certificate),
            ssl_keyfile=str(self.key),
            log_config=None,
            access_log=False,
            lifespan="off",
            interface="asgi3",
            timeout_keep_alive=75,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="gate", daemon=True)
        self._failed: BaseException | None = None
        self._thread.start()
        for _ in range(200):
            if self._server.started:
                return
            if not self._thread.is_alive():
                break
            self._thread.join(0.05)
        raise HoldfastError(
            f"cannot listen on {self.listen[0]}:{self.listen[1]}; another program may use the port: set [server] listen"
        )

    def _run(self) -> None:
        try:
            self._server.run()
        except (SystemExit, OSError) as error:
            self._failed = error

    def stop(self) -> None:
        if not hasattr(self, "_server"):
            return
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(10)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path.startswith(FLEET) and ".." not in path:
            await self._forward(scope, receive, send)
        elif path == JOIN and scope["method"] == "POST":
            await self._join(receive, send)
        elif path == "/health":
            await _answer(send, 200, b"ok")
        else:
            await _answer(send, 404, b"not here")

    async def _join(self, receive: Receive, send: Send) -> None:
        try:
            body = await _body(receive, MAX_JOIN)
            name, number, key = self._identity(body)
            node = await asyncio.to_thread(self.admit, name, number, key)
        except HoldfastError as error:
            log.warning("a site was refused: %s", error)
            await _answer(send, 403, json.dumps({"error": str(error)}).encode())
            return
        await _answer(send, 200, json.dumps({"node": node, "version": __version__}).encode())

    def _identity(self, body: bytes) -> tuple[str, int, bytes]:
        """Name, number and key of the site whose certificate this is."""
        try:
            asked = parse_json(body)
            certificate = x509.load_pem_x509_certificate(asked["certificate"].encode())
            version = str(asked["version"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise HoldfastError("this is no request to join; use holdfast join") from error
        if version != __version__:
            raise HoldfastError(f"the server has Holdfast {__version__}, this site {version}; install the same version")
        check_certificate(certificate, load_certificate(self.authority), "the site's certificate")
        role, number = role_of(certificate), number_of(certificate)
        if not role.startswith("site:") or number is None:
            raise HoldfastError(f"a certificate of the role {role!r} cannot join; use a site's kit")
        return role.removeprefix("site:"), number, public_pem(certificate.public_key())  # type: ignore[arg-type]

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await _body(receive, self.max_bytes)
        except HoldfastError as error:
            log.warning("a request was refused: %s", error)
            await _answer(send, 413, str(error).encode())
            return
        self.meter.up += len(body)
        headers = [(name, value) for name, value in scope["headers"] if name not in HOP and name != b"host"]
        url = f"https://{self.upstream}{scope['path']}"
        if scope.get("query_string"):
            url += "?" + scope["query_string"].decode("ascii", "replace")
        try:
            request = self._client.build_request(scope["method"], url, headers=headers, content=body)
            answer = await self._client.send(request, stream=True)
        except httpx.HTTPError:
            await _answer(send, 503, b"the server is starting")
            return
        kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in HOP]
        await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
        async for chunk in answer.aiter_raw():
            self.meter.down += len(chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await answer.aclose()
        await send({"type": "http.response.body", "body": b""})

    @property
    def _client(self) -> httpx.AsyncClient:
        if not hasattr(self, "_http"):
            context = ssl.create_default_context(cafile=str(self.authority))
            self._http = httpx.AsyncClient(verify=context, timeout=600)
        return self._http


async def _body(receive: Receive, most: int) -> bytes:
    """A request's body; refused as soon as it is longer than it may be."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HoldfastError("the connection was lost")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise HoldfastError(f"a message of more than {most:,} bytes; raise [server] max_megabytes if it is right")
        if not message.get("more_body"):
            return b"".join(parts)


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})
