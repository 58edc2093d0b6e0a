"""The only round loop. It knows roles, never methods."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor

from holdfast.data.images import ImageSet
from holdfast.engines import Engine
from holdfast.federation.client import ClientWork, observe, remember
from holdfast.federation.local import World
from holdfast.federation.messages import Inbox, Job, PrototypeShare, Reply, State
from holdfast.federation.proxy import Proxy
from holdfast.federation.server import Server
from holdfast.federation.transition import Detector, Observation
from holdfast.results import metrics
from holdfast.results.metrics import Counts
from holdfast.seeding import torch_generator


@dataclass
class Federation:
    """The global server, the proxy, the clients' states, and the world they live in."""

    world: World
    server: Server
    proxy: Proxy
    detector: Detector
    test: ImageSet
    growth: str  # schedule or announce
    weighting: str
    states: dict[int, State] = field(default_factory=dict)
    announced: tuple[str, ...] = ()
    last_growth: int = 0  # the round of it
    changed: set[int] = field(default_factory=set)  # clients whose states are not in a checkpoint yet

    def state(self, client: int) -> State:
        return self.states.get(client) or State(client)

    def store(self, states: Sequence[State]) -> None:
        self.states.update((state.client, state) for state in states)
        self.changed.update(state.client for state in states)


@dataclass(frozen=True)
class Round:
    """What a round leaves behind: a line for the record, and the counts it was made from."""

    line: dict[str, Any]
    counts: Counts


def play(
    federation: Federation, engine: Engine, tick: Callable[[], None] = lambda: None, start: int = 0
) -> Iterator[Round]:
    """Plays the plan's rounds one by one from `start` on; `tick` is called after every client's work."""
    work = ClientWork(federation.world)
    for number in range(start, federation.world.plan.rounds):
        yield _round(federation, engine, work, number, tick)


def _round(federation: Federation, engine: Engine, work: ClientWork, number: int, tick: Callable[[], None]) -> Round:
    plan, server = federation.world.plan, federation.server
    clock = Clock()
    with clock("grow"):
        grown = _grow(federation, number)
    with clock("observe"):
        changed = [client for client, _ in plan.arriving.get(number, [])]
        _remember(federation, changed, {c: plan.current(c, number) for c in changed})
        detection = _detect(federation, number)
    with clock("train"):
        selected = plan.selected[number]
        job = _job(federation, number)
        inbox = Inbox(job, federation.proxy.teachers(server.latest_growth))
        replies: list[Reply] = []
        shares: list[PrototypeShare] = []
        for state, reply, share in engine.map(work, [federation.state(c) for c in selected], [inbox] * len(selected)):
            federation.store([state])
            replies.append(reply)
            shares += share
            tick()
    with clock("aggregate"):
        server.aggregate(replies, federation.weighting)
    with clock("proxy"):
        judged = federation.proxy.judge(number, server.registry.growths, server.weights, shares)
    with clock("remember"):
        if plan.ends_task(number):
            present = plan.present(number)
            _remember(federation, present, {c: plan.current(c, number) + 1 for c in present})
    with clock("evaluate"):
        seen = plan.seen(number)
        world = federation.world
        counts = server.confusion(federation.test, world.transform, world.classes, seen).numpy()
    line = {
        "round": number + 1,
        "task": plan.task_of_round(number) + 1,
        "classes_seen": len(seen),
        **_scores(federation, number, counts),
        "losses": _mean_losses(replies),
        "selected": list(selected),
        "trained": [c for c, reply in zip(selected, replies, strict=True) if reply.weights],
        "grown": list(grown),
        "detector": detection,
        "proxy": judged,
        "bytes": {
            "server": {"down": job.size * len(selected), "up": sum(reply.size for reply in replies)},
            "proxy": {
                "encoder": federation.proxy.welcome(int((plan.joined == number).sum())),
                "teachers": inbox.teachers.size * len(selected),
                "shares": sum(share.size for share in shares),
            },
        },
        "seconds": clock.seconds,
    }
    return Round(line, counts)


