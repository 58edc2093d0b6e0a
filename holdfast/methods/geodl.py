"""GeoDL with iCaRL (Simon et al., 2021, On Learning the Geodesic Path for Incremental Learning)."""

from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.losses import cross_entropy, distillation, geodesic_distance, geodesic_flow, subspace
from holdfast.methods.answers import InferenceChoice
from holdfast.methods.base import Losses
from holdfast.methods.context import Batch, ClientContext
from holdfast.methods.prior import LocalPrior
from holdfast.methods.shared import Replay
from holdfast.settings import STRICT

LEAST = 4  # images in a batch that are needed for a subspace


@dataclass(frozen=True, config=STRICT)
class GeoDL(LocalPrior, InferenceChoice, Replay):
    """Compares features of the old and the new model along the geodesic between the subspaces that the batch spans in
    each: by the cosine under the kernel that integrates all projections on the way. The authors' code uses another
    distance on centred, pooled maps and approximates the decomposition with random jitter; here it is the closed form,
    in double precision, with the small-angle series, and no gradient through the kernel. As in the paper's own
    comparison, outputs are not distilled, unless `distil`. Federated: everything is local to the client. A subspace has
    at most half as many dimensions as the features, because an almost complete space makes this a plain cosine, and at
    least two fewer than the batch has images, even if the last batch is short."""

    name: ClassVar[str] = "geodl"
    about: ClassVar[str] = "GeoDL (Simon et al., 2021) with iCaRL: distillation along the geodesic between subspaces"

    strength: float = Field(default=10.0, ge=0, description="weight of the geodesic distance, lambda")
    distil: float = Field(default=0.0, ge=0, description="weight of an added distillation of outputs; 0 as published")
    temperature: float = Field(default=2.0, gt=0, description="temperature of that distillation")

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        output = context.model(batch.images)
        terms = {"classification": cross_entropy(output.logits + self.local_prior(context), batch.labels)}
        if context.predecessor is None:
            return terms
        with torch.no_grad():
            teacher = context.predecessor(batch.images)
        old, new = sum(context.predecessor.growths), context.registry.growths[-1]
        if len(batch.images) >= LEAST:
            distance = self.strength * (old / new) ** 0.5 * self.distance(output.features, teacher.features)
            terms["geodesic"] = distance
        if self.distil:
            terms["distillation"] = self.distil * distillation(output.logits, teacher.logits, self.temperature)
        return terms

    def distance(self, features: Tensor, teacher: Tensor) -> Tensor:
        if not bool(features.isfinite().all()):
            return features.sum()  # not finite either, which the client's training reports
        size = min(len(features) - 2, features.shape[1] // 2)
        kernel = geodesic_flow(subspace(teacher, size), subspace(features, size))
        return geodesic_distance(features, teacher, kernel)
