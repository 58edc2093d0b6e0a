"""The same federation as separate clients: each a `Client` with a private copy of its own images, stored in an order of
its own, reached by bytes alone, and saved to a folder and loaded again between rounds."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from holdfast.client.client import Arrival, Client
from holdfast.client.data import ClientImages
from holdfast.data.images import Images, ImageSet
from holdfast.protocol.messages import (
    Announcement,
    Broadcast,
    Encoder,
    Failure,
    Job,
    Message,
    PrototypeShare,
    Reply,
    RoundClosed,
    TaskEnded,
    Teachers,
    TransitionNotice,
    decode,
)
from holdfast.protocol.state import ClientState
from holdfast.seeding import generator
from holdfast.server.clients import Answers, Clients, Opened, Shares
from holdfast.simulation.federation import Federation


class PrivateData:
    """What one client will ever hold, copied out of the data set and shuffled, with class numbers of its own."""

    def __init__(self, federation: Federation, client: int) -> None:
        population, timeline = federation.population, federation.plan.timeline
        start = int(timeline.first[client])
        kinds = timeline.kind[start : start + len(federation.plan.arrivals[client])].tolist()
        self.arrivals = [population.holdings(kind) for kind in kinds]
        rows = sorted({int(row) for held in self.arrivals for ids in held.values() for row in ids})
        rng = generator(99, "private", client)
        order = [rows[i] for i in rng.permutation(len(rows))]
        self.row_of = torch.tensor(order, dtype=torch.int64)
        self.id_of = {row: i for i, row in enumerate(order)}
        names = list(dict.fromkeys(name for held in self.arrivals for name in held))
        self.classes = tuple(names[i] for i in rng.permutation(len(names)))
        train = federation.data.train
        labels = [federation.data.classes[int(train.labels[row])] for row in order]
        pixels = train.images[self.row_of].clone()
        numbers = torch.tensor([self.classes.index(name) for name in labels], dtype=torch.int64)
        self.images = ImageSet(Images(pixels), numbers)

    def arrival(self, number: int) -> Arrival:
        held = self.arrivals[number]
        return Arrival({name: torch.tensor([self.id_of[int(row)] for row in ids]) for name, ids in held.items()})

    def with_rows(self, state: ClientState) -> ClientState:
        """The client's state with the data set's rows in place of its own ids."""

        def rows(ids: torch.Tensor) -> torch.Tensor:
            return self.row_of[ids.long()].to(ids.dtype)

        notes = dict(state.notes)
        if "prototype.ids" in notes:
            notes["prototype.ids"] = rows(notes["prototype.ids"])
        return ClientState(
            state.client,
            state.arrivals,
            {name: rows(ids) for name, ids in state.data.items()},
            {name: rows(ids) for name, ids in state.memory.items()},
            state.stored,
            state.noticed,
            state.shared,
            notes,
        )


class SeparateClients(Clients):
    """Every client by itself. The plan decides only when data arrives and whom the oracle tells."""

    def __init__(
        self, federation: Federation, folder: Path, keep_pixels: bool = False, as_billed: bool = False
    ) -> None:
        """With `as_billed` a client gets just the messages that the record counts: a selected client observes with its
        first job, updates its memory with a job of phase finish, and gets teachers once per round."""
        self.federation, self.folder, self.as_billed = federation, folder, as_billed
        self.taught: dict[int, int] = {}  # client -> the round of its last teachers
        plan = federation.plan
        self.private = [PrivateData(federation, client) for client in range(len(plan.arrivals))]
        self.keep_pixels = keep_pixels
        self.arrived = [0] * len(self.private)
        self.arrived_until = -1  # the round
        self.loaded: dict[int, Client] = {}
        self.to_proxy: list[bytes] = []
        self.to_server: list[bytes] = []
        self.from_server: list[bytes] = []

    def client(self, number: int) -> Client:
        private = self.private[number]
        if number not in self.loaded:
            images = ClientImages(private.images, private.classes)
            self.loaded[number] = self._faulty(Client.load(self.folder / str(number), images))
        return self.loaded[number]

    def _faulty(self, client: Client) -> Client:
        """The client with the faults of the config inside of its work."""
        if self.federation.faults is not None:
            client._work = self.federation.faults.within(client.work)
        return client

    def _copy_of(self, number: int) -> Client:
        """The same client again, which can be asked without changing it."""
        self.client(number).save(self.folder / f"copy-{number}")
        private = self.private[number]
        return Client.load(self.folder / f"copy-{number}", ClientImages(private.images, private.classes))

    def _save_all(self) -> None:
        for number, client in self.loaded.items():
            client.save(self.folder / str(number))
        self.loaded.clear()

    def _join(self, number: int) -> None:
        private = self.private[number]
        client = Client(ClientImages(private.images, private.classes), self.keep_pixels)
        client.receive(decode(replace(self.federation.enrolment, client=number).to_bytes()))
        encoder = self.federation.selector.encoder
        if encoder is not None:
            client.receive(decode(Encoder(encoder.state_dict()).to_bytes()))
        self.loaded[number] = self._faulty(client)

    def _tell(self, number: int, *messages: Message | Arrival) -> list[Message]:
        """Tells a client something; what it is told and what it sends goes through bytes."""
        client = self.client(number)
        sent: list[Message] = []
        for message in messages:
            if isinstance(message, Arrival):
                client.receive(message)
                continue
            blob = message.to_bytes()
            if not isinstance(message, Teachers):
                self.from_server.append(blob)
            for answer in client.receive(decode(blob)):
                travelled = answer.to_bytes()
                (self.to_proxy if isinstance(answer, PrototypeShare) else self.to_server).append(travelled)
                sent.append(decode(travelled))
        return sent

    def _arrive(self, round_index: int) -> None:
        plan, timeline = self.federation.plan, self.federation.plan.timeline
        if round_index <= self.arrived_until:
            return
        self.arrived_until = round_index
        for arrival in timeline.arriving(round_index).tolist():
            number = int(timeline.client[arrival])
            if not self.arrived[number]:
                self._join(number)
            self._tell(number, self.private[number].arrival(self.arrived[number]))
            self.arrived[number] += 1
            if timeline.brings[arrival]:
                self._tell(number, TransitionNotice(round_index))
        assert sum(map(bool, self.arrived)) == len(plan.present(round_index))

    def announce(self, class_list: Broadcast) -> tuple[list[Announcement], int]:
        self._arrive(class_list.round_index)
        announced = []
        for number in self.federation.plan.present(class_list.round_index):
            for answer in self._tell(number, class_list):
                assert isinstance(answer, Announcement)
                announced.append(answer)
        return announced, sum(one.size for one in announced)

    def open_round(self, broadcast: Broadcast, selected: Sequence[int], observers: np.ndarray) -> Opened:
        self._arrive(broadcast.round_index)
        without = Broadcast(broadcast.round_index, broadcast.registry)
        announcements: dict[int, Announcement] = {}
        clients: dict[int, Client] = {}
        observing = set(observers.tolist())
        for number in self.federation.plan.present(broadcast.round_index):
            # A selected client observes with its first job. Here it, or a copy of it, is asked at once, so that the
            # record can say what its detector found.
            message = broadcast if number in observing else without
            if self.as_billed and number in selected:
                clients[number] = self._copy_of(number)
                told = clients[number].receive(message)
            else:
                told = self._tell(number, message)
                clients[number] = self.client(number)
            for answer in told:
                assert isinstance(answer, Announcement)
                announcements[number] = answer
        present = self.federation.plan.present(broadcast.round_index)
        alarmed = np.array([n for n in present if broadcast.round_index in clients[n].alarms], dtype=np.int64)
        if self.federation.detects:
            observed = sum(bool(clients[n].state.data) for n in present if n in observing)
        else:
            observed = len(alarmed)
        size = sum(one.size for one in announcements.values())
        return Opened(list(announcements.values()), size, observed, alarmed)

    def collect_extras(self, job: Job, teachers: Teachers, selected: Sequence[int]) -> Answers:
        return [(number, self._work(number, job, teachers)[0]) for number in selected]

    def _work(self, number: int, job: Job, teachers: Teachers) -> tuple[Reply | Failure, list[PrototypeShare]]:
        again = self.as_billed and self.taught.get(number) == job.round_index
        self.taught[number] = job.round_index
        sent = self._tell(number, *([] if again else [teachers]), job)
        [reply] = [message for message in sent if isinstance(message, Reply | Failure)]
        return reply, [message for message in sent if isinstance(message, PrototypeShare)]

    def train(
        self, job: Job, teachers: Teachers, selected: Sequence[int], done: Callable[[], None]
    ) -> tuple[Answers, Shares]:
        outcomes = [(number, *self._work(number, job, teachers)) for number in selected]
        answers = [(number, answer) for number, answer, _ in outcomes]
        return answers, [(number, share) for number, _, shares in outcomes for share in shares]

    def end_task(self, message: TaskEnded) -> None:
        plan = self.federation.plan
        asked = plan.selected[message.round_index] if self.federation.method.collects_extras("finish") else ()
        for number in plan.present(message.round_index):
            if not (self.as_billed and number in asked):
                self._tell(number, message)

    def close_round(self, message: RoundClosed, selected: Sequence[int]) -> None:
        for number in self.federation.plan.present(message.round_index):
            self._tell(number, message)
            # The record's scores compare with what was noticed before; separate clients keep it themselves.
            self.federation.population.noticed[number] = self.client(number).state.noticed
        self._save_all()
