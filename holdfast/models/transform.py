"""Batched augmentation on tensors: crop, flip, brightness, normalise; every draw from the caller's generator."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING = 4
BRIGHTNESS = 63 / 255


@dataclass(frozen=True)
class Transform:
    """How a data set's pixels become a network's input."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool

    def plain(self, images: Tensor) -> Tensor:
        """uint8 images (B, 3, S, S) to normalised floats, as in testing."""
        return self.normalised(images.float().div_(255))

    def augmented(self, images: Tensor, rng: torch.Generator) -> Tensor:
        """uint8 images (B, 3, S, S) to randomly cropped, mirrored, brightened and normalised floats."""
        device, count = images.device, len(images)
        shifts = torch.randint(0, 2 * PADDING + 1, (count, 2), generator=rng).to(device)
        mirrored = (torch.rand(count, generator=rng) < 0.5).to(device) & self.flip
        brightness = (1 + BRIGHTNESS * (2 * torch.rand(count, generator=rng) - 1)).to(device)
        pixels = crop_and_flip(images, shifts, mirrored).float().div_(255)
        return self.normalised(pixels.mul_(brightness.view(-1, 1, 1, 1)).clamp_(0, 1))

    def normalised(self, pixels: Tensor) -> Tensor:
        """Pixels from 0 to 1, normalised for the network."""
        mean = pixels.new_tensor(self.mean).view(3, 1, 1)
        std = pixels.new_tensor(self.std).view(3, 1, 1)
        return ((pixels - mean) / std).contiguous(memory_format=torch.channels_last)


def crop_and_flip(images: Tensor, shifts: Tensor, mirrored: Tensor) -> Tensor:
    """Pads by 4 black pixels, crops each image at its own shift (row, column), and mirrors those marked."""
    count, _, height, width = images.shape
    padded = F.pad(images, (PADDING,) * 4)
    rows = shifts[:, :1] + torch.arange(height, device=images.device)  # (B, H)
    steps = torch.arange(width, device=images.device).expand(count, width)
    columns = shifts[:, 1:] + torch.where(mirrored[:, None], width - 1 - steps, steps)  # (B, W)
    batch = torch.arange(count, device=images.device).view(-1, 1, 1)
    # Indexing around a slice puts the indexed axes first: (B, H, W, 3), which is the channels-last order.
    return padded[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
