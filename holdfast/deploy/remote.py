"""The proxy as the server sees it: it sends every global model there, and never hears of shares or teachers."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from holdfast.deploy.clients import Deployed
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.site import ProxyAway
from holdfast.files import write_atomic
from holdfast.protocol.checks import Refusal
from holdfast.protocol.codec import Snapshot
from holdfast.protocol.messages import GlobalModel, PrototypeShare, Teachers
from holdfast.proxy.selectors import TWO, LastModelSelector

UNSENT = 20  # models that are kept for a proxy that is away

log = logging.getLogger("holdfast.deploy")


class ModelSink(Protocol):
    """The proxy as the server sees it. Raises `ProxyAway` if there is no answer."""

    def put_model(self, run: str, counted: list[str], model: GlobalModel) -> None: ...


class RemoteSelector(LastModelSelector):
    """Sends models; those that the proxy could not take are sent later, in their order."""

    sent = TWO
    is_party = True

    def __init__(self, link: ModelSink, clients: Deployed, folder: Path) -> None:
        super().__init__()
        self.link, self.clients, self.folder = link, clients, folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def teachers(self, growth: int) -> Teachers:
        return Teachers()  # sites ask the proxy themselves

    def admit(
        self, growths: tuple[int, ...], shares: Sequence[tuple[int, PrototypeShare]]
    ) -> tuple[list[PrototypeShare], list[Refusal]]:
        return [], []

    def judge(self, model: GlobalModel, shares: Sequence[PrototypeShare]) -> dict[str, Any]:
        facts = {"run": self.clients.run, "counted": self.clients.counted_sites, "round": model.round_index}
        kept = Envelope(facts, {"model": model.to_bytes()}).to_bytes()
        write_atomic(self.folder / f"{model.round_index:08d}.bin", kept)
        waiting = sorted(self.folder.glob("*.bin"))
        for file in waiting[:-UNSENT]:
            file.unlink()
        try:
            for file in waiting[-UNSENT:]:
                order = Envelope.from_bytes(file.read_bytes())
                sent = GlobalModel.from_bytes(order.parts["model"])
                self.link.put_model(order.facts["run"], order.facts["counted"], sent)
                self.clients.judged = sent.round_index
                file.unlink()
        except ProxyAway as error:
            log.warning("%s; the model waits, and training goes on with the last teachers", error)
            return {"away": True}
        return {"away": False}

    def snapshot(self) -> dict[str, Snapshot]:
        return {}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        pass
