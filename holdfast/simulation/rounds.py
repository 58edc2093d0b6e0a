"""The only round loop. It knows roles, never methods."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from holdfast.client.training import ClientWork
from holdfast.methods.base import Method
from holdfast.protocol.checks import Refusal
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.messages import InferenceRequest, Job, Phase, Reply, RoundClosed, Teachers
from holdfast.proxy.selectors import TeacherSelector, encoder_bytes
from holdfast.server.clients import Answers, Clients, Opened, Shares
from holdfast.server.collection import Collection, Quorum, collect, require_update
from holdfast.server.evaluation import confusion
from holdfast.server.metrics import Counts, accuracy
from holdfast.server.server import Server
from holdfast.simulation.engine import Engine, ImageGroup
from holdfast.simulation.faults import Faults, FaultyClients
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
    if federation.faults is not None:
        reached = FaultyClients(reached, federation.faults)
    truth = Truth(federation, engine, work)
    for round_index in range(start, federation.plan.rounds):
        yield run_round(federation, reached, truth, round_index, done)


class Schedule(Protocol):
    """What the loop asks of a plan."""

    @property
    def joined(self) -> np.ndarray: ...

    @property
    def selected(self) -> Sequence[Sequence[int]]: ...

    @property
    def growths(self) -> Sequence[tuple[int, Sequence[int]]]: ...

    @property
    def rounds_per_task(self) -> int: ...

    def ends_task(self, round_index: int) -> bool: ...

    def task_of_round(self, round_index: int) -> int: ...

    def rounds_of(self, task: int) -> range: ...


class Parties(Protocol):
    """The server's side of a federation, whoever its clients are."""

    @property
    def plan(self) -> Schedule: ...

    @property
    def classes(self) -> Sequence[str]: ...

    @property
    def method(self) -> Method: ...

    @property
    def enrolment(self) -> Enrolment: ...

    @property
    def server(self) -> Server: ...

    @property
    def selector(self) -> TeacherSelector: ...

    @property
    def growth(self) -> str: ...

    @property
    def observe(self) -> str: ...

    @property
    def detects(self) -> bool: ...

    @property
    def quorum(self) -> Quorum: ...

    @property
    def faults(self) -> Faults | None: ...


class Scoring(Protocol):
    """What the record says of a round beyond what the server does in it."""

    def start(self) -> None:
        """A round begins, and nobody has been told yet."""
        ...

    def detection(self, round_index: int, opened: Opened) -> dict[str, Any]:
        """Who noticed new classes."""
        ...

    def model(self, round_index: int) -> tuple[dict[str, Any], Counts]:
        """The figures of the round's global model, and the counts they come from."""
        ...


@dataclass
class Truth:
    """A simulation knows everything: its plan, and the test images."""

    federation: Federation
    engine: Engine
    work: ClientWork

    def start(self) -> None:
        self._noticed = self.federation.population.noticed.copy()

    def detection(self, round_index: int, opened: Opened) -> dict[str, Any]:
        return score_detection(self.federation.plan, round_index, opened.observed, opened.alarmed, self._noticed)

    def model(self, round_index: int) -> tuple[dict[str, Any], Counts]:
        federation, plan = self.federation, self.federation.plan
        seen = plan.seen(round_index)
        counts = _evaluate(federation, self.engine, self.work, seen)
        figures = {"classes_seen": len(seen), **score_model(plan, round_index, counts, federation.enrolment.seed)}
        if plan.ends_task(round_index) and federation.method.answer_names:
            figures["answers"] = _answers(federation, self.engine, self.work, seen)
        return figures, counts


def run_round(
    federation: Parties, clients: Clients, scoring: Scoring, round_index: int, done: Callable[[], None]
) -> Round:
    """One round of the server with its clients, simulated or real."""
    plan, server, selector = federation.plan, federation.server, federation.selector
    selected, present = plan.selected[round_index], np.flatnonzero(plan.joined <= round_index)
    clock, sent = Clock(), Bytes()
    refused: list[Refusal] = []
    with clock("grow"):
        grown = _grow(federation, clients, round_index, sent)
    with clock("observe"):
        observers = present if federation.detects and federation.observe == "present" else np.asarray(selected)
        broadcast = server.broadcast(round_index, with_model=True)
        scoring.start()
        opened = clients.open_round(broadcast, selected, observers)
        sent.observed = broadcast.size * (len(observers) - len(selected))
    with clock("begin"):
        if grown:
            refused += _collect_extras(federation, clients, round_index, "begin", sent, clock)
    with clock("check"):
        job, teachers = _job(federation, round_index, "train"), selector.teachers(server.latest_growth)
        found, shares = _train(federation, clients, job, teachers, done, sent, clock)
        refused += found.refused
        replies = found.usable if len(found.replies) >= federation.quorum.least else []
        trained = [client for client, reply in replies if reply.weights]
        # Only now, because real sites announce with their replies.
        server.hear(opened.announcements if federation.growth == "announce" else ())
        sent.announced += opened.announced_bytes if federation.growth == "announce" else 0
        detection = scoring.detection(round_index, opened)
    with clock("aggregate"):
        require_update(found, any(reply.weights for _, reply in found.usable), "update", round_index)
        outliers = server.aggregate(replies)
        refused += outliers
        left_out = {one.client for one in outliers if one.kind == "outlier"}
    with clock("remember"):
        if plan.ends_task(round_index) and federation.method.keeps_memory:
            ended = server.task_ended(round_index)
            clients.end_task(ended)
            # Who is asked for extras has the model by that job.
            asked = len(selected) if federation.method.collects_extras("finish") else 0
            sent.task_end = ended.size * (len(present) - asked)
    with clock("finish"):
        if plan.ends_task(round_index):
            refused += _collect_extras(federation, clients, round_index, "finish", sent, clock)
        with clock("check"):
            server.require_finite(round_index)
        clients.close_round(RoundClosed(round_index), selected)
    with clock("proxy"):
        model = server.global_model(round_index)
        with clock("check"):
            admitted, refused_shares = selector.admit(model.growths, shares)
        judged = selector.judge(model, admitted)
        if refused_shares:
            judged["refused"] = judged.get("refused", 0) + len(refused_shares)
    with clock("evaluate"):
        figures, counts = scoring.model(round_index)
    line = {
        "round": round_index + 1,
        "task": plan.task_of_round(round_index) + 1,
        **figures,
        "losses": _mean_losses([reply for _, reply in replies]),
        "selected": list(selected),
        "trained": [c for c in trained if c not in left_out],
        "refused": [one.to_json() for one in (*refused, *refused_shares)],
        "missing": found.missing,
        "attempts": found.attempts,
        "grown": list(grown),
        "detector": detection,
        "proxy": judged,
        "bytes": {
            "server": vars(sent),
            "proxy": {
                "encoder": encoder_bytes(selector) * int((plan.joined == round_index).sum()),
                "teachers": teachers.size * len(selected),
                "shares": sum(share.size for _, share in shares),
                "models": model.size if selector.is_party else 0,
            },
        },
        "seconds": clock.seconds,
    }
    if federation.faults is not None:
        line["faults"] = sorted(federation.faults.happened)
    return Round(line, counts)


