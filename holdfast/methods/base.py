"""Method: what a federated class-incremental learner may change. Its defaults are plain federated averaging."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as settings
from pydantic.fields import FieldInfo
from torch import Tensor

from holdfast.client.detector import Detector, Told
from holdfast.losses import cross_entropy
from holdfast.methods.context import Batch, Local, Preset, Stage
from holdfast.methods.herding import herd
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.protocol.messages import Extras, Moment, PrototypeShare, State
from holdfast.proxy.selectors import NoTeacher, Proxy, ProxyHome
from holdfast.simulation.plan import Plan

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
Losses = dict[str, Tensor]


# methods.md, section 2.5: a softmax loss and a sigmoid loss averaged over classes differ in gradient scale.
CE = Preset(lr=0.1, momentum=0.9, weight_decay=1e-5, schedule="cosine")
BCE = Preset(
    lr=1.0, momentum=0.0, weight_decay=1e-5, schedule="steps", milestones=(0.5, 0.75, 0.9), gamma=0.2
)  # the paper's 2.0 wants tens of classes and diverges with few


@settings(frozen=True, config=STRICT)
class Method:
    """A learner; its fields are its hyper-parameters, and it overrides only what its paper changes."""

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `holdfast methods`

    @property
    def label(self) -> str:
        """The name with those hyper-parameters that are not at their defaults."""
        known: dict[str, FieldInfo] = type(self).__pydantic_fields__  # type: ignore[attr-defined]
        changed = {key: getattr(self, key) for key, info in known.items() if getattr(self, key) != info.default}
        words = [
            key if value is True else f"w/o {key}" if value is False else f"{key}={value}"
            for key, value in changed.items()
        ]
        return " ".join([self.name, *words])

    @property
    def preset(self) -> Preset:
        """How this method's loss wants to be optimised, where the user does not say."""
        return CE

    # what the federation is made of

    def arrange(self, plan: Plan) -> Plan:
        """The plan under which this method lives; the given one, but for a ceiling that breaks the rules on purpose."""
        return plan

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        return IncrementalModel(spec, rng)

    def build_detector(self, plan: Plan) -> Detector:
        """How clients learn of new classes; by default the schedule tells them."""
        return Told(plan)

    def build_proxy(self, home: ProxyHome) -> Proxy:
        """Who chooses the models that clients distil from; by default nobody distils."""
        return NoTeacher()

    @property
    def keeps_memory(self) -> bool:
        """Does a client of this method keep exemplars of the classes it has learned?"""
        return False

    @property
    def observes_augmented(self) -> bool:
        """Do detectors see the entropies of augmented images?"""
        return False

    @property
    def late_shares(self) -> bool:
        """Does a client that was not selected when it noticed new classes share them when it is next selected?"""
        return False

    # on the client

    def exemplars(self, features: Tensor, count: int) -> Tensor:
        """Which of a class's images (N, d) to keep, best first; by default those that iCaRL's herding takes."""
        return herd(features, count)

    def begin_task(self, local: Local) -> Extras | None:
        """Before the training of a round in which the head has grown: what the server needs for its new classes."""
        return None

    def finish_task(self, local: Local) -> Extras | None:
        """After a task's last round, under the new global model: a bias, importances, class sums, ..."""
        return None

    def visits(self, moment: Moment) -> bool:
        """Are clients asked for extras at this moment? Yes, if the method says what."""
        name = "begin_task" if moment == "begin" else "finish_task"
        return getattr(type(self), name) is not getattr(Method, name)

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        """The names of those tensors that clients neither change nor send; by default none."""
        return frozenset()

    def stages(self, local: Local) -> Iterable[Stage]:
        """What a client optimises in a round: by default one stage over its data and its memory."""
        yield local.stage(local.everything)

    def loss(self, local: Local, batch: Batch) -> Losses:
        """Named terms; their sum is minimised, each is recorded. By default the cross-entropy (Eq. 1) alone."""
        return {"classification": cross_entropy(local.model(batch.images).logits, batch.labels)}

    def share(self, local: Local) -> tuple[State, tuple[PrototypeShare, ...]]:
        """After training: what the client keeps, and what the proxy alone gets; by default nothing new and nothing."""
        return local.state, ()

    # on the server

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, number: int) -> None:
        """What the server makes of its clients' extras; by default nothing. Chance comes from seed and round number."""

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        """Scores (B, C) of normalised images; the highest is the prediction."""
        logits: Tensor = model(images).logits
        return logits

    @property
    def weighs(self) -> bool:
        """Does a softmax of its scores say how probable each class is?"""
        return True
