"""A backbone and a head that grows; one forward gives logits, features and stage maps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.models import BACKBONES
from holdfast.models.layers import materialise


class Output(NamedTuple):
    """What one forward pass gives."""

    logits: Tensor  # (B, C)
    features: Tensor  # (B, d)
    maps: list[Tensor]  # the stages' maps before their ReLU, (B, c, h, w) each


@dataclass(frozen=True)
class ModelSpec:
    """What a network is built from, apart from the number of its classes."""

    backbone: str
    norm: str
    image_size: int


class IncrementalModel(nn.Module):
    """A backbone with one linear block for each growth of the head."""

    def __init__(self, spec: ModelSpec, rng: torch.Generator) -> None:
        super().__init__()
        with torch.device("meta"):
            self.backbone: nn.Module = BACKBONES[spec.backbone](spec.image_size, spec.norm)
        self.features: int = BACKBONES[spec.backbone].features
        materialise(self.backbone, rng)
        self.blocks = nn.ModuleList()
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    @property
    def growths(self) -> list[int]:
        """How many classes each growth brought."""
        return [block.out_features for block in self.blocks]  # type: ignore[misc]

    def grow(self, classes: int, rng: torch.Generator) -> None:
        """Appends a block of new classes; old logits keep their bits, which one wider matrix would not promise."""
        self.blocks.append(self.new_block(classes, rng).to(next(self.backbone.parameters()).device))

    def new_block(self, classes: int, rng: torch.Generator) -> nn.Module:
        """The part of the head that is for new classes: features (B, d) to their logits."""
        with torch.device("meta"):
            block = nn.Linear(self.features, classes)
        materialise(block, rng)
        return block

    def classify(self, features: Tensor) -> Tensor:
        """Features (B, d) to logits (B, C)."""
        if not self.blocks:
            return features.new_zeros(len(features), 0)
        return torch.cat([block(features) for block in self.blocks], dim=1)

    def forward(self, images: Tensor) -> Output:
        features, maps = self.backbone(images)
        return Output(self.classify(features), features, maps)


def grow_to(model: IncrementalModel, growths: Sequence[int], rng: torch.Generator) -> None:
    """Appends the blocks that `model` lacks to have these growths."""
    for classes in growths[len(model.blocks) :]:
        model.grow(classes, rng)