def _grow(federation: Parties, clients: Clients, round_index: int, sent: Bytes) -> tuple[str, ...]:
    """Grows the head by what the schedule says, or by what clients announced in the round before. As long as the server
    knows no class at all there is nothing to train: it asks for the classes first."""
    server = federation.server
    if federation.growth == "announce":
        if not server.registry.names:
            announcements, sent.announced = clients.announce(server.broadcast(round_index, with_model=False))
            server.hear(announcements)
        return server.grow(server.announced, round_index)
    new = (c for when, classes in federation.plan.growths if when == round_index for c in classes)
    return server.grow([federation.classes[c] for c in new], round_index)


def _train(
    federation: Parties,
    clients: Clients,
    job: Job,
    teachers: Teachers,
    done: Callable[[], None],
    sent: Bytes,
    clock: "Clock",
) -> tuple[Collection, Shares]:
    """The checked replies to a job, and what clients sent the proxy beside them."""
    shares: Shares = []
    tick = done

    def ask(waiting: Sequence[int]) -> Answers:
        nonlocal tick
        with clock("train"):
            answers, more = clients.train(job, teachers, waiting, tick)
        tick = _nothing  # a client that is asked again has been counted
        shares.extend(more)
        sent.down += job.size * len(waiting)
        sent.up += sum(answer.size for _, answer in answers)
        return answers

    return _collected(federation, job, ask), shares


def _collect_extras(
    federation: Parties, clients: Clients, round_index: int, phase: Phase, sent: Bytes, clock: "Clock"
) -> list[Refusal]:
    """Asks the round's clients for what the method wants to know beyond their models, if anything, and tells it;
    returns what could not be used."""
    method, server = federation.method, federation.server
    if not method.collects_extras(phase):
        return []
    job, teachers = _job(federation, round_index, phase), federation.selector.teachers(server.latest_growth)

    def ask(waiting: Sequence[int]) -> Answers:
        with clock(phase):
            answers = clients.collect_extras(job, teachers, waiting)
        sent.down += job.size * len(waiting)
        sent.extras += sum(answer.extra_size for _, answer in answers if isinstance(answer, Reply))
        return answers

    with clock("check"):
        found = _collected(federation, job, ask)
    require_update(found, bool(found.replies), f"extras ({phase} phase)", round_index)
    server.merge(method, [reply for _, reply in found.usable], round_index)
    return found.refused


def _collected(federation: Parties, job: Job, ask: Callable[[Sequence[int]], Answers]) -> Collection:
    most = federation.enrolment.max_samples
    check = federation.server.check(federation.method, job.round_index, job.phase, most)
    return collect(ask, federation.plan.selected[job.round_index], check, federation.quorum)


def _nothing() -> None:
    pass


def _job(federation: Parties, round_index: int, phase: Phase) -> Job:
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


def _answers(federation: Federation, engine: Engine, work: ClientWork, seen: Sequence[int]) -> dict[str, float]:
    """The accuracy by every answer that the method's model can give."""
    names, server, data = federation.method.answer_names, federation.server, federation.data
    request = InferenceRequest("answers", server.registry.growths, server.weights)
    rows = torch.cat([data.test.by_class[c] for c in seen])
    scores = engine.infer(work, request, [ImageGroup("test", rows)])[0].unbind(dim=1)

    def correct(answer: Tensor) -> float:
        return accuracy(confusion(server.registry, data.test, data.classes, seen, lambda _: answer).numpy())

    return {name: correct(answer) for name, answer in zip(names, scores, strict=True)}


def _mean_losses(replies: Sequence[Reply]) -> dict[str, float]:
    """Each term's mean over the clients that have it."""
    terms: dict[str, list[float]] = {}
    for reply in replies:
        for name, value in reply.losses.items():
            terms.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in terms.items()}


class Clock:
    """Seconds by phase. Those of a phase within another count for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = [0.0]  # what inner phases have taken, by depth

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._within.append(0.0)
        start = perf_counter()
        yield
        taken = perf_counter() - start
        own = taken - self._within.pop()
        self._within[-1] += taken
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + own, 4)
