"""The settings of the network."""

from typing import Literal

from pydantic.dataclasses import dataclass

from holdfast.models import BACKBONES
from holdfast.settings import STRICT, setting


@dataclass(frozen=True, config=STRICT)
class ModelSettings:
    """The network."""

    name: str = setting("convnet", "backbone: " + ", ".join(BACKBONES))
    norm: Literal["batch", "group"] = setting("batch", "normalisation layers: batch or group")
