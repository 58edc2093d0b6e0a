"""Who is not let in, and one sentence at the right party: real TLS, real certificates, on this machine."""

import json
import os
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

pytest.importorskip("flwr")

from holdfast import __version__
from holdfast.deploy import check
from holdfast.deploy.certificates import Authority, key_pem, new_key, write_secret
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.gate import JOIN, Gate
from holdfast.deploy.join import announce
from holdfast.deploy.provision import Provision
from holdfast.deploy.proxy_link import ProxyLink
from holdfast.deploy.proxy_service import ProxyService
from holdfast.deploy.proxy_service import start as start_proxy
from holdfast.deploy.settings import Kit, read_federation, read_kit
from holdfast.deploy.site import ProxyAway
from holdfast.errors import HoldfastError
from tests.deploy.processes import federation_toml, free_ports

LGA = 'name = "lga"\ncapacity = 10'


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kits of one federation, with its gate and its proxy running."""
    folder = tmp_path_factory.mktemp("kits")
    (folder / "federation.toml").write_text(federation_toml(LGA, ["north", "south"], free_ports(2), 3))
    agreement, sites = read_federation(folder / "federation.toml")
    Provision(agreement, folder / "kits").write(sites)
    return folder / "kits"


@pytest.fixture(scope="module")
def gate(kits: Path) -> Iterator[list[tuple[str, int]]]:
    kit = read_kit(kits / "server", "server")
    admitted: list[tuple[str, int]] = []

    def admit(name: str, number: int, key: bytes) -> int:
        admitted.append((name, number))
        return 1

    files = [kit.file(f"coordinator{end}") for end in (".crt", ".key", "-ca.crt")]
    one = Gate(kit.agreement.server.bind, "127.0.0.1:1", *files, admit, 100_000)
    one.start()
    yield admitted
    one.stop()


@pytest.fixture(scope="module")
def proxy(kits: Path) -> Iterator[ProxyService]:
    kit = read_kit(kits / "proxy", "proxy")
    service = ProxyService(kit, kits / "proxy" / "state")
    server = start_proxy(service, 10_000_000)
    yield service
    server.stop(0)


def copy(kits: Path, tmp_path: Path, name: str = "site-north", role: str = "site") -> Kit:
    """A kit that a test may spoil."""
    target = tmp_path / name
    target.mkdir()
    for file in (kits / name).iterdir():
        if file.is_file():
            write_secret(target / file.name, file.read_bytes())
    return read_kit(target, role)


def renew(kit: Kit, authority: Authority, channel: str, name: str, days: int = 10, number: int | None = 0) -> None:
    key = new_key()
    write_secret(kit.file(f"{channel}.key"), key_pem(key))
    kit.file(f"{channel}.crt").write_bytes(authority.issue(name, key, (), number, days))


def ca(kits: Path, name: str) -> Authority:
    return Authority.load(kits / "authorities" / name)


def why(kit: Kit) -> str:
    with pytest.raises(HoldfastError) as caught:
        announce(kit)
    return str(caught.value)


def test_a_site_with_its_kit_is_let_in(kits: Path, gate: list) -> None:
    assert announce(read_kit(kits / "site-south", "site")) == 1
    assert gate[-1] == ("south", 1)


def test_the_gate_refuses_strangers_each_with_a_sentence(kits: Path, gate: list, tmp_path: Path) -> None:
    before = len(gate)
    kit = copy(kits, tmp_path)
    renew(kit, Authority.create("another"), "coordinator", "site:north")
    assert "is not signed by this federation's CA" in why(kit)
    renew(kit, ca(kits, "proxy-operator"), "coordinator", "site:north")
    assert "is not signed by this federation's CA" in why(kit)
    renew(kit, ca(kits, "coordinator"), "coordinator", "site:north", days=0)
    assert "expired on" in why(kit)
    renew(kit, ca(kits, "coordinator"), "coordinator", "server")
    assert "role 'server' cannot join" in why(kit)
    body = {"certificate": (kits / "site-north" / "coordinator.crt").read_text(), "version": "0.0.1"}
    verify = str(kits / "site-north" / "coordinator-ca.crt")
    url = f"https://{kit.agreement.server.address}"
    answer = httpx.post(url + JOIN, json=body, verify=verify)
    assert (answer.status_code, __version__ in answer.json()["error"]) == (403, True)
    assert len(gate) == before


@pytest.mark.parametrize(
    "path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleet/../control/x"]
)
def test_only_the_fleet_goes_through_the_gate(path: str, kits: Path, gate: list) -> None:
    agreement = read_kit(kits / "site-north", "site").agreement
    verify = str(kits / "site-north" / "coordinator-ca.crt")
    assert httpx.post(f"https://{agreement.server.address}{path}", verify=verify).status_code in (404, 405)


def test_an_oversized_message_is_refused_before_it_is_read(kits: Path, gate: list) -> None:
    agreement = read_kit(kits / "site-north", "site").agreement
    verify = str(kits / "site-north" / "coordinator-ca.crt")
    answer = httpx.post(
        f"https://{agreement.server.address}/v1/fleet/push-object", content=b"x" * 200_000, verify=verify
    )
    assert answer.status_code == 413
    assert "max_megabytes" in answer.text


def test_a_site_does_not_speak_to_another_server(kits: Path, gate: list, tmp_path: Path) -> None:
    kit = copy(kits, tmp_path)
    kit.file("coordinator-ca.crt").write_bytes((kits / "site-north" / "proxy-ca.crt").read_bytes())
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        announce(kit)
    with pytest.raises(HoldfastError, match="has a certificate of another CA"):
        check._server(kit)


def test_the_proxy_lets_in_its_own_certificates_only(kits: Path, proxy: ProxyService, tmp_path: Path) -> None:
    assert ProxyLink(read_kit(kits / "site-north", "site")).hello() == pytest.approx(time.time(), abs=5)
    kit = copy(kits, tmp_path)
    for spoil in (
        lambda: renew(kit, Authority.create("another"), "proxy", "site:north"),
        lambda: renew(kit, ca(kits, "coordinator"), "proxy", "site:north"),
        lambda: renew(kit, ca(kits, "proxy-operator"), "proxy", "site:north", days=0),
    ):
        spoil()
        with pytest.raises(ProxyAway):
            ProxyLink(kit, 3.0).encoder()
    kit.file("proxy-ca.crt").write_bytes((kits / "site-north" / "coordinator-ca.crt").read_bytes())
    with pytest.raises(HoldfastError, match="has a certificate of another CA"):
        check._proxy(kit)


def test_roles_at_the_proxy(kits: Path, proxy: ProxyService, tmp_path: Path) -> None:
    site, server = ProxyLink(read_kit(kits / "site-north", "site")), ProxyLink(read_kit(kits / "server", "server"))
    assert len(site.encoder()) > 1000
    with pytest.raises(HoldfastError, match="role 'server' may not do this"):
        server.encoder()
    with pytest.raises(HoldfastError, match="role 'site:north' may not do this; only a server may"):
        site.call("PutModel", Envelope({"run": "a", "counted": []}, {"model": b""}))
    with pytest.raises(HoldfastError, match="refused"):
        site.call("PutShares", Envelope({"run": "a", "round": 0}, {"0": b"no share"}))
    with pytest.raises(HoldfastError, match="max_megabytes"):
        site.call("PutShares", Envelope({"run": "a", "round": 0}, {"0": b"x" * 11_000_000}))
    assert proxy.run == ""  # nothing of it came in


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda kit: os.chmod(kit.file("coordinator.key"), 0o644), "others can read the key"),
        (lambda kit: os.chmod(kit.file("secret.seed"), 0o644), "others can read"),
        (lambda kit: kit.file("coordinator.key").write_bytes(key_pem(new_key())), "is not the key of"),
        (lambda kit: kit.file("coordinator.crt").write_text("no"), "is not a certificate"),
        (lambda kit: kit.file("coordinator.crt").unlink(), "cannot read the certificate"),
        (lambda kit: kit.file("proxy.key").write_text("no"), "is not a private key"),
    ],
)
def test_a_spoiled_kit_is_refused_at_the_start(spoil, sentence: str, kits: Path, tmp_path: Path) -> None:
    kit = copy(kits, tmp_path)
    check.certificates(kit)
    spoil(kit)
    with pytest.raises(HoldfastError, match=sentence):
        check.certificates(kit)


def test_a_kit_of_another_role_version_or_content_is_refused(kits: Path, tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="is the kit of a proxy, which is started with holdfast proxy"):
        read_kit(kits / "proxy", "site")
    kit = copy(kits, tmp_path)
    facts = json.loads(kit.file("kit.json").read_bytes())
    kit.file("kit.json").write_text(json.dumps({**facts, "version": "9.9"}))
    with pytest.raises(HoldfastError, match=r"is of Holdfast 9.9 and this is .*; install 9.9"):
        read_kit(kit.folder, "site")
    facts["agreement"]["classes"] = 11
    kit.file("kit.json").write_text(json.dumps(facts))
    with pytest.raises(HoldfastError, match="has been changed since it was written"):
        read_kit(kit.folder, "site")


def test_clocks_that_differ_and_a_full_disk_are_said(kits: Path, monkeypatch, tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=r"clocks of the server and of this machine differ by \d+ s"):
        check._clock(datetime(2020, 1, 1, tzinfo=UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "the server")
    monkeypatch.setattr(check, "LEAST", 2**62)
    with pytest.raises(HoldfastError, match="MB are free"):
        list(check._machine(read_kit(kits / "site-north", "site"), tmp_path))


def test_kits_hold_secrets_only_for_their_owner(kits: Path, tmp_path: Path) -> None:
    for kit in (kits / "server", kits / "proxy", kits / "site-north"):
        assert kit.stat().st_mode & 0o077 == 0
        for secret in [*kit.glob("*.key"), kit / "secret.seed"]:
            assert secret.stat().st_mode & 0o777 == 0o600
            for text in [kit / "README.md", kit / "kit.json"]:
                assert secret.read_text().strip() not in text.read_text() or secret.name == "secret.seed"
    assert not (kits / "proxy" / "coordinator.key").exists()  # the proxy never speaks on the server's channel


def test_a_site_that_is_added_later_leaves_the_other_kits_alone(tmp_path: Path) -> None:
    text = federation_toml('name = "fedavg"', ["b-site", "c-site"], [9, 10], 3)
    (tmp_path / "federation.toml").write_text(text)
    agreement, sites = read_federation(tmp_path / "federation.toml")
    Provision(agreement, tmp_path / "kits").write(sites)
    before = {file: file.read_bytes() for file in (tmp_path / "kits").rglob("*") if file.is_file()}
    (tmp_path / "federation.toml").write_text(text.replace('"b-site"', '"a-site", "b-site"'))
    agreement, sites = read_federation(tmp_path / "federation.toml")
    assert [one.name for one in Provision(agreement, tmp_path / "kits").write(sites)] == ["site-a-site"]
    changed = [file.name for file, content in before.items() if file.read_bytes() != content]
    assert changed == ["federation.json"]  # the coordinator's list of numbers
    numbers = {name: read_kit(tmp_path / "kits" / f"site-{name}", "site").number for name in sites}
    assert numbers == {"b-site": 0, "c-site": 1, "a-site": 2}


def test_a_proxy_ca_made_elsewhere_signs_the_proxy_channel(tmp_path: Path) -> None:
    own = Authority.create("hospital trust")
    own.save(tmp_path / "ca")
    (tmp_path / "federation.toml").write_text(federation_toml(LGA, ["north"], [9, 10], 3))
    agreement, sites = read_federation(tmp_path / "federation.toml")
    Provision(agreement, tmp_path / "kits", tmp_path / "ca").write(sites)
    context = ssl.create_default_context(cafile=str(tmp_path / "ca" / "ca.crt"))
    assert context.get_ca_certs()[0]["subject"][0][0][1] == "hospital trust"
    check.certificates(read_kit(tmp_path / "kits" / "proxy", "proxy"))
    assert (tmp_path / "kits" / "proxy" / "proxy-ca.crt").read_bytes() == (tmp_path / "ca" / "ca.crt").read_bytes()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("sites = [", "sites = 3 #["), "names no sites"),
        (('name = "test"', 'name = "Test 1"'), "cannot be a name"),
        (('["north"]', '["north", "north"]'), "names a site twice"),
        (("classes = 10", "clases = 10"), "unknown setting 'clases'"),
        (("deadline = 120.0", "deadline = -1"), "is not possible"),
        (("deadline = 120.0", "dedline = 1"), "unknown setting rounds.dedline"),
        (("[server]", "[sever]"), "unknown setting 'sever'"),
        (('name = "lga"', 'name = "lag"'), "unknown method 'lag'"),
        (('name = "lga"\ncapacity = 10', 'name = "joint"'), "needs all classes at once"),
        (('address = "127.0.0.1:9"', 'address = "nowhere"'), "is not an address"),
    ],
)
def test_a_wrong_federation_toml_is_one_sentence(change: tuple[str, str], sentence: str, tmp_path: Path) -> None:
    text = federation_toml(LGA, ["north"], [9, 10], 3)
    assert change[0] in text
    (tmp_path / "federation.toml").write_text(text.replace(*change))
    with pytest.raises(HoldfastError, match=sentence):
        read_federation(tmp_path / "federation.toml")
