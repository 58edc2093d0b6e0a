"""PODNet (Douillard et al., 2020, Pooled Outputs Distillation for Small-Tasks Incremental Learning)."""

import math
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.losses import pod_flat, pod_spatial
from holdfast.methods import shared
from holdfast.methods.base import Losses
from holdfast.methods.context import ClientContext
from holdfast.models.heads import ProxyModel
from holdfast.models.incremental import IncrementalModel, ModelSpec, Output
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class PODNet(shared.ProxyMethod):
    """A classifier of ten proxies per class; distillation of the squared maps of all stages, summed over width and over
    height, and of the pooled features; after each task but the first, all proxies are fine-tuned on the balanced
    memory. The margin of the published loss is subtracted from every class and so has no effect: it is left out.
    Federated: from the second task on, the server initialises the proxies of new classes from the class means that the
    clients of the growth's round send; old proxies are neither trained nor sent in the main phase; after a task's last
    round those of its clients that have exemplars of old and of new classes fine-tune the classifier, and the server
    averages only the classifier, weighted by the numbers of exemplars. Another port also tunes the backbone and leaves
    out old proxies; here exactly the proxies are tuned, and batch statistics do not change. For nearest-mean prediction
    the authors use a `spatial` of 5 and a fixed scale of 9 in place of the learned one: `scale=9`. By default it is
    learned for both."""

    name: ClassVar[str] = "podnet"
    about: ClassVar[str] = "PODNet (Douillard et al., 2020): pooled-outputs distillation, proxies, balanced fine-tuning"

    spatial: float = Field(default=3.0, ge=0, description="weight of the distillation of maps, lambda_c")
    flat: float = Field(default=1.0, ge=0, description="weight of the distillation of features, lambda_f")
    scale: float | None = Field(
        default=None, gt=0, le=1000, description="fixed scale of the similarities; learned if not given"
    )

    def network(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        model = ProxyModel(spec, rng)
        if self.scale is not None:
            model.log_scale.data.fill_(math.log(self.scale))
        return model

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return super().fixed(model) | ({"log_scale"} if self.scale is not None else set())

    def distilled(self, context: ClientContext, output: Output, teacher: Output) -> Losses:
        return {
            "spatial": self.spatial * pod_spatial(output.maps, teacher.maps),
            "flat": self.flat * pod_flat(output.features, teacher.features),
        }
