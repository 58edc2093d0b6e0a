"""LGA: No One Left Behind, Real-World Federated Class-Incremental Learning (Dong et al., TPAMI 2023)."""

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast import losses
from holdfast.methods.answers import InferenceChoice
from holdfast.methods.base import BCE, CE, Losses
from holdfast.methods.context import Batch, ClientContext
from holdfast.methods.prior import ABSENT, LocalPrior
from holdfast.methods.roles import (
    DetectorKind,
    Perturbation,
    PrototypeSelection,
    PrototypeSharing,
    RandomModel,
    TeacherSelection,
)
from holdfast.methods.shared import Replay
from holdfast.protocol.enrolment import Preset
from holdfast.settings import STRICT, Count

FORM = "the outputs that both losses use: softmax or sigmoid"
SD = (
    "softmax form of the distillation: full (target first), renorm (a separate distribution per growth) or literal "
    "(in the printed direction)"
)
GROUPS = (
    "samples among which a weight is relative: own (the sample's growth, Eq. 4) or cumulative (old groups contain all "
    "older ones, and weights add up; D4)"
)
EXPONENT = (
    "exponent of the weights: client (the client's fraction of old classes, Eq. 4) or federation (t / (t + 1) with t "
    "earlier growths; D3)"
)
CLAMP = "clamp weights to [0.5, 5] (D5)"
DETECTOR = "how a client notices new classes: auto, fixed (the average entropy rises by 1.2), or oracle"
ITERATIONS = "iterations of a prototype's reconstruction"
PATIENCE = (
    "first rounds of a growth that are not scored, because prototypes are fitted to the models of the round that made "
    "them; 0 in the paper, 6 in the code (D40)"
)
START = "start of the reconstruction: smooth (and in frequencies), or white pixels as in the paper"


