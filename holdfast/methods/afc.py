"""AFC (Kang et al., 2022, Class-Incremental Learning by Knowledge Distillation with Adaptive Feature Consolidation)."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.losses import channel_discrepancy, nca
from holdfast.methods import shared
from holdfast.methods.base import Losses
from holdfast.methods.context import ClientContext
from holdfast.methods.roles import ExtrasForm
from holdfast.models.heads import ProxyModel
from holdfast.models.incremental import IncrementalModel, ModelSpec, Output
from holdfast.protocol.checks import Like
from holdfast.protocol.messages import Extras, Phase
from holdfast.settings import STRICT


class ImportantModel(ProxyModel):
    """Proxies, and the importance of each channel of each stage for what has been learned."""

    def __init__(self, spec: ModelSpec, rng: torch.Generator) -> None:
        super().__init__(spec, rng)
        for stage, channels in enumerate(self.channels):
            self.register_buffer(f"importance{stage}", torch.ones(channels))

    @property
    def importance(self) -> list[Tensor]:
        return [buffer for name, buffer in self.named_buffers() if name.startswith("importance")]


@dataclass(frozen=True, config=STRICT)
class AFC(shared.ProxyMethod):
    """PODNet's classifier, and a distillation that preserves a channel more strongly the more the loss depends on it:
    the importance of a channel is the sum over images of its squared gradient, divided by the layer's mean, computed
    again after each task. Federated: after a task's last round its clients fine-tune the classifier as in PODNet and
    then pass over their data, each with its own classifier. They send unnormalised sums, which the server adds up and
    normalises. Importances are never averaged over rounds. In the authors' code batch statistics change during that
    pass; here they do not."""

    name: ClassVar[str] = "afc"
    about: ClassVar[str] = "AFC (Kang et al., 2022): distillation weighted by each channel's importance, proxies"
    extras_are: ClassVar[str] = "class sums, classifier and importances"

    strength: float = Field(default=4.0, ge=0, description="weight of the distillation of maps")

    def network(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        return ImportantModel(spec, rng)

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return super().fixed(model) | {n for n in model.state_dict() if n.startswith("importance")}

    def distilled(self, context: ClientContext, output: Output, teacher: Output) -> Losses:
        assert isinstance(context.model, ImportantModel)
        return {"discrepancy": self.strength * channel_discrepancy(output.maps, teacher.maps, context.model.importance)}

    def finish_task(self, context: ClientContext) -> Extras:
        tuned = super().finish_task(context)
        found = {**importance_sums(context, self.local_prior(context)), **(tuned.tensors if tuned else {})}
        return Extras("classifier and importances", found)

    def extras_form(self, model: IncrementalModel, phase: Phase, most: int) -> ExtrasForm | None:
        """As for PODNet, and sums of squares; without tuning and nearest-mean prediction only these come."""
        form = super().extras_form(model, phase, most)
        if phase == "begin" or form is None:
            return form
        sums = {f"importance{stage}": Like((channels,), least=0) for stage, channels in enumerate(model.channels)}
        if self.inference != "head":
            return ExtrasForm({**form.required, **sums}, form.optional)
        return ExtrasForm(sums, {**form.required, **form.optional})

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        super().merge(model, extras, seed, round_index)
        for name in (name for e in extras[:1] for name in e.tensors if name.startswith("importance")):
            total = torch.stack([e.tensors[name].double() for e in extras]).sum(dim=0)
            mean = total.mean()
            model.get_buffer(name).copy_(total / mean if mean > 0 else torch.ones_like(total))


def importance_sums(context: ClientContext, prior: Tensor | float = 0.0) -> dict[str, Tensor]:
    """Per stage, the sum over the client's images of sum_hw (dL/dmap)^2 (c,), each by its own loss, in evaluation mode.
    The authors use the gradients of a batch's mean loss, which are inversely proportional to the batch size: a client
    with one image would dominate all others. The maps of frozen stages cannot change: theirs are zero."""
    model = context.model.eval()
    assert isinstance(model, ImportantModel)
    model.requires_grad_(True)
    sums = {f"importance{stage}": torch.zeros_like(buffer) for stage, buffer in enumerate(model.importance)}
    for batch in context.batches(context.everything, 0):
        output = model(batch.images)
        maps = {f"importance{i}": stage for i, stage in enumerate(output.maps) if stage.requires_grad}
        if not maps:
            break
        loss = nca(model.scale * output.logits + prior, batch.labels)
        for name, slope in zip(maps, torch.autograd.grad(loss, list(maps.values())), strict=True):
            sums[name] += (len(slope) * slope).square().sum(dim=(0, 2, 3))
    return {name: total.cpu() for name, total in sums.items()}
