"""The settings of the network."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.models import BACKBONES
from holdfast.settings import STRICT, setting


@dataclass(frozen=True, config=STRICT)
class ModelSettings:
    """The network."""

    name: str = setting("convnet", "backbone: " + ", ".join(BACKBONES) + ", or module:Class of your own")
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = setting(
        64, "channels of ResNet-18's first stage, and of convnet's second; 16 makes a narrow network"
    )
    norm: Literal["batch", "group"] = setting("batch", "normalisation layers: batch or group")
    weights: str | None = setting(
        None, "start the backbone from this file: safetensors, or a state dict of torchvision (.pth)"
    )
    weights_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = setting(
        None, "the SHA-256 of model.weights, by which a run knows it; filled in if not given"
    )
    freeze: Annotated[int, Field(ge=0, le=1000)] = setting(
        0, "do not train the backbone's first so many stages, the stem included; clients do not send them either"
    )
