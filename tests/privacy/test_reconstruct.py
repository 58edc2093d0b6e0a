"""Reconstruction: the batched minimiser, and images from gradients."""

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.data import glyphs
from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.distance import Target
from holdfast.privacy.encode import labels_of, prototype_gradients
from holdfast.privacy.reconstruct import minimise, reconstruct
from holdfast.seeding import torch_generator


def rosenbrock(points: Tensor, _: Tensor | None = None) -> tuple[Tensor, Tensor]:
    points = points.detach().requires_grad_()
    values = (100 * (points[:, 1:] - points[:, :-1] ** 2) ** 2 + (1 - points[:, :-1]) ** 2).sum(dim=1)
    return values.detach(), torch.autograd.grad(values.sum(), points)[0]


def test_the_minimiser_finds_known_minima() -> None:
    start = 2 * torch.randn(8, 4, generator=torch_generator(1), dtype=torch.float64)
    [points], values = minimise(rosenbrock, start, iterations=200)
    solved = values < 1e-12  # Rosenbrock's function has a second, context minimum near (-1, 1, 1, 1)
    assert solved.sum() >= 5
    torch.testing.assert_close(points[solved], torch.ones_like(points[solved]))
    assert (rosenbrock(points)[1].abs().amax(dim=1) < 1e-4).all()


def test_values_never_rise_and_each_function_keeps_its_own_path() -> None:
    start = 2 * torch.randn(6, 3, generator=torch_generator(2), dtype=torch.float64)
    before = rosenbrock(start)[0]
    for iterations in (1, 5, 20):
        [points], values = minimise(rosenbrock, start, iterations)
        assert (values <= before).all()
        before = values
        for i in range(6):
            [alone], _ = minimise(rosenbrock, start[i : i + 1], iterations)
            torch.testing.assert_close(alone[0], points[i])


@pytest.mark.parametrize("size", [16, 21, 83])
def test_the_distance_is_the_sum_over_all_layers_and_its_slope_is_autograds(size: int) -> None:
    encoder = GradientEncoder(size, 5, torch_generator(0)).double()
    pixels = torch.rand(3, 3, size, size, generator=torch_generator(1), dtype=torch.float64)
    labels = torch.tensor([1, 3, 0])
    wanted = prototype_gradients(encoder, 1 - pixels, labels)
    target, rows = Target(encoder, wanted, labels), torch.tensor([2, 0])
    watched = pixels[rows].requires_grad_()
    found = prototype_gradients(encoder, watched, labels[rows])
    expected = sum(((g - wanted[name][rows]) ** 2).flatten(1).sum(dim=1) for name, g in found.items())
    assert isinstance(expected, Tensor)
    [slopes] = torch.autograd.grad(expected.sum(), watched)
    values, by_hand = target.distance(pixels[rows], rows)
    torch.testing.assert_close(values, expected.detach())
    torch.testing.assert_close(by_hand, slopes)
    values, by_hand = target.distance(1 - pixels, torch.arange(3))
    assert values.tolist() == pytest.approx([0, 0, 0], abs=1e-20)
    assert float(by_hand.abs().max()) < 1e-10


@pytest.fixture(scope="module")
def prototypes() -> tuple[GradientEncoder, Tensor, Tensor, Tensor]:
    encoder = GradientEncoder(16, 10, torch_generator(0)).double()
    drawn: np.ndarray = glyphs.render(3, 1, 1, 16, 0)["train_images"]
    start = torch.randn(3, 3, 16, 16, generator=torch_generator(5), dtype=torch.float64)
    return encoder, torch.from_numpy(drawn).double() / 255, torch.tensor([2, 7, 9]), start


def test_batched_equals_image_by_image(
    prototypes: tuple[GradientEncoder, Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.privacy.reconstruct.TOGETHER", 2)
    encoder, pixels, labels, start = prototypes
    wanted = prototype_gradients(encoder, pixels, labels)
    together, losses = reconstruct(encoder, wanted, labels, start, iterations=15)
    for i in range(3):
        mine = {name: gradient[i : i + 1] for name, gradient in wanted.items()}
        alone, loss = reconstruct(encoder, mine, labels[i : i + 1], start[i : i + 1], iterations=15)
        torch.testing.assert_close(alone[0], together[i])
        torch.testing.assert_close(loss[0], losses[i])


@pytest.mark.parametrize(("start", "iterations"), [("smooth", 60), ("white", 350)])
def test_an_unperturbed_gradient_is_inverted(
    prototypes: tuple[GradientEncoder, Tensor, Tensor, Tensor], start: str, iterations: int
) -> None:
    encoder, pixels, labels, noise = prototypes
    wanted = prototype_gradients(encoder, pixels, labels)
    images, losses = reconstruct(encoder, wanted, labels_of(wanted), noise, iterations, start=start)
    assert losses.max() < 0.01
    assert images.shape == (3, 1, 3, 16, 16)
    assert (images[:, 0] - pixels).square().mean(dim=(1, 2, 3)).max() < 1e-3
    assert images.min() >= 0
    assert images.max() <= 1


def test_the_last_iterates_can_be_kept(prototypes: tuple[GradientEncoder, Tensor, Tensor, Tensor]) -> None:
    encoder, pixels, labels, noise = prototypes
    wanted = prototype_gradients(encoder, pixels, labels)
    images, _ = reconstruct(encoder, wanted, labels, noise, iterations=6, snapshots=3)
    for k, iterations in enumerate((4, 5, 6)):
        alone, _ = reconstruct(encoder, wanted, labels, noise, iterations)
        torch.testing.assert_close(images[:, k], alone[:, 0])


def test_a_first_step_may_be_shorter() -> None:
    start = torch.full((1, 2), 3.0, dtype=torch.float64)

    def bowl(points: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return points.square().sum(dim=1), 2 * points

    [once], _ = minimise(bowl, start, iterations=1)
    [shorter], _ = minimise(bowl, start, iterations=1, rate=0.1)
    torch.testing.assert_close(start - shorter, 0.1 * (start - once))
