"""Asking a model about many images, outside training: evaluation mode, fixed chunks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from holdfast.data.augment import Transform
from holdfast.data.images import ImageSet
from holdfast.models.incremental import IncrementalModel

CHUNK = 256  # images a forward pass; fixed, because the bits of a result may depend on it


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients, and back to what was before."""
    before = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(before)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode with fixed parameters, though inputs may have gradients; and back to what was before."""
    before = model.training
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        model.train(before).requires_grad_(True)


def one_pass(
    model: IncrementalModel,
    images: ImageSet,
    transform: Transform,
    rows: Tensor,
    question: Callable[[Tensor], Tensor],
    augmented: torch.Generator | None = None,
) -> Tensor:
    """The answers to a question about these images (normalised, or augmented by the chance given), on the CPU."""
    device = next(model.parameters()).device

    def seen(some: Tensor) -> Tensor:
        pixels = images.images[some].to(device)
        return transform.augmented(pixels, augmented) if augmented else transform.plain(pixels)

    with evaluating(model):
        parts = [question(seen(some)) for some in rows.split(CHUNK)]
    return torch.cat(parts).cpu()
