"""Backbone: what is asked of the network below the head, and the adapter that makes one of any `torch.nn.Module`.

A module of your own takes normalised images (B, 3, S, S) and returns one of

- a vector per image (B, d),
- a feature map (B, C, h, w), of which the mean over its pixels becomes the vector,
- `(vector, maps)`, with the maps of its stages before their ReLU: a list of tensors (B, c, h, w)."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import HoldfastError
from holdfast.seeding import torch_seeded


class Backbone(nn.Module):
    """Images (B, 3, S, S) to features (B, d) and the maps of its stages before their ReLU, if it has any."""

    features: int  # d
    channels: tuple[int, ...]  # of the maps

    def parts(self) -> list[list[nn.Module]]:
        """Its layers in order, the first ones first: `model.freeze` counts these."""
        raise NotImplementedError


class AdaptedBackbone(Backbone):
    """Anybody's module as a backbone. Its weights are those that its constructor has given it; how many features and
    channels it has is found by a pass over empty images."""

    def __init__(self, name: str, net: nn.Module, image_size: int) -> None:
        super().__init__()
        self.name, self.net = name, net
        empty = torch.zeros(2, 3, image_size, image_size)
        features, maps = self._try(self.eval(), empty, "images")
        self.features = features.shape[1]
        self.channels = tuple(m.shape[1] for m in maps)
        self._try(copy.deepcopy(self).train(), empty[:1], "a training batch with one image")

    def _try(self, backbone: "AdaptedBackbone", images: Tensor, what: str) -> tuple[Tensor, list[Tensor]]:
        try:
            with torch.no_grad():
                features, maps = backbone(images)
        except HoldfastError:
            raise
        except Exception as error:
            reason = str(error).split("\n")[0]
            raise HoldfastError(
                f"the backbone {self.name!r} fails for {what} {tuple(images.shape)}: {reason}; see docs/extending.md"
            ) from error
        if len(features) != len(images):
            raise self._wrong(f"{len(features)} rows for {len(images)} images")
        return features, maps

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        output = self.net(images.contiguous())  # many modules flatten their maps with `view`
        if isinstance(output, Tensor) and output.ndim == 4:
            return output.mean(dim=(2, 3)), [output]
        if isinstance(output, Tensor) and output.ndim == 2:
            return output, []
        if isinstance(output, tuple | list) and len(output) == 2:
            features, maps = output
            whole = isinstance(features, Tensor) and features.ndim == 2 and isinstance(maps, tuple | list)
            if whole and all(isinstance(m, Tensor) and m.ndim == 4 for m in maps):
                return features, list(maps)
        raise self._wrong(f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__)

    def _wrong(self, what: str) -> HoldfastError:
        return HoldfastError(
            f"the backbone {self.name!r} returns {what}; it should return features (B, d), a feature map (B, C, h, w), "
            "or (features, list of maps)"
        )

    def parts(self) -> list[list[nn.Module]]:
        """The module's direct children with weights, in the order in which they were defined."""
        return [[child] for child in self.net.children() if child.state_dict()]


def check_backbone(name: str, thing: Any) -> Callable[..., nn.Module]:
    """Is this a class of modules, or a function that makes one?"""
    if isinstance(thing, type) and not issubclass(thing, nn.Module):
        raise HoldfastError(f"the backbone {name!r} is not a torch.nn.Module; see docs/extending.md")
    if not callable(thing):
        raise HoldfastError(f"the backbone {name!r} is neither a class nor a function; see docs/extending.md")
    make: Callable[..., nn.Module] = thing
    return make


def adapted(
    name: str, make: Callable[..., Any], settings: Mapping[str, Any], given: Mapping[str, Any], rng: torch.Generator
) -> AdaptedBackbone:
    """A backbone of somebody's own, made with those `settings` that its signature names. Settings in `given`, which
    the user chose, must have an effect. The random numbers that it draws from torch follow from `rng`."""
    wanted = {key: value for key, value in settings.items() if key in inspect.signature(make).parameters}
    for key, value in given.items():
        if key not in wanted:
            raise HoldfastError(f"model.{key}={value} has no effect on the backbone {name!r}; leave it out")
    with torch_seeded(rng, torch.device("cpu")):
        try:
            net = make(**wanted)
        except (TypeError, ValueError, RuntimeError) as error:
            reason = str(error).split("\n")[0]
            raise HoldfastError(
                f"the backbone {name!r} cannot be made: {reason}; it is called with those of "
                f"{', '.join(settings)} that it has as parameters, and needs defaults for all others"
            ) from error
        if not isinstance(net, nn.Module):
            raise HoldfastError(f"the backbone {name!r} makes a {type(net).__name__}, not a torch.nn.Module")
        return AdaptedBackbone(name, net, settings["image_size"])


def hold(part: nn.Module) -> None:
    """Makes buffers of all parameters of a part: they keep their names, and nothing can train them."""
    for module in part.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            delattr(module, name)
            module.register_buffer(name, parameter.detach())
