"""Federated averaging (McMahan et al., 2017): local training with cross-entropy, then the mean of the models."""

from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.methods.base import Method
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class FedAvg(Method):
    """Does nothing against forgetting, except for optional exemplars (`replay`). Without them a client that does not
    move on has nothing to train on: it sends no model and is left out of the mean."""

    name: ClassVar[str] = "fedavg"
    about: ClassVar[str] = "federated averaging (McMahan et al., 2017); replay=true also trains on the exemplar memory"

    replay: bool = Field(default=False, description="train on the exemplars of old classes too")

    @property
    def keeps_memory(self) -> bool:
        return self.replay
