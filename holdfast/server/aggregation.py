"""The mean of the clients' models."""

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.protocol.messages import Reply


def average(replies: Sequence[Reply], weighting: str) -> dict[str, Tensor]:
    """The mean of the clients' models: floats in float64 in client order, integer counters copied from the first."""
    weights = [float(reply.samples) if weighting == "samples" else 1.0 for reply in replies]
    total = sum(weights)
    merged = {}
    for name, first in replies[0].weights.items():
        if not first.is_floating_point():
            merged[name] = first.clone()
            continue
        mean = torch.zeros_like(first, dtype=torch.float64)
        for reply, weight in zip(replies, weights, strict=True):
            mean.add_(reply.weights[name], alpha=weight)  # computed in float64
        merged[name] = mean.div_(total).to(first.dtype)
    return merged
