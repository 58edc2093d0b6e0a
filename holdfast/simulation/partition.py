"""Which images of a class each holder has: all (shared), an equal part (disjoint) or an uneven part (dirichlet)."""

import numpy as np

from holdfast.errors import HoldfastError
from holdfast.seeding import shuffled


def parse_partition(text: str) -> tuple[str, float]:
    """The kind of partition and, for a Dirichlet one, its concentration."""
    kind, colon, alpha = text.partition(":")
    if kind in ("shared", "disjoint") and not colon:
        return kind, 0.0
    try:
        value = float(alpha)
    except ValueError:
        value = 0.0
    if kind == "dirichlet" and 0 < value < 1e6:
        return kind, value
    raise HoldfastError(f"unknown plan.partition={text!r}; choose shared, disjoint or dirichlet:<alpha> with alpha > 0")


def split(images: list[int], holders: int, alpha: float, rng: np.random.Generator) -> list[list[int]]:
    """Deals a class's images to its holders: evenly if alpha is 0, else in proportions drawn from a Dirichlet
    distribution."""
    order = shuffled(rng, images)
    shares = rng.dirichlet([alpha] * holders) if alpha else np.full(holders, 1 / holders)
    bounds = np.rint(np.cumsum(shares) * len(order)).astype(int)
    bounds[-1] = len(order)
    return [sorted(order[a:b]) for a, b in zip([0, *bounds[:-1]], bounds, strict=True)]
