"""What several methods share: exemplars and an old model to distil from, and a classifier made of proxies."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.losses import nca
from holdfast.methods.answers import InferenceChoice, class_means, class_sums, class_sums_form
from holdfast.methods.base import CE, Losses, Method
from holdfast.methods.context import Batch, ClientContext, Stage
from holdfast.methods.prior import LocalPrior
from holdfast.methods.roles import ExtrasForm, LastModel, TeacherSelection
from holdfast.models.heads import ProxyModel
from holdfast.models.incremental import IncrementalModel, ModelSpec, Output
from holdfast.protocol.checks import Like
from holdfast.protocol.enrolment import Preset
from holdfast.protocol.messages import Extras, Phase
from holdfast.seeding import torch_generator
from holdfast.settings import STRICT

SPREAD = 0.3  # length of the noise that makes several proxies from one mean of length 1


class Replay(Method):
    """A method whose clients keep exemplars and distil from the last model of the previous growth."""

    @property
    def keeps_memory(self) -> bool:
        return True

    def teacher_selection(self) -> TeacherSelection:
        return LastModel()


def growth_weight(context: ClientContext) -> float:
    """sqrt(C / C_t): the weight of a distillation grows with the fraction of old classes."""
    growths = context.registry.growths
    return float((sum(growths) / growths[-1]) ** 0.5)


def mean_of(extras: Sequence[Extras], name: str) -> Tensor:
    """One tensor of all clients' extras, averaged with their numbers of images as weights."""
    counts = torch.stack([e.tensors["images"] for e in extras]).double()
    values = torch.stack([e.tensors[name].double() for e in extras])
    mean: Tensor = torch.tensordot(counts / counts.sum(), values, dims=1).float()
    return mean


def old_blocks(model: IncrementalModel) -> frozenset[str]:
    """The names of the head's tensors that do not belong to the newest growth."""
    newest = f"blocks.{len(model.blocks) - 1}."
    return frozenset(n for n in model.state_dict() if n.startswith("blocks.") and not n.startswith(newest))


def stage_without(context: ClientContext, fixed: frozenset[str], ids: Tensor) -> Stage:
    """Ordinary training of all parameters except the `fixed` ones."""
    for name, parameter in context.model.named_parameters():
        parameter.requires_grad_(name not in fixed)
    return context.stage(ids)


