"""GLFC (Dong et al., 2022, Federated Class-Incremental Learning), the paper's predecessor."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast import losses
from holdfast.methods.base import BCE, Losses, Method
from holdfast.methods.context import Batch, ClientContext
from holdfast.methods.roles import DetectorKind, Perturbation, PrototypeSelection, PrototypeSharing, TeacherSelection
from holdfast.protocol.enrolment import Preset
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class GLFC(Method):
    """A sample's loss is weighted by its own gradient divided by the mean gradient of its group: the classes in the
    client's memory, or those in its data. The targets of old classes are the old model's outputs, unweighted. A proxy
    server, which receives the clients' perturbed prototype images as gradients, chooses the old model by its accuracy
    on them (each comes with the variance of its class, as for LGA, which this proxy does not use). The authors' code
    compares a task's models with the best of all earlier tasks, so it may never choose a new one, and it hard-codes the
    number of classes; here every task has its own best model. Transitions are found by `auto`, because few classes
    cannot cause a jump of 1.2."""

    name: ClassVar[str] = "glfc"
    about: ClassVar[str] = "GLFC (Dong et al., 2022): two-group gradient compensation, and a proxy server"

    gradient: Literal["sigmoid", "softmax"] = Field(
        default="sigmoid",
        description="a sample's gradient: |s_y - 1| as in the code, or 1 - p_y as in the text",
    )
    detector: Literal["auto", "fixed", "oracle"] = Field(
        default="auto", description="how clients notice new classes: auto, fixed (1.2) or oracle"
    )
    latent_noise: float = Field(default=0.1, ge=0, description="noise in the latent features for perturbation")
    perturb_steps: int = Field(default=50, ge=1, description="steps of the perturbation")
    iterations: int = Field(default=60, ge=1, description="iterations of the reconstruction at the proxy")
    patience: int = Field(default=1, ge=0, description="first rounds of a growth that are not scored; 0 in the paper")

    @property
    def preset(self) -> Preset:
        return replace(BCE, schedule="cosine")

    @property
    def keeps_memory(self) -> bool:
        return True

    def detector_kind(self) -> DetectorKind:
        return self.detector

    def teacher_selection(self) -> TeacherSelection:
        return PrototypeSelection(iterations=self.iterations, augmented=0, patience=self.patience)

    def prototypes(self) -> PrototypeSharing:
        return PrototypeSharing(Perturbation(self.latent_noise, self.perturb_steps))

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        logits = context.model(batch.images).logits
        hard = losses.one_hot(batch.labels, logits)
        compensated = losses.weighted_binary_cross_entropy(logits, hard, self.weights(context, logits, batch))
        if context.teacher is None:
            return {"compensation": compensated}
        with torch.no_grad():
            soft = losses.soft_labels(batch.labels, logits.shape[1], context.teacher(batch.images).logits.sigmoid())
        distilled = losses.weighted_binary_cross_entropy(logits, soft, torch.ones_like(logits[:, 0]))
        return {"compensation": compensated / 2, "distillation": distilled / 2}

    def weights(self, context: ClientContext, logits: Tensor, batch: Batch) -> Tensor:
        """|V| divided by its mean in the group; 1 as long as there is no memory."""
        if not len(context.memory):
            return torch.ones_like(logits[:, 0])
        gradient = losses.sigmoid_gradient if self.gradient == "sigmoid" else losses.softmax_gradient
        kept = torch.isin(batch.labels, context.labels_of(context.memory))
        return losses.group_balanced_weights(gradient(logits, batch.labels), kept.long(), exponent=1.0)
