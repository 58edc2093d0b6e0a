"""Many clients at the price of few: what is computed for groups equals what each client would find alone."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.client.detector import CorrelationDetector, History, observation_of
from holdfast.client.memory import quota
from holdfast.config import load_config
from holdfast.data.images import Images, ImageSet
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.methods.herding import herd
from holdfast.simulation.engine import ImageGroup
from holdfast.simulation.plan import Plan
from holdfast.simulation.population import MemoryUpdate, Population
from holdfast.simulation.rounds import run_rounds
from holdfast.simulation.timeline import Arrival, Timeline


def test_the_timeline_says_who_has_what_and_who_is_waiting() -> None:
    a, b, none = Arrival(0, (1, 2)), Arrival(4, (2, 3)), Arrival(3, ())
    timeline = Timeline([[a, b], [Arrival(0, (1, 2)), none], [Arrival(2, (5,))]])
    assert timeline.kinds == (a, b, none, Arrival(2, (5,)))  # equal arrivals are one kind
    assert [timeline.current(n).tolist() for n in (0, 2, 3, 4)] == [[0, 0, -1], [0, 0, 0], [0, 1, 0], [1, 1, 0]]
    assert timeline.client[timeline.arriving(0)].tolist() == [0, 1]
    assert timeline.returning.tolist() == [False, True, False, False, False]
    assert timeline.brings.tolist() == [True, True, True, False, True]
    clients = np.array([0, 1, 1])
    assert timeline.waiting(clients, np.array([0, 1, 0]), np.array([2, 2, 2])).tolist() == [True, False, True]


@pytest.mark.parametrize("method", [{"name": "fedavg", "replay": True}, {"name": "lga", "psr": False}])
def test_data_is_stored_at_a_tasks_end_or_with_the_next_model_once_other_data_has_come(
    small: dict[str, Any], method: dict[str, Any]
) -> None:
    """Clients whose detectors observe get every round's model; of the others, only the selected do."""
    config = load_config({**small, "plan": {**small["plan"], "tasks": 1, "rounds": 3}, "method": method})
    data = load_data(config.data)
    arrivals = (Arrival(0, (0, 1)), Arrival(1, (2, 3)))
    plan = replace(plan_of(config, data), arrivals=(arrivals, arrivals, (Arrival(0, (4, 5)),)), selected=((0,),) * 3)
    federation = build_federation(config, data, plan)
    population = federation.population
    stored = []
    for _ in run_rounds(federation, Serial()):
        stored.append(population.stored.tolist())
    observes = method["name"] == "lga"
    assert stored == [[0, 0, 0], [1, int(observes), 0], [2, 2, 1]]
    early, late, later = MemoryUpdate(1, False, 0), MemoryUpdate(2, True, 0), MemoryUpdate(2, True, 1)
    by = [population.updates[i] for i in population.stored_by]
    assert by == [early, late, *((early, late) if observes else (late, later)), late]
    for client in range(3):
        held = {data.classes[c] for arrival in plan.arrivals[client] for c in arrival.classes}
        assert set(population.state(client).memory) == held


@pytest.mark.parametrize("partition", ["shared", "disjoint"])
def test_a_memory_written_out_late_is_the_one_written_at_once(small: dict[str, Any], partition: str) -> None:
    """Against each client's own bookkeeping, task after task."""
    plan = {**small["plan"], "partition": partition}
    config = load_config({**small, "plan": plan, "method": {"name": "fedavg", "replay": True}})
    data = load_data(config.data)
    drawn, method = plan_of(config, data), config.method
    population = Population(drawn, data.train, data.classes, config.plan.memory, method.exemplars)
    features = torch.randn(3, len(data.train), 4, generator=torch.Generator().manual_seed(2))
    own: dict[int, dict[str, Tensor]] = {client: {} for client in range(population.timeline.clients)}
    for task in range(3):
        last = drawn.rounds_of(task)[-1]
        population.begin_round(last)
        present = np.array(drawn.present(last))

        def found(groups: Sequence[ImageGroup], known: Tensor = features[task]) -> list[Tensor]:
            return [known[group.ids] for group in groups]

        population.update_memories(last, True, present, population.current[present] + 1, found)
        for client in present.tolist():
            arrival = drawn.arrivals[client][population.current[client]]
            for c in arrival.classes:
                rows = data.train.by_class[c]
                if arrival.images is not None:
                    rows = rows[torch.isin(rows, torch.tensor(arrival.images))]
                best = rows[herd(features[task][rows], quota(12, 1))]
                own[client].setdefault(data.classes[c], best)
    assert not population.states
    for client, memory in own.items():
        depth = quota(12, len(memory))
        kept = population.state(client).memory
        assert memory
        assert {c: ids.tolist() for c, ids in kept.items()} == {c: ids[:depth].tolist() for c, ids in memory.items()}


