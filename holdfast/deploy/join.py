"""`holdfast join`: a site as a process."""

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from holdfast import __version__
from holdfast.deploy.certificates import load_key
from holdfast.deploy.flower_node import FlowerNode, Unwelcome, brief
from holdfast.deploy.gate import JOIN
from holdfast.deploy.images import SETTLED, Folder
from holdfast.deploy.party import has_proxy, setup_of
from holdfast.deploy.proxy_link import ProxyLink
from holdfast.deploy.settings import Kit
from holdfast.deploy.site import Site
from holdfast.errors import HoldfastError
from holdfast.machine import one_thread
from holdfast.results.record import only_writer

log = logging.getLogger("holdfast.deploy")


def folder_of(kit: Kit, images: Path, settled: float = SETTLED) -> Folder:
    """The watched folder of a site."""
    if not images.is_dir():
        raise HoldfastError(f"there is no folder {images}; give the folder that holds one folder of images per class")
    evaluation = kit.agreement.evaluation
    size = setup_of(kit.agreement, 0).spec.image_size
    return Folder(images, size, evaluation.share, evaluation.most, settled)


def join(kit: Kit, images: Path, state: Path, stopped: Callable[[], bool], settled: float = SETTLED) -> None:
    """Takes part until `stopped`."""
    folder = folder_of(kit, images, settled)
    proxy = ProxyLink(kit) if has_proxy(kit.agreement) else None
    site = Site(kit, folder, state, proxy)
    key = load_key(kit.file("coordinator.key"))
    node = FlowerNode(
        kit.agreement.server.address,
        kit.file("coordinator-ca.crt"),
        key,
        lambda: announce(kit),
        site.handle,
    )
    with only_writer(state), one_thread():
        node.serve(stopped)


def announce(kit: Kit) -> int:
    """Tells the server that this site is here; gives the site's node id. Raises `Unwelcome` if it is refused."""
    body = {"certificate": kit.file("coordinator.crt").read_text(), "version": __version__, "time": time.time()}
    address = kit.agreement.server.address
    answer = httpx.post(f"https://{address}{JOIN}", json=body, verify=str(kit.file("coordinator-ca.crt")), timeout=60)
    if answer.status_code == 403:
        raise Unwelcome(f"the server at {address} refused: {json.loads(answer.content)['error']}")
    if answer.status_code != 200:
        raise HoldfastError(f"the server at {address} answers {answer.status_code}: {brief(RuntimeError(answer.text))}")
    return int(answer.json()["node"])
