"""Perturbed prototype images (Eqs. 13-14): the network still sees their class, a person less so."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.models.incremental import IncrementalModel
from holdfast.models.transform import Transform


def perturb(
    model: IncrementalModel,
    transform: Transform,
    images: Tensor,
    labels: Tensor,
    std: Tensor,
    *,
    noise: float,
    steps: int,
    rate: float,
    rng: torch.Generator,
) -> Tensor:
    """Images (N, 3, S, S) with pixels from 0 to 1, moved down the cross-entropy of their noisy latent features.

    `std` (N, d) is the standard deviation of the features of each image's class. The model must be in evaluation mode.
    Pixels are normalised on their way in and stay between 0 and 1, which the paper leaves open (D26)."""
    for _ in range(steps):
        images = images.detach().requires_grad_()
        features = model(transform.normalised(images)).features
        drawn = torch.randn(std.shape, generator=rng).to(std.device)
        logits = model.classify(features + noise * std * drawn)
        loss = F.cross_entropy(logits, labels, reduction="sum")  # sum, so that every image is optimised independently
        [gradient] = torch.autograd.grad(loss, images)
        images = (images - rate * gradient).clamp(0, 1)
    return images.detach()
