"""Forward passes over many images, outside training: evaluation mode, fixed chunks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

CHUNK = 128  # images per forward pass; fixed, because the bits of a result may depend on it


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; restores the previous mode."""
    before = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(before)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode with fixed parameters, although inputs may have gradients; restores the previous mode."""
    before = model.training
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        model.train(before).requires_grad_(True)


def in_chunks(
    model: torch.nn.Module,
    pixels: Callable[[Tensor], Tensor],
    rows: Tensor,
    compute: Callable[[Tensor], Tensor],
) -> Tensor:
    """The result of `compute` for these images, chunk by chunk, on the CPU; `pixels` returns a chunk's images in the
    form that the network takes."""
    with evaluating(model):
        parts = [compute(pixels(chunk)) for chunk in rows.split(CHUNK)]
    return torch.cat(parts).cpu()
