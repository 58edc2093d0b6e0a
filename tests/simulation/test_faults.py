"""Injected faults: who is hit, that one bad client changes no bit of the others, and rounds without a quorum."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint import Checkpoints
from holdfast.config import load_config, to_toml
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of, pool_of, run_name
from holdfast.methods.context import ClientContext
from holdfast.methods.fedavg import FedAvg
from holdfast.models.incremental import IncrementalModel
from holdfast.models.stored import write_model
from holdfast.protocol.messages import Extras, Phase
from holdfast.simulation.faults import Faults
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds
from holdfast.simulation.settings import FaultSettings

QUICK = {"iterations": 2, "perturb_steps": 1}
BAD = 1  # the client of which everything is bad
REPLAY = {"name": "fedavg", "replay": True}


def federation_of(settings: dict[str, Any], **sections: dict[str, Any]) -> tuple[Any, Federation]:
    merged = {**settings, **{name: {**settings.get(name, {}), **values} for name, values in sections.items()}}
    config = load_config(merged)
    data = load_data(config.data)
    return data, build_federation(config, data, plan_of(config, data))


def run(settings: dict[str, Any], **sections: dict[str, Any]) -> tuple[Federation, list[dict[str, Any]]]:
    _, federation = federation_of(settings, **sections)
    return federation, [done.line for done in run_rounds(federation, Serial())]


def same_model(one: Federation, other: Federation) -> bool:
    return all(torch.equal(tensor, other.server.weights[name]) for name, tensor in one.server.weights.items())


def figures(lines: list[dict[str, Any]]) -> list[Any]:
    """What a round has achieved, and by whom."""
    return [[line[key] for key in ("accuracy", "macro_f1", "losses", "trained", "detector")] for line in lines]


# the nine kinds of bad client: the same bits as if it did not answer

ALL: dict[str, Any] = {"clients": [BAD]}
KINDS: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "nan": ({"nan": ALL}, "server", {"not finite"}),
    "inf": ({"inf": ALL}, "server", {"not finite"}),
    "scale": ({"scale": {**ALL, "factor": 1e30}}, "server", {"range", "not finite"}),
    "wrong_shape": ({"wrong_shape": ALL}, "server", {"shape"}),
    "wrong_key": ({"wrong_key": ALL}, "server", {"names"}),
    "wrong_dtype": ({"wrong_dtype": ALL}, "server", {"type"}),
    "bad_samples": ({"bad_samples": ALL}, "server", {"samples"}),
    "bad_share": ({"bad_share": ALL}, "proxy", {"not finite"}),
    "crash": ({"crash": ALL}, "both", {"crash"}),
}
METHODS: list[dict[str, Any]] = [
    REPLAY,
    {"name": "lga", "detector": "oracle", **QUICK},
    {"name": "podnet", "inference": "nme", "tune_epochs": 1},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method["name"])
def test_a_bad_client_is_left_out_and_nothing_else_changes(small: dict[str, Any], method: dict[str, Any]) -> None:
    """Every method: scripts/torture.py bad-clients."""
    settings = {**small, "method": method, "plan": {**small["plan"], "tasks": 2}}
    without = {
        channel: run(settings, faults={"drop": {**ALL, "channel": channel}}) for channel in ("server", "proxy", "both")
    }
    assert any(BAD in line["selected"] for line in without["both"][1])
    for name, (faults, channel, kinds) in KINDS.items():
        reference, expected = without[channel]
        federation, lines = run(settings, faults=faults)
        assert same_model(federation, reference), name
        assert figures(lines) == figures(expected), name
        refused = [one for line in lines for one in line["refused"]]
        assert {one["client"] for one in refused} <= {BAD}
        seen = {one["kind"] for one in refused}
        assert seen <= kinds
        assert bool(seen) == (channel != "proxy" or method["name"] == "lga")
        assert all(one["reason"] for one in refused)
        assert federation.server.model.training == reference.server.model.training


def test_a_poisoned_share_passes_the_checks_and_label_flips_change_what_is_learned(small: dict[str, Any]) -> None:
    settings = {**small, "method": {"name": "lga", "detector": "oracle", **QUICK}}
    _, lines = run(settings)
    _, after = run(settings, faults={"poison_share": 1.0})
    assert all(line["proxy"]["refused"] == 0 for line in after)
    assert not any(line["refused"] for line in after)
    assert lines[0]["proxy"]["prototypes"] == after[0]["proxy"]["prototypes"] > 0
    assert after[0]["proxy"]["omega"] == pytest.approx(100 * lines[0]["proxy"]["omega"], rel=1e-4)
    assert [one for line in after for one in line["faults"]]
    flipped, told = run({**small, "method": REPLAY}, faults={"label_flip": 1.0})
    assert not same_model(flipped, run({**small, "method": REPLAY})[0])
    assert [kind for _, kind in told[0]["faults"]] == ["label_flip"] * 3


def test_with_every_label_flipped_a_class_is_taken_for_another(small: dict[str, Any]) -> None:
    """The confusion is almost whole where all clients agree on the wrong names."""
    plan = {"tasks": 1, "clients": 3, "selected": 3, "rounds": 4, "class_share": 1.0}
    data = {**small["data"], "classes": 2, "train_per_class": 40}
    settings = {**small, "data": data, "train": {"epochs": 4, "batch": 16}}
    assert run(settings, plan=plan)[1][-1]["accuracy"] > 0.8
    assert run(settings, plan=plan, faults={"label_flip": 1.0})[1][-1]["accuracy"] < 0.2


# quorum, deadline and order


def test_the_order_of_arrival_changes_no_bit(small: dict[str, Any]) -> None:
    """Answers of faulty federations are shuffled; these faults change nothing else."""
    settings = {**small, "method": {"name": "lga", **QUICK}}
    plain, lines = run(settings)
    mixed, again = run(settings, faults={"duplicate": 1.0, "delay": {"probability": 0.5, "seconds": 5}})
    assert same_model(plain, mixed)
    assert figures(lines) == figures(again)
    duplicates = [one["client"] for one in again[0]["refused"] if one["kind"] == "duplicate"]
    assert set(duplicates) == set(again[0]["selected"])
    shared = sum(one["reason"].startswith("a second share") for one in again[0]["refused"])
    assert again[0]["proxy"] == {**lines[0]["proxy"], "refused": shared}


def test_what_comes_after_the_deadline_is_refused_by_its_round(small: dict[str, Any]) -> None:
    faults = {"delay": {"clients": [BAD], "seconds": 31}}
    late, lines = run({**small, "method": REPLAY}, plan={"deadline": 30.0}, faults=faults)
    lost, expected = run({**small, "method": REPLAY}, faults={"drop": {"clients": [BAD]}})
    assert same_model(late, lost)
    assert figures(lines) == figures(expected)
    for number, line in enumerate(lines[:-1]):
        assert line["missing"] == [BAD] * (BAD in line["selected"])
        told = [one for one in lines[number + 1]["refused"] if one["kind"] == "late"]
        assert [one["client"] for one in told] == line["missing"]
        assert all(f"round {number + 1}" in one["reason"] for one in told)
    in_time, _ = run({**small, "method": REPLAY}, plan={"deadline": 31.0}, faults=faults)
    assert same_model(in_time, run({**small, "method": REPLAY})[0])


def test_a_round_without_a_quorum_is_tried_again_and_then_leaves_the_model(small: dict[str, Any]) -> None:
    settings = {**small, "method": REPLAY}
    _, federation = federation_of(
        settings, plan={"quorum": 3, "retries": 1}, faults={"drop": {"rounds": [2], "count": 1}}
    )
    models, lines = [], []
    for done in run_rounds(federation, Serial()):
        lines.append(done.line)
        models.append({name: tensor.clone() for name, tensor in federation.server.weights.items()})
    assert [line["attempts"] for line in lines[:2]] == [1, 2]
    found = len(lines[1]["missing"])
    assert lines[1]["trained"] == ([] if found else lines[1]["selected"])
    # With all lost, the model stays, and the run goes on.
    _, after = run(settings, plan={"retries": 4}, faults={"drop": {"rounds": [2]}})
    assert after[1]["attempts"] == 5
    assert (after[1]["trained"], after[1]["missing"]) == ([], after[1]["selected"])
    assert after[1]["losses"] == {}
    assert after[1]["bytes"]["server"]["up"] == 0
    assert after[1]["accuracy"] == pytest.approx(lines[0]["accuracy"])
    assert after[2]["trained"]


def test_a_client_that_is_asked_again_gives_the_same_answer(small: dict[str, Any]) -> None:
    """Half of the answers are lost, but every round goes on until all are there: the same bits as without a loss."""
    settings = {**small, "method": {"name": "lga", "detector": "oracle", **QUICK}}
    plain, lines = run(settings)
    lossy, again = run(settings, plan={"quorum": 3, "retries": 50}, faults={"drop": 0.5})
    assert max(line["attempts"] for line in again) > 1
    assert figures(lines) == figures(again)
    assert same_model(plain, lossy)


def test_over_selection_asks_more_clients_and_all_of_them_count(small: dict[str, Any]) -> None:
    _, few = federation_of(small)
    federation, lines = run({**small, "method": REPLAY}, plan={"over_select": 2})
    for round_index, line in enumerate(lines):
        assert set(few.plan.selected[round_index]) < set(line["selected"])
        assert len(line["selected"]) == 5
        assert line["trained"] == line["selected"]
    assert len(federation.plan.selected) == len(few.plan.selected)


def test_the_run_ends_in_one_sentence_when_nobody_is_usable(small: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError, match=r"no client's update .* in round 2: client \d+ \(and 2 more\): "):
        run({**small, "method": REPLAY}, faults={"inf": {"rounds": [2]}})


# engines, checkpoints, settings

MUCH: dict[str, Any] = {
    "drop": 0.2,
    "delay": {"probability": 0.3, "seconds": 40},
    "duplicate": 0.2,
    "nan": 0.2,
    "crash": 0.2,
    "label_flip": 0.4,
    "poison_share": 0.4,
}


def test_a_pool_and_an_interruption_see_the_same_faults(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "method": {"name": "lga", **QUICK}, "seed": 4}
    plan = {"quorum": 2, "deadline": 30.0}
    alone, lines = run(settings, plan=plan, faults=MUCH, train={"server_optimiser": "adam"})
    assert {kind for line in lines for _, kind in line["faults"]} == set(MUCH)
    data, first = federation_of(settings, plan=plan, faults=MUCH, train={"server_optimiser": "adam"})
    _, second = federation_of(settings, plan=plan, faults=MUCH, train={"server_optimiser": "adam"})
    checkpoints, again = Checkpoints(tmp_path, {}), []
    stop = next(i + 1 for i, line in enumerate(lines[1:]) if any(one["kind"] == "late" for one in line["refused"]))
    with pool_of(first, data, 1) as pool:
        for done in run_rounds(first, pool):
            again.append(done.line)
            checkpoints.save(done.line["round"], first, done.counts)
            if done.line["round"] == stop:
                break
        assert Checkpoints(tmp_path, {}).restore(second)[0] == stop
        again += [done.line for done in run_rounds(second, pool, start=stop)]
    for one, other in zip(lines, again, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    assert same_model(alone, second)


def test_rules_hit_whom_they_name() -> None:
    selected = [tuple(range(10))] * 200
    rules: dict[str, Any] = {
        "nan": {"clients": [2, 3], "rounds": [5]},
        "drop": 0.3,
        "sign_flip": {"count": 1},
        "inf": {"count": 2, "clients": [1, 4, 5]},
    }
    faults = Faults(FaultSettings(**rules), 7, selected)
    assert [(r, c) for r in range(9) for c in range(10) if faults.hits("nan", r, c)] == [(4, 2), (4, 3)]
    dropped = sum(faults.hits("drop", r, c) for r in range(200) for c in range(10))
    assert abs(dropped - 600) < 4 * (2000 * 0.3 * 0.7) ** 0.5
    assert {sum(faults.hits("sign_flip", r, c) for c in range(10)) for r in range(200)} == {1}
    assert len({c for r in range(200) for c in range(10) if faults.hits("sign_flip", r, c)}) == 10
    hit = [[c for c in range(10) if faults.hits("inf", r, c)] for r in range(20)]
    assert all(len(some) == 2 and set(some) <= {1, 4, 5} for some in hit)
    assert not faults.hits("crash", 0, 0)
    again = Faults.from_bytes(faults.to_bytes())
    every = [(kind, r, c) for kind in rules for r in range(50) for c in range(10)]
    assert [faults.hits(*one) for one in every] == [again.hits(*one) for one in every]
    assert [faults.hits("drop", r, 0, 1) for r in range(50)] != [faults.hits("drop", r, 0) for r in range(50)]


def test_faults_are_settings_that_a_config_keeps(small: dict[str, Any], tmp_path: Path) -> None:
    config = load_config({**small, "faults": {"drop": 0.3, "scale": {"clients": [1], "factor": -2.5}}})
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "config.toml") == config
    flags = [("faults.drop", 0.3), ("faults.scale.clients", [1]), ("faults.scale.factor", -2.5)]
    assert load_config(small, flags) == config
    assert "[faults]" not in to_toml(load_config(small))
    assert run_name(config) != run_name(load_config(small))
    for wrong, reason in (
        ({"drop": 2}, "faults.drop = 2 is not possible"),
        ({"nann": 0.1}, "did you mean 'nan'"),
        ({"nan": {"client": [1]}}, "faults.nan"),
    ):
        with pytest.raises(HoldfastError, match=reason):
            load_config({**small, "faults": wrong})


def test_a_quorum_that_no_round_can_have_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError, match=r"plan\.quorum=4, but a round has only 3 clients"):
        federation_of(small, plan={"quorum": 4})
    federation_of(small, plan={"quorum": 4, "over_select": 1})


# what no run may keep


class Spoiling(FedAvg):
    """A method whose own arithmetic on the server goes wrong."""

    def collects_extras(self, phase: Phase) -> bool:
        return phase == "finish"

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        model.get_parameter("blocks.0.bias").data[-1] = float("nan")

    def finish_task(self, context: ClientContext) -> Extras | None:
        return None


def test_a_model_that_is_not_finite_is_never_saved(small: dict[str, Any], tmp_path: Path) -> None:
    """Whatever made it so."""
    federation, _ = run(small, plan={"tasks": 1, "rounds": 1})
    with torch.no_grad():
        federation.server.model.get_parameter("blocks.0.bias")[-1] = float("nan")
    with pytest.raises(HoldfastError, match=r"after round 1 'blocks\.0\.bias' .* not finite; lower train\.lr"):
        Checkpoints(tmp_path, {}).save(1, federation, None)  # type: ignore[arg-type]
    with pytest.raises(HoldfastError, match=r"'blocks\.0\.bias' .* not finite"):
        write_model(tmp_path / "model.safetensors", federation.server.weights, {})
    assert not list(tmp_path.iterdir())
    _, fresh = federation_of(small, plan={"tasks": 1, "rounds": 1})
    fresh.method = Spoiling()
    with pytest.raises(HoldfastError, match=r"after round 1 'blocks\.0\.bias' of the global model .* not finite"):
        list(run_rounds(fresh, Serial()))


def test_tuning_that_explodes_is_refused_and_named(small: dict[str, Any]) -> None:
    method = {"name": "podnet", "tune_rate": 1e30, "tune_epochs": 2}
    settings = {**small, "method": method, "plan": {**small["plan"], "class_share": 1.0, "move_on": 1.0, "memory": 40}}
    with pytest.raises(HoldfastError, match=r"no client's extras \(finish phase\) .* not finite; lower .* own rates"):
        run(settings, plan={"join_per_task": 0})
