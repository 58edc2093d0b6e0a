"""GLFC (Dong et al., 2022, Federated Class-Incremental Learning), the paper's predecessor."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast import losses
from holdfast.client.detector import Detector, detector_of
from holdfast.client.prototypes import Perturbation, share_prototypes
from holdfast.methods.base import BCE, STRICT, Losses, Method
from holdfast.methods.context import Batch, Local, Preset
from holdfast.protocol.messages import PrototypeShare, State
from holdfast.proxy.selectors import PrototypeProxy, Proxy, ProxyHome, ProxySettings
from holdfast.seeding import torch_generator
from holdfast.simulation.plan import Plan


@dataclass(frozen=True, config=STRICT)
class GLFC(Method):
    """A sample's loss is weighted by its own gradient over the mean gradient of its group, which is the classes in the
    client's memory or those in its data; the targets of old classes are the old model's outputs, unweighted; a proxy
    server, which has the clients' perturbed prototype images as gradients, chooses the old model by its accuracy on
    them (with each comes the variance of its class, as for LGA, which this proxy does not use). The code compares a
    task's models with the best of all tasks before and so may never choose a new one, and has the number of classes
    written into it; here every task has its own best. Transitions are found by `auto`, because a jump of 1.2 cannot be
    seen with few classes."""

    name: ClassVar[str] = "glfc"
    about: ClassVar[str] = "GLFC (Dong et al., 2022): two-group gradient compensation, and a proxy server"

    gradient: Literal["sigmoid", "softmax"] = Field(
        default="sigmoid",
        description="a sample's gradient: |s_y - 1| as in the code, or 1 - p_y as in the text",
    )
    detector: Literal["auto", "fixed", "oracle"] = Field(
        default="auto", description="how clients notice new classes: auto, fixed (1.2) or oracle"
    )
    latent_noise: float = Field(default=0.1, ge=0, description="noise in the latent feature while perturbing")
    perturb_steps: int = Field(default=50, ge=1, description="steps of the perturbation")
    iterations: int = Field(default=60, ge=1, description="of the reconstruction at the proxy")
    patience: int = Field(default=1, ge=0, description="first rounds of a growth that score nothing; the text's 0")

    @property
    def preset(self) -> Preset:
        return replace(BCE, schedule="cosine")

    @property
    def keeps_memory(self) -> bool:
        return True

    def build_detector(self, plan: Plan) -> Detector:
        return detector_of(self.detector, plan)

    def build_proxy(self, home: ProxyHome) -> Proxy:
        buffer = self.build_model(home.spec, torch_generator(0, "buffer")).to(home.device)
        settings = ProxySettings(capacity=home.classes, iterations=self.iterations, augmented=0, patience=self.patience)
        return PrototypeProxy(home, settings, buffer)

    def loss(self, local: Local, batch: Batch) -> Losses:
        logits = local.model(batch.images).logits
        hard = losses.one_hot(batch.labels, logits)
        compensated = losses.weighted_binary_cross_entropy(logits, hard, self.weights(local, logits, batch))
        if local.teacher is None:
            return {"compensation": compensated}
        with torch.no_grad():
            soft = losses.soft_labels(batch.labels, logits.shape[1], local.teacher(batch.images).logits.sigmoid())
        distilled = losses.weighted_binary_cross_entropy(logits, soft, torch.ones_like(logits[:, 0]))
        return {"compensation": compensated / 2, "distillation": distilled / 2}

    def weights(self, local: Local, logits: Tensor, batch: Batch) -> Tensor:
        """|V| over its mean in the group; 1 as long as there is no memory."""
        if not len(local.memory):
            return torch.ones_like(logits[:, 0])
        gradient = losses.sigmoid_gradient if self.gradient == "sigmoid" else losses.softmax_gradient
        kept = torch.isin(batch.labels, local.labels_of(local.memory))
        return losses.group_balanced_weights(gradient(logits, batch.labels), kept.long(), exponent=1.0)

    def share(self, local: Local) -> tuple[State, tuple[PrototypeShare, ...]]:
        return share_prototypes(local, Perturbation(self.latent_noise, self.perturb_steps))
