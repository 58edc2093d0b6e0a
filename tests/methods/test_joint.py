"""Joint training: everything from the start, kept, and the same question as the others."""

from typing import Any

from clients import federation_of

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import plan_of
from holdfast.simulation.rounds import run_rounds


def test_clients_hold_all_their_classes_from_the_day_they_join(small: dict[str, Any]) -> None:
    for partition in ("shared", "disjoint"):
        settings = {**small, "plan": {**small["plan"], "partition": partition}}
        data = load_data(load_config(settings).data)
        plain = plan_of(load_config(settings), data)
        joint = plan_of(load_config({**settings, "method": {"name": "joint"}}), data)
        assert joint.growths == ((0, tuple(c for task in plain.tasks for c in task)),)
        assert (joint.selected, joint.tasks, joint.groups) == (plain.selected, plain.tasks, plain.groups)
        for before, after in zip(plain.arrivals, joint.arrivals, strict=True):
            [only] = after
            assert only.round_index == before[0].round_index
            assert set(only.classes) == {c for arrival in before for c in arrival.classes}
            if partition == "disjoint":
                assert set(only.images or ()) == {i for arrival in before for i in arrival.images or ()}


def test_the_head_has_all_classes_but_only_seen_ones_are_asked(small: dict[str, Any]) -> None:
    federation = federation_of("joint", small)
    rounds = list(run_rounds(federation, Serial()))
    assert len(rounds[0].line["grown"]) == 6
    assert [done.line["classes_seen"] for done in rounds] == [2, 2, 4, 4, 6, 6]
    assert rounds[0].counts.shape == (2, 3)
    assert rounds[0].counts[:, -1].sum() == 0
