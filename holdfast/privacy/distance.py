"""L_IR (Eq. 9): the distance of an image's gradient from the one that was sent, and its own gradient by the pixels.

Both are written out by hand. Automatic differentiation of a gradient would do the same arithmetic in three times the
time, most of it spent on moving memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import Gradients, Layer, passes


class Target:
    """The target gradients of N prototypes, laid out for arithmetic."""

    def __init__(self, encoder: GradientEncoder, wanted: Gradients, labels: Tensor) -> None:
        self.encoder, self.labels = encoder, labels
        count = len(encoder.convs)
        weights = (wanted[f"convs.{i}.weight"].permute(0, 1, 3, 4, 2).flatten(2) for i in range(count))
        self.weights = [weight.contiguous() for weight in weights]  # (N, 12, K) each
        self.biases = [wanted[f"convs.{i}.bias"] for i in range(count)]
        # The last layer's gradient is an outer product; these are the features that explain it best.
        self.error = wanted["linear.bias"]
        lengths = self.error.square().sum(dim=1, keepdim=True)
        self.features = torch.einsum("nch,nc->nh", wanted["linear.weight"], self.error) / lengths

    def distance(self, images: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """L_IR (M,) of images (M, 3, S, S) for the prototypes `rows` (M,), and its gradient by their pixels."""
        found = passes(self.encoder, images, self.labels[rows])
        values, by_error, by_features = self._last_layer(found.error, found.features, rows)
        by_delta, by_weight = [], []  # per layer: L_IR by delta from its own gradients only, and by its weights'
        for layer, weight, bias in zip(found.layers, self.weights, self.biases, strict=True):
            off = layer.weight_gradient - weight[rows]
            off_bias = layer.delta.sum(dim=2) - bias[rows]
            values = values + off.square().sum(dim=(1, 2)) + off_bias.square().sum(dim=1)
            by_weight.append(2 * off)
            by_delta.append(by_weight[-1] @ layer.patches.transpose(1, 2) + 2 * off_bias[:, :, None])
        by_outputs = []  # per layer, from the backward pass only
        by_upstream = torch.empty(0)
        for i, layer in enumerate(found.layers):  # the backward pass, differentiated: from its end to its start
            if i:
                by_delta[i] += _forwards(layer, by_upstream)
            by_upstream = by_delta[i] * layer.outputs * (1 - layer.outputs)
            by_outputs.append(by_delta[i] * layer.upstream * (1 - 2 * layer.outputs))
        last = self.encoder.linear.weight.detach()
        by_error = by_error + by_upstream.flatten(1) @ last.T
        p = found.probabilities
        by_logits = p * (by_error - (p * by_error).sum(dim=1, keepdim=True))
        carried = by_logits @ last + by_features
        for layer, from_outputs, from_weight in zip(
            reversed(found.layers), reversed(by_outputs), reversed(by_weight), strict=True
        ):  # the forward pass, from its end to its start
            by_inputs = (carried.view_as(from_outputs) + from_outputs) * layer.outputs * (1 - layer.outputs)
            carried = _to_inputs(layer, by_inputs, from_weight)
        return values, carried.view_as(images)

    def _last_layer(self, error: Tensor, features: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The last layer's part of L_IR, and its gradients by error and features; no matrix is formed.

        With e, h found and e*, h* wanted, |e h' - e* h*'|^2 is |e - e*|^2 |h|^2 + 2 (e - e*).e* h.(h - h*)
        + |e*|^2 |h - h*|^2, exact near zero as well; the bias adds |e - e*|^2."""
        wanted = self.error[rows]
        wrong, off = error - wanted, features - self.features[rows]
        length, wrongness = _dot(features, features) + 1, _dot(wrong, wrong)
        cross, along = _dot(wrong, wanted), _dot(features, off)
        weight = _dot(wanted, wanted)
        values = wrongness * length + 2 * cross * along + weight * _dot(off, off)
        by_error = 2 * (wrong * length + wanted * along)
        by_features = 2 * (features * wrongness + (features + off) * cross + weight * off)
        return values[:, 0], by_error, by_features


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, keepdim=True)


def _forwards(layer: Layer, maps: Tensor) -> Tensor:
    """A convolution without its bias: (N, C, H * W) to (N, 12, P)."""
    conv = layer.conv
    return F.conv2d(maps.view(layer.size), conv.weight.detach(), None, conv.stride, conv.padding).flatten(2)


def _to_inputs(layer: Layer, by_inputs: Tensor, by_weight: Tensor) -> Tensor:
    """From the gradient by the sigmoid's inputs (N, 12, P), and the patches' part in the weight's gradient, to the
    gradient by the layer's inputs (N, C * H * W): two products in one."""
    conv = layer.conv
    own = by_weight.unflatten(2, (*conv.kernel_size, layer.size[1])).permute(0, 1, 4, 2, 3).flatten(2)
    kernel = conv.weight.detach().flatten(1).expand_as(own)
    patches = torch.cat([kernel, own], dim=1).transpose(1, 2) @ torch.cat([by_inputs, layer.delta], dim=1)
    return F.fold(patches, layer.size[-2:], conv.kernel_size, padding=int(conv.padding[0]), stride=conv.stride).flatten(
        1
    )
