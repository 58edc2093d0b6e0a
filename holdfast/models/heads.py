"""Heads other than the linear one; they also grow by blocks, as classes are added."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.models.incremental import IncrementalModel, ModelSpec, Output, require_maps

PROXIES = 10  # per class


class ProxyBlock(nn.Module):
    """Local similarity classifier (PODNet): each class has several proxies; its score is their similarity to the
    features, with the nearest weighted most."""

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
    ReLU, so that they can point in all directions. The scale is stored as its logarithm, because one large step could
    make a plain scale negative, which would reverse every prediction."""

    def __init__(self, spec: ModelSpec, rng: torch.Generator) -> None:
        super().__init__(spec, rng)
        require_maps(self, spec)
        self.features = self.channels[-1]
        self.log_scale = nn.Parameter(torch.zeros(()))

    @property
    def scale(self) -> Tensor:
        """eta, initially 1."""
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
