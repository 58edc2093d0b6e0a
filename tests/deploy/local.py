"""A federation in one process: the deployed server, sites and proxy with their state on disk, but a courier that only
hands bytes over. What it takes the network away from, it can also kill, delay or repeat."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.deploy.courier import Failure
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.images import Folder
from holdfast.deploy.party import has_proxy, setup_of
from holdfast.deploy.provision import Provision
from holdfast.deploy.proxy_service import ProxyService
from holdfast.deploy.replay import replay
from holdfast.deploy.serve import GlobalServer
from holdfast.deploy.settings import Kit, read_federation, read_kit
from holdfast.deploy.site import ProxyAway, Site
from holdfast.protocol.messages import GlobalModel
from tests.deploy.processes import federation_toml


class Killed(BaseException):
    """A process has ended here."""


class LocalProxy:
    """The proxy as its callers see it, with their roles."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.away = False
        self.bytes: list[tuple[str, str, bytes]] = []
        self.start()

    def start(self) -> None:
        self.service = ProxyService(self.kit, self.kit.file("state"))

    def judge(self) -> None:
        for file in self.service._waiting():
            self.service._judge(file)

    def call(self, role: str, name: str, order: Envelope) -> Envelope:
        if self.away:
            raise ProxyAway("away")
        sent = order.to_bytes()
        answer = getattr(self.service, name)(role, Envelope.from_bytes(sent)).to_bytes()
        self.bytes += [(role, name, sent), (role, f"{name} answer", answer)]
        return Envelope.from_bytes(answer)

    def put_model(self, run: str, counted: list[str], model: GlobalModel) -> None:
        self.call("server", "put_model", Envelope({"run": run, "counted": counted}, {"model": model.to_bytes()}))
        self.judge()


class Caller:
    """The proxy as one site sees it."""

    def __init__(self, proxy: LocalProxy, site: str) -> None:
        self.proxy, self.role = proxy, f"site:{site}"

    def encoder(self) -> bytes:
        return self.proxy.call(self.role, "encoder", Envelope({})).parts["encoder"]

    def teachers(self, growth: int, judged: int) -> bytes:
        return self.proxy.call(self.role, "teachers", Envelope({"growth": growth, "judged": judged})).parts["teachers"]

    def put_shares(self, run: str, round_index: int, shares: list[bytes]) -> None:
        parts = {str(i): blob for i, blob in enumerate(shares)}
        self.proxy.call(self.role, "put_shares", Envelope({"run": run, "round": round_index}, parts))


class LocalCourier:
    """Hands bytes to the sites of a federation, in any order, and notes them."""

    def __init__(self, federation: "LocalFederation") -> None:
        self.federation = federation
        self.down: list[tuple[str, bytes]] = []
        self.up: list[tuple[str, bytes]] = []
        self.before: Callable[[str, bytes], bytes | Failure | None] = lambda site, blob: None
        self.after: Callable[[str, bytes, bytes], bytes | Failure] = lambda site, blob, answer: answer

    def present(self) -> Sequence[str]:
        return sorted(self.federation.present)

    def exchange(self, blobs: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes | Failure]]:
        for site in sorted(blobs, reverse=True):  # answers come in another order than the sites have
            blob = blobs[site]
            self.down.append((site, blob))
            answer = self.before(site, blob)
            if answer is None:
                if site not in self.federation.present:
                    answer = Failure("no answer within a moment")
                else:
                    done = self.federation.site(site).handle(blob)
                    self.up.append((site, done))
                    answer = self.after(site, blob, done)
            yield site, answer


class LocalFederation:
    """Kits, folders and parties."""

    def __init__(
        self, folder: Path, method: str, sites: Sequence[str], total: int, rounds: int = 3, pause: bool = True
    ) -> None:
        self.folder, self.names = folder, list(sites)
        text = federation_toml(method, sites, [9, 10], total, rounds=rounds)
        text = text.replace("[rounds]", f"[rounds]\npause = {str(pause).lower()}")
        (folder / "federation.toml").write_text(text.replace(f"minimum = {len(sites)}", "minimum = 1"))
        agreement, names = read_federation(folder / "federation.toml")
        Provision(agreement, folder / "kits").write(names)
        self.agreement = agreement
        self.present = set(sites)
        self.proxy = LocalProxy(read_kit(folder / "kits" / "proxy", "proxy")) if has_proxy(agreement) else None
        self.sites: dict[str, Site] = {}
        self.courier = LocalCourier(self)
        for site in sites:
            self.images(site).mkdir(parents=True)

    def images(self, site: str) -> Path:
        return self.folder / "images" / site

    def kit(self, site: str) -> Path:
        return self.folder / "kits" / f"site-{site}"

    def site(self, name: str) -> Site:
        """The site's process; one that was killed is started again."""
        if name not in self.sites:
            kit = read_kit(self.kit(name), "site")
            evaluation, size = self.agreement.evaluation, setup_of(self.agreement, 0).spec.image_size
            folder = Folder(self.images(name), size, evaluation.share, evaluation.most, settled=-1)
            self.sites[name] = Site(kit, folder, kit.file("state"), Caller(self.proxy, name) if self.proxy else None)
        return self.sites[name]

    def kill(self, name: str) -> None:
        self.sites.pop(name, None)

    def server(self) -> GlobalServer:
        """The server's process, from its disk."""
        kit = read_kit(self.folder / "kits" / "server", "server")
        server = GlobalServer(kit, kit.file("state"), self.courier, link=self.proxy)
        for number, name in enumerate(self.names):
            server.admit(name, number)
        return server

    @property
    def courier_run(self) -> str:
        """The name of the run, which every message carries."""
        return str(Envelope.from_bytes(self.courier.down[0][1]).facts["run"])

    @property
    def record(self) -> Path:
        return self.folder / "kits" / "server" / "state" / "record"

    def replayed(self) -> list[bool]:
        """Is each round's model that of the simulation?"""
        return [one.same for one in replay(self.record, [self.kit(name) for name in self.names], self.folder / "all")]
