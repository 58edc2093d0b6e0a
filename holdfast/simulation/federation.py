"""Everything that a simulated federation is made of, and its clients as the round loop sees them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from holdfast.client.data import ClientImages
from holdfast.client.detector import detector_of
from holdfast.client.training import ClientWork, Outcome
from holdfast.data.images import DataSet
from holdfast.methods.base import Method
from holdfast.models.pretrained import Loaded
from holdfast.protocol.codec import Weights
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.messages import (
    Announcement,
    Broadcast,
    Failure,
    Inbox,
    InferenceRequest,
    Job,
    RoundClosed,
    TaskEnded,
    Teachers,
)
from holdfast.proxy.selectors import TeacherSelector
from holdfast.server.clients import Answers, Clients, Opened, Shares
from holdfast.server.collection import Quorum
from holdfast.server.server import Server
from holdfast.simulation.engine import Engine, ImageGroup
from holdfast.simulation.faults import Faults
from holdfast.simulation.plan import Plan
from holdfast.simulation.population import Population


@dataclass
class Federation:
    """The global server, the teacher selector, the clients, and the plan and the images of all of them."""

    plan: Plan
    data: DataSet
    method: Method
    enrolment: Enrolment  # what every client is told; its number differs
    server: Server
    selector: TeacherSelector
    growth: str = "schedule"  # or announce
    observe: str = "present"  # or selected
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    loaded: Loaded | None = None  # what became of the file of weights that the model starts from
    quorum: Quorum = field(default_factory=Quorum)
    faults: Faults | None = None  # what is made to go wrong

    def __post_init__(self) -> None:
        self.population = Population(
            self.plan, self.data.train, self.data.classes, self.enrolment.memory, self.method.exemplars
        )

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    @property
    def detects(self) -> bool:
        """Do clients look at the global model's entropies to notice new classes?"""
        return detector_of(self.method.detector_kind()).observes

    def work(self) -> ClientWork:
        """The clients' work, and passes over the federation's images."""
        train, test = (ClientImages(part, self.data.classes) for part in (self.data.train, self.data.test))
        work = ClientWork(self.enrolment, self.method, train, self.device, self.selector.encoder, test)
        return work if self.faults is None else self.faults.within(work)


class SimulatedClients(Clients):
    """Population and engine: the answers of all clients, found together."""

    def __init__(self, federation: Federation, engine: Engine, work: ClientWork) -> None:
        self.federation, self.engine, self.work = federation, engine, work
        self.population, self.timeline = federation.population, federation.plan.timeline
        self.detector = detector_of(federation.method.detector_kind())

    def announce(self, class_list: Broadcast) -> tuple[list[Announcement], int]:
        self.population.begin_round(class_list.round_index)
        found = self._announcements(class_list, self.timeline.arriving(class_list.round_index))
        return [one for one, _ in found], sum(one.size * count for one, count in found)

    def open_round(self, broadcast: Broadcast, selected: Sequence[int], observers: np.ndarray) -> Opened:
        round_index, population = broadcast.round_index, self.population
        population.begin_round(round_index)
        arriving = self.timeline.arriving(round_index)
        arrived = self.timeline.client[arriving[self.timeline.brings[arriving]]]
        self._update_memories(round_index, False, observers, population.current[observers], broadcast.weights)
        if self.detector.observes:
            observed, alarmed = population.observe(self.detector, observers, self._entropies(broadcast))
        else:
            observed, alarmed = len(arrived), arrived
        population.notice(alarmed)
        announcements = self._announcements(broadcast, arriving)
        size = sum(one.size * count for one, count in announcements)
        return Opened([one for one, _ in announcements], size, observed, alarmed)

    def _announcements(self, broadcast: Broadcast, arriving: np.ndarray) -> list[tuple[Announcement, int]]:
        """Clients whose data has just come announce what the registry does not know; equal ones once, with their
        number."""
        found = []
        for kind, count in Counter(self.timeline.kind[arriving].tolist()).items():
            names = broadcast.registry.unknown(self.population.holdings(kind))
            if names:
                found.append((Announcement(broadcast.round_index, names), count))
        return found

    def _entropies(self, broadcast: Broadcast) -> Callable[[Sequence[ImageGroup]], list[Tensor]]:
        augmented = self.federation.method.observes_augmented
        stream = ("round", broadcast.round_index, "observed") if augmented else ()
        request = InferenceRequest("entropies", broadcast.registry.growths, broadcast.weights, stream)
        return lambda groups: self.engine.infer(self.work, request, groups)

    def _update_memories(
        self, round_index: int, after_training: bool, clients: np.ndarray, upto: np.ndarray, weights: Weights
    ) -> None:
        if not self.federation.method.keeps_memory:
            return
        request = InferenceRequest("features", self.federation.server.registry.growths, weights)
        self.population.update_memories(
            round_index, after_training, clients, upto, lambda groups: self.engine.infer(self.work, request, groups)
        )

    def collect_extras(self, job: Job, teachers: Teachers, selected: Sequence[int]) -> Answers:
        return [
            (client, outcome if isinstance(outcome, Failure) else outcome[1])
            for client, outcome in self._map(job, teachers, selected)
        ]

    def train(
        self, job: Job, teachers: Teachers, selected: Sequence[int], done: Callable[[], None]
    ) -> tuple[Answers, Shares]:
        answers: Answers = []
        shares: Shares = []
        for client, outcome in self._map(job, teachers, selected):
            if isinstance(outcome, Failure):  # the client keeps what it had
                answers.append((client, outcome))
            else:
                state, reply, sent = outcome
                self.population.store(state)
                answers.append((client, reply))
                shares += [(client, share) for share in sent]
            done()
        return answers, shares

    def _map(self, job: Job, teachers: Teachers, selected: Sequence[int]) -> Iterator[tuple[int, Outcome | Failure]]:
        states = [self.population.state(client) for client in selected]
        outcomes = self.engine.map(self.work, states, [Inbox(job, teachers)] * len(states))
        return zip(selected, outcomes, strict=True)

    def end_task(self, message: TaskEnded) -> None:
        present = np.flatnonzero(self.population.current >= 0)
        upto = self.population.current[present] + 1
        self._update_memories(message.round_index, True, present, upto, message.weights)

    def close_round(self, message: RoundClosed, selected: Sequence[int]) -> None:
        sharing = self.federation.method.prototypes()
        if sharing is None or not sharing.late:
            self.population.give_up(selected)
