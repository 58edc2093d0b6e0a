"""Method: the parts of a federated class-incremental learner that can be replaced. The defaults are plain FedAvg."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo
from torch import Tensor

from holdfast.losses import cross_entropy
from holdfast.methods.context import Batch, ClientContext, Stage
from holdfast.methods.herding import herd
from holdfast.methods.roles import DetectorKind, ExtrasForm, NoTeachers, PrototypeSharing, TeacherSelection
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.protocol.enrolment import Preset
from holdfast.protocol.messages import Extras, Phase
from holdfast.settings import STRICT

Losses = dict[str, Tensor]


# A softmax loss and a sigmoid loss that is averaged over classes differ in the scale of their gradients (D18).
CE = Preset(lr=0.1, momentum=0.9, weight_decay=1e-5, schedule="cosine")
BCE = Preset(
    lr=1.0, momentum=0.0, weight_decay=1e-5, schedule="steps", milestones=(0.5, 0.75, 0.9), gamma=0.2
)  # the paper's 2.0 needs tens of classes and diverges with few


@dataclass(frozen=True, config=STRICT)
class Method:
    """A learner; its fields are its hyper-parameters, and it overrides only what its paper changes.

    Everything that runs on a client gets a `ClientContext` and must depend on nothing else: the same context gives the
    same bits in any process. Random numbers come from `context.generator`, on the server from `seed`."""

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `holdfast methods`
    extras_are: ClassVar[str] = "extras"  # what they are, in a few words, if the server collects any
    all_at_once: ClassVar[bool] = False  # an upper bound that breaks the rules: no class comes late or leaves

    @property
    def label(self) -> str:
        """The name, with the hyper-parameters that differ from their defaults."""
        known: dict[str, FieldInfo] = type(self).__pydantic_fields__  # type: ignore[attr-defined]
        changed = {key: getattr(self, key) for key, info in known.items() if getattr(self, key) != info.default}
        words = [
            key if value is True else f"w/o {key}" if value is False else f"{key}={value}"
            for key, value in changed.items()
        ]
        return " ".join([self.name, *words])

    def title(self, backbone: str) -> str:
        """The name in tables, for a run with this backbone: the label, unless the backbone makes it another method."""
        return self.label

    @property
    def preset(self) -> Preset:
        """How this method's loss is optimised unless the user sets it."""
        return CE

    # the parts of the federation

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        """A network without classes; its initial weights depend on `rng` only."""
        return IncrementalModel(spec, rng)

    def detector_kind(self) -> DetectorKind:
        """How clients learn of new classes; by default the schedule tells them."""
        return "oracle"

    def teacher_selection(self) -> TeacherSelection:
        """Who picks the models that clients distil from; by default nobody distils."""
        return NoTeachers()

    def prototypes(self) -> PrototypeSharing | None:
        """What clients share with the proxy after training; by default nothing."""
        return None

    @property
    def keeps_memory(self) -> bool:
        """Does a client of this method keep exemplars of the classes it has learned?"""
        return False

    @property
    def observes_augmented(self) -> bool:
        """Do detectors see the entropies of augmented images?"""
        return False

    # on the client

    def exemplars(self, features: Tensor, count: int) -> Tensor:
        """Positions of the `count` images of a class to keep, best first, by their features (N, d); by default those
        that iCaRL's herding chooses.

        Must be prefix-stable: the first k of `exemplars(features, n)` are `exemplars(features, k)` for every k <= n. A
        memory that needs space for more classes drops exemplars from the end of its lists, and a simulation ranks a
        class once for clients with different quotas. The result must depend on the arguments only."""
        return herd(features, count)

    def collects_extras(self, phase: Phase) -> bool:
        """Does the server collect extras from a round's clients in this phase? A method that overrides `begin_task` or
        `finish_task` must return True here; each phase costs one more model per selected client."""
        return False

    def begin_task(self, context: ClientContext) -> Extras | None:
        """Phase "begin", before training in a round in which the head has grown: what the server needs for the new
        classes."""
        return None

    def finish_task(self, context: ClientContext) -> Extras | None:
        """Phase "finish", after a task's last round, under the new global model: a bias, importances, class sums, ...
        The memory already holds the task's classes. Changes to `context.model` are not sent."""
        return None

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        """The names of the tensors that clients neither change nor send, beside frozen stages; by default none."""
        return frozenset()

    def stages(self, context: ClientContext) -> Iterable[Stage]:
        """What a client optimises in a round: by default one stage over its data and its memory. Each stage is run
        before the next one is requested."""
        yield context.stage(context.everything)

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        """Named terms; their sum is minimised, each is recorded. By default the cross-entropy (Eq. 1) alone."""
        return {"classification": cross_entropy(context.model(batch.images).logits, batch.labels)}

    # on the server

    def extras_form(self, model: IncrementalModel, phase: Phase, most: int) -> ExtrasForm | None:
        """What the tensors of a client's extras must look like in this phase, for the server to check before it merges
        them; `most` is the largest number of images that a client may have. By default nothing is told, and the server
        checks only that they are finite and not too many."""
        return None

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        """Updates the server's model from the extras of its clients, in the order of the clients; by default nothing.
        Called once per phase, with no extras if no client sent any. Random numbers come from the seed and the round."""

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        """Scores (B, C) of normalised images; the highest is the prediction."""
        logits: Tensor = model(images).logits
        return logits

    @property
    def answer_names(self) -> tuple[str, ...]:
        """The names of all `answers`; where there are any, the record holds the accuracy of each after every task."""
        return ()

    def answers(self, model: IncrementalModel, images: Tensor) -> dict[str, Tensor]:
        """The scores (B, C) by every answer that this model can give, for methods with more than one; `predict` gives
        that of one of them."""
        return {}

    @property
    def scores_are_logits(self) -> bool:
        """Does a softmax of the scores give class probabilities?"""
        return True


def fixed_names(method: Method, model: IncrementalModel) -> frozenset[str]:
    """The names of all tensors that clients neither change nor send: the method's, and those of frozen stages."""
    return method.fixed(model) | model.frozen_names
