"""All clients of a simulation: a few numbers each, in arrays; a state for those that have been at work; and memories
that are written out when somebody needs them. A round costs what its selected clients cost, however many there are.

Equal images are observed and ranked once for all their holders. What comes out is what separate `Client` objects would
find, to the bit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from holdfast.client.detector import Detector, History, Observation, observation_of
from holdfast.client.memory import candidates, quota, truncated, update_memory
from holdfast.data.images import ImageSet
from holdfast.protocol.codec import Snapshot
from holdfast.protocol.state import ClientState
from holdfast.simulation.engine import ImageGroup
from holdfast.simulation.plan import Plan

EVERYBODY = -1  # the owner of a ranking over all images of a class
Owner = tuple[int, int]  # (kind of arrival or EVERYBODY, class)
Ranked = dict[Owner, Tensor]  # images, best exemplar first
Infer = Callable[[Sequence[ImageGroup]], list[Tensor]]
Exemplars = Callable[[Tensor, int], Tensor]


class MemoryUpdate(NamedTuple):
    """When some clients put data into their memories: before a round's training or at the end of a task, and how often
    that has happened then (a client that was not reached for long has several arrivals to store)."""

    round_index: int
    after_training: bool
    turn: int


class Population:
    """Who has noticed, shared and stored how many of their arrivals, what their detectors remember and what everybody
    keeps."""

    def __init__(self, plan: Plan, train: ImageSet, classes: Sequence[str], memory: int, exemplars: Exemplars) -> None:
        self.timeline, self.train, self.classes = plan.timeline, train, classes
        self.memory, self.exemplars = memory, exemplars
        clients, arrivals = self.timeline.clients, len(self.timeline.kind)
        self.noticed, self.shared, self.stored = (np.zeros(clients, dtype=np.int32) for _ in range(3))
        self.stored_by = np.zeros(arrivals, dtype=np.int32)  # the update by which each arrival was stored
        self.updates: list[MemoryUpdate] = []
        self.rankings: list[Ranked] = []  # one per update
        self.states: dict[int, ClientState] = {}  # of those who were at work, as they were then
        self.changed: set[int] = set()  # clients whose states are not in a checkpoint yet
        # Clients whose detectors remember the same are a group: what one of them decides, all do.
        self.group = np.zeros(clients, dtype=np.int32)
        self.histories: list[History] = [()]
        self.current = np.full(clients, -1, dtype=np.int64)  # which of its arrivals is each client's data
        first: dict[tuple[int, ...], int] = {}  # the first kind of arrival with the same images
        self._owners = [
            EVERYBODY if kind.images is None else first.setdefault(kind.images, i)
            for i, kind in enumerate(self.timeline.kinds)
        ]
        self._fresh, self._owed = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=bool)

    def begin_round(self, round_index: int) -> None:
        """New data arrives at the clients."""
        self.current = self.timeline.current(round_index)

    # single clients

    def state(self, client: int) -> ClientState:
        """A client's state now: as it was left, with what has gone into its memory since, and its current data."""
        left = self.states.get(client) or ClientState(client)
        memory = dict(left.memory)
        start = int(self.timeline.first[client])
        for arrival in range(start + left.stored, start + int(self.stored[client])):
            kind = int(self.timeline.kind[arrival])
            ranked = self.rankings[self.stored_by[arrival]]
            for c in self.timeline.kinds[kind].classes:
                memory[self.classes[c]] = ranked[self._owners[kind], c]
        kinds = self.timeline.kind[start : start + int(self.current[client]) + 1].tolist()
        return replace(
            left,
            arrivals=tuple(self._names(kind) for kind in kinds),
            data=self.holdings(kinds[-1]) if kinds else {},
            memory=truncated(memory, self.memory),
            noticed=int(self.noticed[client]),
            shared=int(self.shared[client]),
            stored=int(self.stored[client]),
        )

    def store(self, state: ClientState) -> None:
        self.states[state.client] = replace(state, data={}, arrivals=())  # these follow from the plan
        self.changed.add(state.client)
        for name in ("noticed", "shared", "stored"):
            getattr(self, name)[state.client] = getattr(state, name)

    def holdings(self, kind: int) -> dict[str, Tensor]:
        """The images of a kind of arrival, by class name."""
        return {self.classes[c]: self._rows(kind, c) for c in self.timeline.kinds[kind].classes}

    def _rows(self, kind: int, c: int) -> Tensor:
        images = self.timeline.kinds[kind].images
        if images is None:
            return self.train.by_class[c]
        rows = torch.tensor(images, dtype=torch.int64)
        return rows[self.train.labels[rows] == c]

    def _names(self, kind: int) -> tuple[str, ...]:
        return tuple(self.classes[c] for c in self.timeline.kinds[kind].brought)

    # memories

    def update_memories(
        self, round_index: int, after_training: bool, clients: np.ndarray, upto: np.ndarray, features: Infer
    ) -> None:
        """Puts the arrivals of these clients before number `upto` into their memories; `features` gives the features of
        groups of training images under the global model that the clients have got."""
        turn = 0
        while True:
            behind = clients[self.stored[clients] < upto]
            if not len(behind):
                return
            self._store_next(MemoryUpdate(round_index, after_training, turn), behind, features)
            turn += 1

    def _store_next(self, update: MemoryUpdate, clients: np.ndarray, features: Infer) -> None:
        """Stores the next arrival of each of these clients: one ranking per class for all clients that meet it for the
        first time, and single ones for those that meet it again."""
        arrivals = self.timeline.first[clients] + self.stored[clients]
        again = self.timeline.returning[arrivals]
        groups: dict[Owner, ImageGroup] = {}
        depths: dict[Owner, int] = {}
        for kind in np.unique(self.timeline.kind[arrivals[~again]]).tolist():
            classes = self.timeline.kinds[kind].classes
            for c in classes:
                owner = self._owners[kind], c
                groups.setdefault(owner, ImageGroup(self.classes[c], self._rows(kind, c)))
                depths[owner] = max(quota(self.memory, len(classes)), depths.get(owner, 0))
        returning = [self._returning(int(client)) for client in clients[again]]
        chosen_from = [candidates(state.memory, data) for state, data in returning]
        own = [ImageGroup(name, ids) for requests in chosen_from for name, ids in requests.items()]
        found = features([*groups.values(), *own]) if self.memory else [torch.empty(0, 1)] * (len(groups) + len(own))
        ranked = zip(groups.items(), found[: len(groups)], strict=True)
        self.rankings.append({owner: self._best(group.ids, some, depths[owner]) for (owner, group), some in ranked})
        self.updates.append(update)
        self.stored_by[arrivals] = len(self.updates) - 1
        answers = iter(found[len(groups) :])
        for state, data in returning:
            memory = update_memory(
                state.memory, data, self.memory, lambda _, ids, count: self._best(ids, next(answers), count)
            )
            self.store(replace(state, memory=memory, stored=state.stored + 1))
        self.stored[clients[~again]] += 1

    def _returning(self, client: int) -> tuple[ClientState, dict[str, Tensor]]:
        """A client that meets classes again, and the data that it is to store."""
        arrival = int(self.timeline.first[client] + self.stored[client])
        return self.state(client), self.holdings(int(self.timeline.kind[arrival]))

    def _best(self, ids: Tensor, features: Tensor, count: int) -> Tensor:
        return (ids[self.exemplars(features, count)] if count else ids[:0]).int()

    # detection

    def observe(self, detector: Detector, clients: np.ndarray, entropies: Infer) -> tuple[int, np.ndarray]:
        """How many of these clients have images to look at (N14), and whose detectors raise an alarm."""
        present = clients[self.current[clients] >= 0]
        kinds = self.timeline.kind[self.timeline.first[present] + self.current[present]]
        has_images = np.array([bool(kind.classes) for kind in self.timeline.kinds])
        looking, kinds = present[has_images[kinds]], kinds[has_images[kinds]]
        if not len(looking):
            return 0, looking
        distinct, which = np.unique(kinds, return_inverse=True)
        seen = self._observations(distinct.tolist(), entropies)
        pairs, member = np.unique(self.group[looking].astype(np.int64) * len(seen) + which, return_inverse=True)
        alarms, groups = [], []
        for old, now in zip((pairs // len(seen)).tolist(), (pairs % len(seen)).tolist(), strict=True):
            alarm, history = detector.decide(self.histories[old], seen[now])
            alarms.append(alarm)
            groups.append(len(self.histories))
            self.histories.append(history)
        self.group[looking] = np.array(groups, dtype=np.int32)[member]
        self._merge_groups()
        return len(looking), looking[np.array(alarms)[member]]

    def _observations(self, kinds: Sequence[int], entropies: Infer) -> list[Observation]:
        """What clients with these kinds of arrivals see; images that several of them hold are passed once."""
        owners = {(self._owners[kind], c): kind for kind in kinds for c in self.timeline.kinds[kind].classes}
        groups = [ImageGroup(self.classes[c], self._rows(kind, c)) for (_, c), kind in owners.items()]
        found = dict(zip(owners, entropies(groups), strict=True))
        return [
            observation_of(
                torch.cat([found[self._owners[kind], c] for c in self.timeline.kinds[kind].classes]).double().numpy()
            )
            for kind in kinds
        ]

    def _merge_groups(self) -> None:
        """Makes groups that remember the same one, and forgets those without clients."""
        used, member = np.unique(self.group, return_inverse=True)
        place: dict[tuple[int, ...], int] = {}
        histories: list[History] = []
        numbers = []
        for old in used.tolist():
            history = self.histories[old]
            key = tuple(map(id, history))
            if key not in place:
                place[key] = len(histories)
                histories.append(history)
            numbers.append(place[key])
        self.histories = histories
        self.group = np.array(numbers, dtype=np.int32)[member]

    def notice(self, alarmed: np.ndarray) -> None:
        """Clients with an alarm notice what has come to them; a false alarm changes nothing."""
        upto, before = (self.current[alarmed] + 1).astype(np.int32), self.noticed[alarmed]
        waited = self.timeline.waiting(alarmed, before, upto)
        self._fresh = alarmed[waited]
        self._owed = self.shared[self._fresh] < before[waited]
        self.noticed[self._fresh] = upto[waited]

    def give_up(self, selected: Sequence[int]) -> None:
        """A round is over: who noticed new classes in it and was not selected does not share their prototypes, unless
        it owed others already."""
        given_up = self._fresh[~np.isin(self._fresh, selected) & ~self._owed]
        self.shared[given_up] = self.noticed[given_up]

    # to a checkpoint and back

    def snapshot(self) -> dict[str, Snapshot]:
        numbers = {name: torch.from_numpy(getattr(self, name)) for name in ("noticed", "shared", "stored", "stored_by")}
        parts: dict[str, Snapshot] = {"numbers": (numbers, {})}
        for i, (update, ranked) in enumerate(zip(self.updates, self.rankings, strict=True)):
            tensors = {
                "keys": torch.tensor(list(ranked), dtype=torch.int32).view(-1, 2),
                "sizes": torch.tensor([len(rows) for rows in ranked.values()], dtype=torch.int32),
                "rows": torch.cat([*ranked.values(), torch.empty(0, dtype=torch.int32)]),
            }
            parts[f"ranking-{i}"] = tensors, {"update": list(update)}
        # Apart, because clients seldom change their group; and groups may have seen the same: that is written once.
        distinct = {id(one): one for history in self.histories for one in history}
        place = {key: i for i, key in enumerate(distinct)}
        images = {str(i): torch.from_numpy(one.images.copy()) for i, one in enumerate(distinct.values())}
        remembered = [[place[id(one)] for one in history] for history in self.histories]
        parts["groups"] = {"of": torch.from_numpy(self.group)}, {}
        parts["seen"] = images, {"means": [one.mean for one in distinct.values()], "by": remembered}
        return parts

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        for name, tensor in parts["numbers"][0].items():
            setattr(self, name, tensor.numpy().copy())
        self.updates, self.rankings = [], []
        for i in range(sum(name.startswith("ranking-") for name in parts)):
            tensors, facts = parts[f"ranking-{i}"]
            keys = (tuple(key) for key in tensors["keys"].tolist())
            rows = tensors["rows"].split(tensors["sizes"].tolist())
            self.rankings.append(dict(zip(keys, rows, strict=True)))
            self.updates.append(MemoryUpdate(*facts["update"]))
        images, facts = parts["seen"]
        seen = [Observation(mean, images[str(i)].numpy()) for i, mean in enumerate(facts["means"])]
        self.histories = [tuple(seen[i] for i in history) for history in facts["by"]]
        self.group = parts["groups"][0]["of"].numpy().copy()
