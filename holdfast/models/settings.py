"""The settings of the network."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.models import BACKBONES
from holdfast.settings import STRICT, setting


@dataclass(frozen=True, config=STRICT)
class ModelSettings:
    """The network."""

    name: str = setting("convnet", "backbone: " + ", ".join(BACKBONES))
    width: Annotated[int, Field(ge=8, le=1024, multiple_of=8)] = setting(
        64, "channels of ResNet-18's first stage, and of convnet's second; 16 makes a narrow network"
    )
    norm: Literal["batch", "group"] = setting("batch", "normalisation layers: batch or group")
