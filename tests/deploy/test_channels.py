"""docs/security.md says who sends what to whom. Here every byte on every channel is recorded, and must be of a kind
that its table names; what a party must never see is looked for in all bytes that reach it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from holdfast.deploy.envelope import Envelope
from holdfast.protocol.codec import kind_of, tensor_bytes
from holdfast.protocol.messages import Encoder, Job, PrototypeShare, Reply
from tests.deploy.local import LocalFederation
from tests.deploy.processes import glyphs, lines
from tests.deploy.test_equality import grow_later, start

TABLE = Path(__file__).parents[2] / "docs" / "security.md"
ROW = re.compile(r"^\| (?P<sender>\w+) \| (?P<receiver>\w+) \| (?P<kind>[^|]+?) \|", re.MULTILINE)


def documented() -> set[tuple[str, str, str]]:
    """Sender, receiver and kind of message of every row of the table."""
    return {(row["sender"], row["receiver"], row["kind"].strip("` ")) for row in ROW.finditer(TABLE.read_text())}


def sent(federation: LocalFederation) -> Iterator[tuple[str, str, str, bytes]]:
    """Every message: sender, receiver, kind, bytes; and every envelope, whose facts are of the kind `facts`."""
    channels = [("server", "site", blob) for _, blob in federation.courier.down]
    channels += [("site", "server", blob) for _, blob in federation.courier.up]
    for role, name, blob in federation.proxy.bytes if federation.proxy else ():
        party = role.partition(":")[0]
        channels.append(("proxy", party, blob) if name.endswith("answer") else (party, "proxy", blob))
    for sender, receiver, blob in channels:
        envelope = Envelope.from_bytes(blob)
        yield sender, receiver, "facts", blob
        for part in envelope.parts.values():
            yield sender, receiver, kind_of(part), part


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> LocalFederation:
    images = glyphs(4, 24)
    one = start(tmp_path_factory.mktemp("channels"), "lga", images, total=6)
    grow_later(one, images)
    one.server().serve(lambda: False)
    return one


def test_only_what_the_table_names_is_sent(federation: LocalFederation) -> None:
    found = {(sender, receiver, kind) for sender, receiver, kind, _ in sent(federation)}
    assert found <= documented()
    assert ("site", "proxy", "share") in found
    assert ("server", "site", "task end") in found


def test_a_method_without_the_proxy_sends_no_more(tmp_path: Path) -> None:
    images = glyphs(4, 24)
    one = start(tmp_path, "podnet", images, total=6)
    grow_later(one, images)
    one.server().serve(lambda: False)
    found = {(sender, receiver, kind) for sender, receiver, kind, _ in sent(one)}
    assert found <= documented()
    assert ("server", "site", "teachers") in found  # here the server keeps the old models
    assert not any("proxy" in row[:2] for row in found)


def test_the_server_never_sees_a_share_nor_the_encoder(federation: LocalFederation) -> None:
    encoder = federation.proxy.service.selector.encoder
    shares = [PrototypeShare.from_bytes(blob) for _, _, kind, blob in sent(federation) if kind == "share"]
    assert shares
    secret = [next(iter(share.gradient.values())).numpy().tobytes()[:64] for share in shares]
    secret += [tensor.numpy().tobytes()[:64] for tensor in encoder.state_dict().values() if tensor.numel() >= 16]
    for _, receiver, _, blob in sent(federation):
        if receiver == "server":
            assert not any(piece in blob for piece in secret)


def test_the_proxy_sees_no_model_of_a_client_and_no_name_in_its_pool(federation: LocalFederation) -> None:
    replies = [Reply.from_bytes(blob) for _, _, kind, blob in sent(federation) if kind == "reply"]
    models = [
        tensor.numpy().tobytes()[:64] for one in replies for tensor in one.weights.values() if tensor.numel() >= 32
    ]
    assert models
    jobs = {
        t.numpy().tobytes()[:64]
        for _, _, k, b in sent(federation)
        if k == "job"
        for t in Job.from_bytes(b).weights.values()
    }
    own = [piece for piece in models if piece not in jobs]  # what training has changed
    assert own
    for _, receiver, kind, blob in sent(federation):
        if receiver == "proxy" and kind == "share":
            assert not any(piece in blob for piece in own)
            assert not any(name in blob for name in (b"north", b"south", b"class-"))
    state = (federation.proxy.service.state / "proxy.bin").read_bytes()
    for name in (b"class-0", b"class-2"):
        assert name not in state
    pool = Envelope.from_bytes(state).parts
    assert not any(name in blob for blob in pool.values() for name in (b"north", b"south"))


def test_no_image_and_no_secret_leaves_a_site(federation: LocalFederation) -> None:
    site = federation.site("north")
    site._enter(federation.courier_run)
    pixels = site._images(site.ledger_.data).pixels
    pieces = [image.numpy().tobytes()[:48] for image in pixels]
    key = site.kit.file("coordinator.key").read_bytes().split(b"\n")[1]
    for sender, _, _, blob in sent(federation):
        if sender == "site":
            assert not any(piece in blob for piece in pieces)
            assert key not in blob


def test_bytes_are_those_that_the_record_says(federation: LocalFederation) -> None:
    """Names and shapes add less than 2 % to the tensors that a run bills."""
    record = lines(federation.record)
    for kind, sender, billed in (
        ("job", "server", sum(line["bytes"]["server"]["down"] for line in record)),
        ("reply", "site", sum(line["bytes"]["server"]["up"] for line in record)),
        ("global model", "server", sum(line["bytes"]["proxy"]["models"] for line in record)),
    ):
        there = sum(len(blob) for one, _, found, blob in sent(federation) if (one, found) == (sender, kind))
        assert there == pytest.approx(billed, rel=0.02), kind
    encoder = [blob for _, _, kind, blob in sent(federation) if kind == "encoder"]
    assert len(encoder) == 2  # once per site
    assert len(encoder[0]) == pytest.approx(tensor_bytes(Encoder.from_bytes(encoder[0]).weights), rel=0.02)


def test_secret_seeds_decide_the_encoder_and_the_noise(tmp_path: Path) -> None:
    """With seeds of their own nobody can compute again what proxy and sites keep to themselves."""
    encoders = []
    for name, seed in (("one", "7"), ("two", "8")):
        (tmp_path / name).mkdir()
        one = LocalFederation(tmp_path / name, 'name = "lga"\ncapacity = 10', ["north"], 3)
        one.proxy.kit.file("secret.seed").write_text(seed)
        one.proxy.start()
        encoders.append(one.proxy.service.selector.encoder.state_dict())
    assert any(not torch.equal(encoders[0][key], encoders[1][key]) for key in encoders[0])
