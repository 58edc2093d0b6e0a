"""The plan's promises, for any federation that can be asked for."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.errors import HoldfastError
from holdfast.simulation.plan import Plan, make_plan, part
from holdfast.simulation.settings import PlanSettings

IMAGES = 7  # per class


def plan(classes: int, seed: int = 0, **kwargs: object) -> Plan:
    names = [f"class {c}" for c in range(classes)]
    images = {c: list(range(c * IMAGES, (c + 1) * IMAGES)) for c in range(classes)}
    return make_plan(PlanSettings(**kwargs), names, images, seed)  # type: ignore[arg-type]


@st.composite
def federations(draw: st.DrawFn) -> tuple[Plan, PlanSettings]:
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    clients = draw(st.integers(1, 12))
    chosen = PlanSettings(
        tasks=sizes,
        order=draw(st.sampled_from(["natural", "seed1993", "random:3"])),
        rounds=draw(st.integers(1, 5)),
        clients=clients,
        join_per_task=draw(st.integers(0, 4)),
        join=draw(st.sampled_from(["task", "irregular"])),
        selected=draw(st.integers(1, clients)),
        move_on=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        class_share=draw(st.sampled_from([0.3, 0.6, 1.0])),
        partition=draw(st.sampled_from(["shared", "disjoint", "dirichlet:0.3"])),
        zo_data=draw(st.sampled_from(["memory", "last_task"])),
    )
    names = [str(c) for c in range(sum(sizes))]
    images = {c: list(range(c * IMAGES, (c + 1) * IMAGES)) for c in range(sum(sizes))}
    try:
        return make_plan(chosen, names, images, draw(st.integers(0, 2**40))), chosen
    except HoldfastError as error:
        assume("cannot hold them all" not in str(error))
        raise


def fresh(made: Plan, chosen: PlanSettings, task: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...] | None]]:
    """(client, classes, images) of those that meet this task's classes."""
    first = task * chosen.rounds
    return [
        (client, a.classes, a.images)
        for client, arrivals in enumerate(made.arrivals)
        for a in arrivals
        if first <= a.round_index < first + chosen.rounds and (a.classes or a.images is not None)
    ]


@settings(max_examples=150, deadline=None)
@given(federations())
def test_every_class_reaches_someone_and_quotas_hold(case: tuple[Plan, PlanSettings]) -> None:
    made, chosen = case
    for t, classes in enumerate(made.tasks):
        holders = fresh(made, chosen, t)
        assert {c for _, held, _ in holders for c in held} == set(classes)
        quota = max(1, part(chosen.class_share, len(classes)))
        for _, held, _ in holders:
            assert len(set(held)) == len(held)
            assert set(held) <= set(classes)
            # An uneven deal may leave a holder without an image of a class; then it does not hold it.
            assert len(held) == quota if chosen.partition == "shared" else len(held) <= quota


@settings(max_examples=150, deadline=None)
@given(federations())
def test_group_sizes(case: tuple[Plan, PlanSettings]) -> None:
    made, chosen = case
    present = chosen.clients
    for t in range(1, len(made.tasks)):
        groups = made.groups[t]
        moving = part(chosen.move_on, present)
        assert groups.count("Za") == chosen.join_per_task
        assert (groups.count("Zn"), groups.count("Zo")) == (moving, present - moving)
        present += chosen.join_per_task
    assert len(made.arrivals) == present


@settings(max_examples=150, deadline=None)
@given(federations())
def test_selection_and_joining(case: tuple[Plan, PlanSettings]) -> None:
    made, chosen = case
    assert made.rounds == len(made.tasks) * chosen.rounds
    for round_index, selected in enumerate(made.selected):
        assert len(set(selected)) == len(selected) == chosen.selected
        assert set(selected) <= set(made.present(round_index))
    for client, joined in enumerate(made.joined):
        task = made.task_of_round(int(joined))
        assert made.groups[task][client] == ("Za" if task else "Zn")
        if chosen.join == "task" or task == 0:
            assert joined % chosen.rounds == 0


