"""Asking a model about many images, outside training: evaluation mode, fixed chunks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from holdfast.data.images import ImageSet
from holdfast.models.incremental import IncrementalModel
from holdfast.models.transform import Transform
from holdfast.protocol.messages import Weights, pack, unpack

CHUNK = 128  # images a forward pass; fixed, because the bits of a result may depend on it


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


@dataclass(frozen=True)
class Question:
    """What is asked of a model about many images, chunk by chunk, by whichever process is free.

    `entropies` (Eq. 8) and `features` are about training images, a method's `scores` about test images."""

    what: str
    growths: tuple[int, ...]
    weights: Weights
    augmented: tuple[str | int, ...] = ()  # the path of the chance by which images are augmented, if they are

    def to_bytes(self) -> bytes:
        return pack("question", self.weights, {key: getattr(self, key) for key in ("what", "growths", "augmented")})

    @staticmethod
    def from_bytes(blob: bytes) -> "Question":
        weights, facts = unpack("question", blob)
        return Question(facts["what"], tuple(facts["growths"]), weights, tuple(facts["augmented"]))
