"""The small network of the benchmark protocols: four convolutions and a 128-d feature."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.models.backbone import Backbone
from holdfast.models.layers import conv, norm_layer


class ConvNet(Backbone):
    """3x3 convolution, norm, ReLU and 2x2 max-pool, four times (32-64-128-128 with width 64), then the mean over
    pixels."""

    def __init__(self, image_size: int, norm: str, width: int) -> None:
        super().__init__()
        self.channels = (width // 2, width, 2 * width, 2 * width)
        self.features = self.channels[-1]
        widths = [3, *self.channels]
        self.convs = nn.ModuleList(conv(a, b) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(norm_layer(norm, width) for width in widths[1:])

    def parts(self) -> list[list[nn.Module]]:
        """Four: each convolution with its norm."""
        return [list(pair) for pair in zip(self.convs, self.norms, strict=True)]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Images (B, 3, S, S) to features (B, d) and the four stages' maps before their ReLU."""
        maps = []
        for convolve, normalise in zip(self.convs, self.norms, strict=True):
            x = normalise(convolve(x))
            maps.append(x)
            x = F.relu(F.max_pool2d(x, 2))  # same result as ReLU before pooling, on a quarter of the pixels
        return x.mean(dim=(2, 3)), maps