@settings(max_examples=150, deadline=None)
@given(federations())
def test_partitions_respect_classes(case: tuple[Plan, PlanSettings]) -> None:
    made, chosen = case
    for t, classes in enumerate(made.tasks):
        dealt: list[int] = []
        for _, held, images in fresh(made, chosen, t):
            if chosen.partition == "shared":
                assert images is None
                continue
            assert images is not None
            assert {i // IMAGES for i in images} == set(held)
            dealt += images
        if chosen.partition != "shared":
            assert sorted(dealt) == sorted(i for c in classes for i in range(c * IMAGES, (c + 1) * IMAGES))


@settings(max_examples=100, deadline=None)
@given(federations())
def test_stayers_train_on_memory_or_keep_their_last_data(case: tuple[Plan, PlanSettings]) -> None:
    made, chosen = case
    for client, arrivals in enumerate(made.arrivals):
        for t in range(1, len(made.tasks)):
            if made.groups[t][client] != "Zo":
                continue
            start = t * chosen.rounds
            data = arrivals[made.current(client, start)].classes
            before = arrivals[made.current(client, start - 1)].classes
            assert data == (() if chosen.zo_data == "memory" else before)


def test_the_papers_numbers() -> None:
    made = plan(100, tasks=10)
    groups = made.groups[1]
    assert [groups.count(g) for g in ("Zo", "Zn", "Za")] == [3, 27, 10]
    assert len(made.arrivals) == 120
    assert all(len(a.classes) in (0, 6) for arrivals in made.arrivals for a in arrivals)
    assert made.rounds == 100
    assert all(len(chosen) == 10 for chosen in made.selected)
    assert len(plan(100, tasks=20).arrivals) == 220


def test_newcomers_are_selected() -> None:
    for join in ("task", "irregular"):
        made = plan(20, tasks=4, join=join, rounds=10)
        for t in range(1, 4):
            picked = {c for chosen in made.selected[t * 10 : (t + 1) * 10] for c in chosen}
            newcomers = {c for c in range(len(made.arrivals)) if made.groups[t][c] == "Za"}
            assert len(newcomers) == 10
            assert picked & newcomers


def test_selection_is_uniform_over_present_clients() -> None:
    made = plan(2, tasks=2, clients=8, join_per_task=2, selected=5, rounds=4000)
    counts = np.bincount([c for chosen in made.selected[4000:] for c in chosen], minlength=10)
    assert np.abs(counts / 4000 - 0.5).max() < 0.05


def test_irregular_joiners_spread_over_the_rounds() -> None:
    made = plan(20, tasks=4, join="irregular", rounds=10, join_per_task=40)
    assert len({int(j) % 10 for j in made.joined if j >= 10}) == 10


def test_same_seed_same_plan_in_another_process() -> None:
    here = plan(20, seed=7, tasks=4, partition="dirichlet:0.5", join="irregular")
    code = (
        "import json, sys; sys.path.insert(0, 'tests/simulation'); from test_plan import plan;"
        "print(json.dumps(plan(20, seed=7, tasks=4, partition='dirichlet:0.5', join='irregular').to_json([])))"
    )
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "5"},
    )
    assert json.loads(there.stdout) == json.loads(json.dumps(here.to_json([])))
    assert plan(20, seed=8, tasks=4, partition="dirichlet:0.5", join="irregular") != here
    assert plan(20, seed=7, tasks=4, partition="dirichlet:0.5", join="irregular") == here


def test_floor_means_the_number_that_was_written() -> None:
    assert part(0.29, 100) == 29
    assert part(0.7, 10) == 7
    assert [part(0.6, n) for n in (5, 10, 20, 1)] == [3, 6, 12, 0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"tasks": 7}, "plan.tasks=7 does not divide 100 classes; use 4, 5, 10"),
        ({"tasks": [50, 20]}, "adds up to 70"),
        ({"selected": 31}, "plan.selected=31"),
        ({"clients": 1, "selected": 1}, "cannot hold them all"),
        ({"partition": "dirichlet:0"}, "plan.partition"),
        ({"partition": "disjoint:2"}, "plan.partition"),
        ({"order": "sorted"}, "plan.order"),
    ],
)
def test_what_cannot_be_is_said(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(HoldfastError) as error:
        plan(100, **wrong)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_newcomers_can_be_left_out_as_in_the_authors_code() -> None:
    settings = {"tasks": 3, "clients": 6, "join_per_task": 4, "selected": 4, "rounds": 5}
    frozen = plan(12, select_from="first_task", **settings)
    assert {client for chosen in frozen.selected for client in chosen} <= set(range(6))
    usual = plan(12, **settings)
    assert any(client >= 6 for chosen in usual.selected for client in chosen)
    assert frozen.arrivals == usual.arrivals
