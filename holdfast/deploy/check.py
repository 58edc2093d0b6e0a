"""`--check`: tries what a party needs before it starts. What is wrong is one sentence."""

import os
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from importlib.metadata import version as installed
from pathlib import Path

import httpx

from holdfast import __version__
from holdfast.deploy.certificates import check_certificate, load_certificate, load_key, role_of
from holdfast.deploy.join import folder_of
from holdfast.deploy.party import has_proxy
from holdfast.deploy.proxy_link import ProxyLink
from holdfast.deploy.settings import Kit, split_address
from holdfast.deploy.site import ProxyAway
from holdfast.errors import HoldfastError

FLOWER = "1.41"  # the release whose interfaces are used
LEAST = 200 * 2**20  # bytes that must be free
SKEW = 60.0  # seconds by which two clocks may differ
SOON = timedelta(days=30)


def certificates(kit: Kit) -> Iterator[str] | None:
    """Keys, certificates and secrets of a kit, as every start checks them."""
    for _ in _certificates(kit):
        pass
    return None


def _certificates(kit: Kit) -> Iterator[str]:
    wanted = f"site:{kit.name}" if kit.role == "site" else kit.role
    for channel in ("coordinator", "proxy"):
        if (kit.role, channel) == ("proxy", "coordinator"):
            continue
        file = kit.file(f"{channel}.crt")
        certificate, key = load_certificate(file), load_key(kit.file(f"{channel}.key"))
        check_certificate(certificate, load_certificate(kit.file(f"{channel}-ca.crt")), f"the certificate {file}")
        if certificate.public_key() != key.public_key():
            raise HoldfastError(
                f"{kit.file(f'{channel}.key')} is not the key of {file}; take the kit again as it was written"
            )
        if role_of(certificate) != wanted:
            raise HoldfastError(f"{file} is of the role {role_of(certificate)!r}, not {wanted!r}; take the right kit")
        left = certificate.not_valid_after_utc - datetime.now(UTC)
        yield f"{channel}'s certificate, valid for {left.days} days" + (" only" if left < SOON else "")
    _ = kit.secret
    yield "secret seed"


def _machine(kit: Kit, state: Path) -> Iterator[str]:
    flower = installed("flwr")
    if not flower.startswith(f"{FLOWER}."):
        raise HoldfastError(f"Flower {flower} is installed, and this version needs {FLOWER}; see constraints.txt")
    yield f"Holdfast {__version__}, Flower {flower}, agreement {kit.agreement.digest}"
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe = state / ".check"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise HoldfastError(f"cannot write to {state}: {error.strerror}; choose another --state") from error
    free = shutil.disk_usage(state).free
    if free < LEAST:
        raise HoldfastError(f"only {free // 2**20} MB are free for {state}; free at least {LEAST // 2**20} MB")
    yield f"disk, {free // 2**30} GB free for {state}"


def _port(place: tuple[str, int], section: str) -> str:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
        except OSError as error:
            raise HoldfastError(
                f"cannot listen on {place[0]}:{place[1]} ({error.strerror}); end its user, or set [{section}] listen"
            ) from error
    return f"port {place[1]} is free"


def server(kit: Kit, state: Path) -> Iterator[str]:
    yield from _certificates(kit)
    yield from _machine(kit, state)
    yield _port(kit.agreement.server.bind, "server")
    if has_proxy(kit.agreement):
        yield _proxy(kit)


def proxy(kit: Kit, state: Path) -> Iterator[str]:
    yield from _certificates(kit)
    yield from _machine(kit, state)
    if not has_proxy(kit.agreement):
        raise HoldfastError(f"the method {kit.agreement.config.method.name} needs no proxy; there is nothing to start")
    yield _port(kit.agreement.proxy.bind, "proxy")


def site(kit: Kit, images: Path, state: Path) -> Iterator[str]:
    yield from _certificates(kit)
    yield from _machine(kit, state)
    if os.path.realpath(state).startswith(os.path.realpath(images) + os.sep):
        raise HoldfastError(f"the state folder {state} lies inside the images; choose another --state")
    train, tests = (folder := folder_of(kit, images)).load(folder.listing())
    yield f"{len(train.pixels)} images of {len(train.files)} classes, and {len(tests.pixels)} held out"
    yield _server(kit)
    if has_proxy(kit.agreement):
        yield _proxy(kit)


def _server(kit: Kit) -> str:
    address = kit.agreement.server.address
    try:
        answer = httpx.get(f"https://{address}/health", verify=str(kit.file("coordinator-ca.crt")), timeout=10)
    except httpx.HTTPError as error:
        raise HoldfastError(unreachable("the server", address, error)) from error
    _clock(answer.headers.get("date", ""), "the server")
    return f"the server at {address} answers"


def _proxy(kit: Kit) -> str:
    address = kit.agreement.proxy.address
    host, port = split_address(address)
    try:  # gRPC does not say why a handshake failed
        context = ssl.create_default_context(cafile=str(kit.file("proxy-ca.crt")))
        context.load_cert_chain(kit.file("proxy.crt"), kit.file("proxy.key"))
        with socket.create_connection((host, port), 10) as raw, context.wrap_socket(raw, server_hostname=host):
            pass
        there = ProxyLink(kit).hello()
    except (OSError, ProxyAway) as error:
        raise HoldfastError(unreachable("the proxy", address, error)) from error
    if abs(there - time.time()) > SKEW:
        raise HoldfastError(
            f"the clocks of the proxy and of this machine differ by {abs(there - time.time()):.0f} s; set them"
        )
    return f"the proxy at {address} answers"


def _clock(date: str, whose: str) -> None:
    try:
        there = datetime.strptime(date, "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    except ValueError:
        return
    skew = abs((datetime.now(UTC) - there).total_seconds())
    if skew > SKEW:
        raise HoldfastError(f"the clocks of {whose} and of this machine differ by {skew:.0f} s; set them")


def unreachable(who: str, address: str, error: Exception) -> str:
    """Why a party cannot be reached, in one sentence."""
    text = str(error)
    if "certificate has expired" in text:
        return f"the certificate of {who} at {address} has expired; its operator needs a new kit"
    if "CERTIFICATE_VERIFY_FAILED" in text or "certificate verify failed" in text:
        return f"{who} at {address} has a certificate of another CA; check the address, or ask for a new kit"
    reason = text.splitlines()[0][:120] if text else type(error).__name__
    return f"cannot reach {who} at {address} ({reason}); is it running?"
