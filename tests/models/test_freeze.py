"""Frozen stages: neither trained nor sent, and their batch statistics stay as they were."""

from typing import Any

import pytest
import torch

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, bytes_of, plan_of, pool_of, run_name
from holdfast.methods import METHODS
from holdfast.models import BACKBONES
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds

STAGES = {"convnet": 4, "resnet18": 5}
TRANSFORMER = {"name": "dytox", "width": 16, "heads": 4, "depth": 2}


@pytest.mark.parametrize("backbone", BACKBONES)
def test_stages_are_counted_from_the_stem_and_cover_the_backbone(backbone: str) -> None:
    stages = STAGES[backbone]
    for freeze in range(stages + 1):
        model = IncrementalModel(ModelSpec(backbone, "batch", 16, 16, freeze), torch_generator(0)).train()
        names = {name for name, _ in model.backbone.named_parameters()}
        whole = IncrementalModel(ModelSpec(backbone, "batch", 16, 16), torch_generator(0))
        weights = {name for name, _ in whole.backbone.named_parameters()}
        assert bool(names) == (freeze < stages)
        assert {f"backbone.{name}" for name in weights - names} <= model.frozen_names
        assert model.state_dict().keys() == whole.state_dict().keys()
        assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in model.state_dict().items())
        norms = {name: part for name, part in model.named_modules() if isinstance(part, torch.nn.BatchNorm2d)}
        evaluating = {f"{name}.running_mean" for name, part in norms.items() if not part.training}
        assert evaluating == {name for name in model.frozen_names if name.endswith("running_mean")}
        assert model.eval().train() is model
    with pytest.raises(HoldfastError, match=f"model.freeze={stages + 1}, but {backbone} has {stages} stages here"):
        IncrementalModel(ModelSpec(backbone, "batch", 16, 16, stages + 1), torch_generator(0))


def test_the_first_stage_of_resnet_is_its_stem() -> None:
    model = IncrementalModel(ModelSpec("resnet18", "batch", 16, 16, 2), torch_generator(0))
    starts = {name.split(".", 3)[1] + (name.split(".")[2] if "stages" in name else "") for name in model.frozen_names}
    assert starts == {"stem", "stem_norm", "stages0"}


def run(settings: dict[str, Any], workers: int = 0) -> Any:
    config = load_config(settings)
    data = load_data(config.data)
    plan = plan_of(config, data)
    federation = build_federation(config, data, plan)
    before = {name: tensor.clone() for name, tensor in federation.server.weights.items()}
    with pool_of(federation, data, workers) if workers else Serial() as engine:
        lines = [{**done.line, "seconds": None} for done in run_rounds(federation, engine)]
    return federation, before, lines, bytes_of(config, data, plan)


@pytest.mark.parametrize("method", [{"name": n} if n != "dytox" else TRANSFORMER for n in METHODS], ids=METHODS)
def test_every_method_keeps_frozen_stages_to_the_bit(small: dict[str, Any], method: dict[str, Any]) -> None:
    fields = METHODS[method["name"]].__pydantic_fields__  # type: ignore[attr-defined]
    quick = {"iterations": 2, "perturb_steps": 2} if "iterations" in fields else {}
    quick |= {"tune_epochs": 1} if "tune_epochs" in fields else {}
    plan = {**small["plan"], "tasks": 2, "rounds": 1, "zo_data": "last_task"}
    settings = {**small, "plan": plan, "method": {**method, **quick}, "model": {"width": 16, "freeze": 2}}
    federation, before, _, _ = run(settings)
    frozen = federation.server.model.frozen_names
    after = federation.server.weights
    assert frozen
    assert all(torch.equal(after[name], before[name]) for name in frozen)
    moved = {name for name in before if name not in frozen and not torch.equal(after[name], before[name])}
    assert any(name.startswith("backbone.") for name in moved)


def test_what_is_sent_falls_as_predicted(small: dict[str, Any]) -> None:
    settings = {**small, "plan": {**small["plan"], "zo_data": "last_task"}, "method": {"name": "icarl"}}
    _, _, lines, expected = run({**settings, "model": {"width": 16, "freeze": 2}})
    assert all(line["trained"] == line["selected"] for line in lines)
    assert [line["bytes"]["server"]["up"] for line in lines] == [one["server"]["up"] for one in expected]
    _, _, whole, _ = run({**settings, "model": {"width": 16}})
    first = 9 * 3 * 8 + 9 * 8 * 16 + 4 * (8 + 16)  # two convolutions, and their norms' weights and statistics
    counters = 2  # of batches, int64
    for more, less in zip(whole, lines, strict=True):
        saved = (4 * first + 8 * counters) * len(less["trained"])
        assert more["bytes"]["server"]["up"] - less["bytes"]["server"]["up"] == saved
        assert more["bytes"]["server"]["down"] == less["bytes"]["server"]["down"]


@pytest.mark.parametrize("name", ["fedavg", "afc"])
def test_a_wholly_frozen_backbone_trains_its_head_alone(small: dict[str, Any], name: str) -> None:
    settings = {**small, "method": {"name": name}, "model": {"width": 16, "freeze": 4}}
    federation, before, _, _ = run(settings)
    after = federation.server.weights
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("backbone."))


def test_workers_freeze_too(small: dict[str, Any]) -> None:
    settings = {**small, "method": {"name": "icarl"}, "model": {"width": 16, "freeze": 1}}
    alone, _, lines, _ = run(settings)
    pooled, _, same, _ = run(settings, workers=1)
    assert same == lines
    assert all(torch.equal(tensor, pooled.server.weights[name]) for name, tensor in alone.server.weights.items())


def test_only_a_run_that_freezes_has_another_name(small: dict[str, Any]) -> None:
    plain = run_name(load_config(dict(small)))
    assert run_name(load_config({**small, "model": {"freeze": 0}})) == plain
    assert run_name(load_config({**small, "model": {"freeze": 1}})) != plain
