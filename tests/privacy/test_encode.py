"""The encoding network, gradients of single images, and the labels they tell."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import labels_of, prototype_gradients
from holdfast.seeding import torch_generator


def images(count: int, size: int = 16) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch_generator(7))


@pytest.mark.parametrize(("size", "inputs"), [(32, 768), (16, 192), (64, 3072), (33, 12 * 81)])
def test_the_networks_size(size: int, inputs: int) -> None:
    encoder = GradientEncoder(size, 100, torch_generator(0))
    assert encoder.linear.in_features == inputs
    assert encoder(images(2, size)).shape == (2, 100)
    if size == 32:
        assert sum(p.numel() for p in encoder.parameters()) == 85_036  # docs/departures.md


def test_initial_weights_are_uniform_and_from_the_given_generator() -> None:
    before = torch.get_rng_state()
    first, again = (GradientEncoder(16, 10, torch_generator(3)) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    weights = first.linear.weight.detach()
    assert -0.5 <= float(weights.min()) < -0.49
    assert 0.49 < float(weights.max()) <= 0.5


def test_gradients_are_each_images_own() -> None:
    encoder = GradientEncoder(16, 10, torch_generator(0)).double()
    pixels, labels = images(3).double(), torch.tensor([4, 0, 9])
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
