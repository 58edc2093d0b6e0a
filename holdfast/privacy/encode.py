"""Prototype images as gradients of the encoding network, and the label that such a gradient reveals."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.models.encoder import GradientEncoder

Gradients = dict[str, Tensor]  # parameter name -> (N, *shape), one gradient per image


@dataclass
class Layer:
    """Inputs and results of a convolution: P pixels, K numbers under its kernel, in the order row, column, channel."""

    conv: nn.Conv2d
    size: torch.Size  # of its inputs, (N, C, H, W)
    patches: Tensor  # (N, P, K)
    outputs: Tensor  # (N, 12, P), after the sigmoid
    upstream: Tensor  # (N, 12, P), the loss's gradient by the outputs
    delta: Tensor  # (N, 12, P), the same by the sigmoid's inputs

    @property
    def weight_gradient(self) -> Tensor:
        """(N, 12, K)"""
        return self.delta @ self.patches


@dataclass
class Passes:
    """The forward and the backward pass of N single images, each with its own cross-entropy."""

    layers: list[Layer]
    features: Tensor  # (N, H): the last layer's inputs
    error: Tensor  # (N, C): p - y; the last layer's gradient is the outer product of the two
    probabilities: Tensor  # (N, C)


def passes(encoder: GradientEncoder, images: Tensor, labels: Tensor) -> Passes:
    """Both passes written out, one batched product per layer: images (N, 3, S, S), pixels from 0 to 1, labels (N,)."""
    inputs, tape = images, []
    convs = [conv for conv in encoder.convs if isinstance(conv, nn.Conv2d)]
    for conv in convs:
        assert conv.bias is not None
        patches = windows(inputs, conv)
        outputs = torch.sigmoid(kernel_of(conv) @ patches.transpose(1, 2) + conv.bias.detach()[:, None])
        tape.append((inputs.shape, patches, outputs))
        inputs = outputs.unflatten(2, [-(-side // conv.stride[0]) for side in inputs.shape[-2:]])
    features = inputs.flatten(1)
    last = encoder.linear.weight.detach()
    probabilities = (features @ last.T + encoder.linear.bias.detach()).softmax(dim=1)
    error = probabilities - F.one_hot(labels, probabilities.shape[1]).to(probabilities.dtype)
    layers: list[Layer] = []
    upstream = error @ last
    for conv, (size, patches, outputs) in zip(reversed(convs), reversed(tape), strict=True):
        upstream = upstream.view_as(outputs)
        delta = upstream * outputs * (1 - outputs)
        layers.insert(0, Layer(conv, size, patches, outputs, upstream, delta))
        if len(layers) < len(convs):
            upstream = backwards(conv, delta, size)
    return Passes(layers, features, error, probabilities)


def windows(maps: Tensor, conv: nn.Conv2d) -> Tensor:
    """Maps (N, C, H, W) to the (N, P, K) that the kernel sees at each position. Channels are moved to the end first, so
    that every row under the kernel is contiguous in memory."""
    kernel, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
    padded = F.pad(maps, (padding,) * 4).permute(0, 2, 3, 1).contiguous()
    seen = padded.unfold(1, kernel, stride).unfold(2, kernel, stride)  # (N, h, w, C, k, k)
    return seen.permute(0, 1, 2, 4, 5, 3).reshape(len(maps), seen.shape[1] * seen.shape[2], -1)


def kernel_of(conv: nn.Conv2d) -> Tensor:
    """The weights (12, K) in the order of `windows`."""
    return conv.weight.detach().permute(0, 2, 3, 1).flatten(1)


def backwards(conv: nn.Conv2d, delta: Tensor, size: torch.Size) -> Tensor:
    """Backpropagates (N, 12, P) through a convolution: (N, C * H * W)."""
    stride = conv.stride[0]
    places = [-(-side // stride) for side in size[-2:]]
    padding, kernel = int(conv.padding[0]), conv.kernel_size[0]
    covered = [(count - 1) * stride + kernel - 2 * padding for count in places]
    rest = [side - least for side, least in zip(size[-2:], covered, strict=True)]
    maps = F.conv_transpose2d(delta.unflatten(2, places), conv.weight.detach(), None, stride, padding, rest)
    return maps.flatten(1)


def prototype_gradients(encoder: GradientEncoder, images: Tensor, labels: Tensor) -> Gradients:
    """The gradient of each image's own cross-entropy."""
    found = passes(encoder, images, labels)
    gradients: Gradients = {}
    for i, layer in enumerate(found.layers):
        kernels = layer.weight_gradient.unflatten(2, (*layer.conv.kernel_size, layer.size[1]))
        gradients[f"convs.{i}.weight"] = kernels.permute(0, 1, 4, 2, 3).contiguous()
        gradients[f"convs.{i}.bias"] = layer.delta.sum(dim=2)
    last = found.error[:, :, None] * found.features[:, None, :]
    return {**gradients, "linear.weight": last, "linear.bias": found.error}


def labels_of(gradients: Gradients) -> Tensor:
    """The label of each gradient (N,): the one negative entry of the last bias's gradient, which is p - y (N11)."""
    bias = gradients["linear.bias"]  # (N, C)
    if not torch.equal((bias < 0).sum(dim=1), torch.ones(len(bias), dtype=torch.int64, device=bias.device)):
        raise ValueError("a prototype gradient must have exactly one negative entry in the last bias")
    return bias.argmin(dim=1)
