"""The plan: everything random about the federation, decided before training starts."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor
from typing import Any

import numpy as np

from holdfast.errors import HoldfastError
from holdfast.seeding import draw, generator, shuffled
from holdfast.simulation.class_order import class_order
from holdfast.simulation.partition import parse_partition, split
from holdfast.simulation.settings import PlanSettings
from holdfast.simulation.timeline import Arrival, Timeline


@dataclass(frozen=True)
class Plan:
    """Class order, tasks, who joins when, who holds what, who is selected. A plain value: print, save, compare it."""

    tasks: tuple[tuple[int, ...], ...]  # the classes of each task, in head order
    starts: tuple[int, ...]  # the first round of each task
    rounds_per_task: int  # as configured; with irregular arrivals, the server's assumption after a growth
    arrivals: tuple[tuple[Arrival, ...], ...]  # per client, in time order; with the first one it joins
    selected: tuple[tuple[int, ...], ...]  # per round
    growths: tuple[tuple[int, tuple[int, ...]], ...]  # (round, classes): the growths under plan.growth=schedule
    groups: tuple[tuple[str, ...], ...]  # per task: Zo, Zn or Za of each client; empty if it joins later

    @property
    def rounds(self) -> int:
        return len(self.selected)

    def task_of_round(self, round_index: int) -> int:
        return bisect_right(self.starts, round_index) - 1

    def rounds_of(self, task: int) -> range:
        """The rounds of a task."""
        return range(self.starts[task], (*self.starts, self.rounds)[task + 1])

    def ends_task(self, round_index: int) -> bool:
        return round_index + 1 == self.rounds or round_index + 1 in self.starts

    @cached_property
    def timeline(self) -> Timeline:
        """The arrivals of all clients as arrays."""
        return Timeline(self.arrivals)

    @cached_property
    def joined(self) -> np.ndarray:
        """The round in which each client joins."""
        return np.array([arrivals[0].round_index for arrivals in self.arrivals])

    def present(self, round_index: int) -> list[int]:
        """The clients that have joined by this round."""
        return [int(c) for c in np.flatnonzero(self.joined <= round_index)]

    def current(self, client: int, round_index: int) -> int:
        """Which of the client's arrivals is its data in this round; -1 before it joins."""
        return sum(arrival.round_index <= round_index for arrival in self.arrivals[client]) - 1

    def seen(self, round_index: int) -> list[int]:
        """The classes of all tasks begun by this round, in head order."""
        return [c for task in self.tasks[: self.task_of_round(round_index) + 1] for c in task]

    def held(self, client: int, round_index: int) -> set[int]:
        """Every class that the client has met by this round."""
        return {c for arrival in self.arrivals[client] if arrival.round_index <= round_index for c in arrival.classes}

    def to_json(self, names: Sequence[str], clients: Sequence[str] = ()) -> dict[str, Any]:
        """The plan as plain values for people: with the names of classes and (if they have any) of clients; rounds are
        counted from 1."""
        arrivals_of = [
            [
                {
                    "round": a.round_index + 1,
                    "classes": list(a.classes),
                    **({} if a.images is None else {"images": list(a.images)}),
                    **({} if a.new is None else {"new": list(a.new)}),
                }
                for a in arrivals
            ]
            for arrivals in self.arrivals
        ]
        return {
            "class_names": list(names),
            "tasks": [list(task) for task in self.tasks],
            "starts": [round_index + 1 for round_index in self.starts],
            "clients": list(clients),
            "arrivals": arrivals_of,
            "selected": [list(chosen) for chosen in self.selected],
            "growths": [{"round": index + 1, "classes": list(classes)} for index, classes in self.growths],
            "groups": [list(groups) for groups in self.groups],
        }


def all_at_once(plan: Plan) -> Plan:
    """The same federation, but every client gets all its data in the round it joins, and the head has all classes from
    the start: for an upper bound that breaks the rules on purpose."""
    everything = tuple(c for task in plan.tasks for c in task)
    return replace(plan, arrivals=tuple(map(_joined, plan.arrivals)), growths=((0, everything),))


