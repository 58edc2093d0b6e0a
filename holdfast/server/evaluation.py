"""How well the global model does on labelled images: counts of true and predicted classes."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from holdfast.data.images import ImageSet
from holdfast.protocol.registry import Registry


def confusion(
    registry: Registry,
    test: ImageSet,
    classes: Sequence[str],
    seen: Sequence[int],
    scores: Callable[[Tensor], Tensor],
) -> Tensor:
    """Counts (K, K + 1) over the test images of the seen classes: true class by predicted class, in their order.

    `scores` gives test images' scores (N, C). Candidates are the seen classes that the head knows; the last column
    counts images without a candidate."""
    rows = torch.cat([test.by_class[c] for c in seen])
    truth = torch.repeat_interleave(torch.arange(len(seen)), torch.tensor([len(test.by_class[c]) for c in seen]))
    positions = registry.positions([classes[c] for c in seen])
    candidates = torch.nonzero(positions >= 0).flatten()
    guess = torch.full_like(truth, len(seen))
    if len(candidates):
        guess = candidates[scores(rows)[:, positions[candidates]].argmax(dim=1)]
    shape = (len(seen), len(seen) + 1)
    return torch.bincount(truth * shape[1] + guess, minlength=shape[0] * shape[1]).view(shape)
