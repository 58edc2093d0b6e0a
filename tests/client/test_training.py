"""What a client trains on, what it keeps, and what it sends."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.client.training import ClientWork
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of
from holdfast.methods.context import Local, Preset, Training
from holdfast.methods.herding import herd, quota
from holdfast.models.passes import one_pass
from holdfast.protocol.messages import Inbox, State
from holdfast.simulation.population import Population
from holdfast.simulation.rounds import Federation, Round, play
from holdfast.simulation.timeline import Arrival


def federation_of(settings: dict[str, Any], **plan: Any) -> Federation:
    config = load_config({**settings, "plan": {**settings["plan"], **plan}})
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


def with_replay(small: dict[str, Any]) -> dict[str, Any]:
    return {**small, "method": {"name": "fedavg", "replay": True}}


@pytest.mark.parametrize("partition", ["shared", "disjoint", "dirichlet:0.5"])
@pytest.mark.parametrize("join", ["task", "irregular"])
def test_memories_hold_what_was_learned_and_no_more(small: dict[str, Any], partition: str, join: str) -> None:
    federation = federation_of(with_replay(small), partition=partition, join=join)
    plan, train = federation.world.plan, federation.world.train
    before: dict[int, State] = {}
    for number, _ in enumerate(play(federation, Serial())):
        if not plan.ends_task(number):
            continue
        for client in plan.present(number):
            state = federation.population.state(client)
            held = {c for arrival in plan.arrivals[client] if arrival.round <= number for c in arrival.classes}
            assert set(state.memory) == held
            owned = {
                i for a in plan.arrivals[client] if a.round <= number for i in federation.world.holding(a).tolist()
            }
            for c, rows in state.memory.items():
                mine = [i for i in train.by_class[c].tolist() if i in owned]
                assert len(rows) == min(quota(12, len(held)), len(mine))
                assert len(set(rows.tolist())) == len(rows)
                assert set(rows.tolist()) <= set(mine)
                if client in before and c in before[client].memory:
                    assert rows.tolist() == before[client].memory[c].tolist()[: len(rows)]  # only the tail goes
        before = {client: federation.population.state(client) for client in plan.present(number)}
    assert len(before) == len(plan.arrivals)


def test_exemplars_are_herded_under_the_model_of_the_finished_task(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small), tasks=1, clients=3)
    for _ in play(federation, Serial()):
        pass
    world, state = federation.world, federation.population.state(0)
    model = federation.server.model
    for c, rows in state.memory.items():
        features = one_pass(
            model, world.train, world.transform, world.train.by_class[c], lambda pixels: model(pixels).features
        )
        best = world.train.by_class[c][herd(features, quota(12, len(state.memory)))]
        assert rows.tolist() == best.tolist()


def test_features_are_asked_once_for_the_distinct_images(small: dict[str, Any]) -> None:
    population = federation_of(with_replay(small)).population
    asked: list[Tensor] = []

    def features(rows: Tensor) -> Tensor:
        asked.append(rows)
        return torch.randn(len(rows), 4, generator=torch.Generator().manual_seed(0))

    population.settle(3, population.timeline.current(1) + 1, features)
    assert len(asked) == 1
    assert len(asked[0].unique()) == len(asked[0])
    states = [population.state(client) for client in range(5)]
    assert all(state.stored == 1 and state.memory for state in states)


def test_a_class_met_again_competes_with_its_old_exemplars(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small))
    first, second = (tuple(federation.world.train.by_class[0][part].tolist()) for part in (slice(0, 4), slice(4, 12)))
    arrivals = (Arrival(0, (0,), first), Arrival(2, (0,), second))
    world = replace(federation.world, plan=replace(federation.world.plan, arrivals=(arrivals,)))

    def features(rows: Tensor) -> Tensor:
        return torch.randn(len(world.train), 4, generator=torch.Generator().manual_seed(1))[rows]

    population = Population(world)
    assert population.timeline.event.tolist() == [3, 7]
    population.settle(3, np.array([1]), features)
    assert sorted(population.state(0).memory[0].tolist()) == sorted(first)
    assert not population.states  # nothing is written out until somebody needs it
    population.settle(7, np.array([2]), features)
    assert sorted(population.state(0).memory[0].tolist()) == sorted(first + second)
    assert population.state(0).stored == 2


def test_memory_may_be_zero(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small), memory=0)
    rounds = list(play(federation, Serial()))
    states = [federation.population.state(client) for client in range(len(federation.world.plan.arrivals))]
    assert all(not len(rows) for state in states for rows in state.memory.values())
    assert State.from_bytes(states[0].to_bytes()).stored == states[0].stored == len(federation.world.plan.arrivals[0])
    assert len(rounds) == 6


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("zo_data", ["memory", "last_task"])
def test_stayers_train_on_memory_on_their_last_data_or_not_at_all(
    small: dict[str, Any], zo_data: str, replay: bool
) -> None:
    settings = {**small, "method": {"name": "fedavg", "replay": replay}}
    federation = federation_of(settings, zo_data=zo_data, selected=5, rounds=1, join_per_task=0, move_on=0.6)
    plan = federation.world.plan
    rounds: list[Round] = list(play(federation, Serial()))
    for number in range(1, 3):
        stayers = [c for c in plan.selected[number] if plan.groups[number][c] == "Zo"]
        assert stayers
        for client in stayers:
            assert (client in rounds[number].line["trained"]) == (replay or zo_data == "last_task")


def local_of(federation: Federation, client: int, number: int, state: State) -> Local:
    from holdfast.simulation.rounds import _job

    work = ClientWork(federation.world)
    return Local(
        federation.world, state, Inbox(_job(federation, number, "train")), federation.server.model, work._frozen
    )


def test_data_and_memory_do_not_overlap_and_unknown_classes_are_left_out(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small))
    world = federation.world
    client = 0
    classes = world.plan.arrivals[client][0].classes
    assert len(classes) == 1  # floor(0.6 x 2)
    rows = {c: world.train.by_class[c][:3].int() for c in range(6)}
    federation.server.grow(tuple(world.classes[c] for c in range(4)))
    local = local_of(federation, client, 0, State(client, rows))
    assert local.data.tolist() == world.train.by_class[classes[0]].tolist()
    kept = set(world.train.labels[local.memory].tolist())
    assert kept == {0, 1, 2, 3} - set(classes)  # 4 and 5 are not known to the head; its own class is in its data
    empty = federation_of(with_replay(small), growth="announce")
    assert len(local_of(empty, client, 0, State(client)).everything) == 0


def test_a_client_knows_whether_it_has_exemplars_of_old_and_of_new_classes(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small))
    world = federation.world
    federation.server.grow(tuple(world.classes[c] for c in (0, 1)))
    federation.server.grow(tuple(world.classes[c] for c in (2, 3)))
    rows = {c: world.train.by_class[c][:3].int() for c in range(6)}

    def both(*classes: int) -> bool:
        return local_of(federation, 0, 0, State(0, {c: rows[c] for c in classes})).has_old_and_new

    assert both(0, 3)
    assert not any((both(), both(0, 1), both(2, 3), both(2, 5)))  # 5 is not known to the head


def test_batches_cover_everything_once_and_label_by_head_position(small: dict[str, Any]) -> None:
    federation = federation_of(small, class_share=1.0)
    world = federation.world
    federation.server.grow((world.classes[1], world.classes[0]))  # not the data set's order
    local = local_of(federation, 0, 0, State(0))
    batches = list(local.batches(local.data, epoch=0))
    rows = torch.cat([batch.rows for batch in batches])
    assert sorted(rows.tolist()) == sorted(local.data.tolist())
    assert [len(batch.rows) for batch in batches] == [16, 8]
    labels = torch.cat([batch.labels for batch in batches])
    assert torch.equal(labels, 1 - world.train.labels[rows])
    again = torch.cat([batch.rows for batch in local.batches(local.data, epoch=1)])
    assert not torch.equal(rows, again)


def test_learning_rate_is_a_function_of_the_tasks_progress() -> None:
    steps = Training(1, 1, Preset(2.0, 0.0, 0.0, "steps", (0.5, 0.75, 0.9), 0.2))
    rates = [steps.rate(p) for p in (0.0, 0.49, 0.5, 0.74, 0.75, 0.9, 0.99)]
    assert rates == pytest.approx([2.0, 2.0, 0.4, 0.4, 0.08, 0.016, 0.016])
    cosine = Training(1, 1, Preset(0.1, 0.9, 0.0, "cosine"))
    assert [cosine.rate(p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.1, 0.05, 0.0])
    assert cosine.rate(0.25) == pytest.approx(0.05 * (1 + math.sqrt(0.5)))


def test_a_loss_that_is_not_finite_stops_with_client_round_and_advice(small: dict[str, Any]) -> None:
    federation = federation_of({**small, "train": {**small["train"], "lr": 100.0, "epochs": 5}})
    with pytest.raises(
        HoldfastError, match=r"the loss of client \d+ is no longer finite in round \d+; lower train\.lr"
    ):
        list(play(federation, Serial()))


@pytest.mark.parametrize("images", [1, 2])
def test_clients_with_one_image_train(small: dict[str, Any], images: int) -> None:
    settings = {**small, "data": {**small["data"], "train_per_class": images}}
    rounds = list(play(federation_of(with_replay(settings), partition="disjoint"), Serial()))
    assert all(math.isfinite(value) for played in rounds for value in played.line["losses"].values())
