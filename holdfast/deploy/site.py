"""A site as a party: it owns its images, its exemplars and its client, and answers the server's messages.

Whatever it answers is on its disk first, together with the state that it leaves behind. Asked twice, it answers the
same bytes; killed at any moment, it goes on from the last answer. A round in which it was not counted is taken back."""

import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from holdfast.client.client import Arrival, Client
from holdfast.client.data import ClientImages
from holdfast.deploy.envelope import Envelope
from holdfast.deploy.images import Folder, Listing, Part, same_spelling
from holdfast.deploy.party import has_proxy, setup_of, site_enrolment
from holdfast.deploy.settings import Kit
from holdfast.errors import HoldfastError
from holdfast.files import write_atomic, write_json
from holdfast.models.passes import CHUNK
from holdfast.protocol.codec import MalformedMessage, Weights, pack, unpack
from holdfast.protocol.messages import (
    Announcement,
    Broadcast,
    Encoder,
    Failure,
    InferenceRequest,
    Job,
    Message,
    PrototypeShare,
    Reply,
    RoundClosed,
    TaskEnded,
    Teachers,
    TransitionNotice,
)
from holdfast.protocol.registry import Registry

log = logging.getLogger("holdfast.deploy")

SCHEMA = 1
PHASES = ("begin", "train", "finish")


class ProxyAway(HoldfastError):
    """The proxy cannot be reached now."""


class Proxy(Protocol):
    """The proxy as a site sees it. Every call raises `ProxyAway` if there is no answer."""

    def encoder(self) -> bytes: ...

    def teachers(self, growth: int, judged: int) -> bytes:
        """The teachers of a growth, once the proxy has judged the model of round `judged`."""
        ...

    def put_shares(self, run: str, round_index: int, shares: list[bytes]) -> None: ...


@dataclass
class Ledger:
    """What `site.json` says. It is written last, so all that it names is there."""

    run: str
    opened: int = -1  # the last round in which the site took part
    closed: int = -1  # the last round that the server has closed
    ended: int = -1  # the last task end that the site knows
    client: str = ""  # the folder with its state
    before: list[Any] | None = None  # round, folder, ended: as it was before that round's work
    data: str = ""  # the file with its current images
    tests: str = ""  # and that with those held out
    listing: Listing = field(default_factory=dict)  # of its folder at the last arrival
    arrivals: int = 0
    answers: dict[str, str] = field(default_factory=dict)  # of the last round, by phase
    unsent: list[list[Any]] = field(default_factory=list)  # round, files of shares that the proxy has not got
    written: int = 0  # folders written so far


