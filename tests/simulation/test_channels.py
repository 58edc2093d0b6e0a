"""What travels where: every channel is listened to, byte by byte. The global server's never carries a share or the
encoding network, the proxy's never a client's model or anything that says whose a share is, and the record and the
arithmetic count what was heard."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.client.training import ClientWork, Outcome
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, bytes_of, plan_of
from holdfast.protocol.codec import Weights, unpack
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.messages import (
    COUNT_BYTES,
    Announcement,
    Broadcast,
    Encoder,
    GlobalModel,
    Inbox,
    InferenceRequest,
    Job,
    PrototypeShare,
    Reply,
    RoundClosed,
    TaskEnded,
    Teachers,
    TransitionNotice,
    decode,
)
from holdfast.protocol.state import ClientState
from holdfast.simulation.engine import ImageGroup
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds
from holdfast.simulation.traffic import Bytes, by_task

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
from separate import SeparateClients

LGA = {"name": "lga", "iterations": 2, "perturb_steps": 1}
ORACLE = {**LGA, "detector": "oracle"}
AUTO = {**LGA, "detector": "auto"}
# With other numbers of images in each task, new classes are noticed in the very round.
UNEVEN = {"partition": "dirichlet:0.5", "class_share": 1.0, "move_on": 1.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lga, told": (ORACLE, {}),
    "lga, notices at once": (AUTO, UNEVEN),
    "lga, selected observe": (AUTO, {**UNEVEN, "observe": "selected"}),
    # Two clients: with three, a weight that two have alike and the third nearly is the mean of all by rounding.
    "lga, announced": (AUTO, {"growth": "announce", "join": "irregular", "rounds": 3, "selected": 2}),
    "fedavg": ({"name": "fedavg", "replay": True}, {}),
    "fedavg, announced": ({"name": "fedavg"}, {"growth": "announce", "selected": 1}),
    "podnet": ({"name": "podnet", "inference": "nme", "tune_epochs": 2}, {}),
    "icarl": ({"name": "icarl", "inference": "nme"}, {"observe": "selected"}),
    "icarl with a head": ({"name": "icarl", "inference": "head"}, {}),
}
# Who sends what to whom. Nothing else crosses a boundary.
SERVER_TO_CLIENT = (Enrolment, Broadcast, TransitionNotice, Job, TaskEnded, RoundClosed)
CLIENT_TO_SERVER = (Reply, Announcement)
PROXY_TO_CLIENT = (Encoder, Teachers)


@dataclass(frozen=True)
class Heard:
    """A message on its way: between whom, to or from which client (which only the tap knows), and as it arrives."""

    sender: str
    receiver: str
    client: int | None
    message: Any
    blob: bytes

    @property
    def size(self) -> int:
        """The bytes of its tensors: all that comes after the header."""
        return len(self.blob) - 8 - int.from_bytes(self.blob[:8], "little")

    @property
    def content(self) -> bytes:
        """These bytes."""
        return self.blob[len(self.blob) - self.size :]


class Wiretap(SeparateClients):
    """Separate clients, and everything that goes to them, comes from them and passes between server and proxy."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        super().__init__(federation, folder)
        self.rounds: list[list[Heard]] = []
        self.known: dict[bytes, tuple[bytes, Any]] = {}  # equal bytes are kept once
        self.judged: list[tuple[GlobalModel, int]] = []  # what teachers are chosen from; shares, in each round
        judge = federation.selector.judge

        def tapped(model: GlobalModel, shares: Sequence[PrototypeShare]) -> dict[str, Any]:
            if federation.selector.is_party:
                self.hear("server", "proxy", None, model)
            self.judged.append((GlobalModel.from_bytes(model.to_bytes()), len(shares)))
            return judge(model, shares)

        federation.selector.judge = tapped  # type: ignore[method-assign]

    def hear(self, sender: str, receiver: str, client: int | None, message: Any) -> None:
        blob = message.to_bytes()
        if blob not in self.known:
            self.known[blob] = blob, decode(blob)
        blob, arrived = self.known[blob]
        self.rounds[-1].append(Heard(sender, receiver, client, arrived, blob))

    def _save_all(self) -> None:
        """Clients stay; that they can be saved is another test's affair."""

    def announce(self, class_list: Any) -> Any:
        self.rounds.append([])
        return super().announce(class_list)

    def open_round(self, broadcast: Any, *arguments: Any) -> Any:
        if len(self.rounds) == broadcast.round_index:
            self.rounds.append([])
        return super().open_round(broadcast, *arguments)

    def _join(self, number: int) -> None:
        super()._join(number)
        work = self.loaded[number].work
        self.hear("server", "client", number, work.enrolment)
        if work.encoder is not None:
            self.hear("proxy", "client", number, Encoder(work.encoder.state_dict()))

    def _tell(self, number: int, *messages: Any) -> list[Any]:
        answers: list[Any] = []
        for message in messages:
            told = super()._tell(number, message)
            if isinstance(message, SERVER_TO_CLIENT):
                self.hear("server", "client", number, message)
            elif isinstance(message, PROXY_TO_CLIENT):
                self.hear("proxy", "client", number, message)
            for answer in told:
                self.hear("client", "server" if isinstance(answer, CLIENT_TO_SERVER) else "proxy", number, answer)
            answers += told
        return answers

    def all(self, *ends: str) -> list[Heard]:
        """Everything that was heard between these two, in either direction."""
        return [one for heard in self.rounds for one in heard if {one.sender, one.receiver} == set(ends)]