def test_a_group_decides_as_each_of_its_clients_would_alone() -> None:
    """Clients that join later, have no images for a while, hold parts of a class, or are not asked in every round."""
    rng = np.random.Generator(np.random.PCG64(3))
    clients, per_class, classes, rounds = 40, 60, 8, 14
    train = ImageSet(
        Images(torch.zeros(classes * per_class, 3, 1, 1, dtype=torch.uint8)),
        torch.arange(classes).repeat_interleave(per_class),
    )
    part = tuple(range(7 * per_class + 3, 8 * per_class))
    choices = [((0,), None), ((1,), None), ((0, 1), None), ((3, 2), None), ((4,), None), ((), None), ((7,), part)]

    def arrivals_of(client: int) -> tuple[Arrival, ...]:
        moves = [0 if client % 8 else 5, *([7] if client % 3 else []), *([11] if client % 5 else [])]
        return tuple(Arrival(n, *choices[rng.integers(0, len(choices))]) for n in moves)

    arrivals = tuple(map(arrivals_of, range(clients)))
    plan = Plan((), (0,), rounds, arrivals, (), (), ())
    population = Population(plan, train, tuple("abcdefgh"), 0, herd)
    detector, histories = CorrelationDetector(), [()] * clients
    hardness = rng.gamma(2.0, 0.3, len(train))
    levels, noise = rng.uniform(0.5, 1.5, (rounds, classes)), 0.05 * rng.random((rounds, len(train)))
    alarms, passed, seen = 0, 0, 0
    for round_index in range(rounds):
        known = torch.from_numpy(hardness * levels[round_index].repeat(per_class) + noise[round_index])

        def entropies(groups: Sequence[ImageGroup], known: Tensor = known) -> list[Tensor]:
            nonlocal passed
            whole = [group.name for group in groups if group.name != "h"]
            assert len(set(whole)) == len(whole)  # once for all that hold the class
            passed += sum(len(group.ids) for group in groups)
            return [known[group.ids] for group in groups]

        population.begin_round(round_index)
        observers = np.flatnonzero(rng.random(clients) < (0.5 if round_index in (6, 12) else 1.0))
        observed, alarmed = population.observe(detector, observers, entropies)
        expected, looked = [], 0
        for client in observers.tolist():
            current = plan.current(client, round_index)
            arrival = arrivals[client][current]
            if current >= 0 and arrival.classes:
                looked += 1
                rows = torch.cat([train.by_class[c] for c in arrival.classes])
                own = known[rows if arrival.images is None else torch.tensor(arrival.images)].numpy()
                seen += len(own)
                alarm, histories[client] = detector.decide(histories[client], observation_of(own))
                expected += [client] * alarm
        assert alarmed.tolist() == expected
        assert observed == looked
        for client, history in enumerate(histories):
            assert_same(population.histories[population.group[client]], history)
        alarms += len(alarmed)
    assert alarms > clients
    assert passed < seen / 3
    assert 1 < len(population.histories) < clients


def assert_same(one: History, other: History) -> None:
    assert [seen.mean for seen in one] == [seen.mean for seen in other]
    assert all(np.array_equal(a.images, b.images) for a, b in zip(one, other, strict=True))


def test_ten_thousand_clients_have_no_states_of_their_own(small: dict[str, Any]) -> None:
    plan = {**small["plan"], "clients": 10_000, "join_per_task": 500}
    config = load_config({**small, "plan": plan, "method": {"name": "lga", "iterations": 1, "perturb_steps": 1}})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    lines = [done.line for done in run_rounds(federation, Serial())]
    population = federation.population
    worked = {client for line in lines for client in line["selected"]}
    assert set(population.states) == worked
    assert sum(len(ranked) for ranked in population.rankings) == len(data.classes)
    idle = next(c for c in range(10_000) if c not in worked)
    held = {data.classes[c] for arrival in federation.plan.arrivals[idle] for c in arrival.classes}
    assert set(population.state(idle).memory) == held
    assert len(lines[0]["detector"]["hits"]) == 10_000
