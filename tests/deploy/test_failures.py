"""What goes wrong in a deployed federation: nothing is counted twice and nothing is lost, so that a replay, which knows
only who was counted, finds the same models."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from holdfast.deploy.courier import Failure
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.site import Site
from holdfast.errors import HoldfastError
from holdfast.protocol.messages import Reply
from holdfast.seeding import generator
from tests.deploy.local import Killed, LocalFederation
from tests.deploy.processes import lines
from tests.deploy.test_equality import grow_later, images, start  # noqa: F401

LGA = "lga"


def phase(blob: bytes) -> tuple[int, str]:
    facts = Envelope.from_bytes(blob).facts
    return facts.get("round", -1), facts["phase"]


def serve_through(federation: LocalFederation, kills: int = 100) -> int:
    """Starts the server again whenever it is killed; returns how often it was."""
    for count in range(kills):
        try:
            federation.server().serve(lambda: False)
        except Killed:
            continue
        return count
    raise AssertionError("the server never came to an end")


@pytest.mark.parametrize("method", ["fedavg", "lga"])
@pytest.mark.parametrize("moment", ["before the work", "after the work", "after the answer"])
def test_a_killed_server_goes_on_with_the_same_bits(method: str, moment: str, images: dict, tmp_path: Path) -> None:  # noqa: F811
    federation = start(tmp_path, method, images, total=4, pause=False)
    left = {(1, "train"), (2, "train"), (3, "train")}

    def kill(site: str, blob: bytes) -> None:
        if moment == "before the work" and phase(blob) in left and site == "north":
            left.discard(phase(blob))
            raise Killed

    def kill_after(site: str, blob: bytes, answer: bytes) -> bytes:
        last = "south" if moment == "after the work" else "north"  # the second answer of a round is north's
        if moment != "before the work" and phase(blob) in left and site == last:
            left.discard(phase(blob))
            raise Killed
        return answer

    federation.courier.before, federation.courier.after = kill, kill_after
    assert serve_through(federation) == 3
    assert [line["counted"] for line in lines(federation.record)] == [[0, 1]] * 4
    assert federation.replayed() == [True] * 4


@pytest.mark.parametrize("where", ["_arrive", "_tell", "_share", "_keep", "_write", "after"])
def test_a_site_killed_anywhere_loses_nothing(where: str, images: dict, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    """It is started again and gets the round's job again; the proxy has its shares once."""
    federation = start(tmp_path, LGA, images, total=4, pause=False)
    killed: list[int] = []

    def deliver(site: str, blob: bytes, again: bool = False) -> bytes | None:
        if site != "south" or phase(blob)[1] != "train":
            return None
        round_index = phase(blob)[0]
        if round_index in (0, 1, 2) and round_index not in killed:
            killed.append(round_index)
            if where == "after":
                federation.site(site).handle(blob)
            else:
                with monkeypatch.context() as patch:
                    patch.setattr(Site, where, _killed)
                    with pytest.raises(Killed):
                        federation.site(site).handle(blob)
            federation.kill(site)
        return federation.site(site).handle(blob)

    def _killed(*_: object) -> None:
        raise Killed

    federation.courier.before = deliver
    if where == "_share":  # shares come only in the round in which the head has just grown
        killed += [1, 2]
    if where == "_arrive":  # in the first round the class list has come before the job
        killed.append(0)
    federation.server().serve(lambda: False)
    assert [line["counted"] for line in lines(federation.record)] == [[0, 1]] * 4
    assert federation.replayed() == [True] * 4
    judged = [json.loads(line) for line in (federation.proxy.service.state / "proxy.jsonl").read_text().splitlines()]
    assert sum(line["shares"] for line in judged) == 3  # north's two classes and south's one


