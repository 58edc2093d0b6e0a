"""The plan of a federation whose data determines who holds what, and possibly when it arrives."""

from holdfast.data.images import DataSet, Stream
from holdfast.errors import HoldfastError
from holdfast.seeding import draw, generator
from holdfast.simulation.class_order import class_order
from holdfast.simulation.plan import Plan, equal_tasks
from holdfast.simulation.settings import PlanSettings
from holdfast.simulation.timeline import Arrival

Tasks = tuple[tuple[int, ...], ...]


def plan_of_folders(settings: PlanSettings, data: DataSet, seed: int) -> Plan:
    """Clients hold what their folders hold, and join with their first data. With a stream, a task begins whenever a
    class arrives that no client has had before. Without one, the settings define the tasks, and each task brings every
    client its images of the task's classes. While fewer clients are present than should be selected, all are
    selected."""
    owned = _owned(data)
    tasks, starts, rounds, comings = (
        _of_stream(settings, data, data.stream, owned) if data.stream else _of_schedule(settings, data, owned)
    )
    arrivals = []
    for client, name in enumerate(data.clients):
        mine = [
            Arrival(round_index, classes, tuple(sorted(i for c in classes for i in owned[client][c])), new)
            for round_index, classes, new in comings[client]
        ]
        if not mine or not mine[0].classes:
            raise HoldfastError(f"client {name!r} has no images of the classes that are used; remove its folder")
        arrivals.append(tuple(mine))
    joined = [mine[0].round_index for mine in arrivals]
    if min(joined) > 0:
        raise HoldfastError(f"nobody has data before round {min(joined) + 1}; let something arrive in round 1")
    groups = tuple(
        tuple(_group(mine, start, end) for mine in arrivals)
        for start, end in zip(starts, (*starts[1:], rounds), strict=True)
    )
    selected = []
    for round_index in range(rounds):
        present = [client for client, since in enumerate(joined) if since <= round_index]
        count = min(settings.selected + settings.over_select, len(present))
        selected.append(tuple(draw(generator(seed, "plan", "selected", round_index), present, count)))
    growths = tuple(zip(starts, tasks, strict=True))
    return Plan(tasks, starts, settings.rounds, tuple(arrivals), tuple(selected), growths, groups)


def _owned(data: DataSet) -> list[dict[int, list[int]]]:
    """The training images that each client has of each class."""
    assert data.train.owners is not None
    owned: list[dict[int, list[int]]] = [{} for _ in data.clients]
    for row, (client, label) in enumerate(zip(data.train.owners.tolist(), data.train.labels.tolist(), strict=True)):
        owned[client].setdefault(label, []).append(row)
    return owned


Classes = tuple[int, ...]
# Per client, in time order: the round, its data's classes from then on, and which of them are new (None: all).
Comings = list[list[tuple[int, Classes, Classes | None]]]


def _of_schedule(
    settings: PlanSettings, data: DataSet, owned: list[dict[int, list[int]]]
) -> tuple[Tasks, tuple[int, ...], int, Comings]:
    tasks = equal_tasks(settings.tasks, class_order(settings.order, data.classes))
    starts = tuple(t * settings.rounds for t in range(len(tasks)))
    comings: Comings = [[] for _ in data.clients]
    for start, classes in zip(starts, tasks, strict=True):
        for client, mine in enumerate(owned):
            now = tuple(c for c in classes if c in mine)
            if now or (comings[client] and settings.zo_data == "memory"):
                comings[client].append((start, now, None))
    return tasks, starts, len(tasks) * settings.rounds, comings


def _of_stream(
    settings: PlanSettings, data: DataSet, stream: Stream, owned: list[dict[int, list[int]]]
) -> tuple[Tasks, tuple[int, ...], int, Comings]:
    index = {name: c for c, name in enumerate(data.classes)}  # data.classes may leave some classes out
    comings: Comings = [[] for _ in data.clients]
    born: dict[int, list[int]] = {}
    seen: set[int] = set()
    for round_index, client, names, leaves in stream.arrivals:
        known = (index[name] for name in names if name in index)
        gone = {index[name] for name in leaves if name in index}
        before = comings[client][-1][1] if comings[client] else ()
        kept = tuple(c for c in before if c not in gone)
        new = tuple(c for c in known if c in owned[client] and c not in kept)  # some may have no images left
        if not new and kept == before:
            continue
        comings[client].append((round_index, (*kept, *new), new if kept else None))
        born.setdefault(round_index, []).extend(c for c in new if c not in seen)
        seen.update(new)
    tasks = {round_index: tuple(dict.fromkeys(new)) for round_index, new in born.items() if new}
    starts = tuple(sorted(tasks))
    rounds = stream.rounds or starts[-1] + settings.rounds
    last = max(round_index for round_index, *_ in stream.arrivals)
    return tuple(tasks[start] for start in starts), starts, max(rounds, last + 1), comings


def _group(arrivals: tuple[Arrival, ...], start: int, end: int) -> str:
    """A client's group in a task: it joins (Za; in the first task Zn), moves on to new data (Zn) or stays (Zo)."""
    first = arrivals[0].round_index
    if first >= end:
        return ""
    if first >= start:
        return "Za" if start else "Zn"
    return "Zn" if any(start <= a.round_index < end and a.brought for a in arrivals) else "Zo"
