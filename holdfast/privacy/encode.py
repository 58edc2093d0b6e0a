"""Prototype images as gradients of the encoding network, and the label that such a gradient tells."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from holdfast.models.encoder import GradientEncoder

Gradients = dict[str, Tensor]  # parameter name -> (N, *shape), one gradient for each image


def prototype_gradients(encoder: GradientEncoder, images: Tensor, labels: Tensor) -> Gradients:
    """The gradient of each image's own cross-entropy, differentiable in the images: (N, 3, S, S), labels (N,)."""
    weights = {name: parameter.detach() for name, parameter in encoder.named_parameters()}

    def loss(given: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(encoder, given, (image[None],)), label[None])

    gradients: Gradients = vmap(grad(loss), in_dims=(None, 0, 0))(weights, images, labels)
    return gradients


def labels_of(gradients: Gradients) -> Tensor:
    """The label of each gradient (N,): the one negative entry of the last bias's gradient, which is p - y (N11)."""
    bias = gradients["linear.bias"]  # (N, C)
    if not torch.equal((bias < 0).sum(dim=1), torch.ones(len(bias), dtype=torch.int64, device=bias.device)):
        raise ValueError("a prototype gradient must have exactly one negative entry in the last bias")
    return bias.argmin(dim=1)