@dataclass(frozen=True, config=STRICT)
class LGA(LocalPrior, InferenceChoice, Replay):
    """Local-global anti-forgetting. On a client: a classification loss that weights every sample by its own gradient
    divided by the mean of its growth (L_CB), and a distillation with the same weights from the old model that knew the
    classes before (L_SD). For the federation: clients that notice new classes send a proxy server one perturbed
    prototype per class, as a gradient. The proxy reconstructs them and chooses the old model that all clients distil
    from: the global model of a growth that classifies their augmented features best.

    This is the form that performed best in our experiments: sigmoid outputs, because the softmax form makes a new image
    leave a third of its probability to old classes, and weights that add up over cumulative groups, as in the authors'
    code, because weights with a mean of 1 in every growth cannot counter the imbalance of old and new images. Where
    paper and code leave a choice, there is a field; see docs/departures.md. Beyond the paper, it can predict by the
    nearest mean of exemplars (`inference`), as iCaRL does; not by default, because clients then tell the global server
    which classes they hold."""

    name: ClassVar[str] = "lga"
    about: ClassVar[str] = "local-global anti-forgetting (Dong et al., 2023), in the form that performed best"

    form: Literal["softmax", "sigmoid"] = Field(default="sigmoid", description=FORM)
    sd: Literal["full", "renorm", "literal"] = Field(default="full", description=SD)
    gamma1: float = Field(default=1.0, ge=0, description="weight of the compensation loss L_CB")
    gamma2: float = Field(
        default=1.0, ge=0, description="weight of the distillation loss L_SD, once there is a teacher"
    )
    cbl: bool = Field(
        default=True, description="category-balanced compensation; off: w/oCBL, unweighted classification"
    )
    groups: Literal["own", "cumulative"] = Field(default="cumulative", description=GROUPS)
    exponent: Literal["client", "federation"] = Field(default="client", description=EXPONENT)
    clamp: bool = Field(default=False, description=CLAMP)
    sdl: bool = Field(default=True, description="semantic distillation; off: w/oSDL, iCaRL's distillation instead")
    psr: bool = Field(default=True, description="proxy server; off: w/oPSR, a random teacher of the previous growth")
    sbm: bool = Field(default=True, description="selection of the best model; off: w/oSBM, the growth's last model")
    ssa: bool = Field(default=True, description="augmented prototype features; off: w/oSSA, only the prototypes")
    npb: bool = Field(default=True, description="perturbed prototypes; off: w/oNPB, gradients of the images themselves")
    detector: Literal["auto", "fixed", "oracle"] = Field(default="auto", description=DETECTOR)
    observed: Literal["plain", "augmented"] = Field(
        default="plain", description="images for the detector's entropy: plain, or augmented as in training (D10)"
    )
    shares: Literal["first_round", "when_selected"] = Field(
        default="first_round",
        description="who sends prototypes: only clients selected in the round in which they notice new classes, "
        "or every client when it is next selected",
    )
    latent_noise: float = Field(default=0.1, ge=0, description="noise in the latent features for perturbation, epsilon")
    perturb_steps: Count = Field(default=50, description="steps of the perturbation (D25)")
    perturb_rate: float = Field(
        default=1.0, gt=0, description="learning rate of the perturbation; 0.2 in the code (D25)"
    )
    capacity: Count | None = Field(
        default=None, description="class outputs of the encoding network; the data set's number of classes if not given"
    )
    iterations: Count = Field(default=60, description=ITERATIONS)
    start: Literal["smooth", "white"] = Field(default="smooth", description=START)
    rate: float = Field(default=1.0, gt=0, description="first step length of L-BFGS; 0.1 in the code (D27)")
    snapshots: Count = Field(default=1, description="last iterates that are used as prototypes; 20 in the code (D28)")
    augmented: Count = Field(default=5, description="augmented features per prototype, upsilon")
    radius: float = Field(default=0.1, ge=0, description="radius of the augmented features, xi")
    omega: Literal["mean", "sqrt"] = Field(
        default="mean", description="scale of the augmentation: the mean variance (Eq. 12), or its square root (N8)"
    )
    patience: int = Field(default=1, ge=0, description=PATIENCE)

    @property
    def preset(self) -> Preset:
        return CE if self.form == "softmax" else replace(BCE, schedule="cosine")

    @property
    def observes_augmented(self) -> bool:
        return self.observed == "augmented"

    def detector_kind(self) -> DetectorKind:
        return self.detector

    def teacher_selection(self) -> TeacherSelection:
        if not self.psr:
            return RandomModel()
        return PrototypeSelection(
            capacity=self.capacity,
            iterations=self.iterations,
            start=self.start,
            rate=self.rate,
            snapshots=self.snapshots,
            augmented=self.augmented if self.ssa else 0,
            radius=self.radius,
            root=self.omega == "sqrt",
            patience=self.patience,
            select=self.sbm,
        )

    def prototypes(self) -> PrototypeSharing | None:
        if not self.psr:
            return None
        perturbation = Perturbation(self.latent_noise, self.perturb_steps, self.perturb_rate)
        return PrototypeSharing(perturbation if self.npb else None, late=self.shares == "when_selected")

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        """L_CB and, where there is a teacher, L_SD (Eq. 7)."""
        logits = context.model(batch.images).logits
        adjusted = logits + self.local_prior(context)
        weights = self.weights(context, adjusted, batch.labels)
        terms = {"compensation": self.gamma1 * self.compensation(adjusted, batch.labels, weights)}
        if context.teacher is not None and self.gamma2:
            with torch.no_grad():
                teacher = context.teacher(batch.images).logits
            if self.prior and self.form == "sigmoid":  # labels are the targets of classes that the teacher lacks
                logits = torch.cat([logits[:, : teacher.shape[1]], adjusted[:, teacher.shape[1] :]], dim=1)
            distilled = self.distillation(logits, batch.labels, teacher, weights, context.growth_of)
            terms["distillation"] = self.gamma2 * distilled
        return terms

    def local_prior(self, context: ClientContext, ids: Tensor | None = None) -> Tensor | float:
        """Of sigmoid outputs, each of which decides for or against its class, the logarithm of the class's odds among
        the client's images, not of its count."""
        if self.form == "softmax" or not self.prior:
            return super().local_prior(context, ids)
        return self.prior * losses.log_odds(context.counts, ABSENT)

    def weights(self, context: ClientContext, logits: Tensor, labels: Tensor) -> Tensor:
        """w_i (B,) of Eqs. 2-5: a sample's own gradient relative to the mean of its group; 1 for a client without old
        classes."""
        old, new = context.class_counts
        if not old:
            return torch.ones_like(logits[:, 0])
        gradient = losses.softmax_gradient if self.form == "softmax" else losses.sigmoid_gradient
        newest = len(context.registry.growths) - 1
        exponent = losses.sharpening(old, new) if self.exponent == "client" else newest / (newest + 1)
        found, groups = gradient(logits, labels), context.growth_of[labels]
        if self.groups == "own":
            weights = losses.group_balanced_weights(found, groups, exponent)
        else:
            weights = losses.cumulative_weights(found, groups, newest, exponent)
        return weights.clamp(0.5, 5.0) if self.clamp else weights

    def compensation(self, logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """L_CB (Eq. 5)."""
        if not self.cbl:
            weights = torch.ones_like(weights)
        if self.form == "softmax":
            return losses.weighted_cross_entropy(logits, labels, weights)
        return losses.weighted_binary_cross_entropy(logits, losses.one_hot(labels, logits), weights)

    def distillation(
        self, logits: Tensor, labels: Tensor, teacher: Tensor, weights: Tensor, growth_of: Tensor
    ) -> Tensor:
        """L_SD (Eq. 6)."""
        if not self.sdl:
            return losses.distillation_binary_cross_entropy(logits, teacher.sigmoid())
        if self.form == "sigmoid":
            soft = losses.soft_labels(labels, logits.shape[1], teacher.sigmoid())
            return losses.weighted_binary_cross_entropy(logits, soft, weights)
        if self.sd == "renorm":
            return losses.semantic_distillation_by_growth(logits, labels, teacher, weights, growth_of)
        soft = losses.soft_labels(labels, logits.shape[1], teacher.softmax(dim=1))
        form = losses.semantic_distillation if self.sd == "full" else losses.semantic_distillation_literal
        return form(logits, soft, weights)


@dataclass(frozen=True, config=STRICT)
class LGAPaper(LGA):
    """The same method exactly as the paper's text describes it: softmax outputs, weights with a mean of 1 in every
    growth, the distillation in the printed direction, the fixed entropy threshold, reconstruction from white noise.
    Only the defaults differ."""

    name: ClassVar[str] = "lga_paper"
    about: ClassVar[str] = "LGA exactly as in the paper's text: softmax, Eq. 6 as printed, threshold 1.2"

    form: Literal["softmax", "sigmoid"] = Field(default="softmax", description=FORM)
    sd: Literal["full", "renorm", "literal"] = Field(default="literal", description=SD)
    groups: Literal["own", "cumulative"] = Field(default="own", description=GROUPS)
    detector: Literal["auto", "fixed", "oracle"] = Field(default="fixed", description=DETECTOR)
    iterations: Count = Field(default=300, description=ITERATIONS)
    start: Literal["smooth", "white"] = Field(default="white", description=START)
    patience: int = Field(default=0, ge=0, description=PATIENCE)
