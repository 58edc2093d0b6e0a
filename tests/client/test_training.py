"""What a client trains on, what it keeps, and what it sends."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.client.memory import quota
from holdfast.client.training import attempt
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of
from holdfast.methods.context import ClientContext
from holdfast.methods.herding import herd
from holdfast.models.passes import in_chunks
from holdfast.protocol.enrolment import Preset, Training
from holdfast.protocol.messages import Failure, Inbox
from holdfast.protocol.state import ClientState, Holdings
from holdfast.simulation.engine import ImageGroup
from holdfast.simulation.federation import Federation
from holdfast.simulation.population import MemoryUpdate
from holdfast.simulation.rounds import Round, _job, run_rounds
from holdfast.simulation.timeline import Arrival


def federation_of(settings: dict[str, Any], **plan: Any) -> Federation:
    config = load_config({**settings, "plan": {**settings["plan"], **plan}})
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


def with_replay(small: dict[str, Any]) -> dict[str, Any]:
    return {**small, "method": {"name": "fedavg", "replay": True}}


def owned_rows(federation: Federation, client: int, round_index: int) -> dict[str, list[int]]:
    """All images that a client has ever had by this round, by class name."""
    data, rows = federation.data, set()
    for arrival in federation.plan.arrivals[client]:
        if arrival.round_index <= round_index:
            everything = (i for c in arrival.classes for i in data.train.by_class[c].tolist())
            rows |= set(everything if arrival.images is None else arrival.images)
    return {name: [i for i in data.train.by_class[c].tolist() if i in rows] for c, name in enumerate(data.classes)}


@pytest.mark.parametrize("partition", ["shared", "disjoint", "dirichlet:0.5"])
@pytest.mark.parametrize("join", ["task", "irregular"])
def test_memories_hold_what_was_learned_and_no_more(small: dict[str, Any], partition: str, join: str) -> None:
    federation = federation_of(with_replay(small), partition=partition, join=join)
    plan = federation.plan
    before: dict[int, ClientState] = {}
    for round_index, _ in enumerate(run_rounds(federation, Serial())):
        if not plan.ends_task(round_index):
            continue
        for client in plan.present(round_index):
            state = federation.population.state(client)
            held = {federation.data.classes[c] for c in plan.held(client, round_index)}
            assert set(state.memory) == held
            owned = owned_rows(federation, client, round_index)
            for name, rows in state.memory.items():
                mine = owned[name]
                assert len(rows) == min(quota(12, len(held)), len(mine))
                assert len(set(rows.tolist())) == len(rows)
                assert set(rows.tolist()) <= set(mine)
                if client in before and name in before[client].memory:
                    assert rows.tolist() == before[client].memory[name].tolist()[: len(rows)]  # only the tail goes
        before = {client: federation.population.state(client) for client in plan.present(round_index)}
    assert len(before) == len(plan.arrivals)


def test_exemplars_are_herded_under_the_model_of_the_finished_task(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small), tasks=1, clients=3)
    for _ in run_rounds(federation, Serial()):
        pass
    train, state = federation.data.train, federation.population.state(0)
    model, transform = federation.server.model, federation.enrolment.transform
    assert state.memory
    for name, rows in state.memory.items():
        images = train.by_class[federation.data.classes.index(name)]
        features = in_chunks(
            model, lambda some: transform.plain(train.pixels(some)), images, lambda pixels: model(pixels).features
        )
        best = images[herd(features, quota(12, len(state.memory)))]
        assert rows.tolist() == best.tolist()


def test_features_are_asked_once_for_the_distinct_images(small: dict[str, Any]) -> None:
    population = federation_of(with_replay(small)).population
    asked: list[Sequence[ImageGroup]] = []

    def features(groups: Sequence[ImageGroup]) -> list[Tensor]:
        asked.append(groups)
        return [torch.randn(len(group.ids), 4, generator=torch.Generator().manual_seed(0)) for group in groups]

    population.begin_round(1)
    clients = np.arange(5)
    population.update_memories(1, True, clients, population.current[clients] + 1, features)
    assert len(asked) == 1
    rows = torch.cat([group.ids for group in asked[0]])
    assert len(rows.unique()) == len(rows)
    for group in asked[0]:
        assert {population.classes[c] for c in population.train.labels[group.ids].tolist()} == {group.name}
    states = [population.state(client) for client in range(5)]
    assert all(state.stored == 1 and state.memory for state in states)


def test_a_class_met_again_competes_with_its_old_exemplars(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small))
    first, second = (tuple(federation.data.train.by_class[0][part].tolist()) for part in (slice(0, 4), slice(4, 12)))
    arrivals = (Arrival(0, (0,), first), Arrival(2, (0,), second))
    population = replace(federation, plan=replace(federation.plan, arrivals=(arrivals,))).population
    known = torch.randn(len(federation.data.train), 4, generator=torch.Generator().manual_seed(1))
    name = federation.data.classes[0]

    def features(groups: Sequence[ImageGroup]) -> list[Tensor]:
        return [known[group.ids] for group in groups]

    population.begin_round(1)
    population.update_memories(1, True, np.array([0]), np.array([1]), features)
    assert sorted(population.state(0).memory[name].tolist()) == sorted(first)
    assert not population.states  # nothing is written out until somebody needs it
    population.begin_round(3)
    population.update_memories(3, True, np.array([0]), np.array([2]), features)
    assert sorted(population.state(0).memory[name].tolist()) == sorted(first + second)
    assert population.state(0).stored == 2
    assert population.updates == [MemoryUpdate(1, True, 0), MemoryUpdate(3, True, 0)]


def test_memory_may_be_zero(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small), memory=0)
    rounds = list(run_rounds(federation, Serial()))
    states = [federation.population.state(client) for client in range(len(federation.plan.arrivals))]
    assert all(not len(rows) for state in states for rows in state.memory.values())
    assert ClientState.from_bytes(states[0].to_bytes()).stored == states[0].stored == len(federation.plan.arrivals[0])
    assert len(rounds) == 6


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("zo_data", ["memory", "last_task"])
def test_stayers_train_on_memory_on_their_last_data_or_not_at_all(
    small: dict[str, Any], zo_data: str, replay: bool
) -> None:
    settings = {**small, "method": {"name": "fedavg", "replay": replay}}
    federation = federation_of(settings, zo_data=zo_data, selected=5, rounds=1, join_per_task=0, move_on=0.6)
    plan = federation.plan
    rounds: list[Round] = list(run_rounds(federation, Serial()))
    for round_index in range(1, 3):
        stayers = [c for c in plan.selected[round_index] if plan.groups[round_index][c] == "Zo"]
        assert stayers
        for client in stayers:
            assert (client in rounds[round_index].line["trained"]) == (replay or zo_data == "last_task")


def context_of(federation: Federation, client: int, memory: Holdings | None = None) -> ClientContext:
    """What the method sees of this client in the first round, with this memory."""
    federation.population.begin_round(0)
    state = replace(federation.population.state(client), memory=memory or {})
    return federation.work().context(state, Inbox(_job(federation, 0, "train")))


def three_of_each(federation: Federation) -> dict[str, Tensor]:
    """Three images of every class, by name."""
    data = federation.data
    return {name: data.train.by_class[c][:3].int() for c, name in enumerate(data.classes)}


def test_data_and_memory_do_not_overlap_and_unknown_classes_are_left_out(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small))
    data, client = federation.data, 0
    classes = federation.plan.arrivals[client][0].classes
    assert len(classes) == 1  # floor(0.6 x 2)
    federation.server.grow(data.classes[:4])
    context = context_of(federation, client, three_of_each(federation))
    assert context.data.tolist() == data.train.by_class[classes[0]].tolist()
    kept = set(data.train.labels[context.memory].tolist())
    assert kept == {0, 1, 2, 3} - set(classes)  # 4 and 5 are not known to the head; its own class is in its data
    assert context.everything.tolist() == [*context.data.tolist(), *context.memory.tolist()]
    empty = federation_of(with_replay(small), growth="announce")
    assert len(context_of(empty, client).everything) == 0


def test_a_client_knows_whether_it_has_exemplars_of_old_and_of_new_classes(small: dict[str, Any]) -> None:
    federation = federation_of(with_replay(small))
    names = federation.data.classes
    federation.server.grow(names[:2])
    federation.server.grow(names[2:4])
    ids = three_of_each(federation)

    def both(*classes: int) -> bool:
        return context_of(federation, 0, {names[c]: ids[names[c]] for c in classes}).has_old_and_new

    assert both(0, 3)
    assert not any((both(), both(0, 1), both(2, 3), both(2, 5)))  # 5 is not known to the head


def test_batches_cover_everything_once_and_label_by_head_position(small: dict[str, Any]) -> None:
    federation = federation_of(small, class_share=1.0)
    data = federation.data
    federation.server.grow((data.classes[1], data.classes[0]))  # not the data set's order
    context = context_of(federation, 0)
    batches = list(context.batches(context.data, epoch=0))
    ids = torch.cat([batch.ids for batch in batches])
    assert sorted(ids.tolist()) == sorted(context.data.tolist())
    assert [len(batch.ids) for batch in batches] == [16, 8]
    labels = torch.cat([batch.labels for batch in batches])
    assert torch.equal(labels, 1 - data.train.labels[ids])
    again = torch.cat([batch.ids for batch in context.batches(context.data, epoch=1)])
    assert not torch.equal(ids, again)


def test_learning_rate_is_a_function_of_the_tasks_progress() -> None:
    steps = Training(1, 1, Preset(2.0, 0.0, 0.0, "steps", (0.5, 0.75, 0.9), 0.2))
    rates = [steps.rate(p) for p in (0.0, 0.49, 0.5, 0.74, 0.75, 0.9, 0.99)]
    assert rates == pytest.approx([2.0, 2.0, 0.4, 0.4, 0.08, 0.016, 0.016])
    cosine = Training(1, 1, Preset(0.1, 0.9, 0.0, "cosine"))
    assert [cosine.rate(p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.1, 0.05, 0.0])
    assert cosine.rate(0.25) == pytest.approx(0.05 * (1 + math.sqrt(0.5)))


def test_a_run_whose_clients_all_diverge_stops_with_client_round_and_advice(small: dict[str, Any]) -> None:
    federation = federation_of({**small, "train": {**small["train"], "lr": 100.0, "epochs": 5}})
    with pytest.raises(HoldfastError, match=r"^no client's update .* in round \d+: client \d+ .*: .*; lower train\.lr"):
        list(run_rounds(federation, Serial()))


def test_a_loss_that_is_not_finite_is_the_failure_of_its_client(small: dict[str, Any]) -> None:
    federation = federation_of(small)
    federation.server.grow(federation.data.classes[:2])
    weights = {**federation.server.job(0, "train", 0.0, 1.0).weights, "blocks.0.bias": torch.full((2,), float("nan"))}
    job = replace(federation.server.job(0, "train", 0.0, 1.0), weights=weights)
    federation.population.begin_round(0)
    client = federation.plan.selected[0][0]
    outcome = attempt(federation.work(), federation.population.state(client), Inbox(job))
    assert isinstance(outcome, Failure)
    assert (outcome.what, outcome.round_index, outcome.phase) == ("diverged", 0, "train")
    assert re.match(r"the loss of client \d+ is no longer finite in round 1; lower train\.lr", outcome.reason)


@pytest.mark.parametrize("images", [1, 2])
def test_clients_with_one_image_train(small: dict[str, Any], images: int) -> None:
    settings = {**small, "data": {**small["data"], "train_per_class": images}}
    rounds = list(run_rounds(federation_of(with_replay(settings), partition="disjoint"), Serial()))
    assert all(math.isfinite(value) for done in rounds for value in done.line["losses"].values())
