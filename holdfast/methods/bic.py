"""BiC (Wu et al., 2019, Large Scale Incremental Learning)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.losses import cross_entropy, distillation
from holdfast.methods.base import CE, Losses
from holdfast.methods.context import Batch, ClientContext, Stage
from holdfast.methods.roles import ExtrasForm
from holdfast.methods.shared import Replay
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.protocol.checks import Like
from holdfast.protocol.enrolment import Preset
from holdfast.protocol.messages import Extras, Phase
from holdfast.seeding import torch_generator
from holdfast.settings import STRICT

PULL = 0.1  # weight of the penalty on the shift; halved in the loss


@dataclass(frozen=True, config=STRICT)
class BiC(Replay):
    """Stage one: cross-entropy and distillation at temperature 2, weighted by the fraction of old classes; the old
    model's outputs for its newest task are corrected. Stage two: on held-out validation images (a tenth of the
    exemplars of each old class and as many images of each new one) the outputs of new classes get a scale and a shift,
    with the network in evaluation mode. Federated: after a task's last round each of its clients that has validation
    images of both old and new classes fits its own pair; the server takes their mean, weighted by the numbers of
    validation images. So newcomers and clients without new data, whose fits are extreme, do not contribute. As in the
    authors' code, only the newest task is corrected, unless `keep_all`. Some ports fit on probabilities, with changing
    batch statistics, or predict without the correction; this one does not."""

    name: ClassVar[str] = "bic"
    about: ClassVar[str] = "BiC (Wu et al., 2019): distillation, then a fitted correction of the new classes' outputs"
    extras_are: ClassVar[str] = "bias correction"

    temperature: float = Field(default=2.0, gt=0, description="of the distillation, T; without a factor of T squared")
    held_out: float = Field(default=0.1, gt=0, lt=1, description="fraction of the exemplars held out for validation")
    keep_all: bool = Field(default=False, description="keep the corrections of older tasks too")

    @property
    def preset(self) -> Preset:
        return replace(CE, weight_decay=2e-4)

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        model = IncrementalModel(spec, rng)
        model.kinds = {"scale": ((), 1.0), "shift": ((), 0.0)}
        return model

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return model.note_names

    def stages(self, context: ClientContext) -> Iterable[Stage]:
        yield context.stage(context.without(context.everything, self.validation(context)))

    def validation(self, context: ClientContext) -> Tensor:
        """The images that are never trained on in this task: for each class of older growths the last exemplars that
        its list will still have after the task, and as many random images for each class of the newest growth. A class
        with too few images to spare one is left out; without both kinds of classes there are none."""
        first, position = sum(context.registry.growths[:-1]), context.registry.position
        exemplars = {name: ids[: context.quota] for name, ids in context.exemplars_by_class.items()}
        old = [ids for name, ids in exemplars.items() if position[name] < first and len(ids) > 1]
        many = max(1, min((int(self.held_out * len(ids)) for ids in old), default=0))
        new = {name: ids for name, ids in context.data_by_class.items() if position[name] >= first and len(ids) > many}
        if not old or not new:
            return torch.empty(0, dtype=torch.int64)
        kept = [ids[-many:] for ids in old]
        for name, ids in new.items():
            rng = torch_generator(context.seed, "client", context.state.client, "held out", name)
            kept.append(ids[torch.randperm(len(ids), generator=rng)[:many]])
        return torch.cat(kept)

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        logits = self.raw(context.model, batch.images)
        classification = cross_entropy(logits, batch.labels)
        if context.predecessor is None:
            return {"classification": classification}
        with torch.no_grad():
            teacher = self.predict(context.predecessor, batch.images)  # its newest task corrected
        share = teacher.shape[1] / logits.shape[1]  # lambda = Co / C
        distilled = distillation(logits, teacher, self.temperature)
        return {"classification": (1 - share) * classification, "distillation": share * distilled}

    def collects_extras(self, phase: Phase) -> bool:
        return phase == "finish"

    def finish_task(self, context: ClientContext) -> Extras | None:
        ids = self.validation(context)
        if not len(ids) or len(context.registry.growths) < 2:
            return None
        logits = context.infer(context.model, ids, lambda pixels: self.raw(context.model, pixels))
        labels = context.positions_of(ids)
        scale, shift = fit_correction(logits, labels, context.registry.growths[-1])
        return Extras("bias", {"scale": scale, "shift": shift, "images": torch.tensor(len(ids))})

    def extras_form(self, model: IncrementalModel, phase: Phase, most: int) -> ExtrasForm | None:
        return ExtrasForm({"scale": Like((), least=0), "shift": Like(()), "images": Like((), torch.int64, 1, most)})

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        for name, neutral in (("scale", 1.0), ("shift", 0.0)):
            values = model.noted(name) if self.keep_all else torch.full_like(model.noted(name), neutral)
            if extras:
                counts = torch.stack([e.tensors["images"] for e in extras]).double()
                fitted = torch.stack([e.tensors[name] for e in extras]).double()
                values[-model.growths[-1] :] = float((counts * fitted).sum() / counts.sum())
            model.note(name, values)

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        """Without `keep_all` only the newest task is corrected; during a task none is, because the outputs that the
        model was distilled from were corrected already."""
        logits: Tensor = model(images).logits
        scale, shift = model.noted("scale"), model.noted("shift")
        if not self.keep_all and model.growths:
            old = sum(model.growths[:-1])
            scale = torch.cat([torch.ones_like(scale[:old]), scale[old:]])
            shift = torch.cat([torch.zeros_like(shift[:old]), shift[old:]])
        return scale * logits + shift

    def raw(self, model: IncrementalModel, images: Tensor) -> Tensor:
        """The model's outputs in training: uncorrected, unless older tasks keep their corrections."""
        if self.keep_all:
            return self.predict(model, images)
        logits: Tensor = model(images).logits
        return logits


def fit_correction(logits: Tensor, labels: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """The scale and shift of the last `new` outputs (N, C) that minimise the cross-entropy with a penalty on the shift.
    The scale is optimised as its logarithm: with a handful of images it could become negative, which would reverse the
    order of the new classes."""
    logits = logits.double()
    pair = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # log of the scale, shift
    optimiser = torch.optim.LBFGS([pair], max_iter=200, tolerance_change=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        corrected = torch.cat([logits[:, :-new], pair[0].exp() * logits[:, -new:] + pair[1]], dim=1)
        total = F.cross_entropy(corrected, labels) + PULL * pair[1].square() / 2
        total.backward()
        return total

    optimiser.step(closure)
    fitted = pair.detach()
    return fitted[0].exp().float(), fitted[1].float()
