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
from holdfast.methods.base import CE, STRICT, Losses
from holdfast.methods.context import Batch, Local, Preset, Stage
from holdfast.methods.herding import quota
from holdfast.methods.shared import Replay
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.passes import one_pass
from holdfast.protocol.messages import Extras
from holdfast.seeding import torch_generator

PULL = 0.1  # of the shift towards 0, over 2


@dataclass(frozen=True, config=STRICT)
class BiC(Replay):
    """Stage one: cross-entropy and distillation at temperature 2, weighted by the share of old classes; the old model's
    outputs of its newest task are corrected. Stage two: on validation images that were held out (a tenth of the
    exemplars of each old class and as many of each new one) the outputs of new classes get a scale and a shift, with
    the network in evaluation mode. Federated: after a task's last round each of its clients that has validation images
    of both old and new classes fits its own pair; the server takes their mean, weighted by their validation images. So
    newcomers and clients without new data, whose fits run to extremes, have no part in it. As in the authors' code only
    the newest task is corrected, unless `keep_all`. Ports that fit on probabilities, with moving statistics, or answer
    without the correction are not followed."""

    name: ClassVar[str] = "bic"
    about: ClassVar[str] = "BiC (Wu et al., 2019): distillation, then a fitted correction of the new classes' outputs"

    temperature: float = Field(default=2.0, gt=0, description="of the distillation, T; there is no factor of T squared")
    held_out: float = Field(default=0.1, gt=0, lt=1, description="part of the exemplars kept for validation")
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

    def stages(self, local: Local) -> Iterable[Stage]:
        held = self.validation(local)
        yield local.stage(local.everything[~torch.isin(local.everything, held)])

    def validation(self, local: Local) -> Tensor:
        """The images that are never trained on in this task: of each class of older growths the last of the exemplars
        that its list will still have when the task is over, of each class of the newest growth as many, drawn by
        chance. A class that has too few to spare one is left out; without both kinds there are none."""
        labels, world = local.world.train.labels, local.world
        first = sum(local.registry.growths[:-1])
        share = quota(world.memory, len({*local.state.memory, *labels[local.data].tolist()}))
        kept_rows = {c: rows[:share].long() for c, rows in local.state.memory.items()}
        old = [rows for c, rows in kept_rows.items() if 0 <= int(local.positions[c]) < first and len(rows) > 1]
        new = [local.data[labels[local.data] == c] for c in labels[local.data].unique()]
        new = [rows for rows in new if int(local.positions[labels[rows[0]]]) >= first]
        many = max(1, min((int(self.held_out * len(rows)) for rows in old), default=0))
        new = [rows for rows in new if len(rows) > many]
        if not old or not new:
            return torch.empty(0, dtype=torch.int64)
        kept = [rows[-many:] for rows in old]
        for rows in new:
            rng = torch_generator(local.world.seed, "client", local.state.client, "held out", int(labels[rows[0]]))
            kept.append(rows[torch.randperm(len(rows), generator=rng)[:many]])
        return torch.cat(kept)

    def loss(self, local: Local, batch: Batch) -> Losses:
        logits = self.raw(local.model, batch.images)
        classification = cross_entropy(logits, batch.labels)
        if local.predecessor is None:
            return {"classification": classification}
        with torch.no_grad():
            teacher = self.predict(local.predecessor, batch.images)  # its newest task corrected
        share = teacher.shape[1] / logits.shape[1]  # lambda = Co / C
        distilled = distillation(logits, teacher, self.temperature)
        return {"classification": (1 - share) * classification, "distillation": share * distilled}

    def finish_task(self, local: Local) -> Extras | None:
        rows = self.validation(local)
        if not len(rows) or len(local.registry.growths) < 2:
            return None
        world = local.world
        logits = one_pass(local.model, world.train, world.transform, rows, lambda pixels: self.raw(local.model, pixels))
        labels = local.positions[world.train.labels[rows]]
        scale, shift = fit_correction(logits, labels, local.registry.growths[-1])
        return Extras("bias", {"scale": scale, "shift": shift, "images": torch.tensor(len(rows))})

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, number: int) -> None:
        for name, neutral in (("scale", 1.0), ("shift", 0.0)):
            values = model.noted(name) if self.keep_all else torch.full_like(model.noted(name), neutral)
            if extras:
                counts = torch.stack([e.tensors["images"] for e in extras]).double()
                fitted = torch.stack([e.tensors[name] for e in extras]).double()
                values[-model.growths[-1] :] = float((counts * fitted).sum() / counts.sum())
            model.note(name, values)

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        """Without `keep_all` only the newest task is corrected: in mid-task none, for what it has been distilled from
        was corrected already."""
        logits: Tensor = model(images).logits
        scale, shift = model.noted("scale"), model.noted("shift")
        if not self.keep_all and model.growths:
            old = sum(model.growths[:-1])
            scale = torch.cat([torch.ones_like(scale[:old]), scale[old:]])
            shift = torch.cat([torch.zeros_like(shift[:old]), shift[old:]])
        return scale * logits + shift

    def raw(self, model: IncrementalModel, images: Tensor) -> Tensor:
        """A student's outputs in training: without any correction, unless older tasks keep theirs."""
        if self.keep_all:
            return self.predict(model, images)
        logits: Tensor = model(images).logits
        return logits


def fit_correction(logits: Tensor, labels: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """The scale and shift of the `new` last outputs (N, C) under which the cross-entropy, with a pull of the shift
    towards 0, is least. The scale is sought by its logarithm: a handful of images may want a negative one, which would
    turn the order of the new classes round."""
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
