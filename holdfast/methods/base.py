"""Method: what a federated class-incremental learner may change. Its defaults are plain federated averaging."""

from collections.abc import Iterable
from typing import ClassVar

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as settings
from pydantic.fields import FieldInfo
from torch import Tensor

from holdfast.data.schedule import Plan
from holdfast.federation.local import Batch, Local, Preset, Stage
from holdfast.losses import cross_entropy
from holdfast.models.incremental import IncrementalModel, ModelSpec

STRICT = ConfigDict(extra="forbid")
Losses = dict[str, Tensor]


# methods.md, section 2.5: a softmax loss and a sigmoid loss averaged over classes differ in gradient scale.
CE = Preset(lr=0.1, momentum=0.9, weight_decay=1e-5, schedule="cosine")


@settings(frozen=True, config=STRICT)
class Method:
    """A learner; its fields are its hyper-parameters, and it overrides only what its paper changes."""

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `holdfast methods`
    preset: ClassVar[Preset] = CE

    @property
    def label(self) -> str:
        """The name with those hyper-parameters that are not at their defaults."""
        known: dict[str, FieldInfo] = type(self).__pydantic_fields__  # type: ignore[attr-defined]
        changed = {key: getattr(self, key) for key, info in known.items() if getattr(self, key) != info.default}
        return " ".join([self.name, *(key if value is True else f"{key}={value}" for key, value in changed.items())])

    # what the federation is made of

    def arrange(self, plan: Plan) -> Plan:
        """The plan under which this method lives; the given one, but for a ceiling that breaks the rules on purpose."""
        return plan

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        return IncrementalModel(spec, rng)

    @property
    def keeps_memory(self) -> bool:
        """Does a client of this method keep exemplars of the classes it has learned?"""
        return False

    # on the client

    def stages(self, local: Local) -> Iterable[Stage]:
        """What a client optimises in a round: by default one stage over its data and its memory."""
        yield local.stage(local.everything)

    def loss(self, local: Local, batch: Batch) -> Losses:
        """Named terms; their sum is minimised, each is recorded. By default the cross-entropy (Eq. 1) alone."""
        return {"classification": cross_entropy(local.model(batch.images).logits, batch.labels)}

    # on the server

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        """Scores (B, C) of normalised images; the highest is the prediction."""
        logits: Tensor = model(images).logits
        return logits