@dataclass(frozen=True)
class Tapped:
    """A federation that has run, what was heard of it, what its record says and what was foretold."""

    case: str
    federation: Federation
    tap: Wiretap
    lines: list[dict[str, Any]]
    foretold: list[Bytes]

    @property
    def proxy(self) -> bool:
        return self.case.startswith("lga")

    @property
    def announced(self) -> bool:
        return "announced" in self.case


@pytest.fixture(scope="module", params=CASES)
def run(small: dict[str, Any], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tapped:
    """One case after the other; each runs once for all tests."""
    method, changes = CASES[request.param]
    config = load_config({**small, "plan": {**small["plan"], **changes}, "method": method})
    data = load_data(config.data)
    plan = plan_of(config, data)
    federation = build_federation(config, data, plan)
    tap = Wiretap(federation, tmp_path_factory.mktemp("clients"))
    lines = [done.line for done in run_rounds(federation, Serial(), clients=tap)]
    return Tapped(request.param, federation, tap, lines, bytes_of(config, data, plan))


# what is secret from whom


SLOTS = 26  # bits


def pieces(tensor: Tensor) -> np.ndarray:
    """Every piece of eight bytes, which is two floats, but for zeros."""
    blob = tensor.detach().contiguous().numpy().tobytes()
    found = np.frombuffer(blob[: len(blob) // 8 * 8], dtype=np.uint64)
    return found[found != 0]


def slots(these: np.ndarray) -> np.ndarray:
    """A place in a table for each piece, so that most of what was heard need not be compared with the secrets."""
    return (these * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - SLOTS)


def overheard(secrets: Iterable[Tensor], blobs: Iterable[bytes]) -> np.ndarray:
    """Which pieces of these secrets are in these blobs, at any place where a float can begin."""
    wanted = np.unique(np.concatenate([pieces(secret) for secret in secrets]))
    assert len(wanted)
    table = np.zeros(2**SLOTS, dtype=bool)
    table[slots(wanted)] = True
    found = []
    for blob in set(blobs):
        for offset in (0, 4):
            heard = np.frombuffer(blob[offset : offset + (len(blob) - offset) // 8 * 8], dtype=np.uint64)
            heard = heard[table[slots(heard)]]
            places = np.searchsorted(wanted, heard).clip(max=len(wanted) - 1)
            found.append(heard[wanted[places] == heard])
    return np.unique(np.concatenate(found))


def same(a: Weights, b: Weights) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_every_message_travels_on_its_own_channel(run: Tapped) -> None:
    channels = {
        ("server", "client"): SERVER_TO_CLIENT,
        ("client", "server"): CLIENT_TO_SERVER,
        ("proxy", "client"): PROXY_TO_CLIENT,
        ("client", "proxy"): (PrototypeShare,),
        ("server", "proxy"): (GlobalModel,),
    }
    for heard in run.tap.rounds:
        for one in heard:
            assert isinstance(one.message, channels[one.sender, one.receiver])
    kinds = Counter(type(one.message) for heard in run.tap.rounds for one in heard)
    expected = {Enrolment, Broadcast, TransitionNotice, Job, RoundClosed, Reply, Teachers}
    expected |= {Encoder, PrototypeShare, GlobalModel} if run.proxy else set()
    expected |= {Announcement} if run.announced else set()
    expected |= {TaskEnded} if run.federation.method.keeps_memory else set()
    assert set(kinds) == expected


def test_the_servers_channel_carries_no_share_and_no_encoder(run: Tapped) -> None:
    if not run.proxy:
        assert run.federation.selector.encoder is None
        return
    on_servers = run.tap.all("server", "client")
    shares = [one.message for one in run.tap.all("client", "proxy") if isinstance(one.message, PrototypeShare)]
    encoder = run.federation.selector.encoder
    assert shares
    assert encoder is not None
    blobs = {one.blob for one in on_servers}
    secrets = [part for share in shares for part in (*share.gradient.values(), share.variance)]
    assert not len(overheard([*secrets, *encoder.state_dict().values()], blobs))
    jobs = [one.message for one in on_servers if isinstance(one.message, Job)]
    for weights in jobs[-1].weights.values():  # the tap would have heard them
        if len(pieces(weights)) and weights.is_floating_point():
            assert len(overheard([weights], blobs)) == len(np.unique(pieces(weights)))
            break
    assert not hasattr(run.federation.server, "encoder")


def test_the_proxys_channel_carries_no_clients_model(run: Tapped) -> None:
    """The proxy gets what clients send together (a global model), never what one of them sends."""
    if not run.proxy:
        assert not run.tap.all("server", "proxy")
        return
    to_proxy = [*run.tap.all("client", "proxy"), *run.tap.all("server", "proxy")]
    blobs = {one.blob for one in to_proxy}
    secrets = [
        tensor
        for line, heard in zip(run.lines, run.tap.rounds, strict=True)
        for one in heard
        if isinstance(one.message, Reply) and len(line["trained"]) > 1  # the mean of one model is that model
        for tensor in one.message.weights.values()
        if tensor.is_floating_point()
    ]
    assert not len(overheard(secrets, blobs))
    models = [one.message for one in to_proxy if isinstance(one.message, GlobalModel)]
    assert len(overheard([models[-1].weights["backbone.convs.0.weight"]], blobs))  # the tap would have heard them


def test_what_the_proxy_gets_says_neither_who_nor_which_class(run: Tapped) -> None:
    encoder = run.federation.selector.encoder
    parameters = {name for name, _ in encoder.named_parameters()} if encoder else set()
    shares = [one for one in run.tap.all("client", "proxy") if isinstance(one.message, PrototypeShare)]
    assert bool(shares) == run.proxy
    for one in shares:
        tensors, facts = unpack("share", one.blob)
        assert set(facts) == {"kind", "count"}
        assert set(tensors) == {*parameters, "variance"}
        assert all(name.encode() not in one.blob for name in run.federation.data.classes if len(name) > 3)
    for one in run.tap.all("server", "proxy"):
        tensors, facts = unpack("global model", one.blob)
        assert set(facts) == {"kind", "round_index", "growths"}
        assert set(tensors) <= set(run.federation.server.weights)
    sent = [sum(isinstance(one.message, PrototypeShare) for one in heard) for heard in run.tap.rounds]
    assert [shares for _, shares in run.tap.judged] == sent


def test_teachers_are_old_global_models_and_everybody_has_the_same_encoder(run: Tapped) -> None:
    """Where there is no proxy, the server sends them: they are old global models all the same."""
    encoder = run.federation.selector.encoder
    distilled = 0
    joined = []
    for round_index, heard in enumerate(run.tap.rounds):
        older = [model for model, _ in run.tap.judged[:round_index]]
        for one in heard:
            if isinstance(one.message, Encoder):
                assert encoder is not None
                assert same(one.message.weights, encoder.state_dict())
                joined.append(one.client)
            if isinstance(one.message, Teachers):
                for growth, weights in one.message.models.items():
                    assert any(len(m.growths) - 1 == growth and same(m.weights, weights) for m in older)
                    distilled += 1
    assert bool(distilled) == ("fedavg" not in run.case)
    assert joined == (list(range(len(run.federation.plan.arrivals))) if run.proxy else [])


# what is counted


def unbilled(heard: Sequence[Heard], round_index: int) -> set[int]:
    """The places of messages that a federation would not send, because their receiver has the same model by another:
    the broadcast of a selected client, the task end of a client that is asked for extras after it, and teachers in a
    round's later phases. Checks that it really is the same."""
    found: set[int] = set()
    first: dict[int | None, Heard] = {}
    last: dict[int | None, Heard] = {}
    teachers: dict[int | None, Heard] = {}
    for i, one in enumerate(heard):
        if isinstance(one.message, Job):
            assert one.message.round_index == round_index
            first.setdefault(one.client, one)
            if one.message.phase == "finish":
                last[one.client] = one
        if isinstance(one.message, Teachers):
            if one.client in teachers:
                assert one.blob == teachers[one.client].blob
                found.add(i)
            teachers.setdefault(one.client, one)
    for i, one in enumerate(heard):
        instead = first if isinstance(one.message, Broadcast) else last if isinstance(one.message, TaskEnded) else {}
        if one.client in instead:
            assert one.content in (b"", instead[one.client].content)
            found.add(i)
    return found


def count(heard: Sequence[Heard], round_index: int) -> dict[str, Counter[str]]:
    """The record's account of a round, from what was heard alone."""
    skipped = unbilled(heard, round_index)
    lines = {
        Broadcast: ("server", "observed"),
        Job: ("server", "down"),
        TaskEnded: ("server", "task_end"),
        Encoder: ("proxy", "encoder"),
        Teachers: ("proxy", "teachers"),
        GlobalModel: ("proxy", "models"),
    }
    account: dict[str, Counter[str]] = {
        "server": Counter(dict.fromkeys(("down", "up", "extras", "observed", "task_end", "announced"), 0)),
        "proxy": Counter(dict.fromkeys(("encoder", "teachers", "shares", "models"), 0)),
    }
    for i, one in enumerate(heard):
        if i in skipped:
            continue
        if type(one.message) in lines:
            channel, line = lines[type(one.message)]
            account[channel][line] += one.size
        elif isinstance(one.message, Reply):
            tensors, facts = unpack("reply", one.blob)
            of_extras = sum(t.nbytes for name, t in tensors.items() if name.startswith("extras."))
            assert bool(facts["extras"]) or not of_extras
            account["server"]["extras"] += of_extras
            account["server"]["up"] += one.size - of_extras
        elif isinstance(one.message, Announcement):
            names = unpack("announcement", one.blob)[1]["names"]
            account["server"]["announced"] += sum(len(name.encode("utf-8", "surrogateescape")) for name in names)
        elif isinstance(one.message, PrototypeShare):
            account["proxy"]["shares"] += one.size + COUNT_BYTES
        else:  # nothing but facts
            assert isinstance(one.message, Enrolment | TransitionNotice | RoundClosed)
            assert one.size == 0
    return account


def test_the_record_counts_what_was_heard_line_by_line(run: Tapped) -> None:
    for round_index, (line, heard) in enumerate(zip(run.lines, run.tap.rounds, strict=True)):
        assert line["bytes"] == count(heard, round_index), round_index


def totals(lines: Sequence[dict[str, Any]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for line in lines:
        for ways in line["bytes"].values():
            found.update(ways)
    return found


# Which lines are not empty in each case: a line that nobody ever sends would be counted rightly by chance.
PROXYS = {"encoder", "teachers", "shares", "models"}
NOT_EMPTY: dict[str, set[str]] = {
    "lga, told": PROXYS | {"task_end"},
    "lga, notices at once": PROXYS | {"task_end", "observed"},
    "lga, selected observe": PROXYS | {"task_end"},
    "lga, announced": PROXYS | {"task_end", "observed", "announced"},
    "fedavg": {"task_end"},
    "fedavg, announced": {"announced"},
    "podnet": {"task_end", "teachers", "extras"},
    "icarl": {"task_end", "teachers", "extras"},
    "icarl with a head": {"task_end", "teachers"},
}


def test_every_line_is_of_what_the_method_sends(run: Tapped) -> None:
    assert {line for line, size in totals(run.lines).items() if size} == {"down", "up"} | NOT_EMPTY[run.case]


def test_arithmetic_foretells_the_record(run: Tapped) -> None:
    """Where the head grows by schedule; shares, where new classes are noticed at once."""
    if run.announced:
        assert run.federation.growth == "announce"
        return
    at_once = not any(line["detector"]["misses"] or line["detector"]["late"] for line in run.lines)
    assert at_once == (run.case != "lga, selected observe")
    everybody = 0
    for line, expected in zip(run.lines, run.foretold, strict=True):
        everybody += len(line["trained"]) == len(line["selected"])
        for channel, ways in expected.items():
            for way, size in ways.items():
                if way == "up" and len(line["trained"]) < len(line["selected"]):
                    assert line["bytes"][channel][way] < size  # who has nothing to train on sends nothing
                elif way != "shares" or at_once:
                    assert line["bytes"][channel][way] == size, (line["round"], way)
    assert everybody
    foretold: Counter[str] = Counter()
    for task in by_task(run.federation.plan, run.foretold):
        foretold.update(task)
    found = totals(run.lines)
    for way in {"down", "observed", "task_end", *PROXYS} - ({"shares"} if not at_once else set()):
        assert foretold[way] == found[way], way


def test_who_observes_decides_who_gets_the_model(run: Tapped) -> None:
    """With plan.observe = present and a detector, whoever is there; otherwise only selected clients, by their jobs."""
    everybody = run.federation.detects and run.federation.observe == "present"
    assert everybody == (run.case in ("lga, notices at once", "lga, announced"))
    for round_index, heard in enumerate(run.tap.rounds):
        broadcasts = [one for one in heard if isinstance(one.message, Broadcast)]
        present, selected = run.federation.plan.present(round_index), run.federation.plan.selected[round_index]
        asked = broadcasts[: len(present)] if run.announced and not round_index else []  # for the first classes
        assert [one.client for one in asked if not one.size] == (present if asked else [])
        broadcasts = broadcasts[len(asked) :]
        assert [one.client for one in broadcasts] == present
        assert {one.client for one in broadcasts if one.size} == set(present if everybody else selected)
        assert {one.client for one in heard if isinstance(one.message, Job)} == set(selected)


# the engine


class Engine(Serial):
    """Hears what a simulation asks of its engine, and compares it with the global model of that very moment."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.asked: list[tuple[str, bytes]] = []
        self.answers: dict[str, list[Tensor]] = {"entropies": [], "features": [], "scores": []}
        self.rounds: list[Counter[str]] = [Counter()]
        self.server: list[bytes] = []
        self.proxy: list[bytes] = []

    def map(self, work: ClientWork, states: Sequence[ClientState], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        for state, inbox in zip(states, inboxes, strict=True):
            outcome = work(state, inbox)
            _, reply, shares = outcome
            assert same(inbox.job.weights, self.federation.server.weights)
            self.rounds[-1].update(down=inbox.job.size, up=reply.size, extras=reply.extra_size)
            self.rounds[-1].update(shares=sum(share.size for share in shares))
            self.server += [inbox.job.to_bytes(), reply.to_bytes()]
            self.proxy += [share.to_bytes() for share in shares]
            yield outcome

    def infer(self, work: ClientWork, request: InferenceRequest, groups: Sequence[ImageGroup]) -> list[Tensor]:
        assert same(request.weights, self.federation.server.weights)
        assert request.growths == self.federation.server.registry.growths
        self.asked.append((request.what, request.to_bytes()))
        assert same(unpack("inference request", self.asked[-1][1])[0], self.federation.server.weights)
        answers = super().infer(work, request, groups)
        assert [len(answer) for answer in answers] == [len(group.ids) for group in groups]
        self.answers[request.what] += answers
        return answers


@pytest.fixture(scope="module", params=["plain", "augmented"])
def simulated(small: dict[str, Any], request: pytest.FixtureRequest) -> tuple[Engine, list[dict[str, Any]]]:
    """A simulation that has run, and what its engine was asked for."""
    method = {**AUTO, "observed": request.param}
    config = load_config({**small, "plan": {**small["plan"], **UNEVEN}, "method": method})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    engine = Engine(federation)
    lines = []
    for done in run_rounds(federation, engine):
        lines.append(done.line)
        engine.rounds.append(Counter())
    return engine, lines


def test_an_inference_request_holds_the_global_model_and_nothing_else(
    simulated: tuple[Engine, list[dict[str, Any]]],
) -> None:
    engine, lines = simulated
    assert {what for what, _ in engine.asked} == {"entropies", "features", "scores"}
    for blob in {blob for _, blob in engine.asked}:
        tensors, facts = unpack("inference request", blob)
        assert set(tensors) <= set(engine.federation.server.weights)
        assert set(facts) == {"kind", "what", "growths", "stream"}
        assert facts["stream"] in ([], *(["round", i, "observed"] for i in range(len(lines))))
    encoder = engine.federation.selector.encoder
    assert encoder is not None
    shares = [PrototypeShare.from_bytes(blob) for blob in engine.proxy]
    assert shares
    secrets = [part for share in shares for part in (*share.gradient.values(), share.variance)]
    assert not len(overheard([*secrets, *encoder.state_dict().values()], (blob for _, blob in engine.asked)))


def test_what_clients_find_in_their_images_stays_with_them(simulated: tuple[Engine, list[dict[str, Any]]]) -> None:
    """Neither the server nor the proxy hears entropies or features of training images."""
    engine, _ = simulated
    for what in ("entropies", "features"):
        assert not len(overheard(engine.answers[what], [*engine.server, *engine.proxy]))
    for answer in engine.answers["entropies"]:
        assert answer.dim() == 1
        assert float(answer.min()) >= 0


def test_what_the_engine_hears_is_what_the_record_counts(simulated: tuple[Engine, list[dict[str, Any]]]) -> None:
    engine, lines = simulated
    for line, heard in zip(lines, engine.rounds, strict=False):
        sizes = {**line["bytes"]["server"], **line["bytes"]["proxy"]}
        for way in ("down", "up", "extras", "shares"):
            assert sizes[way] == heard[way], (line["round"], way)
