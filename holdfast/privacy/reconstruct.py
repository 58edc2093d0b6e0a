"""Prototype images from their gradients (Eqs. 9-10), all of them as one batched computation.

Every image has its own L-BFGS (history, direction, step length). Only the arithmetic is batched, so an image's path
does not depend on the other images."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.distance import Target
from holdfast.privacy.encode import Gradients

SUFFICIENT = 1e-4  # fraction of the decrease that the slope predicts (Armijo)
HALVINGS = 12
GREY, CONTRAST = 0.5, 0.3  # of the pixels of a smooth start
HISTORY = 20  # steps that L-BFGS remembers
TOGETHER = 24  # images per pass; many more would not fit into a core's cache
VECTORS = 2 * HISTORY + 8  # per image: what L-BFGS remembers, points, gradients, directions and trials
GROUP = 2**30  # bytes of these for the images that are reconstructed at a time
# Points (M, D) and the index of each one's function (M,) -> values (M,), gradients (M, D)
Objective = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


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

    K is the number of last iterates that are kept. `noise` (N, 3, S, S) is standard normal: the initial pixels
    themselves (`white`, as in the paper), or their initial frequencies under the spectrum of natural images (`smooth`).
    With `smooth`, L-BFGS works on frequencies and needs a tenth of the iterations."""
    shape = noise.shape
    size = shape[-1]
    basis, spectrum = _cosines(size, noise), _spectrum(size, noise)

    def pixels(points: Tensor) -> Tensor:
        if start == "white":
            return points.view(-1, *shape[1:])
        return GREY + CONTRAST * (basis.T @ (spectrum * points.view(-1, *shape[1:])) @ basis)

    def by_points(slopes: Tensor) -> Tensor:
        if start == "white":
            return slopes.flatten(1)
        return (CONTRAST * spectrum * (basis @ slopes @ basis.T)).flatten(1)

    target = Target(encoder, wanted, labels)

    def objective(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        parts = zip(points.split(TOGETHER), rows.split(TOGETHER), strict=True)
        values, slopes = zip(*(target.distance(pixels(some), which) for some, which in parts), strict=True)
        return torch.cat(values), by_points(torch.cat(slopes))

    trail, values = minimise(objective, noise.flatten(1), iterations, rate, snapshots)
    return torch.stack([pixels(points).clamp(0, 1) for points in trail], dim=1), values


def group_size(image_size: int) -> int:
    """How many images are reconstructed at a time: all of a round at 32 pixels, 37 at 224."""
    return max(1, GROUP // (12 * image_size**2 * VECTORS))


def group_bytes(image_size: int, images: int) -> int:
    """What the reconstruction of so many images needs at a time."""
    return 12 * image_size**2 * (VECTORS * min(images, group_size(image_size)) + 2 * images)


def _cosines(size: int, like: Tensor) -> Tensor:
    """The orthonormal cosine basis (S, S): one row per frequency."""
    k = torch.arange(size, dtype=like.dtype, device=like.device)
    basis = torch.cos(math.pi / size * k[:, None] * (k[None, :] + 0.5)) * math.sqrt(2 / size)
    basis[0] /= math.sqrt(2)
    return basis


def _spectrum(size: int, like: Tensor) -> Tensor:
    """The strength of each frequency in natural images (S, S): it falls with the distance from zero."""
    k = torch.arange(size, dtype=like.dtype, device=like.device)
    return 1 / (1 + (k[:, None] ** 2 + k[None, :] ** 2).sqrt() / 2)


@dataclass
class History:
    """The last steps of each image and the changes of its gradient, for L-BFGS."""

    size: int
    steps: list[Tensor]  # (N, D) each
    changes: list[Tensor]
    scales: list[Tensor]  # (N, 1): 1 / (step . change), or 0 where the pair is not usable

    def add(self, step: Tensor, change: Tensor) -> None:
        curvature = (step * change).sum(dim=1, keepdim=True)
        useful = curvature > 1e-10 * change.square().sum(dim=1, keepdim=True).clamp(min=1e-30)
        self.steps.append(step)
        self.changes.append(change)
        self.scales.append(torch.where(useful, 1 / torch.where(useful, curvature, 1.0), 0.0))
        for entries in (self.steps, self.changes, self.scales):
            del entries[: -self.size]

    def direction(self, gradient: Tensor) -> Tensor:
        """Minus the estimated inverse Hessian times the gradient: the two-loop recursion, for all images at once."""
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
    objective: Objective, start: Tensor, iterations: int, rate: float = 1.0, keep: int = 1
) -> tuple[list[Tensor], Tensor]:
    """Minimises N independent functions together by L-BFGS with a backtracking line search for each.

    `rate` is the initial step length. Returns the last `keep` points and the last values."""
    history = History(HISTORY, [], [], [])
    points, trail = start, [start]
    values, gradients = objective(points, torch.arange(len(points), device=points.device))
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
    """Shortens each image's step until its value has fallen enough; an image whose value never falls keeps its point.
    Only images without an accepted step are tried again."""
    best, best_values, best_gradients = points.clone(), values.clone(), gradients.clone()
    waiting = torch.arange(len(values), device=values.device)
    for _ in range(HALVINGS):
        trial = points[waiting] + lengths[:, None] * directions[waiting]
        found, slope = objective(trial, waiting)
        before, expected = values[waiting], slopes[waiting]
        accepted = found <= before + SUFFICIENT * lengths * expected
        done = waiting[accepted]
        best[done], best_values[done], best_gradients[done] = trial[accepted], found[accepted], slope[accepted]
        if accepted.all():
            break
        # The minimum of the parabola through the value, its slope and the failed trial, but bounded from below.
        parabola = -expected * lengths.square() / (2 * (found - before - expected * lengths)).clamp(min=1e-30)
        shorter = torch.where(found.isfinite(), parabola.clamp(0.1 * lengths, 0.5 * lengths), 0.1 * lengths)
        waiting, lengths = waiting[~accepted], shorter[~accepted]
    return best, best_values, best_gradients