def _joined(arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """All of a client's arrivals merged into one, in the round it joins."""
    classes = tuple(sorted({c for arrival in arrivals for c in arrival.classes}))
    shared = all(arrival.images is None for arrival in arrivals if arrival.classes)
    images = None if shared else tuple(sorted({i for arrival in arrivals for i in arrival.images or ()}))
    return (Arrival(arrivals[0].round_index, classes, images),)


def make_plan(settings: PlanSettings, names: Sequence[str], images: Mapping[int, Sequence[int]], seed: int) -> Plan:
    """Draws the whole federation: `names` are the classes, `images` the training images of each."""
    kind, alpha = parse_partition(settings.partition)
    tasks = equal_tasks(settings.tasks, class_order(settings.order, names))
    arrivals: list[list[Arrival]] = []
    groups: list[dict[int, str]] = []
    for t, classes in enumerate(tasks):
        start = t * settings.rounds
        movers, stayers, newcomers = _groups(settings, len(arrivals), generator(seed, "plan", "groups", t))
        joins = _join_rounds(settings, t, len(newcomers), generator(seed, "plan", "joins", t))
        drawn = _draw_classes(classes, len(movers) + len(newcomers), settings, t, generator(seed, "plan", "classes", t))
        owned = None if kind == "shared" else _split_images(drawn, images, alpha, seed, t)
        arrivals += [[] for _ in newcomers]
        rounds = [start] * len(movers) + [start + j for j in joins]
        for i, client in enumerate([*movers, *newcomers]):
            mine = drawn[i] if owned is None else tuple(c for c in drawn[i] if owned[i].get(c))
            own = None if owned is None else tuple(sorted(x for part in owned[i].values() for x in part))
            arrivals[client].append(Arrival(rounds[i], mine, own))
        groups.append(dict.fromkeys(movers, "Zn") | dict.fromkeys(stayers, "Zo"))
        groups[t] |= dict.fromkeys(newcomers, "Za" if t else "Zn")
        if settings.zo_data == "memory":
            for client in stayers:
                arrivals[client].append(Arrival(start, ()))
    frozen = tuple(tuple(a) for a in arrivals)
    starts = tuple(t * settings.rounds for t in range(len(tasks)))
    growths = tuple(zip(starts, tasks, strict=True))
    named = tuple(tuple(group.get(client, "") for client in range(len(frozen))) for group in groups)
    return Plan(tasks, starts, settings.rounds, frozen, _select(settings, len(tasks), frozen, seed), growths, named)


def equal_tasks(sizes: int | list[int], order: list[int]) -> tuple[tuple[int, ...], ...]:
    """Divides the classes into `sizes` equal tasks, or into tasks of these sizes."""
    count = len(order)
    if isinstance(sizes, int):
        if count % sizes:
            wanted = sizes
            good = sorted((d for d in range(1, count + 1) if count % d == 0), key=lambda d: abs(d - wanted))[:3]
            choice = ", ".join(map(str, sorted(good)))
            raise HoldfastError(f"plan.tasks={sizes} does not divide {count} classes; use {choice}, or a list of sizes")
        sizes = [count // sizes] * sizes
    if sum(sizes) != count:
        raise HoldfastError(f"plan.tasks={sizes} adds up to {sum(sizes)} classes, but there are {count}")
    ends = np.cumsum(sizes)
    return tuple(tuple(order[end - size : end]) for size, end in zip(sizes, ends, strict=True))


def _groups(settings: PlanSettings, present: int, rng: np.random.Generator) -> tuple[list[int], list[int], list[int]]:
    """The clients that move on (Zn), that stay (Zo) and that join (Za, or everybody in the first task)."""
    if not present:
        return [], [], list(range(settings.clients))
    moving = draw(rng, range(present), part(settings.move_on, present))
    staying = sorted(set(range(present)) - set(moving))
    return moving, staying, list(range(present, present + settings.join_per_task))


def part(share: float, whole: int) -> int:
    """floor(share x whole), robust against rounding errors: 0.29 x 100 is 29."""
    return floor(share * whole + 1e-9)


def _join_rounds(settings: PlanSettings, task: int, newcomers: int, rng: np.random.Generator) -> list[int]:
    if settings.join == "task" or task == 0 or not newcomers:
        return [0] * newcomers
    return [int(x) for x in rng.bit_generator.random_raw(newcomers) % np.uint64(settings.rounds)]


def _draw_classes(
    classes: tuple[int, ...], clients: int, settings: PlanSettings, task: int, rng: np.random.Generator
) -> list[tuple[int, ...]]:
    """Each client's classes of a task, drawn without replacement; every class has at least one holder."""
    size = max(1, part(settings.class_share, len(classes)))
    if clients * size < len(classes):
        raise HoldfastError(
            f"in task {task + 1}, {clients} clients with {size} of {len(classes)} classes each cannot hold them all; "
            "raise plan.class_share, plan.move_on, plan.clients or plan.join_per_task"
        )
    keys = rng.bit_generator.random_raw(clients * len(classes)).reshape(clients, len(classes))
    held = np.zeros(keys.shape, dtype=bool)
    np.put_along_axis(held, np.argsort(keys, axis=1, kind="stable")[:, :size], True, axis=1)
    for missing in np.flatnonzero(~held.any(axis=0)):
        _give(held, int(missing), rng)
    return [tuple(classes[c] for c in np.flatnonzero(row)) for row in held]


def _give(held: np.ndarray, missing: int, rng: np.random.Generator) -> None:
    """At a random client, replaces a class that others hold too by the missing one."""
    spare = held & (held.sum(axis=0) > 1)
    client = shuffled(rng, np.flatnonzero(spare.any(axis=1)).tolist())[0]
    given = shuffled(rng, np.flatnonzero(spare[client]).tolist())[0]
    held[client, given], held[client, missing] = False, True


def _split_images(
    drawn: list[tuple[int, ...]], images: Mapping[int, Sequence[int]], alpha: float, seed: int, task: int
) -> list[dict[int, list[int]]]:
    """The images of each client's classes when holders of a class do not share them."""
    holders: dict[int, list[int]] = {}
    for client, classes in enumerate(drawn):
        for c in classes:
            holders.setdefault(c, []).append(client)
    owned: list[dict[int, list[int]]] = [{} for _ in drawn]
    for c, clients in sorted(holders.items()):
        parts = split(list(images[c]), len(clients), alpha, generator(seed, "plan", "images", task, c))
        for client, mine in zip(clients, parts, strict=True):
            owned[client][c] = mine
    return owned


def _select(
    settings: PlanSettings, tasks: int, arrivals: tuple[tuple[Arrival, ...], ...], seed: int
) -> tuple[tuple[int, ...], ...]:
    joined = np.array([a[0].round_index for a in arrivals])
    selected = []
    for round_index in range(tasks * settings.rounds):
        present = np.flatnonzero(joined <= round_index).tolist()
        if settings.select_from == "first_task":
            present = [client for client in present if client < settings.clients]
        if settings.selected > len(present):
            raise HoldfastError(
                f"plan.selected={settings.selected}, but round {round_index + 1} has only {len(present)} clients; "
                "select fewer or raise plan.clients"
            )
        count = settings.selected + settings.over_select
        selected.append(tuple(draw(generator(seed, "plan", "selected", round_index), present, count)))
    return tuple(selected)
