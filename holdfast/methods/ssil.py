"""SS-IL (Ahn et al., 2021, Separated Softmax for Incremental Learning)."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.losses import distillation_by_growth, separated_cross_entropy
from holdfast.methods.base import CE, Losses
from holdfast.methods.context import Batch, ClientContext, Stage
from holdfast.methods.shared import Replay
from holdfast.protocol.enrolment import Preset
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class SSIL(Replay):
    """The softmax is taken over new classes for new images and over old classes for exemplars, so that neither
    suppresses the other's outputs; the outputs of each old task are distilled as a separate distribution; each batch of
    new images is joined by a quarter as many exemplars, which are cycled; the memory keeps the first images of a class,
    not the herded ones. Federated: "new" is the newest growth of the head, even for a client that holds only some of
    its classes or none. A newcomer has no exemplars and so no second term; a client that has not moved on has only
    exemplars. The authors' code maps a label to its remainder modulo the task's size; here it is the position after the
    old classes."""

    name: ClassVar[str] = "ssil"
    about: ClassVar[str] = "SS-IL (Ahn et al., 2021): separated softmax, task-wise distillation, 4:1 replay batches"

    temperature: float = Field(default=2.0, gt=0, description="temperature of the task-wise distillation, T")
    ratio: int = Field(default=4, ge=1, description="new images per exemplar in a batch")

    @property
    def preset(self) -> Preset:
        return replace(CE, weight_decay=1e-4)

    def exemplars(self, features: Tensor, count: int) -> Tensor:
        return torch.arange(min(count, len(features)))

    def stages(self, context: ClientContext) -> Iterable[Stage]:
        """Ordinary training with the learning rate divided by the number of tasks so far."""
        stage = context.stage(context.everything)
        rate, tasks = stage.rate, len(context.registry.growths)
        yield replace(stage, batches=lambda e: self.batches(context, e), rate=lambda epoch: rate(epoch) / tasks)

    def batches(self, context: ClientContext, epoch: int) -> Iterator[Batch]:
        """All new images once, each batch with some exemplars; only exemplars if there are no new images."""
        fresh, kept = context.data, context.memory
        if not len(fresh) or not len(kept):
            yield from context.batches(context.everything, epoch)
            return
        size = context.training.batch
        count = -(-len(fresh) // size)
        part = max(1, size // self.ratio)
        order, augment = context.generator("replay", epoch), context.generator("augment", epoch)
        turns = -(-count * part // len(kept))
        cycled = torch.cat([kept[torch.randperm(len(kept), generator=order)] for _ in range(turns)])
        shuffled = fresh[torch.randperm(len(fresh), generator=context.generator("batches", epoch))]
        for new, old in zip(shuffled.split(size), cycled.split(part), strict=False):
            yield context.augmented(torch.cat([new, old]), augment)

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        logits = context.model(batch.images).logits
        growths = list(context.registry.growths)
        terms = {"classification": separated_cross_entropy(logits, batch.labels, sum(growths[:-1]))}
        if context.predecessor is not None:
            with torch.no_grad():
                teacher = context.predecessor(batch.images).logits
            old = growths[: len(context.predecessor.growths)]
            terms["distillation"] = distillation_by_growth(logits, teacher, self.temperature, old)
        return terms
