"""Prototype images from their gradients (Eqs. 9-10), all of them as one batched computation.

Every image has an L-BFGS of its own (history, direction, step length); only the arithmetic is shared, so an image's
path does not depend on its company."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import Gradients, Parts, gradient_parts, parts_of

SUFFICIENT = 1e-4  # of the decrease that the slope promises (Armijo)
HALVINGS = 12
GREY, CONTRAST = 0.5, 0.3  # of the pixels that a smooth start draws
Objective = Callable[[Tensor], tuple[Tensor, Tensor]]  # points (N, D) -> values (N,), gradients (N, D)


def gradient_distance(encoder: GradientEncoder, images: Tensor, labels: Tensor, wanted: Parts) -> Tensor:
    """L_IR (Eq. 9) of each image (N,): the squared distance of its gradient to the wanted one, over all layers.

    Of the last layer without forming its matrix: with e, h found and e*, h* wanted,
    |e h' - e* h*'|^2 = |e - e*|^2 |h|^2 + 2 (e - e*).e* h.(h - h*) + |e*|^2 |h - h*|^2, exact near zero as well."""
    found = gradient_parts(encoder, images, labels)
    wrong, off = found.error - wanted.error, found.features - wanted.features
    total = (
        _dot(wrong, wrong) * (_dot(found.features, found.features) + 1)
        + 2 * _dot(wrong, wanted.error) * _dot(found.features, off)
        + _dot(wanted.error, wanted.error) * _dot(off, off)
    )
    for name, part in found.convs.items():
        total = total + (part - wanted.convs[name]).square().flatten(1).sum(dim=1)
    return total


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1)


def reconstruct(
    encoder: GradientEncoder,
    wanted: Gradients,
    labels: Tensor,
    noise: Tensor,
    iterations: int,
    *,
    start: str = "smooth",
    rate: float = 1.0,
    snapshots: int = 1,
) -> tuple[Tensor, Tensor]:
    """Images (N, K, 3, S, S) with pixels from 0 to 1 whose gradients come near the wanted ones, and their L_IR (N,).

    K is the number of last iterates that are kept. `noise` (N, 3, S, S) is standard normal: the first pixels
    themselves (`white`, the paper's way), or their first frequencies under the spectrum of natural images (`smooth`),
    in whose coordinates L-BFGS then works; it needs a tenth of the iterations."""
    shape = noise.shape
    size = shape[-1]
    basis, spectrum = _cosines(size, noise), _spectrum(size, noise)

    def pixels(points: Tensor) -> Tensor:
        if start == "white":
            return points.view(shape)
        return GREY + CONTRAST * (basis.T @ (spectrum * points.view(shape)) @ basis)

    parts = parts_of(wanted)

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        points = points.detach().requires_grad_()
        values = gradient_distance(encoder, pixels(points), labels, parts)
        [gradients] = torch.autograd.grad(values.sum(), points)
        return values.detach(), gradients

    trail, values = minimise(objective, noise.flatten(1), iterations, rate, snapshots)
    return torch.stack([pixels(points).clamp(0, 1) for points in trail], dim=1), values


def _cosines(size: int, like: Tensor) -> Tensor:
    """The orthonormal cosine basis (S, S): a row for each frequency."""
    k = torch.arange(size, dtype=like.dtype, device=like.device)
    basis = torch.cos(math.pi / size * k[:, None] * (k[None, :] + 0.5)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def _spectrum(size: int, like: Tensor) -> Tensor:
    """How strong each frequency is in images of things (S, S): it falls with its distance from zero."""
    k = torch.arange(size, dtype=like.dtype, device=like.device)
    return 1 / (1 + (k[:, None] ** 2 + k[None, :] ** 2).sqrt() / 2)


@dataclass
class History:
    """The last steps of each image and the changes of its gradient, as L-BFGS wants them."""

    size: int
    steps: list[Tensor]  # (N, D) each
    changes: list[Tensor]
    scales: list[Tensor]  # (N, 1): 1 / (step . change), or 0 where the pair is of no use

    def add(self, step: Tensor, change: Tensor) -> None:
        curvature = (step * change).sum(dim=1, keepdim=True)
        useful = curvature > 1e-10 * change.square().sum(dim=1, keepdim=True).clamp(min=1e-30)
        self.steps.append(step)
        self.changes.append(change)
        self.scales.append(torch.where(useful, 1 / torch.where(useful, curvature, 1.0), 0.0))
        for entries in (self.steps, self.changes, self.scales):
            del entries[: -self.size]

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the inverse Hessian's estimate times the gradient: the two-loop recursion, for all images at once."""
        q = gradient.clone()
        weights = []
        for step, change, scale in zip(
            reversed(self.steps), reversed(self.changes), reversed(self.scales), strict=True
        ):
            weights.append(scale * (step * q).sum(dim=1, keepdim=True))
            q = q - weights[-1] * change
        if self.steps:
            length = self.changes[-1].square().sum(dim=1, keepdim=True).clamp(min=1e-30)
            gamma = (self.steps[-1] * self.changes[-1]).sum(dim=1, keepdim=True) / length
            q = q * torch.where(self.scales[-1] > 0, gamma, 1.0)
        for step, change, scale, weight in zip(self.steps, self.changes, self.scales, reversed(weights), strict=True):
            q = q + step * (weight - scale * (change * q).sum(dim=1, keepdim=True))
        return -q


def minimise(
    objective: Objective, start: Tensor, iterations: int, rate: float = 1.0, keep: int = 1, history_size: int = 20
) -> tuple[list[Tensor], Tensor]:
    """Minimises N independent functions together by L-BFGS with a backtracking line search for each.

    `rate` is the length of a step before it is shortened. Returns the last `keep` points and the last values."""
    history = History(history_size, [], [], [])
    points, trail = start, [start]
    values, gradients = objective(points)
    for iteration in range(iterations):
        directions = history.direction(gradients)
        slopes = (directions * gradients).sum(dim=1)
        uphill = slopes >= 0
        directions = torch.where(uphill[:, None], -gradients, directions)
        slopes = torch.where(uphill, -gradients.square().sum(dim=1), slopes)
        # Without a history the direction has no natural length.
        first = (
            (1 / gradients.abs().sum(dim=1).clamp(min=1e-30)).clamp(max=1)
            if iteration == 0
            else torch.ones_like(values)
        ) * rate
        moved = _line_search(objective, points, values, gradients, directions, slopes, first)
        history.add(moved[0] - points, moved[2] - gradients)
        points, values, gradients = moved
        trail = [*trail, points][-keep:]
    return trail, values


def _line_search(
    objective: Objective,
    points: Tensor,
    values: Tensor,
    gradients: Tensor,
    directions: Tensor,
    slopes: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shortens each image's step until its value has fallen enough; an image that never falls stays where it is."""
    best = points, values, gradients
    waiting = torch.ones_like(values, dtype=torch.bool)
    for _ in range(HALVINGS):
        trial = points + lengths[:, None] * directions
        found, slope = objective(trial)
        accepted = waiting & (found <= values + SUFFICIENT * lengths * slopes)
        best = (
            torch.where(accepted[:, None], trial, best[0]),
            torch.where(accepted, found, best[1]),
            torch.where(accepted[:, None], slope, best[2]),
        )
        waiting = waiting & ~accepted
        if not waiting.any():
            break
        # The minimum of the parabola through the value, its slope and the failed trial, but not too short a step.
        parabola = -slopes * lengths.square() / (2 * (found - values - slopes * lengths)).clamp(min=1e-30)
        shorter = torch.where(found.isfinite(), parabola.clamp(0.1 * lengths, 0.5 * lengths), 0.1 * lengths)
        lengths = torch.where(waiting, shorter, lengths)
    return best