def _grow(federation: Federation, number: int) -> tuple[str, ...]:
    """Grows the head by what the schedule says, or by what clients announced in the round before."""
    plan, server, classes = federation.world.plan, federation.server, federation.world.classes
    if federation.growth == "schedule":
        names = server.registry.unknown(classes[c] for when, new in plan.growths if when == number for c in new)
        server.grow(names)
        return names
    names = federation.announced
    server.grow(names)
    if names:
        federation.last_growth = number
    arrived = (classes[c] for _, arrival in plan.arriving.get(number, []) for c in arrival.classes)
    federation.announced = server.registry.unknown(arrived)
    return names


def _detect(federation: Federation, number: int) -> dict[str, Any]:
    """Asks every present client's detector, notes what each has noticed, and compares that with the truth.

    A false alarm changes nothing; what was missed waits for the next alarm, and nothing of it is lost."""
    world, plan, selected = federation.world, federation.world.plan, federation.world.plan.selected[number]
    arrived = {client for client, arrival in plan.arriving.get(number, []) if arrival.classes}
    asked = len(arrived)

    def entropies() -> dict[int, Observation]:
        nonlocal asked
        found = observe(world, plan.present(number), number, partial(_entropies, federation, number))
        asked = len(found)
        return found

    hits, late, false_alarms = [], [], []
    for client in federation.detector.notice(number, entropies):
        state, current = federation.state(client), plan.current(client, number)
        waiting = [arrival for arrival in plan.arrivals[client][state.noticed : current + 1] if arrival.classes]
        if not waiting:
            false_alarms.append(client)
            continue
        if client in arrived:
            hits.append(client)
        late += [[client, number - arrival.round] for arrival in waiting if arrival.round < number]
        # The prototypes of a client that is not selected just now are not asked for again, unless the method does.
        waits = client in selected or world.method.late_shares or state.shared < state.noticed
        shared = state.shared if waits else current + 1
        federation.store([replace(state, noticed=current + 1, shared=shared)])
    misses = sorted(arrived.difference(hits))
    return {"asked": asked, "hits": hits, "misses": misses, "late": late, "false_alarms": false_alarms}


def _entropies(federation: Federation, number: int, rows: Tensor) -> Tensor:
    world = federation.world
    rng = torch_generator(world.seed, "round", number, "observed") if world.method.observes_augmented else None
    return federation.server.entropies(world.train, world.transform, rows, rng)


def _remember(federation: Federation, clients: Sequence[int], upto: dict[int, int]) -> None:
    """Puts what these clients have finished learning into their memories, if the method keeps any."""
    world = federation.world
    behind = [state for state in map(federation.state, clients) if state.stored < upto[state.client]]
    if not world.method.keeps_memory or not behind:
        return

    def features(rows: Tensor) -> Tensor:
        return federation.server.features(world.train, world.transform, rows)

    federation.store(remember(world, behind, upto, features))


def _job(federation: Federation, number: int) -> Job:
    """The job of a round. A server that is told nothing counts from the last growth, a round after the classes came."""
    cycle = federation.world.plan.rounds_per_task
    since = number % cycle
    if federation.growth == "announce":
        cycle = max(1, cycle - 1)
        since = min(number - federation.last_growth, cycle - 1)
    weights = {name: tensor.clone() for name, tensor in federation.server.weights.items()}
    step = 1 / cycle
    return Job(number, since * step, step, federation.server.registry, weights)


def _scores(federation: Federation, number: int, counts: Counts) -> dict[str, Any]:
    plan = federation.world.plan
    sizes = [len(task) for task in plan.tasks[: plan.task_of_round(number) + 1]]
    return {
        "accuracy": metrics.accuracy(counts),
        "macro_f1": metrics.macro_f1(counts),
        "macro_recall": metrics.macro_recall(counts),
        "task_accuracy": metrics.task_accuracy(counts, sizes),
    }


def _mean_losses(replies: Sequence[Reply]) -> dict[str, float]:
    """Each term's mean over the clients that have it."""
    terms: dict[str, list[float]] = {}
    for reply in replies:
        for name, value in reply.losses.items():
            terms.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in terms.items()}


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = perf_counter()
        yield
        self.seconds[phase] = round(perf_counter() - start, 4)
