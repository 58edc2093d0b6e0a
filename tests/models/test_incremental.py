"""Networks: shapes, growth, initialisation."""

import random

import numpy as np
import pytest
import torch

from holdfast.models import BACKBONES
from holdfast.models.incremental import IncrementalModel, ModelSpec, grow_to
from holdfast.seeding import torch_generator


def model(backbone: str = "convnet", norm: str = "batch", size: int = 32, seed: int = 0) -> IncrementalModel:
    return IncrementalModel(ModelSpec(backbone, norm, size), torch_generator(seed))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("size", [16, 32, 64])
def test_one_forward_gives_logits_features_and_four_maps(backbone: str, norm: str, size: int) -> None:
    net = model(backbone, norm, size)
    net.grow(3, torch_generator(1))
    net.grow(2, torch_generator(2))
    output = net(torch.randn(2, 3, size, size, generator=torch_generator(3)))
    assert output.logits.shape == (2, 5)
    assert output.features.shape == (2, {"convnet": 128, "resnet18": 512}[backbone])
    assert len(output.maps) == 4
    assert min(float(m.detach().min()) for m in output.maps) < 0  # before the ReLU
    assert net.growths == [3, 2]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_growth_keeps_old_logits_to_the_bit(backbone: str) -> None:
    net = model(backbone).eval()
    net.grow(5, torch_generator(1))
    images = torch.randn(37, 3, 32, 32, generator=torch_generator(2))
    before = net(images).logits
    for i in range(4):
        net.grow(5 + i, torch_generator(3 + i))
        assert torch.equal(net(images).logits[:, :5], before)


def test_resnet18_is_the_papers() -> None:
    small = model("resnet18", size=64)
    assert small.backbone.stem.weight.shape == (64, 3, 3, 3)
    _, maps = small.backbone(torch.zeros(1, 3, 64, 64))
    assert [tuple(m.shape[1:]) for m in maps] == [(64, 64, 64), (128, 32, 32), (256, 16, 16), (512, 8, 8)]
    large = model("resnet18", size=96)
    assert large.backbone.stem.weight.shape == (64, 3, 7, 7)
    _, maps = large.backbone(torch.zeros(1, 3, 96, 96))
    assert [m.shape[-1] for m in maps] == [24, 12, 6, 3]
    # He et al. (2016) count 11,689,512 parameters with 1,000 classes and the 7x7 stem.
    large.grow(1000, torch_generator(0))
    assert sum(p.numel() for p in large.parameters()) == 11_689_512


def test_convnet_is_the_protocols() -> None:
    net = model()
    widths = [(32, 3), (64, 32), (128, 64), (128, 128)]
    assert sum(p.numel() for p in net.backbone.parameters()) == sum(9 * o * i + 2 * o for o, i in widths)


def test_initial_weights_come_from_the_given_generator_alone() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index,union-attr]
    first, again, other = model(seed=1), model(seed=1), model(seed=2)
    for net in (first, again, other):
        net.grow(4, torch_generator(5))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not torch.equal(first.backbone.convs[0].weight, other.backbone.convs[0].weight)  # type: ignore[union-attr]
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index,union-attr]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_initial_scale_is_hes() -> None:
    weight = model("resnet18").backbone.stages[3][1].conv2.weight  # type: ignore[index]
    assert abs(float(weight.detach().std()) / (2 / (512 * 9)) ** 0.5 - 1) < 0.01


def test_grow_to_adds_only_what_is_missing() -> None:
    net = model()
    grow_to(net, [3, 2], torch_generator(0))
    first = net.blocks[0].weight  # type: ignore[union-attr]
    grow_to(net, [3, 2, 4], torch_generator(0))
    assert net.growths == [3, 2, 4]
    assert net.blocks[0].weight is first  # type: ignore[union-attr]


def test_a_model_without_classes_has_no_logits() -> None:
    assert model()(torch.zeros(2, 3, 32, 32)).logits.shape == (2, 0)


def test_a_narrow_network_is_the_same_with_fewer_channels() -> None:
    images = torch.randn(2, 3, 32, 32, generator=torch_generator(3))
    for backbone, features in (("resnet18", 128), ("convnet", 32)):
        for norm in ("batch", "group"):
            net = IncrementalModel(ModelSpec(backbone, norm, 32, width=16), torch_generator(0))
            net.grow(3, torch_generator(1))
            output = net(images)
            assert output.features.shape == (2, features)
            assert [m.shape[1] for m in output.maps] == list(net.channels)
            wide = model(backbone, norm)
            assert [name for name, _ in wide.backbone.named_parameters()] == [
                name for name, _ in net.backbone.named_parameters()
            ]
    narrow = sum(
        p.numel() for p in IncrementalModel(ModelSpec("resnet18", "batch", 32, 16), torch_generator(0)).parameters()
    )
    assert narrow < 11_200_000 / 15


@pytest.mark.parametrize(("size", "kernel", "side"), [(32, 3, 32), (84, 3, 84), (85, 7, 22), (224, 7, 56)])
def test_the_stem_keeps_the_resolution_up_to_84_pixels(size: int, kernel: int, side: int) -> None:
    net = IncrementalModel(ModelSpec("resnet18", "batch", size, width=8), torch_generator(0))
    assert net.backbone.stem.kernel_size == (kernel, kernel)  # type: ignore[union-attr]
    assert net(torch.zeros(2, 3, size, size)).maps[0].shape[-1] == side
