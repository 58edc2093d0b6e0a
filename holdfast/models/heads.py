"""Heads beyond the linear one, and what a model remembers for its head: each grows by blocks, as the classes do."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.models.incremental import IncrementalModel, ModelSpec, Output

PROXIES = 10  # of a class


class ProxyBlock(nn.Module):
    """Local similarity classifier (PODNet): each class has several proxies and is as near as they are, the nearest
    counting most."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.out_features = classes
        self.weight = nn.Parameter(torch.empty(classes, PROXIES, features))

    def forward(self, features: Tensor) -> Tensor:
        """sum_k softmax_k(s) s_k with s = -|x/|x| - w/|w||^2 = 2 cos - 2: features (B, d) to scores (B, C)."""
        unit = F.normalize(self.weight, dim=2).flatten(0, 1)
        similarity = (2 * F.normalize(features, dim=1) @ unit.T - 2).unflatten(1, (self.out_features, PROXIES))
        scores: Tensor = (similarity.softmax(dim=2) * similarity).sum(dim=2)
        return scores


class ProxyModel(IncrementalModel):
    """A backbone, blocks of proxies, and one learned scale of all scores. Features are the last maps' means before the
    ReLU, so that they can point in all directions. The scale is kept as its logarithm: a scale that crosses zero, which
    one large step can make it do, turns every answer into its opposite."""

    def __init__(self, spec: ModelSpec, rng: torch.Generator) -> None:
        super().__init__(spec, rng)
        self.log_scale = nn.Parameter(torch.zeros(()))

    @property
    def scale(self) -> Tensor:
        """eta, at first 1."""
        return self.log_scale.exp()

    def forward(self, images: Tensor) -> Output:
        _, maps = self.backbone(images)
        features = maps[-1].mean(dim=(2, 3))
        return Output(self.classify(features), features, maps)

    @property
    def proxies(self) -> list[nn.Parameter]:
        """The proxies (classes, 10, d) of each growth."""
        return [block.weight for block in self.blocks if isinstance(block, ProxyBlock)]

    def new_block(self, classes: int, rng: torch.Generator) -> nn.Module:
        block = ProxyBlock(self.features, classes)
        with torch.no_grad():
            block.weight.normal_(generator=rng)
            block.weight.copy_(F.normalize(block.weight, dim=2))
        return block


class NotedModel(IncrementalModel):
    """A linear head whose model also carries what the server has noted about each class or each growth: buffers that
    no client trains. `notes` says their names and, for each, the shape a class has and the first value."""

    def __init__(self, spec: ModelSpec, rng: torch.Generator, notes: dict[str, tuple[tuple[int, ...], float]]) -> None:
        super().__init__(spec, rng)
        self.kinds = notes
        self.notes = nn.ModuleList()

    def grow(self, classes: int, rng: torch.Generator) -> None:
        super().grow(classes, rng)
        note = nn.Module()
        for name, (shape, value) in self.kinds.items():
            note.register_buffer(name, torch.full((classes, *shape), value))
        self.notes.append(note.to(next(self.backbone.parameters()).device))

    def noted(self, name: str) -> Tensor:
        """One kind of note, of all classes (C, ...)."""
        return torch.cat([note.get_buffer(name) for note in self.notes])

    def note(self, name: str, values: Tensor) -> None:
        """Writes one kind of note for all classes (C, ...)."""
        for note, part in zip(self.notes, values.split(self.growths), strict=True):
            note.get_buffer(name).copy_(part)


def noted_names(model: IncrementalModel) -> frozenset[str]:
    """The tensors that hold notes."""
    return frozenset(name for name in model.state_dict() if name.startswith("notes."))
