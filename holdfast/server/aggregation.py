"""How the server puts the clients' models together: plain means, and rules that bear some hostile clients.

All work in float64 and in the order in which the models are given, which the server makes that of client numbers.
Integer counters are copied from the first. `over` names the tensors by which models are compared: the trainable ones,
because batch statistics have scales of their own."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import floor

import torch
from torch import Tensor

from holdfast.protocol.codec import Weights
from holdfast.protocol.messages import Reply

ROUNDS = 100  # of Weiszfeld's iteration
CLOSE = 1e-12  # change of its weights at which it ends
NEAR = 1e-12  # distances below it, relative to the largest, count as this


@dataclass(frozen=True)
class Aggregation:
    """How a server aggregates: the settings `train.aggregator` and what belongs to it."""

    name: str = "mean"
    trim: float = 0.2  # trimmed_mean: the fraction left out at each end
    hostile: int = 1  # krum, multi_krum: how many clients may be hostile
    outlier: float | None = None  # updates longer than so many times the median are outliers
    clip: bool = False  # outliers are shortened, not left out
    optimiser: str = "none"  # or momentum, adam
    rate: float | None = None
    momentum: float = 0.9
    beta: float = 0.99


def aggregate(replies: Sequence[Reply], settings: Aggregation, over: Collection[str]) -> dict[str, Tensor]:
    """The models of these replies put together by the rule of this name."""
    models = [reply.weights for reply in replies]
    names = [name for name in models[0] if name in over]
    match settings.name:
        case "mean" | "samples":
            return average(replies, {"mean": "uniform"}.get(settings.name, "samples"))
        case "median":
            return by_coordinate(models, median)
        case "trimmed_mean":
            return by_coordinate(models, lambda values: trimmed_mean(values, settings.trim))
        case "krum":
            return dict(models[krum_order(models, names, settings.hostile)[0]])
        case "multi_krum":
            order = krum_order(models, names, settings.hostile)
            chosen = set(order[: max(1, len(models) - settings.hostile)])
            return weighted_mean(models, [float(i in chosen) for i in range(len(models))])
        case "geometric_median":
            return weighted_mean(models, geometric_median(gram(models, names)))
    raise ValueError(f"unknown aggregator {settings.name!r}")


def average(replies: Sequence[Reply], weighting: str) -> dict[str, Tensor]:
    """The mean of the models, each counted once (uniform) or by its number of images (samples)."""
    weights = [float(reply.samples) if weighting == "samples" else 1.0 for reply in replies]
    return weighted_mean([reply.weights for reply in replies], weights)


def weighted_mean(models: Sequence[Weights], weights: Sequence[float]) -> dict[str, Tensor]:
    """sum_i w_i x_i / sum_i w_i"""
    total = sum(weights)
    merged = {}
    for name, first in models[0].items():
        if not first.is_floating_point():
            merged[name] = first.clone()
            continue
        mean = torch.zeros_like(first, dtype=torch.float64)
        for model, weight in zip(models, weights, strict=True):
            if weight:
                mean.add_(model[name], alpha=weight)  # computed in float64
        merged[name] = mean.div_(total).to(first.dtype)
    return merged


def by_coordinate(models: Sequence[Weights], rule: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Applies a rule for N numbers to every coordinate: it takes their sorted values (N, ...) in float64."""
    merged = {}
    for name, first in models[0].items():
        if not first.is_floating_point():
            merged[name] = first.clone()
            continue
        values = torch.stack([model[name].double() for model in models]).sort(dim=0).values
        merged[name] = rule(values).to(first.dtype)
    return merged


def median(values: Tensor) -> Tensor:
    """Of sorted values (N, ...): the middle one, or the mean of the two in the middle."""
    count = len(values)
    return (values[(count - 1) // 2] + values[count // 2]) / 2


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """The mean of sorted values (N, ...) without the floor(trim N) least and as many of the largest; one or two stay at
    least."""
    count = len(values)
    out = min(floor(trim * count + 1e-9), (count - 1) // 2)
    return values[out : count - out].mean(dim=0)


def gram(models: Sequence[Weights], names: Sequence[str]) -> Tensor:
    """All scalar products (N, N) of the models as vectors over these tensors. The origin is their median by coordinate,
    so that no digits are lost where one of them is far away."""
    count = len(models)
    products = torch.zeros(count, count, dtype=torch.float64)
    for name in names:
        rows = torch.stack([model[name].double().flatten() for model in models])
        rows -= median(rows.sort(dim=0).values)
        products += (rows @ rows.T).cpu()
    return products


def squared_distances(products: Tensor) -> Tensor:
    """|x_i - x_j|^2 (N, N) from the scalar products."""
    own = products.diagonal()
    return (own[:, None] + own[None, :] - 2 * products).clamp(min=0)


def krum_order(models: Sequence[Weights], names: Sequence[str], hostile: int) -> list[int]:
    """The models from the best to the worst by Krum's score (Blanchard et al., 2017): the sum of the squared distances
    to the N - f - 2 nearest others. A tie goes to the earlier one."""
    distances = squared_distances(gram(models, names))
    near = min(max(1, len(models) - hostile - 2), len(models) - 1)
    scores = [float(torch.cat([row[:i], row[i + 1 :]]).sort().values[:near].sum()) for i, row in enumerate(distances)]
    return sorted(range(len(models)), key=lambda i: (scores[i], i))


def geometric_median(products: Tensor) -> list[float]:
    """The weights a_i with which sum_i a_i x_i is the point whose distances to all x_i have the least sum, by
    Weiszfeld's iteration. As the point is a mean of the models, its distances follow from their scalar products."""
    own = products.diagonal()
    smallest = NEAR * float(own.max().sqrt()) or 1.0
    weights = torch.full((len(own),), 1 / len(own), dtype=torch.float64)
    for _ in range(ROUNDS):
        squares = weights @ products @ weights - 2 * products @ weights + own
        found = 1 / squares.clamp(min=0).sqrt().clamp(min=smallest)
        found /= found.sum()
        done = float((found - weights).abs().max()) < CLOSE
        weights = found
        if done:
            break
    return [float(weight) for weight in weights]


# the length of updates


def update_norms(models: Sequence[Weights], base: Weights, over: Collection[str]) -> list[float]:
    """How far each model has gone from `base`: the length of its update over these tensors."""
    names = [name for name in models[0] if name in over]
    return [
        float(sum(float((model[name].double() - base[name].double()).square().sum()) for name in names) ** 0.5)
        for model in models
    ]


def clipped(model: Weights, base: Weights, factor: float) -> dict[str, Tensor]:
    """The model with its update shortened by this factor; counters stay."""
    return {
        name: torch.lerp(base[name].double(), tensor.double(), factor).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in model.items()
    }