def place_proxies(model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
    """Initialises the proxies of new classes: the mean of the class's unit features over all clients, plus noise to
    make several proxies from it, scaled to the average length of the old proxies. Centres that every client computed by
    itself would be in a different order on each, and their mean would be meaningless. A class that no client reported
    keeps its random proxies."""
    assert isinstance(model, ProxyModel)
    if not extras:
        return
    means, known = class_means(extras)
    *old_ones, newest = model.proxies
    start = sum(model.growths[:-1])
    old = [weight.detach().norm(dim=2).flatten() for weight in old_ones]
    length = float(torch.cat(old).mean()) if old else 1.0
    noise = torch.randn(newest.shape, generator=torch_generator(seed, "proxies", round_index)) / newest.shape[2] ** 0.5
    proxies = length * F.normalize(means[start:, None, :] + SPREAD * noise, dim=2)
    with torch.no_grad():
        newest.copy_(torch.where(known[start:, None, None].to(newest.device), proxies.to(newest), newest))


def tuned_classifier(
    context: ClientContext, epochs: int, rate: float, prior: Tensor | float = 0.0
) -> dict[str, Tensor]:
    """All proxies after some epochs on the client's exemplars, which are balanced; the rest of the model, including its
    batch statistics, stays unchanged. Empty without exemplars of both old and new classes, because then there is
    nothing to balance; so nothing is tuned in the first task, as published. `prior` is added to the scaled scores."""
    if not epochs or not context.has_old_and_new:
        return {}
    model = context.model.eval()
    assert isinstance(model, ProxyModel)
    model.requires_grad_(False)
    proxies = {f"blocks.{i}.weight": weight.requires_grad_() for i, weight in enumerate(model.proxies)}
    decay = context.training.optimiser.weight_decay
    optimiser = torch.optim.SGD(list(proxies.values()), lr=rate, momentum=0.9, weight_decay=decay)
    for epoch in range(epochs):
        for batch in context.batches(context.exemplars, epoch):
            optimiser.zero_grad()
            nca(model.scale * model(batch.images).logits + prior, batch.labels).backward()
            optimiser.step()
    return {name: weight.detach().cpu().clone() for name, weight in proxies.items()}


def merge_classifiers(model: IncrementalModel, extras: Sequence[Extras]) -> None:
    """Averages all proxies over the clients that tuned them, weighted by the numbers of exemplars."""
    tuned = [e for e in extras if any(name.startswith("blocks.") for name in e.tensors) and e.tensors["images"] > 0]
    for name in (name for name in (tuned[0].tensors if tuned else ()) if name.startswith("blocks.")):
        model.get_parameter(name).data.copy_(mean_of(tuned, name))


@dataclass(frozen=True, config=STRICT)
class ProxyMethod(LocalPrior, InferenceChoice, Replay):
    """What PODNet and AFC, which uses PODNet's classifier, have in common. A local prior is added to the scaled scores,
    whose exponentials the NCA loss compares; fine-tuning has that of the exemplars, which tell absent classes only."""

    extras_are: ClassVar[str] = "class sums and classifier"

    tune_epochs: int = Field(default=20, ge=0, description="epochs of the balanced fine-tuning")
    tune_rate: float = Field(default=0.05, gt=0, description="learning rate of the balanced fine-tuning")
    clamp: float = Field(default=5.0, gt=0, description="gradients are clamped to this absolute value")

    @property
    def preset(self) -> Preset:
        return replace(CE, weight_decay=5e-4)

    def network(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        return ProxyModel(spec, rng)

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return super().fixed(model) | old_blocks(model)

    def collects_extras(self, phase: Phase) -> bool:
        return True

    def begin_task(self, context: ClientContext) -> Extras | None:
        """The class sums of the new classes; none in the first task, whose proxies start at random."""
        return class_sums(context, context.data) if len(context.registry.growths) > 1 else None

    def finish_task(self, context: ClientContext) -> Extras | None:
        """The tuned classifier, and the sums for other answers than the head's; tuning does not change the features."""
        prior = self.local_prior(context, context.exemplars)
        found = tuned_classifier(context, self.tune_epochs, self.tune_rate, prior)
        if self.inference != "head" and (sums := super().finish_task(context)):
            found |= sums.tensors
        return Extras("classifier", {**found, "images": torch.tensor(len(context.exemplars))}) if found else None

    def extras_form(self, model: IncrementalModel, phase: Phase, most: int) -> ExtrasForm | None:
        if phase == "begin":
            return ExtrasForm(class_sums_form(model, most))
        assert isinstance(model, ProxyModel)
        required = self.sums_form(model, most)
        tuned = {f"blocks.{i}.weight": Like(tuple(weight.shape)) for i, weight in enumerate(model.proxies)}
        return ExtrasForm({**required, "images": Like((), torch.int64, 0, most)}, tuned)

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        if not extras or extras[0].kind == "class sums":
            place_proxies(model, extras, seed, round_index)
            return
        merge_classifiers(model, extras)
        if self.inference != "head":
            super().merge(model, extras, seed, round_index)

    def head(self, model: IncrementalModel, output: Output) -> Tensor:
        assert isinstance(model, ProxyModel)
        return model.scale * output.logits

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        assert isinstance(context.model, ProxyModel)
        output = context.model(batch.images)
        scores = context.model.scale * output.logits + self.local_prior(context)
        terms = {"classification": nca(scores, batch.labels)}
        if context.predecessor is not None:
            with torch.no_grad():
                teacher = context.predecessor(batch.images)
            weight = growth_weight(context)
            terms |= {name: weight * term for name, term in self.distilled(context, output, teacher).items()}
        return terms

    def distilled(self, context: ClientContext, output: Output, teacher: Output) -> Losses:
        """The distillation losses; their weight grows with the fraction of old classes."""
        raise NotImplementedError

    def stages(self, context: ClientContext) -> Iterable[Stage]:
        yield replace(stage_without(context, self.fixed(context.model), context.everything), clamp=self.clamp)
