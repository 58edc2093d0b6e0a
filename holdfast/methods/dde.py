"""DDE with iCaRL (Hu et al., 2021, Distilling Causal Effect of Data in Class-Incremental Learning)."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.losses import cross_entropy, distillation, neighbour_cross_entropy
from holdfast.methods.base import Losses
from holdfast.methods.context import Batch, ClientContext, Stage
from holdfast.methods.roles import ExtrasForm
from holdfast.methods.shared import Replay
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.protocol.checks import Like
from holdfast.protocol.messages import Extras, Phase
from holdfast.settings import STRICT

MOMENTUM = 0.9  # of the head direction
ROWS = 1024  # of the similarity matrix, computed at a time


class DirectedModel(IncrementalModel):
    """A linear head, and the mean direction of the features of the newest data."""

    def __init__(self, spec: ModelSpec, rng: torch.Generator) -> None:
        super().__init__(spec, rng)
        self.direction: Tensor
        self.register_buffer("direction", torch.zeros(self.features))


@dataclass(frozen=True, config=STRICT)
class DDE(Replay):
    """Separates two effects. The effect of old data: an image's probability is averaged with those of its ten nearest
    neighbours among the client's new images in the old model's feature space, so that images that the old data made
    similar stay similar. The effect of the head: at inference half of what the newest data's common direction adds to
    the outputs is removed, from the second task on. In addition, distillation at temperature 2. The authors' code has
    no variant with iCaRL, which the paper compares; this is one with a linear head. In their code neighbours are
    augmented as in training; here they are plain images in evaluation mode. Federated: neighbours are the client's own;
    the clients of a task's last round compute the direction (a running mean of batch means) in one pass under the new
    global model, and the server adds the unnormalised directions, weighted by the numbers of batches. It is used until
    the next task is over. A client without an old model, without memory (a newcomer) or without new data uses ordinary
    cross-entropy."""

    name: ClassVar[str] = "dde"
    about: ClassVar[str] = "DDE (Hu et al., 2021) with iCaRL: neighbours in the old feature space, head effect removed"
    extras_are: ClassVar[str] = "head direction"

    neighbours: int = Field(default=10, ge=0, description="nearest new images that contribute to a prediction, K")
    beta: float = Field(default=0.25, ge=0, description="weight of the distillation (times T squared)")
    temperature: float = Field(default=2.0, gt=0, description="temperature of the distillation, T")
    alpha: float = Field(default=0.5, ge=0, description="fraction of the head effect that is removed at inference")

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        return DirectedModel(spec, rng)

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return frozenset({"direction"})

    def stages(self, context: ClientContext) -> Iterable[Stage]:
        if len(context.memory) and self.neighbours and context.predecessor is not None:
            fresh = self.fresh(context)
            if len(fresh) > 1:
                unit = F.normalize(context.features(context.predecessor, context.everything), dim=1)
                context.scratch |= {
                    "near": nearest_others(unit, fresh, self.neighbours),  # (N, K) positions in `everything`
                    "order": context.everything.argsort(),
                }
        yield context.stage(context.everything)

    def fresh(self, context: ClientContext) -> Tensor:
        """Which of the client's images are of the newest growth's classes: positions in `everything`, data first."""
        newest = context.positions_of(context.data) >= sum(context.registry.growths[:-1])
        return newest.nonzero().flatten()

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        logits = context.model(batch.images).logits
        if context.predecessor is None:
            return {"classification": cross_entropy(logits, batch.labels)}
        with torch.no_grad():
            teacher = context.predecessor(batch.images).logits
        strength = self.beta * self.temperature**2
        return {
            "classification": self.classification(context, batch, logits),
            "distillation": strength * distillation(logits, teacher, self.temperature),
        }

    def classification(self, context: ClientContext, batch: Batch, logits: Tensor) -> Tensor:
        """Cross-entropy of probabilities averaged with those of the neighbours, if there are any."""
        if "near" not in context.scratch:
            return cross_entropy(logits, batch.labels)
        everything, order = context.everything, context.scratch["order"]
        places = order[torch.searchsorted(everything[order], batch.ids)]
        near = context.scratch["near"][places]  # (B, K)
        distinct, found = near.unique(return_inverse=True)  # many images share a neighbour
        probabilities = context.infer(
            context.model, everything[distinct], lambda pixels: context.model(pixels).logits.softmax(dim=1)
        )
        p = probabilities[found].to(logits.device)  # (B, K, C)
        theirs = p.gather(2, batch.labels[:, None, None].expand(-1, near.shape[1], 1)).squeeze(2).mean(dim=1)
        return neighbour_cross_entropy(logits, batch.labels, theirs)

    def collects_extras(self, phase: Phase) -> bool:
        return phase == "finish"

    def finish_task(self, context: ClientContext) -> Extras | None:
        if len(context.registry.growths) == 1:  # there are no old classes yet
            return None
        ids = context.everything[torch.randperm(len(context.everything), generator=context.generator("direction"))]
        means = [part.mean(dim=0) for part in context.features(context.model, ids).split(context.training.batch)]
        direction = torch.zeros_like(means[0])
        for mean in means:
            direction = MOMENTUM * direction + mean
        return Extras("head direction", {"direction": direction, "steps": torch.tensor(len(means))})

    def extras_form(self, model: IncrementalModel, phase: Phase, most: int) -> ExtrasForm | None:
        return ExtrasForm({"direction": Like((model.features,)), "steps": Like((), torch.int64, 1, most)})

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        assert isinstance(model, DirectedModel)
        if extras:
            total = torch.stack([e.tensors["direction"].double() * e.tensors["steps"] for e in extras]).sum(dim=0)
            model.direction.copy_(F.normalize(total, dim=0))

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        assert isinstance(model, DirectedModel)
        output = model(images)
        along = output.features @ model.direction  # (B,)
        weights = torch.cat([block.weight for block in model.blocks])  # type: ignore[misc]
        corrected: Tensor = output.logits - self.alpha * along[:, None] * (weights @ model.direction)
        return corrected


def nearest_others(unit: Tensor, pool: Tensor, count: int) -> Tensor:
    """For each of N unit features the nearest ones in `pool` (M positions), except itself: positions (N, K)."""
    found = []
    for start in range(0, len(unit), ROWS):
        similarity = unit[start : start + ROWS] @ unit[pool].T
        itself = torch.arange(start, start + len(similarity))[:, None] == pool
        found.append(pool[similarity.masked_fill(itself, -torch.inf).topk(min(count, len(pool) - 1), dim=1).indices])
    return torch.cat(found)
