"""The sites as the round loop sees them: `Clients` over a courier."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.deploy import courier as transport
from holdfast.deploy.courier import Courier
from holdfast.deploy.envelope import Envelope
from holdfast.errors import HoldfastError
from holdfast.protocol.codec import Facts, MalformedMessage, unpack
from holdfast.protocol.messages import (
    Announcement,
    Broadcast,
    Failure,
    Job,
    Reply,
    RoundClosed,
    TaskEnded,
    Teachers,
)
from holdfast.protocol.registry import Registry
from holdfast.server.clients import Answers, Clients, Opened, Shares
from holdfast.server.collection import Check

log = logging.getLogger("holdfast.deploy")

GREETING = 30.0  # seconds
ENDS = 4  # task ends that are kept for sites that are away
REASON = 300  # characters of a site's reason that are kept


@dataclass
class Evaluation:
    """What one site found on its held-out images: counts by class name, or totals."""

    classes: tuple[str, ...] = ()
    counts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))  # (true, head position)
    right: int = 0
    of: int = 0


@dataclass
class Deployed(Clients):
    """Sends orders to sites and reads what they answer. What it must not forget is in `remembered`."""

    courier: Courier
    agreement: str  # its digest
    run: str
    check: Callable[[Job], Check]
    least: int  # usable replies without which nobody is counted
    deadline: float
    names: dict[int, str] = field(default_factory=dict)  # number -> site
    closed: dict[str, list[Any]] = field(default_factory=dict)  # site -> its last round, and whether it was counted
    ends: dict[int, bytes] = field(default_factory=dict)  # round -> a task's end, as long as a site does not know it
    knows: dict[str, int] = field(default_factory=dict)  # site -> the last task end that it knows
    judged: int = -1  # the last round whose model the proxy has
    known: int = 0  # head rows before this round's growth: the candidates of an evaluation
    ready: Sequence[int] = ()  # sites that take part in this round, selected or not

    def __post_init__(self) -> None:
        self.counted: list[int] = []
        self.evaluations: dict[str, Evaluation] = {}  # of the model that the round began with
        self.away: dict[str, str] = {}  # sites that did not reach the proxy
        self.announced: dict[int, Announcement] = {}
        self.opened = Opened()

    # outside of rounds

    def greet(self, sites: Sequence[str]) -> dict[str, str]:
        """Which of these sites are ready: site -> why not; empty if it is."""
        found = {}
        for site, answer in self._exchange({site: Envelope(self._facts("hello")) for site in sites}, GREETING):
            found[site] = "" if isinstance(answer, Envelope) else answer
        return found

    def poll(self, sites: Sequence[str], registry: Registry) -> list[str]:
        """The sites to which a new class has come."""
        order = Envelope({**self._facts("poll"), "known": list(registry.names)})
        answers = self._exchange(dict.fromkeys(sites, order), GREETING)
        return [site for site, answer in answers if isinstance(answer, Envelope) and answer.facts.get("news") is True]

    def evaluate(self, sites: Sequence[str], model: TaskEnded) -> dict[str, Evaluation]:
        """What sites find with the last model, when no job is there to carry it."""
        self.evaluations = {}
        order = Envelope({**self._facts("evaluate"), "round": model.round_index}, {"model": model.to_bytes()})
        for site, answer in self._exchange(dict.fromkeys(sites, order), self.deadline):
            if isinstance(answer, Envelope):
                self._take_counts(site, answer, model.registry, len(model.registry.names))
        return self.evaluations

    # a round

    def announce(self, class_list: Broadcast) -> tuple[Sequence[Announcement], int]:
        self.opened, self.announced = Opened([]), {}
        parts = {"broadcast": class_list.to_bytes()}
        orders = {self.names[n]: self._order("observe", class_list.round_index, n, parts) for n in self.ready}
        for site, answer in self._exchange(orders, GREETING):
            if isinstance(answer, Envelope):
                self._take_announcement(site, answer)
        return self.opened.announcements, self.opened.announced_bytes

    def open_round(self, broadcast: Broadcast, selected: Sequence[int], observers: np.ndarray) -> Opened:
        self.opened, self.counted, self.evaluations, self.away = Opened([]), [], {}, {}
        self.announced = {}
        self._usable: set[int] = set()  # sites whose replies can be used
        others = [number for number in self.ready if number not in selected]
        parts = {"broadcast": Broadcast(broadcast.round_index, broadcast.registry).to_bytes()}
        orders = {self.names[number]: self._order("observe", broadcast.round_index, number, parts) for number in others}
        for site, answer in self._exchange(orders, GREETING):
            if isinstance(answer, Envelope):
                self._take_announcement(site, answer)
        return self.opened

    def collect_extras(self, job: Job, teachers: Teachers, selected: Sequence[int]) -> Answers:
        asked = selected if job.phase == "begin" else [number for number in selected if number in self.counted]
        return self._ask(job, teachers, asked)

    def train(
        self, job: Job, teachers: Teachers, selected: Sequence[int], done: Callable[[], None]
    ) -> tuple[Answers, Shares]:
        answers = self._ask(job, teachers, selected, done)
        check = self.check(job)
        self._usable |= {number for number, answer in answers if check(answer) is None}
        self.counted = sorted(self._usable) if len(self._usable) >= self.least else []
        return answers, []

    def end_task(self, message: TaskEnded) -> None:
        known = [self.knows.get(site, -1) for site in self.names.values()]
        self.ends = {end: blob for end, blob in self.ends.items() if end > min(known, default=-1)}
        self.ends[message.round_index] = message.to_bytes()
        for end in sorted(self.ends)[:-ENDS]:
            del self.ends[end]

    def close_round(self, message: RoundClosed, selected: Sequence[int]) -> None:
        for number in self.ready:
            self.closed[self.names[number]] = [message.round_index, number in self.counted]

    @property
    def counted_sites(self) -> list[str]:
        return [self.names[number] for number in self.counted]

    # messages

    def _ask(
        self, job: Job, teachers: Teachers, numbers: Sequence[int], done: Callable[[], None] = lambda: None
    ) -> Answers:
        parts = {"job": job.to_bytes()}
        if teachers.models:
            parts["teachers"] = teachers.to_bytes()
        orders = {self.names[number]: self._order(job.phase, job.round_index, number, parts) for number in numbers}
        number_of = {name: number for number, name in self.names.items()}
        answers: Answers = []
        for site, answer in self._exchange(orders, self.deadline):
            answers.append((number_of[site], self._reply(site, answer, job)))
            done()
        return answers

    def _reply(self, site: str, answer: Envelope | str, job: Job) -> Reply | Failure:
        if isinstance(answer, str):
            what = "timeout" if answer.startswith("no answer") else "crash"
            return Failure(what, answer[:REASON], job.round_index, job.phase)
        try:
            blob = answer.parts["reply"]
            reply: Reply | Failure = Reply.from_bytes(blob)
        except KeyError:
            return Failure("names", "its answer has no reply", job.round_index, job.phase)
        except MalformedMessage as error:
            try:
                reply = Failure.from_bytes(answer.parts["reply"])
            except MalformedMessage:
                return Failure("malformed", str(error)[:REASON], job.round_index, job.phase)
        self._take_announcement(site, answer)
        if "counts" in answer.parts:
            self._take_counts(site, answer, job.registry, self.known)
        if job.phase == "finish":
            self.knows[site] = max(job.round_index, self.knows.get(site, -1))
        if isinstance(answer.facts.get("away"), str) and answer.facts["away"]:
            self.away[site] = answer.facts["away"][:REASON]
        return reply

    def _take_announcement(self, site: str, answer: Envelope) -> None:
        """Announcements count in the order of the sites' numbers, whenever they come."""
        if "announcement" not in answer.parts:
            return
        try:
            one = Announcement.from_bytes(answer.parts["announcement"])
        except MalformedMessage as error:
            log.warning("%s: %s", site, error)
            return
        [number] = [number for number, name in self.names.items() if name == site]
        self.announced.setdefault(number, one)
        self.opened.announcements = [self.announced[number] for number in sorted(self.announced)]
        self.opened.announced_bytes = sum(one.size for one in self.opened.announcements)

    def _take_counts(self, site: str, answer: Envelope, registry: Registry, known: int) -> None:
        """Counts are of classes that the head had, and never negative."""
        try:
            blob = answer.parts["counts"]
            try:
                tensors, facts = unpack("counts", blob)
            except MalformedMessage:
                totals = Facts("totals", unpack("totals", blob)[1])
                self.evaluations[site] = Evaluation(right=totals.integer("right"), of=totals.integer("of"))
                return
            names, counts = Facts("counts", facts).names("classes"), tensors["counts"].numpy()
            fits = counts.shape == (len(names), known) and counts.dtype == np.int64 and (counts >= 0).all()
            if not fits or any(registry.position.get(name, known) >= known for name in names):
                raise MalformedMessage("its counts do not fit the classes that it was asked about")
        except (MalformedMessage, KeyError) as error:
            log.warning("%s: %s", site, error)
            return
        right = sum(int(counts[i, registry.position[name]]) for i, name in enumerate(names))
        self.evaluations[site] = Evaluation(names, counts, right, int(counts.sum()))

    def _facts(self, phase: str) -> dict[str, Any]:
        return {"agreement": self.agreement, "run": self.run, "phase": phase}

    def _order(self, phase: str, round_index: int, number: int, parts: Mapping[str, bytes]) -> Envelope:
        site = self.names[number]
        facts = {**self._facts(phase), "round": round_index, "closed": self.closed.get(site), "judged": self.judged}
        if phase == "train":
            facts["evaluate"] = self.known
        missed = [end for end in sorted(self.ends) if self.knows.get(site, -1) < end < round_index]
        if missed:  # the first one stores everything; nothing has come to an absent site since
            facts["ended"] = missed[-1]
            parts = {**parts, "ended": self.ends[missed[0]]}
        return Envelope(facts, parts)

    def _exchange(self, orders: Mapping[str, Envelope], deadline: float) -> list[tuple[str, Envelope | str]]:
        """The answers of these sites, or in a few words why there is none."""
        found: list[tuple[str, Envelope | str]] = []
        blobs = {site: order.to_bytes() for site, order in orders.items()}
        for site, blob in self.courier.exchange(blobs, deadline):
            if isinstance(blob, transport.Failure):
                found.append((site, blob.reason))
                continue
            try:
                answer = Envelope.from_bytes(blob)
                ended = answer.facts.get("ended")
                if type(ended) is int:
                    self.knows[site] = ended
                if answer.facts.get("site") != site:
                    raise MalformedMessage("the answer names another site")
                found.append((site, str(answer.facts["error"]) if "error" in answer.facts else answer))
            except HoldfastError as error:
                found.append((site, str(error)))
        return found

    # to a checkpoint and back

    def remembered(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        facts = {"names": {str(n): s for n, s in self.names.items()}, "closed": self.closed, "knows": self.knows}
        facts |= {"judged": self.judged}
        return facts, {str(end): blob for end, blob in self.ends.items()}

    def remember(self, facts: Mapping[str, Any], parts: Mapping[str, bytes]) -> None:
        self.names |= {int(number): name for number, name in facts["names"].items()}
        self.closed, self.knows, self.judged = dict(facts["closed"]), dict(facts["knows"]), facts["judged"]
        self.ends = {int(end): blob for end, blob in parts.items()}
