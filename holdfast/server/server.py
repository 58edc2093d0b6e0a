"""The global server: it grows the head, averages the clients' models and evaluates the result."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from holdfast.data.images import ImageSet
from holdfast.models.incremental import IncrementalModel, grow_to
from holdfast.protocol.messages import Reply, Snapshot, Weights
from holdfast.protocol.registry import Registry
from holdfast.seeding import torch_generator


def average(replies: Sequence[Reply], weighting: str) -> dict[str, Tensor]:
    """The mean of the clients' models: floats in float64 in client order, integer counters copied from the first."""
    shares = [float(reply.samples) if weighting == "samples" else 1.0 for reply in replies]
    total = sum(shares)
    merged = {}
    for name, first in replies[0].weights.items():
        if not first.is_floating_point():
            merged[name] = first.clone()
            continue
        mean = torch.zeros_like(first, dtype=torch.float64)
        for reply, share in zip(replies, shares, strict=True):
            mean.add_(reply.weights[name], alpha=share)  # computed in float64
        merged[name] = mean.div_(total).to(first.dtype)
    return merged


class Server:
    """Holds the global model and the registry of class names."""

    def __init__(self, model: IncrementalModel, seed: int) -> None:
        self.model, self.seed = model, seed
        self.registry = Registry()

    @property
    def weights(self) -> Weights:
        return self.model.state_dict()

    @property
    def latest_growth(self) -> int:
        """The index of the last growth; -1 before the first."""
        return len(self.registry.growths) - 1

    def grow(self, names: tuple[str, ...]) -> None:
        """Gives new class names their places; the server draws the new rows, so all clients start from the same."""
        if names:
            self.model.grow(len(names), torch_generator(self.seed, "growth", len(self.registry.growths)))
            self.registry = self.registry.grown(names)

    def snapshot(self) -> dict[str, Snapshot]:
        facts = {"names": self.registry.names, "growths": self.registry.growths}
        return {"model": (dict(self.weights), facts)}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        weights, facts = parts["model"]
        self.registry = Registry(tuple(facts["names"]), tuple(facts["growths"]))
        grow_to(self.model, self.registry.growths, torch_generator(0, "buffer"))
        self.model.load_state_dict(weights)

    def aggregate(self, replies: Sequence[Reply], weighting: str) -> None:
        """Replaces the model by the mean of those clients that trained; keeps it if none did."""
        trained = [reply for reply in replies if reply.weights]
        if trained:
            # What no client sends is fixed, and stays to the bit.
            self.model.load_state_dict({**self.weights, **average(trained, weighting)})

    def confusion(
        self, test: ImageSet, classes: tuple[str, ...], seen: Sequence[int], scores: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Counts (K, K + 1) over the test images of the seen classes: true class by predicted class, in their order.

        `scores` gives test images' scores (N, C). Candidates are the seen classes that the head knows; the last column
        counts images without a candidate."""
        rows = torch.cat([test.by_class[c] for c in seen])
        truth = torch.repeat_interleave(torch.arange(len(seen)), torch.tensor([len(test.by_class[c]) for c in seen]))
        positions = torch.tensor([self.registry.position.get(classes[c], -1) for c in seen])
        asked = torch.nonzero(positions >= 0).flatten()
        guess = torch.full_like(truth, len(seen))
        if len(asked):
            guess = asked[scores(rows)[:, positions[asked]].argmax(dim=1)]
        shape = (len(seen), len(seen) + 1)
        return torch.bincount(truth * shape[1] + guess, minlength=shape[0] * shape[1]).view(shape)
