"""The only round loop. It knows roles, never methods."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.client.detector import Detector, Observed
from holdfast.client.training import ClientWork
from holdfast.engines import Engine
from holdfast.methods.context import World
from holdfast.models.passes import Question
from holdfast.protocol.messages import Inbox, Job, Moment, PrototypeShare, Reply
from holdfast.proxy.selectors import Proxy, encoder_bytes
from holdfast.seeding import generator
from holdfast.server import metrics
from holdfast.server.metrics import Counts
from holdfast.server.server import Server
from holdfast.simulation.population import Population


@dataclass
class Federation:
    """The global server, the proxy, the clients, and the world they live in."""

    world: World
    server: Server
    proxy: Proxy
    detector: Detector
    population: Population
    growth: str  # schedule or announce
    weighting: str
    announced: tuple[str, ...] = ()
    last_growth: int = 0  # the round of it


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
    plan, server, population = federation.world.plan, federation.server, federation.population
    clock = Clock()

    def ask(what: str, rows: Tensor) -> Tensor:
        """Asks the global model as it is now."""
        augmented = what == "entropies" and federation.world.method.observes_augmented
        chance = ("round", number, "observed") if augmented else ()
        return engine.ask(work, Question(what, server.registry.growths, server.weights, chance), rows)

    with clock("grow"):
        grown = _grow(federation, number)
    with clock("observe"):
        _settle(federation, number, ask, over=False)
        detection = _detect(federation, number, partial(ask, "entropies"))
    with clock("begin"):
        visits = _visit(federation, engine, work, number, "begin") if grown else Sent()
    with clock("train"):
        selected = plan.selected[number]
        job, inbox = _messages(federation, number, "train")
        replies: list[Reply] = []
        shares: list[PrototypeShare] = []
        for state, reply, share in engine.map(work, [population.state(c) for c in selected], [inbox] * len(selected)):
            population.store(state)
            replies.append(reply)
            shares += share
            tick()
    with clock("aggregate"):
        server.aggregate(replies, federation.weighting)
    with clock("remember"):
        if plan.ends_task(number):
            _settle(federation, number, ask, over=True)
    with clock("finish"):
        if plan.ends_task(number):
            visits += _visit(federation, engine, work, number, "finish")
    with clock("proxy"):
        judged = federation.proxy.judge(number, server.registry.growths, server.weights, shares)
    with clock("evaluate"):
        seen = plan.seen(number)
        world = federation.world
        counts = server.confusion(world.test, world.classes, seen, partial(ask, "scores")).numpy()
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
            "server": {
                "down": job.size * len(selected) + visits.down,
                "up": sum(reply.size for reply in replies),
                "extras": visits.extras,
            },
            "proxy": {
                "encoder": encoder_bytes(federation.proxy) * int((plan.joined == number).sum()),
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
    timeline = plan.timeline
    kinds = dict.fromkeys(timeline.kind[timeline.arriving(number)].tolist())  # each once, in the order of the clients
    federation.announced = server.registry.unknown(classes[c] for kind in kinds for c in timeline.kinds[kind].classes)
    return names


def _detect(federation: Federation, number: int, entropies: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Asks every present client's detector, notes what each has noticed, and compares that with the truth.

    A false alarm changes nothing; what was missed waits for the next alarm, and nothing of it is lost."""
    world, population, timeline = federation.world, federation.population, federation.world.plan.timeline
    arrivals = timeline.arriving(number)
    arrived = timeline.client[arrivals[timeline.brings[arrivals]]]
    asked = len(arrived)

    def observe() -> Observed:
        nonlocal asked
        observed = population.observe(number, entropies)
        asked = int((observed.which >= 0).sum())
        return observed

    alarmed = federation.detector.notice(number, observe)
    upto = timeline.current(number)[alarmed] + 1
    before = population.noticed[alarmed]
    waited = timeline.waiting(alarmed, before, upto)
    noticed, upto, before = alarmed[waited], upto[waited], before[waited]
    # The prototypes of a client that is not selected just now are not asked for again, unless the method does.
    given_up = ~np.isin(noticed, world.plan.selected[number]) & (population.shared[noticed] >= before)
    if not world.method.late_shares:
        population.shared[noticed[given_up]] = upto[given_up]
    population.noticed[noticed] = upto
    late = [
        [client, number - arrival.round]
        for client, start, end in _longer(noticed, before, upto, arrived)
        for arrival in world.plan.arrivals[client][start:end]
        if arrival.classes and arrival.round < number
    ]
    return {
        "asked": asked,
        "hits": np.intersect1d(noticed, arrived).tolist(),
        "misses": np.setdiff1d(arrived, noticed).tolist(),
        "late": late,
        "false_alarms": alarmed[~waited].tolist(),
    }


