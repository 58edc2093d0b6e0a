"""Federated averaging (McMahan et al., 2017): local training with cross-entropy, then the mean of the models."""

from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.errors import HoldfastError
from holdfast.losses import cross_entropy
from holdfast.methods.answers import InferenceChoice
from holdfast.methods.base import Losses
from holdfast.methods.context import Batch, ClientContext
from holdfast.methods.prior import LocalPrior
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class FedAvg(LocalPrior, InferenceChoice):
    """Does nothing against forgetting, except for optional exemplars (`replay`). Without them a client that does not
    move on has nothing to train on: it sends no model and is left out of the mean."""

    name: ClassVar[str] = "fedavg"
    about: ClassVar[str] = "federated averaging (McMahan et al., 2017); replay=true also trains on the exemplar memory"

    replay: bool = Field(default=False, description="train on the exemplars of old classes too")

    @property
    def keeps_memory(self) -> bool:
        return self.replay

    def network(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        if self.inference == "nme" and not self.replay:
            raise HoldfastError("method.inference=nme needs exemplars, and fedavg has none; set method.replay=true")
        return super().network(spec, rng)

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        logits = context.model(batch.images).logits
        return {"classification": cross_entropy(logits + self.local_prior(context), batch.labels)}
