"""FedProx (Li et al., 2020, Federated Optimization in Heterogeneous Networks)."""

from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.losses import cross_entropy
from holdfast.methods.base import Losses, Method
from holdfast.methods.context import Batch, ClientContext
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class FedProx(Method):
    """Cross-entropy plus mu/2 times the squared distance of all parameters from those of the global model. It does
    nothing against forgetting; to be comparable with the other methods it also trains on the exemplars, unless `replay`
    is false."""

    name: ClassVar[str] = "fedprox"
    about: ClassVar[str] = "FedProx (Li et al., 2020): averaging, with local models held near the global one"

    mu: float = Field(default=0.01, ge=0, description="weight of the squared distance to the global model, over 2")
    replay: bool = Field(default=True, description="train on the exemplars of old classes too")

    @property
    def keeps_memory(self) -> bool:
        return self.replay

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        pairs = zip(context.model.parameters(), context.broadcast.parameters(), strict=True)
        distance = torch.stack([(mine - theirs).square().sum() for mine, theirs in pairs]).sum()
        return {
            "classification": cross_entropy(context.model(batch.images).logits, batch.labels),
            "proximity": self.mu / 2 * distance,
        }
