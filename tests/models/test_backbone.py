"""Own backbones: what they may return, what is found out about them, and that their weights are kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast import extensions
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of
from holdfast.methods import METHODS
from holdfast.models import BACKBONE_TABLE
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKBONE_TABLE, "registered", {})
    monkeypatch.setattr(extensions, "_allowed", set())


class Vector(nn.Module):
    """Flattens with `view`, as many published networks do."""

    def __init__(self, image_size: int, width: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.linear = nn.Linear(4 * image_size**2, width)

    def forward(self, x: Tensor) -> Any:
        return self.linear(self.conv(x).view(len(x), -1))


class Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2)
        self.norm = nn.BatchNorm2d(6)
        nn.init.constant_(self.conv.bias, 0.25)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x))


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Conv2d(3, 4, 3, stride=2), nn.ReLU()
        self.second = nn.Conv2d(4, 8, 3, stride=2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Any:
        first = self.first(x)
        second = self.second(self.act(first))
        return self.drop(self.act(second)).mean(dim=(2, 3)), [first, second]


def model(thing: Any, size: int = 16, seed: int = 0, **spec: Any) -> IncrementalModel:
    if "own" not in BACKBONE_TABLE.registered:
        holdfast.register_backbone("own", thing)
    return IncrementalModel(ModelSpec("own", spec.pop("norm", "batch"), size, **spec), torch_generator(seed))


@pytest.mark.parametrize(
    ("thing", "features", "channels"), [(Vector, 64, ()), (Map, 6, (6,)), (Stages, 8, (4, 8))], ids=str
)
def test_three_kinds_of_output_are_understood(thing: type[nn.Module], features: int, channels: tuple[int]) -> None:
    net = model(thing)
    net.grow(3, torch_generator(1))
    images = torch.randn(5, 3, 16, 16, generator=torch_generator(2)).contiguous(memory_format=torch.channels_last)
    output = net(images)
    assert output.logits.shape == (5, 3)
    assert (net.features, net.channels) == (features, channels)
    assert output.features.shape == (5, features)
    assert tuple(m.shape[1] for m in output.maps) == channels
    if thing is Map:
        assert torch.equal(output.features, output.maps[0].mean(dim=(2, 3)))


def test_the_constructor_decides_the_weights_and_the_seed_what_it_draws() -> None:
    state = torch.get_rng_state()
    first, again, other = model(Map, seed=1), model(Map, seed=1), model(Map, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    weights, same = first.state_dict(), again.state_dict()
    assert torch.equal(weights["backbone.net.conv.bias"], torch.full((6,), 0.25))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["backbone.net.conv.weight"], other.state_dict()["backbone.net.conv.weight"])
    bound = 1 / (3 * 9) ** 0.5  # of torch's own initialisation; ours would be normal
    assert float(weights["backbone.net.conv.weight"].abs().max()) <= bound
    assert torch.equal(weights["backbone.net.norm.running_mean"], torch.zeros(6))  # the dry pass has left no trace
    assert int(weights["backbone.net.norm.num_batches_tracked"]) == 0


def test_a_network_with_given_weights_keeps_them_below_a_transformer_too() -> None:
    given = torch.arange(6.0)

    def ready() -> nn.Module:
        net = Map()
        with torch.no_grad():
            net.conv.bias.copy_(given)  # type: ignore[union-attr]
        return net

    holdfast.register_backbone("own", ready)
    for method in (METHODS["icarl"](), METHODS["dytox"](encoder="network", width=16, heads=4)):  # type: ignore[call-arg]
        net = method.build_model(ModelSpec("own", "batch", 16), torch_generator(0))
        [bias] = [tensor for name, tensor in net.state_dict().items() if name.endswith("net.conv.bias")]
        assert torch.equal(bias, given)


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Any:
        raise ValueError("no\nidea")


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.mean()


class Named(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"features": x}


class Merged(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.flatten(1).reshape(1, -1)


class Alone(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 256, 8), nn.BatchNorm1d(8))


class Demanding(nn.Module):
    def __init__(self, colour: str) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("thing", "says"),
    [
        (Broken, r"the backbone 'own' fails for images \(2, 3, 16, 16\): no; see"),
        (Pooled, r"returns a tensor \(\); it should return features \(B, d\)"),
        (Named, "returns dict; it should return"),
        (Merged, "returns 1 rows for 2 images"),
        (Alone, r"fails for a training batch with one image \(1, 3, 16, 16\): Expected more than 1 value"),
        (Demanding, "cannot be made: .*'colour'; it is called with those of image_size, norm, width"),
        (lambda: 3, "makes a int, not a torch.nn.Module"),
    ],
)
def test_what_is_wrong_with_a_backbone_is_one_sentence(thing: Any, says: str) -> None:
    with pytest.raises(HoldfastError, match=says) as error:
        model(thing)
    assert "\n" not in str(error.value)


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(HoldfastError, match=r"model\.width=32 has no effect on the backbone 'own'"):
        model(Map, width=32)
    with pytest.raises(HoldfastError, match=r"model\.norm=group has no effect"):
        model(Map, norm="group")
    holdfast.register_backbone("wide", Vector)
    assert IncrementalModel(ModelSpec("wide", "batch", 16, width=32), torch_generator(0)).features == 32


@pytest.mark.parametrize("method", ["podnet", "afc", "dytox", "kelp"])
def test_methods_that_need_maps_say_so(method: str) -> None:
    holdfast.register_backbone("own", Vector)
    fields = {"encoder": "network"} if method == "dytox" else {}
    with pytest.raises(HoldfastError, match=r"'own' returns features without maps.*return \(features, list of maps\)"):
        METHODS[method](**fields).build_model(ModelSpec("own", "batch", 16), torch_generator(0))


QUICK: dict[str, dict[str, Any]] = {
    "dytox": {"width": 16, "heads": 4, "depth": 1, "encoder": "network", "tune_epochs": 1},
    "podnet": {"tune_epochs": 1},
    "afc": {"tune_epochs": 1},
}


def sent(federation: Any) -> list[tuple[int, int]]:
    """Bytes that clients sent back in each round, and how many clients trained."""
    lines = [done.line for done in run_rounds(federation, Serial())]
    return [(line["bytes"]["server"]["up"], len(line["trained"])) for line in lines]


def federation_of(settings: dict[str, Any]) -> Any:
    config = load_config(settings)
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


@pytest.mark.parametrize("name", METHODS)
def test_every_method_trains_on_an_own_backbone_with_a_frozen_stage(small: dict[str, Any], name: str) -> None:
    holdfast.register_backbone("own", Stages)
    quick = {"iterations": 2, "perturb_steps": 2} if "iterations" in METHODS[name].__pydantic_fields__ else {}  # type: ignore[attr-defined]
    plan = {**small["plan"], "tasks": 2, "rounds": 1}
    settings = {**small, "plan": plan, "method": {"name": name, **quick, **QUICK.get(name, {})}}
    free = federation_of({**settings, "model": {"name": "own"}})
    held = federation_of({**settings, "model": {"name": "own", "freeze": 1}})
    before = {key: value.clone() for key, value in held.server.weights.items()}
    more, less = sent(free), sent(held)
    parts = {key for key in before if ".first." in key}
    assert parts == set(held.server.model.frozen_names)
    after = held.server.weights
    assert all(torch.equal(after[key], before[key]) for key in parts)
    assert not torch.equal(free.server.weights[min(parts)], before[min(parts)])
    moved = [key for key in before if ".second." in key]
    assert any(not torch.equal(after[key], before[key]) for key in moved)
    first = 4 * (3 * 4 * 9 + 4)
    assert more == [(up + first * clients, clients) for up, clients in less]