@pytest.mark.parametrize("method", ["fedavg", "lga"])
def test_a_round_in_which_a_site_was_not_counted_is_taken_back(method: str, images: dict, tmp_path: Path) -> None:  # noqa: F811
    """South has trained and shared in round 2, but its answer was too late; in round 3 it did not hear at all."""
    federation = start(tmp_path, method, images, total=6, pause=False)
    grow_later(federation, images)
    arrive = federation.courier.before

    def lose(site: str, blob: bytes) -> Failure | None:
        arrive(site, blob)
        return Failure("no answer within 1 s") if (site, *phase(blob)) == ("south", 2, "train") else None

    def late(site: str, blob: bytes, answer: bytes) -> bytes | Failure:
        return Failure("no answer within 1 s") if (site, *phase(blob)) == ("south", 1, "train") else answer

    federation.courier.before, federation.courier.after = lose, late
    federation.server().serve(lambda: False)
    record = lines(federation.record)
    assert [line["counted"] for line in record] == [[0, 1], [0], [0], [0, 1], [0, 1], [0, 1]]
    assert federation.replayed() == [True] * 6


def test_an_unusable_reply_is_refused_with_its_reason(images: dict, tmp_path: Path) -> None:  # noqa: F811
    federation = start(tmp_path, "fedavg", images, total=4, pause=False)

    def spoil(site: str, blob: bytes, answer: bytes) -> bytes:
        if (site, *phase(blob)) != ("north", 2, "train"):
            return answer
        told = Envelope.from_bytes(answer)
        reply = Reply.from_bytes(told.parts["reply"])
        next(one for one in reply.weights.values() if one.is_floating_point()).view(-1)[0] = float("nan")
        return Envelope(told.facts, {**told.parts, "reply": reply.to_bytes()}).to_bytes()

    federation.courier.after = spoil
    server = federation.server()
    server.serve(lambda: False)
    record = lines(federation.record)
    assert record[2]["counted"] == [1]
    assert record[2]["refused"][0]["client"] == 0
    assert "not finite" in record[2]["refused"][0]["reason"]
    assert federation.replayed() == [True] * 4
    audit = [json.loads(line) for line in (server.state / "audit.jsonl").read_text().splitlines()]
    assert [(one["round"], one["site"]) for one in audit if one["what"] == "refused"] == [(3, "north")]


def test_stale_foreign_and_damaged_messages_change_nothing(images: dict, tmp_path: Path) -> None:  # noqa: F811
    federation = start(tmp_path, "fedavg", images, total=3, pause=False)
    federation.server().serve(lambda: False)
    site = federation.site("north")
    orders = {phase(blob): blob for name, blob in federation.courier.down if name == "north"}
    ledger = site.root / "site.json"
    before = ledger.read_bytes()

    def said(blob: bytes) -> str:
        return Envelope.from_bytes(site.handle(blob)).facts.get("error", "")

    assert "is over here" in said(orders[0, "train"])  # a replayed old job
    good = Envelope.from_bytes(orders[2, "train"])
    assert "another agreement" in said(Envelope({**good.facts, "agreement": "x"}, good.parts).to_bytes())
    assert "no envelope" in said(b"nonsense" * 10)
    assert said(orders[2, "train"][:-5])  # cut short
    assert "unknown phase" in said(Envelope({**good.facts, "round": 3, "phase": "own"}, good.parts).to_bytes())
    assert said(Envelope({**good.facts, "round": 3}, good.parts).to_bytes())  # a job of another round
    assert ledger.read_bytes() == before
    again = Envelope.from_bytes(site.handle(orders[2, "train"]))
    assert "error" not in again.facts  # the same answer from the store


def test_without_the_proxy_training_goes_on_and_says_so(images: dict, tmp_path: Path) -> None:  # noqa: F811
    federation = start(tmp_path, LGA, images, total=5, pause=False)
    proxy = federation.proxy

    def go(site: str, blob: bytes) -> None:
        if phase(blob)[1] == "train":
            proxy.away = phase(blob)[0] in (1, 2)

    federation.courier.before = go
    federation.server().serve(lambda: False)
    record = lines(federation.record)
    assert [sorted(line["away"]) for line in record] == [[], ["north", "south"], ["north", "south"], [], []]
    assert [line["proxy"]["away"] for line in record] == [False, True, True, False, False]
    judged = [json.loads(line) for line in (proxy.service.state / "proxy.jsonl").read_text().splitlines()]
    assert [line["round"] for line in judged] == [1, 2, 3, 4, 5]  # models that waited were sent in their order
    assert sum(line["shares"] for line in judged) == 3  # late, but all of them
    assert len({line["digest"] for line in record}) == 5


