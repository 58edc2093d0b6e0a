"""What the networks share: normalisation layers, and initialisation from an explicit generator."""

import math
from collections.abc import Iterable

import torch
from torch import nn


def norm_layer(kind: str, channels: int) -> nn.Module:
    """BatchNorm, or GroupNorm with at least four channels per group."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(min(32, channels // 4), channels), channels)


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


@torch.no_grad()
def initialise(parts: Iterable[nn.Module], rng: torch.Generator) -> None:
    """Fills every parameter and buffer: He's normal for convolutions, uniform for linear layers, identity for norms, a
    narrow normal for embeddings."""
    for part in parts:
        if isinstance(part, nn.Conv2d):
            fan_out = part.out_channels * part.kernel_size[0] * part.kernel_size[1]
            part.weight.normal_(0.0, math.sqrt(2 / fan_out), generator=rng)
            if part.bias is not None:
                part.bias.zero_()
        elif isinstance(part, nn.Linear):
            bound = 1 / math.sqrt(part.in_features)
            part.weight.uniform_(-bound, bound, generator=rng)
            if part.bias is not None:
                part.bias.uniform_(-bound, bound, generator=rng)
        elif isinstance(part, nn.Embedding):
            part.weight.normal_(0.0, 0.02, generator=rng)
        elif isinstance(part, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
            part.weight.fill_(1.0)
            part.bias.zero_()
            if isinstance(part, nn.BatchNorm2d):
                part.reset_running_stats()


def without_values(module: nn.Module) -> list[nn.Module]:
    """The parts of a module that were built on the meta device, and those that have no tensors of their own."""
    return [
        part
        for part in module.modules()
        if all(t.is_meta for t in (*part.parameters(recurse=False), *part.buffers(recurse=False)))
    ]


def materialise(module: nn.Module, rng: torch.Generator) -> None:
    """Allocates and initialises what was built on the meta device (which draws no random numbers). Parts that have
    values already keep them."""
    parts = without_values(module)
    for part in parts:
        part.to_empty(device="cpu", recurse=False)
    initialise(parts, rng)
    for part in parts:
        if isinstance(part, Particular):
            part.begin()


class Particular(nn.Module):
    """A module with its own initial values, which `begin` sets."""

    def begin(self) -> None:
        raise NotImplementedError
