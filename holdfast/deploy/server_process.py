"""The server's process: the SuperLink, the gate before it, and the round loop."""

import logging
from pathlib import Path

from holdfast.deploy.flower import FlowerCourier
from holdfast.deploy.gate import Gate
from holdfast.deploy.serve import GlobalServer
from holdfast.deploy.settings import Kit

log = logging.getLogger("holdfast.deploy")


def run_server(kit: Kit, state: Path) -> None:
    """Serves until the federation's rounds are over, or the process is stopped."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    certificate, key, authority = (kit.file(f"coordinator{end}") for end in (".crt", ".key", "-ca.crt"))
    courier = FlowerCourier(state / "flower", certificate, key, authority)
    place = kit.agreement.server

    def admit(site: str, number: int, public_key: bytes) -> int:
        server.admit(site, number)
        return courier.admit(site, public_key)

    gate = Gate(place.bind, courier.address, certificate, key, authority, admit, place.max_megabytes * 2**20)
    server = GlobalServer(kit, state, courier, lambda: {"down": gate.meter.down, "up": gate.meter.up})
    try:
        courier.start()
        gate.start()
        log.info("the server of %s listens on %s:%d", kit.agreement.name, *place.bind)
        server.serve(lambda: False)
    finally:
        gate.stop()
        courier.stop()
