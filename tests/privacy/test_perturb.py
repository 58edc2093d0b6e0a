"""Perturbed prototypes: down the cross-entropy of the noisy feature, within the picture's range, each by itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.transform import Transform
from holdfast.privacy.perturb import perturb
from holdfast.seeding import torch_generator

TRANSFORM = Transform((0.4, 0.5, 0.6), (0.2, 0.3, 0.25), False)


def setting() -> tuple[IncrementalModel, Tensor, Tensor]:
    model = IncrementalModel(ModelSpec("convnet", "batch", 16), torch_generator(0)).double()
    model.grow(4, torch_generator(1))
    model.double().eval().requires_grad_(False)
    images = torch.rand(3, 3, 16, 16, generator=torch_generator(2), dtype=torch.float64)
    return model, images, torch.tensor([0, 3, 1])


def loss_of(model: IncrementalModel, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(TRANSFORM.normalised(images)).logits, labels, reduction="none")


def test_one_step_is_equation_14() -> None:
    model, images, labels = setting()
    std = torch.rand(3, 128, generator=torch_generator(3))
    found = perturb(model, TRANSFORM, images, labels, std, noise=0.1, steps=1, rate=0.5, rng=torch_generator(4))
    drawn = torch.randn((3, 128), generator=torch_generator(4))
    for i in range(3):
        pixels = images[i : i + 1].clone().requires_grad_()
        features = model(
            (pixels - torch.tensor(TRANSFORM.mean).view(3, 1, 1).double())
            / torch.tensor(TRANSFORM.std).view(3, 1, 1).double()
        ).features
        logits = model.classify(features + 0.1 * std[i] * drawn[i])
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels[i : i + 1]), pixels)
        torch.testing.assert_close(found[i], (images[i] - 0.5 * gradient[0]).clamp(0, 1), rtol=1e-4, atol=1e-6)


def test_it_stays_a_picture_and_looks_more_like_its_class_to_the_model() -> None:
    model, images, labels = setting()
    std = torch.rand(3, 128, generator=torch_generator(3))
    found = perturb(model, TRANSFORM, images, labels, std, noise=0.1, steps=50, rate=1.0, rng=torch_generator(4))
    assert not found.requires_grad
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1
    assert (loss_of(model, found, labels) < loss_of(model, images, labels)).all()
    assert not torch.equal(found, images)


def test_without_noise_no_chance_is_left() -> None:
    model, images, labels = setting()
    std = torch.ones(3, 128)
    both = [
        perturb(model, TRANSFORM, images, labels, std, noise=0.0, steps=2, rate=1.0, rng=torch_generator(seed))
        for seed in (1, 2)
    ]
    assert torch.equal(*both)