def _longer(noticed: np.ndarray, start: np.ndarray, end: np.ndarray, arrived: np.ndarray) -> list[list[int]]:
    """Client, start and end of those who have noticed more than what came in this round."""
    more = (end - start > 1) | ~np.isin(noticed, arrived)
    rows: list[list[int]] = np.stack([noticed[more], start[more], end[more]], axis=1).tolist()
    return rows


def _settle(federation: Federation, number: int, ask: Callable[[str, Tensor], Tensor], over: bool) -> None:
    """Puts what clients have finished learning into their memories, if the method keeps any: what other data has taken
    the place of, or, when a task is over, everything."""
    if federation.world.method.keeps_memory:
        current = federation.world.plan.timeline.current(number)
        federation.population.settle(2 * number + over, current + over, partial(ask, "features"))


@dataclass(frozen=True)
class Sent:
    """The bytes of visits. Teachers are not sent again: a round's clients have them."""

    down: int = 0
    extras: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.down + other.down, self.extras + other.extras)


def _visit(federation: Federation, engine: Engine, work: ClientWork, number: int, moment: Moment) -> Sent:
    """Asks the round's clients for what the method wants to know beyond their models, if anything, and tells it."""
    method, population = federation.world.method, federation.population
    if not method.visits(moment):
        return Sent()
    selected = federation.world.plan.selected[number]
    job, inbox = _messages(federation, number, moment)
    outcomes = engine.map(work, [population.state(c) for c in selected], [inbox] * len(selected))
    replies = [reply for _, reply, _ in outcomes]
    extras = [reply.extras for reply in replies if reply.extras]
    method.merge(federation.server.model, extras, federation.world.seed, number)
    return Sent(job.size * len(selected), sum(reply.extra_size for reply in replies))


def _messages(federation: Federation, number: int, moment: Moment) -> tuple[Job, Inbox]:
    job = _job(federation, number, moment)
    return job, Inbox(job, federation.proxy.teachers(federation.server.latest_growth))


def _job(federation: Federation, number: int, moment: Moment) -> Job:
    """The job of a round. A server that is told nothing counts from the last growth, a round after the classes came."""
    plan = federation.world.plan
    rounds = plan.rounds_of(plan.task_of_round(number))
    cycle, since = len(rounds), number - rounds.start
    if federation.growth == "announce":
        cycle = max(1, plan.rounds_per_task - 1)
        since = min(number - federation.last_growth, cycle - 1)
    weights = {name: tensor.clone() for name, tensor in federation.server.weights.items()}
    step = 1 / cycle
    return Job(number, since * step, step, federation.server.registry, weights, moment)


def _scores(federation: Federation, number: int, counts: Counts) -> dict[str, Any]:
    plan = federation.world.plan
    sizes = [len(task) for task in plan.tasks[: plan.task_of_round(number) + 1]]
    return {
        "accuracy": metrics.accuracy(counts),
        "macro_f1": metrics.macro_f1(counts),
        "macro_recall": metrics.macro_recall(counts),
        "batchwise128": metrics.batchwise(counts, generator(federation.world.seed, "batchwise", number)),
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
