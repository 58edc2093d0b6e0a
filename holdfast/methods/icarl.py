"""iCaRL (Rebuffi et al., 2017, Incremental Classifier and Representation Learning)."""

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.losses import soft_labels, weighted_binary_cross_entropy
from holdfast.methods.answers import INFERENCE, Inference, InferenceChoice
from holdfast.methods.base import BCE, Losses
from holdfast.methods.context import Batch, ClientContext
from holdfast.methods.shared import Replay
from holdfast.protocol.enrolment import Preset
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class ICaRL(InferenceChoice, Replay):
    """Sigmoid outputs; the targets of old classes are the old model's outputs, for new images and exemplars alike; the
    targets of new classes are the labels; exemplars are chosen by herding. As published, the nearest mean of exemplars
    predicts; with `inference=head` the head does. Federated: the old model is the last global model of the previous
    task; memories stay on the clients; `InferenceChoice` describes how the nearest mean of exemplars is computed. Ports
    often use cross-entropy in place of sigmoids, or swapped colour channels in place of a mirror image; here it is a
    mirror image, if the data set allows one."""

    name: ClassVar[str] = "icarl"
    about: ClassVar[str] = "iCaRL (Rebuffi et al., 2017): sigmoid distillation, herding, nearest mean"

    inference: Inference = Field(default="nme", description=INFERENCE)

    @property
    def preset(self) -> Preset:
        return replace(BCE, schedule="cosine")

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        logits = context.model(batch.images).logits
        targets = F.one_hot(batch.labels, logits.shape[1]).to(logits.dtype)
        if context.predecessor is not None:
            with torch.no_grad():
                targets = soft_labels(batch.labels, logits.shape[1], context.predecessor(batch.images).logits.sigmoid())
        return {"classification": weighted_binary_cross_entropy(logits, targets, torch.ones_like(logits[:, 0]))}