def test_a_proxy_that_is_killed_goes_on(images: dict, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    federation = start(tmp_path, LGA, images, total=5, pause=False)
    proxy, killed = federation.proxy, []
    judge = type(proxy.service)._judge

    def kill(self, file: Path) -> None:
        if file.name not in killed:
            killed.append(file.name)
            if len(killed) % 2:
                raise Killed  # it has the model, and has not judged it
            monkeypatch.setattr(Path, "unlink", _killed)  # it has judged it, and not tidied up
        judge(self, file)

    def _killed(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(type(proxy.service), "_judge", kill)
    real, unlink = proxy.judge, Path.unlink

    def persistent() -> None:
        while True:
            try:
                return real()
            except Killed:
                monkeypatch.setattr(Path, "unlink", unlink)
                proxy.start()

    monkeypatch.setattr(proxy, "judge", persistent)
    federation.server().serve(lambda: False)
    assert len(killed) == 5
    assert federation.replayed() == [True] * 5


def test_shares_are_taken_once_and_by_role(images: dict, tmp_path: Path) -> None:  # noqa: F811
    federation = start(tmp_path, LGA, images, total=3, pause=False)
    federation.server().serve(lambda: False)
    service = federation.proxy.service
    [shares] = [blob for role, name, blob in federation.proxy.bytes if (role, name) == ("site:south", "put_shares")]
    pool = len(service.selector.gallery())
    assert service.put_shares("site:south", Envelope.from_bytes(shares)).facts == {"taken": False}  # replayed
    assert not list((service.state / "shares").glob("*"))
    assert len(service.selector.gallery()) == pool
    for role in ("server", "site-of-others", ""):
        for call in (service.encoder, service.teachers, service.put_shares):
            with pytest.raises(HoldfastError, match="may not do this"):
                call(role, Envelope({}))
    with pytest.raises(HoldfastError, match="only a server may"):
        service.put_model("site:south", Envelope({}))
    tampered = bytearray(shares)
    tampered[-1000] ^= 0xFF
    order = Envelope.from_bytes(bytes(tampered))
    with pytest.raises(HoldfastError):  # of another run; its content is checked when its round is judged
        service.put_shares("site:south", Envelope({**order.facts, "run": "other"}, order.parts))


def test_random_kills_of_all_parties(images: dict, tmp_path: Path, monkeypatch) -> None:  # noqa: F811
    """Twelve kills at drawn moments of sites and of the server, in one run."""
    federation = start(tmp_path, LGA, images, total=6, pause=False)
    grow_later(federation, images)
    arrive, rng, count = federation.courier.before, generator(5, "kills"), [0]

    def chance() -> bool:
        return int(rng.bit_generator.random_raw()) % 3 == 0 and count[0] < 12

    def before(site: str, blob: bytes) -> None:
        arrive(site, blob)
        if chance():
            count[0] += 1
            raise Killed
        if chance():
            count[0] += 1
            federation.kill(site)

    def after(site: str, blob: bytes, answer: bytes) -> bytes:
        if chance():
            count[0] += 1
            federation.kill(site)
            raise Killed
        return answer

    federation.courier.before, federation.courier.after = before, after
    serve_through(federation)
    assert count[0] == 12
    assert federation.replayed() == [True] * len(lines(federation.record))


def test_sites_evaluate_on_images_that_they_hold_out(images: dict, tmp_path: Path) -> None:  # noqa: F811
    federation = start(tmp_path, "fedavg", images, total=4, pause=False)
    federation.server().serve(lambda: False)
    record = lines(federation.record)
    sites = record[-1]["evaluation"]["sites"]
    counts = json.loads((federation.record / "result.json").read_text())["confusion"]
    assert set(sites) == {"north"}  # of south's twelve images of one class chance holds out none
    total = np.array(counts).sum()
    assert record[-1]["evaluation"]["images"] == total > 0
    assert record[-1]["accuracy"] == np.trace(np.array(counts)) / total
    assert record[0]["evaluation"]["images"] == total  # its classes were known before its jobs
