"""The only round loop. It knows roles, never methods."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from holdfast.client.training import ClientWork
from holdfast.protocol.messages import InferenceRequest, Job, Phase, Reply, RoundClosed
from holdfast.proxy.selectors import encoder_bytes
from holdfast.server.clients import Clients
from holdfast.server.evaluation import confusion
from holdfast.server.metrics import Counts
from holdfast.simulation.engine import Engine, ImageGroup
from holdfast.simulation.federation import Federation, SimulatedClients
from holdfast.simulation.scoring import score_detection, score_model


@dataclass(frozen=True)
class Round:
    """What a round leaves behind: a line for the record, and the counts it was made from."""

    line: dict[str, Any]
    counts: Counts


@dataclass
class Bytes:
    """The bytes that the global server sends and receives in a round, by kind. Teachers are not sent again in later
    phases: a round's clients have them."""

    down: int = 0  # jobs
    up: int = 0  # replies
    extras: int = 0
    observed: int = 0  # models to clients that only observe
    task_end: int = 0  # models with which clients choose exemplars
    announced: int = 0


def run_rounds(
    federation: Federation,
    engine: Engine,
    done: Callable[[], None] = lambda: None,
    start: int = 0,
    clients: Clients | None = None,
) -> Iterator[Round]:
    """Runs the plan's rounds one by one from `start` on; `done` is called after every client's work. `clients` are
    the simulated ones unless others are given."""
    work = federation.work()
    reached = clients or SimulatedClients(federation, engine, work)
    for round_index in range(start, federation.plan.rounds):
        yield _run_round(federation, engine, work, reached, round_index, done)


def _run_round(
    federation: Federation,
    engine: Engine,
    work: ClientWork,
    clients: Clients,
    round_index: int,
    done: Callable[[], None],
) -> Round:
    plan, server, selector = federation.plan, federation.server, federation.selector
    selected, present = plan.selected[round_index], np.flatnonzero(plan.joined <= round_index)
    clock, sent = Clock(), Bytes()
    with clock("grow"):
        grown = _grow(federation, clients, round_index, sent)
    with clock("observe"):
        observers = present if federation.detects and federation.observe == "present" else np.asarray(selected)
        broadcast = server.broadcast(round_index, with_model=True)
        noticed = federation.population.noticed.copy()
        opened = clients.open_round(broadcast, selected, observers)
        server.hear(opened.announcements if federation.growth == "announce" else ())
        sent.announced += opened.announced_bytes if federation.growth == "announce" else 0
        sent.observed = broadcast.size * (len(observers) - len(selected))
        detection = score_detection(plan, round_index, opened.observed, opened.alarmed, noticed)
    with clock("begin"):
        if grown:
            _collect_extras(federation, clients, round_index, "begin", sent)
    with clock("train"):
        job, teachers = _job(federation, round_index, "train"), selector.teachers(server.latest_growth)
        replies, shares = clients.train(job, teachers, selected, done)
        sent.down += job.size * len(selected)
        sent.up += sum(reply.size for reply in replies)
    with clock("aggregate"):
        server.aggregate(replies)
    with clock("remember"):
        if plan.ends_task(round_index) and federation.method.keeps_memory:
            ended = server.task_ended(round_index)
            clients.end_task(ended)
            # Who is asked for extras has the model by that job.
            asked = len(selected) if federation.method.collects_extras("finish") else 0
            sent.task_end = ended.size * (len(present) - asked)
    with clock("finish"):
        if plan.ends_task(round_index):
            _collect_extras(federation, clients, round_index, "finish", sent)
        clients.close_round(RoundClosed(round_index), selected)
    with clock("proxy"):
        model = server.global_model(round_index)
        judged = selector.judge(model, shares)
    with clock("evaluate"):
        seen = plan.seen(round_index)
        counts = _evaluate(federation, engine, work, seen)
    line = {
        "round": round_index + 1,
        "task": plan.task_of_round(round_index) + 1,
        "classes_seen": len(seen),
        **score_model(plan, round_index, counts, federation.enrolment.seed),
        "losses": _mean_losses(replies),
        "selected": list(selected),
        "trained": [c for c, reply in zip(selected, replies, strict=True) if reply.weights],
        "grown": list(grown),
        "detector": detection,
        "proxy": judged,
        "bytes": {
            "server": vars(sent),
            "proxy": {
                "encoder": encoder_bytes(selector) * int((plan.joined == round_index).sum()),
                "teachers": teachers.size * len(selected),
                "shares": sum(share.size for share in shares),
                "models": model.size if selector.is_party else 0,
            },
        },
        "seconds": clock.seconds,
    }
    return Round(line, counts)


def _grow(federation: Federation, clients: Clients, round_index: int, sent: Bytes) -> tuple[str, ...]:
    """Grows the head by what the schedule says, or by what clients announced in the round before. As long as the server
    knows no class at all there is nothing to train: it asks for the classes first."""
    server = federation.server
    if federation.growth == "announce":
        if not server.registry.names:
            announcements, sent.announced = clients.announce(server.broadcast(round_index, with_model=False))
            server.hear(announcements)
        return server.grow(server.announced, round_index)
    new = (c for when, classes in federation.plan.growths if when == round_index for c in classes)
    return server.grow([federation.data.classes[c] for c in new], round_index)


def _collect_extras(federation: Federation, clients: Clients, round_index: int, phase: Phase, sent: Bytes) -> None:
    """Asks the round's clients for what the method wants to know beyond their models, if anything, and tells it."""
    method, server, selected = federation.method, federation.server, federation.plan.selected[round_index]
    if not method.collects_extras(phase):
        return
    job = _job(federation, round_index, phase)
    replies = clients.collect_extras(job, federation.selector.teachers(server.latest_growth), selected)
    server.merge(method, replies, round_index)
    sent.down += job.size * len(selected)
    sent.extras += sum(reply.extra_size for reply in replies)


def _job(federation: Federation, round_index: int, phase: Phase) -> Job:
    """The job of a round. A server that is told nothing counts from the last growth, a round after the classes came; it
    knows the first ones at once."""
    plan = federation.plan
    rounds = plan.rounds_of(plan.task_of_round(round_index))
    cycle, since = len(rounds), round_index - rounds.start
    if federation.growth == "announce":
        cycle = max(1, plan.rounds_per_task - (federation.server.last_growth > 0))
        since = min(round_index - federation.server.last_growth, cycle - 1)
    step = 1 / cycle
    return federation.server.job(round_index, phase, since * step, step)


def _evaluate(federation: Federation, engine: Engine, work: ClientWork, seen: Sequence[int]) -> Counts:
    """Confusion counts of the global model over the test images of the seen classes."""
    server, data = federation.server, federation.data
    request = InferenceRequest("scores", server.registry.growths, server.weights)

    def scores(rows: Tensor) -> Tensor:
        return engine.infer(work, request, [ImageGroup("test", rows)])[0]

    counts: Counts = confusion(server.registry, data.test, data.classes, seen, scores).numpy()
    return counts


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
