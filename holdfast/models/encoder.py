"""The gradient encoding network: a 4-layer LeNet whose gradients carry a prototype image to the proxy."""

import math

import torch
from torch import Tensor, nn

CHANNELS, KERNEL = 12, 5
PLACES = 16  # per side after the first convolution, about; the authors' number at 32 pixels


class GradientEncoder(nn.Module):
    """Three convolutions with sigmoids and a linear layer; 85,036 parameters for 100 classes at 32 pixels.

    Kernels are 5x5 and strides 2, 2 and 1. For larger images the first stride grows, and the first kernel with it, so
    that the linear layer keeps about 768 inputs and no pixel is left out: a gradient stays below 1 MB with 200 classes
    at up to 512 pixels. The proxy server initialises the network and sends it to each client once; the number of
    classes is a fixed capacity."""

    def __init__(self, image_size: int, classes: int, rng: torch.Generator) -> None:
        super().__init__()
        first = max(2, round(image_size / PLACES))  # 2 up to 40 pixels, 4 at 64, 5 at 84, 14 at 224
        places = math.ceil(image_size / first)
        side = math.ceil(places / 2)
        with torch.device("meta"):
            self.convs = nn.ModuleList(
                _conv(inputs, size, stride)
                for inputs, size, stride in ((3, image_size, first), (CHANNELS, places, 2), (CHANNELS, side, 1))
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


def _conv(inputs: int, size: int, stride: int) -> nn.Conv2d:
    """A convolution with ceil(size / stride) places per side, whose kernel is at least as wide as its stride. The
    padding lets the places cover the whole image."""
    kernel = max(KERNEL, stride | 1)
    covered = (math.ceil(size / stride) - 1) * stride + kernel
    return nn.Conv2d(inputs, CHANNELS, kernel, stride, padding=math.ceil((covered - size) / 2))
