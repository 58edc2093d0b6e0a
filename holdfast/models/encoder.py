"""The gradient encoding network: a 4-layer LeNet whose gradients carry a prototype image to the proxy."""

import math

import torch
from torch import Tensor, nn

CHANNELS, KERNEL, PADDING = 12, 5, 2


class GradientEncoder(nn.Module):
    """Three 5x5 convolutions with sigmoids and a linear layer; 85,036 parameters for 100 classes at 32 pixels.

    The proxy server initialises it and sends it to each client once; the number of classes is a fixed capacity."""

    def __init__(self, image_size: int, classes: int, rng: torch.Generator) -> None:
        super().__init__()
        side = math.ceil(image_size / 4)  # two strides of 2, each rounding up
        with torch.device("meta"):
            self.convs = nn.ModuleList(
                nn.Conv2d(inputs, CHANNELS, KERNEL, stride, padding=PADDING)
                for inputs, stride in ((3, 2), (CHANNELS, 2), (CHANNELS, 1))
            )
            self.linear = nn.Linear(CHANNELS * side * side, classes)
        self.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-0.5, 0.5, generator=rng)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, S, S) with pixels from 0 to 1 to logits (B, C)."""
        for conv in self.convs:
            images = torch.sigmoid(conv(images))
        logits: Tensor = self.linear(images.flatten(1))
        return logits
