"""The encoding network, gradients of single images, and the labels they tell."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import labels_of, prototype_gradients
from holdfast.seeding import torch_generator


def images(count: int, size: int = 16) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch_generator(7))


@pytest.mark.parametrize(
    ("size", "inputs"),
    [(32, 768), (16, 192), (33, 12 * 81), (64, 768), (84, 12 * 81), (224, 768), (257, 12 * 81), (1024, 768)],
)
def test_the_networks_size(size: int, inputs: int) -> None:
    encoder = GradientEncoder(size, 100, torch_generator(0))
    assert encoder.linear.in_features == inputs
    assert encoder(images(2, size)).shape == (2, 100)
    if size == 32:
        assert sum(p.numel() for p in encoder.parameters()) == 85_036  # docs/departures.md


@pytest.mark.parametrize(("classes", "limit"), [(200, 1_000_000), (1000, 4_000_000)])
def test_a_share_is_small_at_every_image_size(classes: int, limit: int) -> None:
    for size in (*range(8, 260), 384, 512):
        encoder = GradientEncoder(size, classes, torch_generator(0))
        share = 4 * sum(p.numel() for p in encoder.parameters()) + 4 * 512 + 8  # and the variance of the features
        assert share < limit * (1 if classes == 200 or size == 224 else 1.25), size


@pytest.mark.parametrize("size", [32, 48, 83, 84, 97, 224])
def test_every_pixel_is_seen(size: int) -> None:
    encoder = GradientEncoder(size, 3, torch_generator(0)).double()
    pixels = images(1, size).double().requires_grad_()
    F.cross_entropy(encoder(pixels), torch.tensor([1])).backward()
    assert pixels.grad is not None
    assert bool((pixels.grad != 0).all())


def test_initial_weights_are_uniform_and_from_the_given_generator() -> None:
    before = torch.get_rng_state()
    first, again = (GradientEncoder(16, 10, torch_generator(3)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    weights = first.linear.weight.detach()
    assert -0.5 <= float(weights.min()) < -0.49
    assert 0.49 < float(weights.max()) <= 0.5


@pytest.mark.parametrize("size", [16, 84, 100])
def test_gradients_are_each_images_own(size: int) -> None:
    encoder = GradientEncoder(size, 10, torch_generator(0)).double()
    pixels, labels = images(3, size).double(), torch.tensor([4, 0, 9])
    together = prototype_gradients(encoder, pixels, labels)
    for i in range(3):
        encoder.zero_grad()
        F.cross_entropy(encoder(pixels[i : i + 1]), labels[i : i + 1]).backward()
        for name, parameter in encoder.named_parameters():
            torch.testing.assert_close(together[name][i], parameter.grad)


def test_the_label_of_every_class_is_recovered() -> None:
    encoder = GradientEncoder(16, 30, torch_generator(0))
    labels = torch.arange(30)
    gradients = prototype_gradients(encoder, images(30), labels)
    assert torch.equal(labels_of(gradients), labels)
    p = encoder(images(30)).softmax(1)
    torch.testing.assert_close(gradients["linear.bias"], (p - F.one_hot(labels, 30)).detach())


def test_a_gradient_that_tells_no_label_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly one negative"):
        labels_of({"linear.bias": torch.tensor([[0.1, 0.2], [-0.1, 0.1]])})
