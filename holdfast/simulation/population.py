"""All clients of a federation: a few numbers each, in arrays; a state for those that have been at work; and memories
that are written out when somebody needs them. A round costs what its selected clients cost, however many there are."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from holdfast.client.detector import IMAGES, Observation, Observed
from holdfast.methods.context import World
from holdfast.methods.herding import quota
from holdfast.protocol.messages import Snapshot, State
from holdfast.simulation.timeline import Arrival

EVERYBODY = -1  # the owner of a ranking over all images of a class
Ranked = dict[tuple[int, int], Tensor]  # (kind of arrival or EVERYBODY, class) -> its images, best exemplar first
ToRank = dict[tuple[int, int], tuple[Tensor, int]]  # the images, and how many are wanted


class Population:
    """Who has noticed, shared and stored how many of their arrivals, and what everybody keeps."""

    def __init__(self, world: World) -> None:
        self.world, self.timeline = world, world.plan.timeline
        self.noticed, self.shared, self.stored = (np.zeros(self.timeline.clients, dtype=np.int32) for _ in range(3))
        self.states: dict[int, State] = {}  # of those who were at work, as they were then
        self.rankings: dict[int, Ranked] = {}  # by the event (see Timeline.event) that made them
        self.changed: set[int] = set()  # clients whose states are not in a checkpoint yet

    def state(self, client: int) -> State:
        """A client's state now: as it was left, with what has gone into its memory since."""
        left = self.states.get(client) or State(client)
        memory = dict(left.memory)
        for i in range(left.stored, self.stored[client]):
            arrival = self.timeline.first[client] + i
            kind = int(self.timeline.kind[arrival])
            ranked = self.rankings[int(self.timeline.event[arrival])]
            memory |= {c: ranked[_owner(self.timeline.kinds[kind], kind), c] for c in self.timeline.kinds[kind].classes}
        share = quota(self.world.memory, len(memory))
        return replace(
            left,
            memory={c: rows[:share] for c, rows in memory.items()},
            noticed=int(self.noticed[client]),
            shared=int(self.shared[client]),
            stored=int(self.stored[client]),
        )

    def store(self, state: State) -> None:
        self.states[state.client] = state
        self.changed.add(state.client)
        for name in ("noticed", "shared", "stored"):
            getattr(self, name)[state.client] = getattr(state, name)

    def settle(self, event: int, upto: np.ndarray, features: Callable[[Tensor], Tensor]) -> None:
        """Puts every client's arrivals before number `upto` into its memory.

        `features` gives training images' features under the global model; it is asked once, for the distinct images."""
        behind = np.flatnonzero(self.stored < upto)
        arrivals = self.timeline.first[behind] + self.stored[behind]
        if not len(behind):
            return
        assert (self.stored[behind] + 1 == upto[behind]).all(), "an arrival was left out"
        again = self.timeline.returning[arrivals]
        wanted: ToRank = {}
        for kind in np.unique(self.timeline.kind[arrivals[~again]]).tolist():
            arrival = self.timeline.kinds[kind]
            depth = quota(self.world.memory, len(arrival.classes))
            for c, rows in self._of_classes(arrival):
                key = _owner(arrival, kind), c
                wanted[key] = rows, max(depth, wanted[key][1] if key in wanted else 0)
        grown = {int(client): self._grown(int(client)) for client in behind[again]}
        own = {(client, c): request for client, requests in grown.items() for c, request in requests.items()}
        known = _Known([rows for rows, depth in [*wanted.values(), *own.values()] if depth], features)

        def best(rows: Tensor, count: int) -> Tensor:
            order = self.world.method.exemplars(known.of(rows), count) if count else slice(0)
            return rows[order].int()

        self.rankings[event] = {key: best(*request) for key, request in wanted.items()}
        for client, requests in grown.items():
            state = self.state(client)
            memory = {**state.memory, **{c: best(*requests[c]) for c in requests}}
            share = quota(self.world.memory, len(memory))
            kept = {c: rows[:share] for c, rows in memory.items()}
            self.store(replace(state, memory=kept, stored=state.stored + 1))
        self.stored = np.maximum(self.stored, upto).astype(np.int32)

    def _grown(self, client: int) -> dict[int, tuple[Tensor, int]]:
        """For a client that meets classes again: its images of each, old exemplars among them."""
        state = self.state(client)
        arrival = self.world.plan.arrivals[client][state.stored]
        depth = quota(self.world.memory, len({*state.memory, *arrival.classes}))
        none = torch.empty(0, dtype=torch.int32)
        return {
            c: (torch.unique(torch.cat([rows, state.memory.get(c, none).long()])), depth)
            for c, rows in self._of_classes(arrival)
        }

    def _of_classes(self, arrival: Arrival) -> list[tuple[int, Tensor]]:
        rows = self.world.holding(arrival)
        labels = self.world.train.labels[rows]
        return [(c, rows[labels == c]) for c in arrival.classes]

    def observe(self, number: int, entropies: Callable[[Tensor], Tensor]) -> Observed:
        """The entropies of each client's current images; a client without any sees nothing (N14).

        `entropies` gives training images' entropies under the global model; asked once, for the distinct images."""
        current = self.timeline.current(number)
        kinds = np.where(current >= 0, self.timeline.kind[self.timeline.first + np.maximum(current, 0)], -1)
        rows = {kind: self.world.holding(self.timeline.kinds[kind]) for kind in np.unique(kinds).tolist() if kind >= 0}
        rows = {kind: mine for kind, mine in rows.items() if len(mine)}
        place = np.full(len(self.timeline.kinds) + 1, -1)  # the last is for kind -1
        place[list(rows)] = np.arange(len(rows))
        if not rows:
            return Observed(place[kinds], [])
        known = _Known(list(rows.values()), lambda distinct: entropies(distinct).double())
        seen = [known.of(mine).numpy() for mine in rows.values()]
        return Observed(place[kinds], [Observation(float(values.mean()), values[:IMAGES]) for values in seen])

    def snapshot(self) -> dict[str, Snapshot]:
        numbers = {name: torch.from_numpy(getattr(self, name)) for name in ("noticed", "shared", "stored")}
        parts: dict[str, Snapshot] = {"numbers": (numbers, {})}
        for event, ranked in self.rankings.items():
            tensors = {
                "keys": torch.tensor(list(ranked), dtype=torch.int32),
                "sizes": torch.tensor([len(rows) for rows in ranked.values()], dtype=torch.int32),
                "rows": torch.cat([*ranked.values(), torch.empty(0, dtype=torch.int32)]),
            }
            parts[f"ranking-{event}"] = tensors, {}
        return parts

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        for name, tensor in parts["numbers"][0].items():
            setattr(self, name, tensor.numpy().copy())
        self.rankings = {}
        for name, (tensors, _) in parts.items():
            if name != "numbers":
                keys = (tuple(key) for key in tensors["keys"].tolist())
                rows = tensors["rows"].split(tensors["sizes"].tolist())
                self.rankings[int(name.removeprefix("ranking-"))] = dict(zip(keys, rows, strict=True))


def _owner(arrival: Arrival, kind: int) -> int:
    return EVERYBODY if arrival.images is None else kind


class _Known:
    """What one pass over the distinct images of several sets has found."""

    def __init__(self, sets: list[Tensor], ask: Callable[[Tensor], Tensor]) -> None:
        self.rows = torch.unique(torch.cat([*sets, torch.empty(0, dtype=torch.int64)]))
        self.values = ask(self.rows) if len(self.rows) else torch.empty(0, 1)

    def of(self, rows: Tensor) -> Tensor:
        return self.values[torch.searchsorted(self.rows, rows)]
