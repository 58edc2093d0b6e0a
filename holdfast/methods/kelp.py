"""KELP, our own method: local priors, held features, and a Gaussian that predicts."""

from typing import ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.losses import cross_entropy, log_counts, pod_flat, pod_spatial
from holdfast.methods.answers import SHRINK, InferenceChoice
from holdfast.methods.base import Losses
from holdfast.methods.context import Batch, ClientContext
from holdfast.methods.shared import Replay, growth_weight
from holdfast.models.incremental import IncrementalModel, ModelSpec, require_maps
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class Kelp(InferenceChoice, Replay):
    """Three known parts, put together for clients that hold different classes. (1) Local prior: a client's softmax is
    given the logarithms of its own image counts (logit adjustment, Menon et al. 2021), so that neither new classes nor
    those that a client happens to hold are preferred by the averaged head; predictions use the plain outputs. (2) Held
    features: pooled features and maps stay where the last model of the previous growth had them (PODNet's two
    distances), so that class means that nobody could renew stay valid. (3) Gaussian answer: one Gaussian per class with
    one covariance (LDA), from sums over the clients of a task's last round. With `inference=head` nothing but the model
    leaves a client."""

    name: ClassVar[str] = "kelp"
    about: ClassVar[str] = "our own method: local priors, held features, and Gaussians from sums over clients"

    inference: Literal["gauss", "head", "both"] = Field(
        default="gauss", description="prediction by Gaussians with one covariance, by the head, or by both together"
    )
    prior: float = Field(default=1.0, ge=0, description="how much of the logarithm of a client's counts is added, tau")
    absent: float = Field(default=0.1, gt=0, description="the count of a class that the client has no image of, eps")
    flat: float = Field(default=1.0, ge=0, description="weight of the distillation of features")
    spatial: float = Field(default=1.0, ge=0, description="weight of the distillation of maps")
    shrink: float = Field(
        default=SHRINK, ge=0.001, le=1, description="how far the covariance is moved towards the identity, a"
    )

    def network(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        model = super().network(spec, rng)
        if self.spatial:
            require_maps(model, spec)
        return model

    @property
    def shrinkage(self) -> float:
        return self.shrink

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        output = context.model(batch.images)
        adjusted = output.logits + self.prior * log_counts(context.counts, self.absent)
        terms = {"classification": cross_entropy(adjusted, batch.labels)}
        if context.predecessor is None or not (self.flat or self.spatial):
            return terms
        with torch.no_grad():
            teacher = context.predecessor(batch.images)
        weight = growth_weight(context)
        if self.flat:
            terms["flat"] = weight * self.flat * pod_flat(output.features, teacher.features)
        if self.spatial:
            terms["spatial"] = weight * self.spatial * pod_spatial(output.maps, teacher.maps)
        return terms
