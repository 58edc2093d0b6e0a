"""The text of a module that a user might have written: a method, a backbone and a data set."""

HEADER = """
from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn

from holdfast.losses import cross_entropy
from holdfast.methods.base import Method
from holdfast.settings import STRICT

"""
CALM = (
    HEADER
    + """
@dataclass(frozen=True, config=STRICT)
class Calm(Method):
    name: ClassVar[str] = "calm"
    about: ClassVar[str] = "small logits"
    weight: float = Field(default=0.1, ge=0, description="weight of the penalty")

    def loss(self, context, batch):
        logits = context.model(batch.images).logits
        return {"classification": cross_entropy(logits, batch.labels), "penalty": self.weight * logits.square().mean()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(8, 12, 3), nn.ReLU())

    def forward(self, x):
        return self.layers(x)


def cells(settings):
    '''Squares and noise.'''
    import numpy as np
    import torch
    from holdfast.data.images import DataSet, Images, ImageSet
    pixels = np.random.default_rng(settings.seed).integers(0, 255, (80, 3, 16, 16), dtype=np.uint8)
    labels = torch.arange(80) % 4
    part = ImageSet(Images.of(pixels), labels)
    return DataSet("cells", tuple("abcd"), part, part, (0.5,) * 3, (0.25,) * 3, False)
"""
)
