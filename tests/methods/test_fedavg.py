"""Federated averaging: facts of its loss."""

import math

import pytest
import torch

from holdfast.losses import cross_entropy
from holdfast.seeding import torch_generator


@pytest.mark.parametrize("classes", [2, 5, 100])
def test_equal_logits_give_ln_c(classes: int) -> None:
    logits = torch.full((7, classes), 3.0)
    labels = torch.arange(7) % classes
    assert float(cross_entropy(logits, labels)) == pytest.approx(math.log(classes), rel=1e-6)


def test_by_hand_and_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]], dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1, 0]))
    z = [math.exp(1) + math.exp(2) + math.exp(0.5), 1 + math.exp(-1) + math.exp(3)]
    assert float(loss.detach()) == pytest.approx((math.log(z[0]) - 2 + math.log(z[1]) - 0) / 2)
    loss.backward()
    onehot = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(logits.grad, (logits.detach().softmax(1) - onehot) / 2)


def test_gradient_by_differences() -> None:
    logits = torch.randn(4, 6, generator=torch_generator(0), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 5, 2, 2])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels), (logits,))
