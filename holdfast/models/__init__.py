"""Networks. BACKBONES has the built-in feature extractors, name -> class; BACKBONE_TABLE these and everybody else's."""

from collections.abc import Callable
from typing import Any

from torch import nn

from holdfast.extensions import Table
from holdfast.models.backbone import check_backbone
from holdfast.models.convnet import ConvNet
from holdfast.models.resnet import ResNet18

BACKBONES: dict[str, type[ConvNet] | type[ResNet18]] = {"convnet": ConvNet, "resnet18": ResNet18}
Maker = Callable[..., nn.Module]
BACKBONE_TABLE: Table[Maker] = Table("backbone", "holdfast.backbones", BACKBONES, check_backbone)


def register_backbone(name: str, make: Maker | None = None) -> Any:
    """Makes a backbone, a class or a function that makes a module, known in this process under this name; also a
    decorator: `@register_backbone("tiny")`. See `register_method` for what other processes find."""

    def register(thing: Maker) -> Maker:
        BACKBONE_TABLE.register(name, thing)
        return thing

    return register if make is None else register(make)
