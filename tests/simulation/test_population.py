"""Many clients at the price of few: what is computed for groups equals what each client would find alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.client.detector import Auto, Observation, Observed
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.methods.herding import herd, quota
from holdfast.simulation.population import Population
from holdfast.simulation.rounds import play
from holdfast.simulation.timeline import Arrival, Timeline

RNG = np.random.Generator(np.random.PCG64(3))


def test_the_timeline_says_who_has_what_and_when_it_is_stored() -> None:
    a, b, none = Arrival(0, (1, 2)), Arrival(4, (2, 3)), Arrival(3, ())
    timeline = Timeline([[a, b], [Arrival(0, (1, 2)), none], [Arrival(2, (5,))]], (0, 3, 6))
    assert timeline.kinds == (a, b, none, Arrival(2, (5,)))  # equal arrivals are one kind
    assert [timeline.current(n).tolist() for n in (0, 2, 3, 4)] == [[0, 0, -1], [0, 0, 0], [0, 1, 0], [1, 1, 0]]
    assert timeline.client[timeline.arriving(0)].tolist() == [0, 1]
    assert timeline.returning.tolist() == [False, True, False, False, False]
    # Stored after round 2 (a task's end) or, when other data comes before that, before that round.
    assert timeline.event.tolist() == [5, 11, 5, 11, 5]
    sooner = Timeline([[Arrival(0, (1,)), Arrival(1, (2,))]], (0, 3))
    assert sooner.event.tolist() == [2, 5]
    clients = np.array([0, 1, 1])
    assert timeline.waiting(clients, np.array([0, 1, 0]), np.array([2, 2, 2])).tolist() == [True, False, True]


@pytest.mark.parametrize("partition", ["shared", "disjoint"])
def test_a_memory_written_out_late_is_the_one_written_at_once(small: dict[str, Any], partition: str) -> None:
    """Against each client's own bookkeeping, task after task."""
    plan = {**small["plan"], "partition": partition}
    config = load_config({**small, "plan": plan, "method": {"name": "fedavg", "replay": True}})
    data = load_data(config.data)
    world = build_federation(config, data, plan_of(config, data)).world
    population = Population(world)
    features = torch.randn(3, len(world.train), 4, generator=torch.Generator().manual_seed(2))
    own: dict[int, dict[int, Tensor]] = {client: {} for client in range(population.timeline.clients)}
    for task in range(3):
        last = world.plan.rounds_of(task)[-1]
        current = population.timeline.current(last)
        population.settle(2 * last + 1, current + 1, lambda rows, t=task: features[t][rows])  # type: ignore[misc]
        for client in world.plan.present(last):
            arrival = world.plan.arrivals[client][current[client]]
            for c in set(arrival.classes) - set(own[client]):
                rows = world.holding(arrival)
                own[client][c] = rows[world.train.labels[rows] == c]
                own[client][c] = own[client][c][herd(features[task][own[client][c]], quota(12, 1))]
    for client, memory in own.items():
        share = quota(12, len(memory))
        found = population.state(client).memory
        assert {c: rows.tolist() for c, rows in found.items()} == {c: r[:share].tolist() for c, r in memory.items()}


def test_a_group_decides_as_each_of_its_clients_would_alone() -> None:
    clients, sights = 40, 5
    together, alone = Auto(), [Auto() for _ in range(clients)]
    images = [RNG.gamma(2.0, 0.3, 60) for _ in range(3 * sights)]
    which = RNG.integers(-1, sights, clients)
    for number in range(14):
        if number in (5, 9):  # some get other images, some have none for a while
            moved = RNG.random(clients) < 0.6
            which = np.where(moved, RNG.integers(-1, sights, clients), which)
        base = 0 if number < 5 else sights if number < 9 else 2 * sights
        seen = [
            Observation(0.0, images[base + i] * RNG.uniform(0.5, 1.5) + 0.05 * RNG.random(60)) for i in range(sights)
        ]
        alarmed = together.notice(number, lambda: Observed(which, seen))  # noqa: B023
        expected = [
            c
            for c in range(clients)
            if len(alone[c].notice(number, lambda: Observed(which[c : c + 1], seen)))  # noqa: B023
        ]
        assert alarmed.tolist() == expected
    assert 0 < len(together.seen) < clients


def test_ten_thousand_clients_have_no_states_of_their_own(small: dict[str, Any]) -> None:
    plan = {**small["plan"], "clients": 10_000, "join_per_task": 500}
    config = load_config({**small, "plan": plan, "method": {"name": "lga", "iterations": 1, "perturb_steps": 1}})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    lines = [done.line for done in play(federation, Serial())]
    population = federation.population
    worked = {client for line in lines for client in line["selected"]}
    assert set(population.states) == worked
    assert sum(len(ranked) for ranked in population.rankings.values()) == len(data.classes)
    idle = next(c for c in range(10_000) if c not in worked)
    held = {c for arrival in federation.world.plan.arrivals[idle] for c in arrival.classes}
    assert set(population.state(idle).memory) == held
    assert len(lines[0]["detector"]["hits"]) == 10_000
