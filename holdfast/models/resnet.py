"""ResNet-18 as the authors use it: a 3x3 stem without pooling for small images, the usual 7x7 stem for large ones."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.models.backbone import Backbone
from holdfast.models.layers import conv, norm_layer

SMALL = 84  # pixels; up to here, MiniImageNet's size, the first layers keep the full resolution


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut; the result is returned before its ReLU."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, stride=stride), norm_layer(norm, outputs)
        self.conv2, self.norm2 = conv(outputs, outputs), norm_layer(norm, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(conv(inputs, outputs, size=1, stride=stride), norm_layer(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        total: Tensor = inner + self.shortcut(x)
        return total


class ResNet18(Backbone):
    """Four stages of two blocks, `width` to 8 * `width` channels, and a mean-pooled feature of the last; the published
    width is 64."""

    def __init__(self, image_size: int, norm: str, width: int) -> None:
        super().__init__()
        self.channels = (width, 2 * width, 4 * width, 8 * width)
        self.features = self.channels[-1]
        self.large = image_size > SMALL
        self.stem = conv(3, width, size=7, stride=2) if self.large else conv(3, width)
        self.stem_norm = norm_layer(norm, width)
        widths = [width, *self.channels]
        self.stages = nn.ModuleList(
            nn.ModuleList([Block(a, b, 1 if i == 0 else 2, norm), Block(b, b, 1, norm)])
            for i, (a, b) in enumerate(pairwise(widths))
        )

    def parts(self) -> list[list[nn.Module]]:
        """Five: the first convolution with its norm, and the four stages."""
        return [[self.stem, self.stem_norm], *([stage] for stage in self.stages)]

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Images (B, 3, S, S) to features (B, d) and the four stages' maps before their last ReLU."""
        x = F.relu(self.stem_norm(self.stem(x)))
        if self.large:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        maps = []
        for stage in self.stages:
            for block in stage:  # type: ignore[attr-defined]
                pre = block(x)
                x = F.relu(pre)
            maps.append(pre)
        return x.mean(dim=(2, 3)), maps
