"""The round loop: who tells the server of new classes, and what the learning rate follows."""

from typing import Any

import pytest
import torch

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.protocol.messages import Job, Reply
from holdfast.server.aggregation import average
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds


class Listening(Serial):
    """Serial, but remembers the jobs."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def map(self, work: Any, states: Any, inboxes: Any) -> Any:
        inboxes = list(inboxes)
        self.jobs.append(inboxes[0].job)
        return super().map(work, states, inboxes)


class Keeping(Serial):
    """Serial, but remembers the last round's replies."""

    def map(self, work: Any, states: Any, inboxes: Any) -> Any:
        self.replies: list[Reply] = []
        for outcome in super().map(work, states, inboxes):
            self.replies.append(outcome[1])
            yield outcome


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_the_server_averages_as_it_is_told(small: dict[str, Any], weighting: str) -> None:
    plan = {**small["plan"], "partition": "dirichlet:0.5", "class_share": 1.0}
    config = load_config({**small, "plan": plan, "train": {**small["train"], "weighting": weighting}})
    data = load_data(config.data)
    federation, engine = build_federation(config, data, plan_of(config, data)), Keeping()
    next(run_rounds(federation, engine))
    replies = [reply for reply in engine.replies if reply.weights]
    assert len({reply.samples for reply in replies}) > 1
    expected, other = (average(replies, one) for one in (weighting, {"uniform": "samples"}.get(weighting, "uniform")))
    assert all(torch.equal(federation.server.weights[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(federation.server.weights[name], tensor) for name, tensor in other.items())


def listened(settings: dict[str, Any], **plan: Any) -> tuple[Federation, list[Job], list[dict[str, Any]]]:
    config = load_config({**settings, "plan": {**settings["plan"], **plan}})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    engine = Listening()
    lines = [done.line for done in run_rounds(federation, engine)]
    return federation, engine.jobs, lines


def test_a_schedule_grows_at_every_task_and_restarts_the_learning_rate(small: dict[str, Any]) -> None:
    federation, jobs, lines = listened(small, rounds=3)
    assert [line["round"] for line in lines if line["grown"]] == [1, 4, 7]
    assert [job.progress for job in jobs] == pytest.approx([0, 1 / 3, 2 / 3] * 3)
    assert all(job.step == pytest.approx(1 / 3) for job in jobs)
    order = [c for task in federation.plan.tasks for c in task]
    assert federation.server.registry.names == tuple(federation.data.classes[c] for c in order)
    assert federation.server.registry.growths == (2, 2, 2)


def test_announced_classes_grow_the_head_a_round_later_but_the_first_at_once(small: dict[str, Any]) -> None:
    federation, jobs, lines = listened(small, rounds=4, growth="announce", selected=1)
    assert [line["round"] for line in lines if line["grown"]] == [1, 6, 10]  # nobody need be selected to announce
    assert lines[0]["trained"] == lines[0]["selected"] != []
    assert lines[0]["accuracy"] > 0.0
    assert [line["bytes"]["server"]["announced"] > 0 for line in lines[:5]] == [True, False, False, False, True]
    assert sorted(federation.server.registry.names) == sorted(federation.data.classes)
    # Four rounds per task. From the second task on one of them is spent on announcing: three steps of the new cycle
    # follow the last step of the old one.
    assert [round(job.progress * 4) for job in jobs[:5]] == [0, 1, 2, 3, 3]
    assert [round(job.progress * 3) for job in jobs[5:]] == [0, 1, 2, 2, 0, 1, 2]
    assert [round(1 / job.step) for job in jobs] == [4] * 5 + [3] * 7


def test_irregular_announcements_make_growths_of_their_own(small: dict[str, Any]) -> None:
    plan = {
        "rounds": 6,
        "growth": "announce",
        "join": "irregular",
        "move_on": 0.0,
        "join_per_task": 6,
        "class_share": 0.5,
    }
    federation, _, lines = listened(small, **plan)
    grown = [line["round"] for line in lines if line["grown"]]
    assert len(grown) == len(federation.server.registry.growths) > 3
    for round_index, line in enumerate(lines[1:], start=1):
        before = [a for mine in federation.plan.arrivals for a in mine if a.round_index == round_index - 1]
        arrived = {c for a in before for c in a.classes}
        assert set(line["grown"]) <= {federation.data.classes[c] for c in arrived}


def test_newcomers_in_mid_task_train_from_the_day_they_join(small: dict[str, Any]) -> None:
    federation, _, lines = listened(small, rounds=5, join="irregular", join_per_task=3, selected=5)
    plan = federation.plan
    newcomers = {c for c in range(len(plan.arrivals)) if plan.joined[c] % 5}
    trained = {c for line in lines for c in line["trained"]}
    assert newcomers & trained
    for line in lines:
        assert all(plan.joined[c] < line["round"] for c in line["selected"])


def test_one_round_per_task_works_either_way(small: dict[str, Any]) -> None:
    for growth in ("schedule", "announce"):
        _, jobs, _ = listened(small, rounds=1, growth=growth)
        assert [job.progress for job in jobs] == [0, 0, 0]