class Site:
    """Answers one message after the other."""

    def __init__(self, kit: Kit, folder: Folder, state: Path, proxy: Proxy | None) -> None:
        self.kit, self.folder, self.state, self.proxy = kit, folder, state, proxy
        self.agreement = kit.agreement
        self.enrolment = site_enrolment(kit.agreement, kit.number)
        self.size = setup_of(kit.agreement, 0).spec.image_size
        self.needs_proxy = has_proxy(kit.agreement)
        self.ledger: Ledger | None = None
        self.client: Client | None = None
        self.away = ""  # why the proxy could not be reached in this message
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._status: dict[str, Any] = {"site": kit.name, "since": time.time(), "bytes": {"in": 0, "out": 0}}

    # messages

    def handle(self, blob: bytes) -> bytes:
        """The answer to a message; an answer with an error if it cannot be given."""
        self._status["bytes"]["in"] += len(blob)
        try:
            answer = self._answer(Envelope.from_bytes(blob))
        except HoldfastError as error:
            log.error("%s", error)
            said = str(error) if isinstance(error, MalformedMessage | Refused) else "the site's log says more"
            answer = Envelope({"site": self.kit.name, "error": said}).to_bytes()
            self._forget()
        except Exception as error:
            log.exception("the work on a message ended in an error")
            answer = Envelope({"site": self.kit.name, "error": type(error).__name__}).to_bytes()
            self._forget()
        self._status["bytes"]["out"] += len(answer)
        write_json(self.state / "status.json", {**self._status, "written": time.time()})
        return answer

    def _answer(self, order: Envelope) -> bytes:
        facts = order.checked
        if facts.text("agreement") != self.agreement.digest:
            raise Refused("the server works by another agreement than this site's kit; compare federation.toml")
        phase, run = facts.text("phase"), facts.text("run")
        if not run.isalnum() or len(run) > 40:
            raise MalformedMessage("a message names no run")
        self._enter(run)
        if phase == "hello":
            return self._said({"ready": True, "opened": self.ledger_.opened})
        if phase == "poll":
            return self._said({"news": self._news(set(facts.texts("known")))})
        round_index = facts.integer("round")
        key = f"{round_index} {phase}"
        if key in self.ledger_.answers:
            log.info("round %d: answering %s again", round_index + 1, phase)
            return (self.root / self.ledger_.answers[key]).read_bytes()
        if round_index < self.ledger_.opened:
            raise Refused(f"round {round_index + 1} is over here; this site is in round {self.ledger_.opened + 1}")
        if phase == "evaluate":
            model = TaskEnded.from_bytes(order.parts["model"])
            return self._said({}, {"counts": self._counts(model.registry, model.weights, len(model.registry.names))})
        if phase not in (*PHASES, "observe"):
            raise MalformedMessage(f"a message asks for the unknown phase {phase[:40]!r}")
        return self._work(order, round_index, phase, key)

    def _said(self, facts: Mapping[str, Any], parts: Mapping[str, bytes] | None = None) -> bytes:
        common = {"site": self.kit.name, "ended": self.ledger_.ended, "away": self.away}
        return Envelope({**common, **facts}, parts or {}).to_bytes()

    # a round

    def _work(self, order: Envelope, round_index: int, phase: str, key: str) -> bytes:
        ledger, self.away = self.ledger_, ""
        self._catch_up(order)
        self._send_unsent()
        if round_index > ledger.opened:
            ledger.answers = {}
            ledger.opened = round_index
            self._arrive(round_index)
        if phase in ("begin", "train") and (ledger.before is None or ledger.before[0] != round_index):
            ledger.before = [round_index, self._save_client(), ledger.ended]
        sent = self._tell(order, round_index, phase)
        shares = [one.to_bytes() for one in sent if isinstance(one, PrototypeShare)]
        if shares:
            self._share(round_index, shares)
        if phase == "finish":
            ledger.ended = round_index
        parts = {}
        for message in sent:
            if isinstance(message, Reply | Failure):
                parts["reply"] = message.to_bytes()
            elif isinstance(message, Announcement):
                parts["announcement"] = message.to_bytes()
                self._spelling(message.names, self._registry(order))
        known = order.facts.get("evaluate", 0)
        if phase == "train" and type(known) is int and known > 0:
            job = Job.from_bytes(order.parts["job"])
            parts["counts"] = self._counts(job.registry, job.weights, known)
        answer = self._said({"round": round_index, "phase": phase}, parts)
        self._keep(key, answer)
        self._status |= {"round": round_index + 1, "phase": phase, "proxy": self.away or "reached"}
        log.info("round %d: %s done", round_index + 1, phase)
        return answer

    def _registry(self, order: Envelope) -> Registry:
        return (Job.from_bytes(order.parts["job"]) if "job" in order.parts else _broadcast(order)).registry

    def _tell(self, order: Envelope, round_index: int, phase: str) -> list[Message]:
        """Gives the client its messages; returns what it sends."""
        if phase == "observe":
            return self.client_.receive(_broadcast(order))
        job = Job.from_bytes(order.parts["job"])
        if (job.round_index, job.phase) != (round_index, phase):
            raise MalformedMessage("a job is of another round or phase than its envelope says")
        if self.ledger_.answers == {} or phase == "train":
            self._teach(order, len(job.registry.growths) - 1)
        return self.client_.receive(job)

    def _teach(self, order: Envelope, growth: int) -> None:
        """Teachers come from the proxy, or with the job where there is none; without an answer the last ones stay."""
        if "teachers" in order.parts:
            self.client_.receive(Teachers.from_bytes(order.parts["teachers"]))
        elif self.needs_proxy and self.proxy is not None:
            try:
                blob = self.proxy.teachers(growth, int(order.facts.get("judged", -1)))
                self.client_.receive(Teachers.from_bytes(blob))
            except ProxyAway as error:
                self._missed(error)

    def _missed(self, error: ProxyAway) -> None:
        self.away = "the proxy was away: the last teachers were used, and shares wait"
        log.warning("%s (%s)", self.away, error)

    def _share(self, round_index: int, shares: list[bytes]) -> None:
        try:
            assert self.proxy is not None
            self.proxy.put_shares(self.ledger_.run, round_index, shares)
        except ProxyAway as error:
            self._missed(error)
            names = []
            for i, blob in enumerate(shares):
                names.append(f"share-{round_index}-{i}.safetensors")
                write_atomic(self.root / names[-1], blob)
            self.ledger_.unsent.append([round_index, names])

    def _send_unsent(self) -> None:
        while self.ledger_.unsent and self.proxy is not None:
            round_index, names = self.ledger_.unsent[0]
            try:
                blobs = [(self.root / name).read_bytes() for name in names]
                self.proxy.put_shares(self.ledger_.run, round_index, blobs)
            except ProxyAway as error:
                self._missed(error)
                return
            del self.ledger_.unsent[0]

    def _catch_up(self, order: Envelope) -> None:
        """What has become of the site's last round, and the task's end if it has missed that."""
        ledger, closed = self.ledger_, order.facts.get("closed")
        if isinstance(closed, list) and len(closed) == 2 and type(closed[0]) is int and closed[0] > ledger.closed:
            round_index, counted = closed[0], closed[1] is True
            if ledger.before is not None and ledger.before[0] == round_index and not counted:
                log.warning("round %d went on without this site; its work is taken back", round_index + 1)
                self._load_client(ledger.before[1])
                ledger.ended = ledger.before[2]
                ledger.unsent = [one for one in ledger.unsent if one[0] != round_index]
            ledger.closed, ledger.before = round_index, None
            self.client_.receive(RoundClosed(round_index))
        if "ended" in order.parts:
            ended = TaskEnded.from_bytes(order.parts["ended"])
            if ended.round_index > ledger.ended:
                self.client_.receive(ended)
                ledger.ended = max(ended.round_index, order.checked.integer("ended"))

    # images

    def _news(self, known: set[str]) -> bool:
        """Has a class come that neither the federation nor the last arrival knows?"""
        return not set(self.folder.listing()) <= known

    def _arrive(self, round_index: int) -> None:
        """If the folder has changed, this is the client's data from now on."""
        ledger, listing = self.ledger_, self.folder.listing()
        if listing == ledger.listing:
            return
        train, tests = self.folder.load(listing)
        if not train.files and not ledger.arrivals:
            return  # nothing has come yet
        ledger.listing = listing
        ledger.data = self._put_images("data", train)
        ledger.tests = self._put_images("tests", self._more_tests(tests))
        self.client_.receive(Arrival(train.holdings, (train.images, train.classes)))
        if train.files:
            self.client_.receive(TransitionNotice(round_index))
        place = str(self.folder.place.resolve())
        facts = {"round": round_index, "folder": place, "train": train.files, "tests": tests.files}
        write_json(self.root / f"arrival-{ledger.arrivals}.json", facts)
        ledger.arrivals += 1
        log.info("round %d: %d images of %d classes", round_index + 1, len(train.pixels), len(train.files))

    def _more_tests(self, fresh: Part) -> Part:
        """The held-out images of every class the site has ever met: those it has, and new ones of other content."""
        old, most = self._images(self.ledger_.tests), self.agreement.evaluation.most
        files: dict[str, list[str]] = {}
        pixels: list[torch.Tensor] = []
        for name in sorted({*old.files, *fresh.files}):
            known: set[bytes] = set()
            for part in (old, fresh):
                for file, row in zip(part.files.get(name, []), part.holdings.get(name, []), strict=True):
                    content = part.pixels[row].numpy().tobytes()
                    if content in known or len(known) >= most:
                        continue
                    known.add(content)
                    files.setdefault(name, []).append(file)
                    pixels.append(part.pixels[row])
        return Part(files, torch.stack(pixels) if pixels else fresh.pixels[:0])

    def _counts(self, registry: Registry, weights: Weights, known: int) -> bytes:
        """How the model does on the held-out images of the classes met: true by predicted class, among the first
        `known` head positions."""
        tests = self._images(self.ledger_.tests)
        names = [name for name in tests.files if registry.position.get(name, known) < known]
        counts = torch.zeros((len(names), known), dtype=torch.int64)
        work = self.client_.work
        work.test = ClientImages(tests.images, tests.classes)
        request = InferenceRequest("scores", registry.growths, weights)
        for row, name in enumerate(names):
            scores = torch.cat([work.infer(request, ids) for ids in tests.holdings[name].split(CHUNK)])
            counts[row] = torch.bincount(scores[:, :known].argmax(dim=1), minlength=known)
        if self.agreement.evaluation.totals_only:
            right = sum(int(counts[i, registry.position[name]]) for i, name in enumerate(names))
            return pack("totals", {}, {"right": right, "of": int(counts.sum())})
        return pack("counts", {"counts": counts}, {"classes": names})

    def _spelling(self, names: tuple[str, ...], registry: Registry) -> None:
        for name in names:
            for known in registry.names:
                if same_spelling(name, known):
                    log.warning(
                        "the class %r is new, but %r is known: if they are the same, write %r = %r into classes.toml",
                        name, known, name, known,
                    )  # fmt: skip

    # disk

    @property
    def root(self) -> Path:
        return self.state / self.ledger_.run

    @property
    def ledger_(self) -> Ledger:
        assert self.ledger is not None
        return self.ledger

    @property
    def client_(self) -> Client:
        assert self.client is not None
        return self.client

    def _forget(self) -> None:
        """After an error: the state is read from the disk again, as the last answer left it."""
        self.ledger = self.client = None

    def _enter(self, run: str) -> None:
        """Goes on with a run from the disk, or begins a new one."""
        if self.ledger is not None and self.ledger.run == run:
            return
        root = self.state / run
        root.mkdir(exist_ok=True, mode=0o700)
        file = root / "site.json"
        self.ledger = Ledger(run)
        if file.exists():
            try:
                facts = json.loads(file.read_bytes())
                self.ledger = Ledger(**facts["ledger"])
                if facts["schema"] != SCHEMA:
                    raise ValueError(f"schema {facts['schema']}")
            except (ValueError, KeyError, TypeError) as error:
                raise HoldfastError(f"{file} is damaged ({error}); restore the site's state folder") from error
            self._load_client(self.ledger.client)
            return
        self.client = Client(ClientImages(self._images("").images, ()), keep_pixels=True)
        self.client.receive(self.enrolment)
        self._arm()
        self.client_.save(root / "new")
        self.ledger.client = "new"
        self._write()

    def _arm(self) -> None:
        """The client's secret, and the encoder if its method needs the proxy."""
        self.client_.work.secret = self.kit.secret
        if self.needs_proxy and self.client_.work.encoder is None:
            if self.proxy is None:
                raise Refused("this site's method needs the proxy, and there is none")
            self.client_.receive(Encoder.from_bytes(self.proxy.encoder()))

    def _load_client(self, name: str) -> None:
        data = self._images(self.ledger_.data)
        self.client = Client.load(self.root / name, ClientImages(data.images, data.classes))
        self._arm()

    def _save_client(self) -> str:
        """Writes the client into a folder of its own; files that have not changed are shared with the last one."""
        ledger = self.ledger_
        ledger.written += 1
        name = f"state-{ledger.written:06d}"
        target = self.root / name
        shutil.rmtree(target, ignore_errors=True)  # left by a process that was killed
        target.mkdir(mode=0o700)
        for old in (self.root / ledger.client).glob("*.safetensors"):
            os.link(old, target / old.name)
        self.client_.save(target)
        return name

    def _keep(self, key: str, answer: bytes) -> None:
        """Makes the answer and the state that goes with it permanent, in one step."""
        ledger = self.ledger_
        ledger.client = self._save_client()
        ledger.answers[key] = f"answer-{key.replace(' ', '-')}.bin"
        write_atomic(self.root / ledger.answers[key], answer)
        self._write()
        self._tidy()

    def _write(self) -> None:
        write_json(self.root / "site.json", {"schema": SCHEMA, "ledger": asdict(self.ledger_)})

    def _tidy(self) -> None:
        ledger = self.ledger_
        kept = {ledger.client, ledger.data, ledger.tests, *ledger.answers.values(), *(ledger.before or [])[1:2]}
        kept |= {name for _, names in ledger.unsent for name in names}
        for entry in self.root.iterdir():
            if entry.name in kept or entry.name.startswith(("site.json", "arrival-")):
                continue
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)

    def _put_images(self, kind: str, part: Part) -> str:
        name = f"{kind}-{self.ledger_.arrivals:06d}.safetensors"
        write_atomic(self.root / name, pack("images", {"pixels": part.pixels}, {"files": dict(part.files)}))
        return name

    def _images(self, name: str) -> Part:
        """Images that this site has written; none if it has none yet."""
        if not name:
            return Part({}, torch.empty((0, 3, self.size, self.size), dtype=torch.uint8))
        tensors, facts = unpack("images", (self.root / name).read_bytes())
        return Part(facts["files"], tensors["pixels"])


class Refused(HoldfastError):
    """A message that this site does not answer, for a reason that the server may know."""


def _broadcast(order: Envelope) -> Broadcast:
    return Broadcast.from_bytes(order.parts["broadcast"])
