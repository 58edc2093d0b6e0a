"""Prototype images as gradients of the encoding network, and the label that such a gradient tells."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.models.encoder import KERNEL, PADDING, GradientEncoder

Gradients = dict[str, Tensor]  # parameter name -> (N, *shape), one gradient for each image


class Parts(NamedTuple):
    """What the gradients of N single images consist of: that of the last layer is an outer product."""

    error: Tensor  # (N, C): p - y, the gradient of the last bias
    features: Tensor  # (N, H): the last layer's inputs; its weight's gradient is error x features
    convs: Gradients


def gradient_parts(encoder: GradientEncoder, images: Tensor, labels: Tensor) -> Parts:
    """Back-propagates each image's own cross-entropy, written out so that it is differentiable in the images and costs
    one batched product a layer: images (N, 3, S, S) with pixels from 0 to 1, labels (N,)."""
    inputs, tape = images, []
    layers = [layer for layer in encoder.convs if isinstance(layer, nn.Conv2d)]
    for conv in layers:
        assert conv.bias is not None
        kernel = conv.weight.detach().flatten(1)  # (12, K)
        patches = F.unfold(inputs, KERNEL, padding=PADDING, stride=conv.stride)  # (N, K, pixels)
        outputs = torch.sigmoid(kernel @ patches + conv.bias.detach()[:, None])  # (N, 12, pixels)
        tape.append((kernel, patches, outputs, inputs.shape[-2:]))
        inputs = outputs.unflatten(2, [-(-side // conv.stride[0]) for side in inputs.shape[-2:]])
    features = inputs.flatten(1)
    last = encoder.linear.weight.detach()
    logits = features @ last.T + encoder.linear.bias.detach()
    error = logits.softmax(dim=1) - F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    convs: Gradients = {}
    upstream = error @ last
    for i in reversed(range(len(tape))):
        conv, (kernel, patches, outputs, size) = layers[i], tape[i]
        delta = upstream.view_as(outputs) * outputs * (1 - outputs)
        convs[f"convs.{i}.weight"] = (delta @ patches.transpose(1, 2)).view(len(images), *conv.weight.shape)
        convs[f"convs.{i}.bias"] = delta.sum(dim=2)
        if i:
            upstream = F.fold(kernel.T @ delta, size, KERNEL, padding=PADDING, stride=conv.stride).flatten(2)
    return Parts(error, features, convs)


def prototype_gradients(encoder: GradientEncoder, images: Tensor, labels: Tensor) -> Gradients:
    """The gradient of each image's own cross-entropy."""
    error, features, convs = gradient_parts(encoder, images, labels)
    return {**convs, "linear.weight": error[:, :, None] * features[:, None, :], "linear.bias": error}


def parts_of(gradients: Gradients) -> Parts:
    """The parts of received gradients; the features are those that explain the last layer's gradient best."""
    error = gradients["linear.bias"]
    features = torch.einsum("nch,nc->nh", gradients["linear.weight"], error) / error.square().sum(dim=1, keepdim=True)
    return Parts(error, features, {name: part for name, part in gradients.items() if name.startswith("convs.")})


def labels_of(gradients: Gradients) -> Tensor:
    """The label of each gradient (N,): the one negative entry of the last bias's gradient, which is p - y (N11)."""
    bias = gradients["linear.bias"]  # (N, C)
    if not torch.equal((bias < 0).sum(dim=1), torch.ones(len(bias), dtype=torch.int64, device=bias.device)):
        raise ValueError("a prototype gradient must have exactly one negative entry in the last bias")
    return bias.argmin(dim=1)
