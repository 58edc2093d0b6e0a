"""iCaRL (Rebuffi et al., 2017, Incremental Classifier and Representation Learning)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.federation.local import Batch, Local, Preset
from holdfast.federation.messages import Extras
from holdfast.federation.proxy import LastRound, Proxy, ProxyHome
from holdfast.losses import soft_labels, weighted_binary_cross_entropy
from holdfast.methods.base import BCE, STRICT, Losses, Method
from holdfast.methods.shared import class_means, class_sums
from holdfast.models.heads import NotedModel, noted_names
from holdfast.models.incremental import IncrementalModel, ModelSpec


@dataclass(frozen=True, config=STRICT)
class ICaRL(Method):
    """Sigmoid outputs; the targets of old classes are the old model's outputs, for new images and exemplars alike,
    those of new classes the labels; exemplars by herding. Federated: the old model is the last global one of the task
    before; memories stay with the clients. For the nearest mean of exemplars the clients of a task's last round send,
    class by class, the sum of their exemplars' unit features under the new global model and their number; the server
    adds them up. A class that none of them holds keeps its mean of before; as long as any class of the head has no mean
    at all (in mid-task, or when none of these clients holds it) the head answers. Often ported with swapped colour
    channels in place of a mirror image; here it is a mirror image, where the data set allows one."""

    name: ClassVar[str] = "icarl"
    about: ClassVar[str] = "iCaRL (Rebuffi et al., 2017): sigmoid distillation, herding; head or nearest mean answers"

    inference: Literal["head", "nme"] = Field(
        default="head", description="who answers: the head, or the nearest mean of exemplars"
    )

    @property
    def preset(self) -> Preset:
        return replace(BCE, schedule="cosine")

    @property
    def keeps_memory(self) -> bool:
        return True

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        if self.inference == "head":
            return IncrementalModel(spec, rng)
        model = NotedModel(spec, rng, {})
        model.kinds = {"mean": ((model.features,), 0.0)}
        return model

    def build_proxy(self, home: ProxyHome) -> Proxy:
        return LastRound()

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return noted_names(model)

    def loss(self, local: Local, batch: Batch) -> Losses:
        logits = local.model(batch.images).logits
        targets = F.one_hot(batch.labels, logits.shape[1]).to(logits.dtype)
        if local.predecessor is not None:
            with torch.no_grad():
                targets = soft_labels(batch.labels, logits.shape[1], local.predecessor(batch.images).logits.sigmoid())
        return {"classification": weighted_binary_cross_entropy(logits, targets, torch.ones_like(logits[:, 0]))}

    def visits(self, moment: str) -> bool:
        return self.inference == "nme" and moment == "finish"

    def finish_task(self, local: Local) -> Extras:
        return class_sums(local, local.exemplars)

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, number: int) -> None:
        assert isinstance(model, NotedModel)
        if extras:
            means, known = class_means(extras)
            before = model.noted("mean")
            model.note("mean", torch.where(known[:, None].to(before.device), means.to(before), before))

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        output = model(images)
        if self.inference == "nme" and isinstance(model, NotedModel):
            means = model.noted("mean")
            if len(means) and bool(means.any(dim=1).all()):
                return F.normalize(output.features, dim=1) @ means.T  # of unit length both: the largest is the nearest
        logits: Tensor = output.logits
        return logits
