"""Prototype images from their gradients (Eqs. 9-10), all of them as one batched computation.

Every image has an L-BFGS of its own (history, direction, step length); only the arithmetic is shared, so an image's
path does not depend on its company."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import Gradients, prototype_gradients

SUFFICIENT = 1e-4  # of the decrease that the slope promises (Armijo)
HALVINGS = 12
Objective = Callable[[Tensor], tuple[Tensor, Tensor]]  # points (N, D) -> values (N,), gradients (N, D)


def gradient_distance(encoder: GradientEncoder, images: Tensor, labels: Tensor, wanted: Gradients) -> Tensor:
    """L_IR (Eq. 9) of each image (N,): the squared distance of its gradient to the wanted one, over all layers."""
    found = prototype_gradients(encoder, images, labels)
    return torch.stack([(found[name] - wanted[name]).square().flatten(1).sum(dim=1) for name in wanted]).sum(dim=0)


def reconstruct(
    encoder: GradientEncoder, wanted: Gradients, labels: Tensor, start: Tensor, iterations: int
) -> tuple[Tensor, Tensor]:
    """Images (N, 3, S, S) with pixels from 0 to 1 whose gradients come near the wanted ones, and their L_IR (N,)."""
    shape = start.shape

    def objective(points: Tensor) -> tuple[Tensor, Tensor]:
        points = points.detach().requires_grad_()
        values = gradient_distance(encoder, points.view(shape), labels, wanted)
        [gradients] = torch.autograd.grad(values.sum(), points)
        return values.detach(), gradients

    points, values = minimise(objective, start.flatten(1), iterations)
    return points.view(shape).clamp(0, 1), values


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


def minimise(objective: Objective, start: Tensor, iterations: int, history_size: int = 20) -> tuple[Tensor, Tensor]:
    """Minimises N independent functions together by L-BFGS with a backtracking line search for each."""
    history = History(history_size, [], [], [])
    points = start
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
        )
        moved = _line_search(objective, points, values, gradients, directions, slopes, first)
        history.add(moved[0] - points, moved[2] - gradients)
        points, values, gradients = moved
    return points, values


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
