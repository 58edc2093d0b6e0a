"""What several methods do alike: answers by class means that clients put together, and a classifier made of proxies."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.losses import nca
from holdfast.methods.base import CE, Losses, Method
from holdfast.methods.context import Batch, ClientContext, Stage
from holdfast.methods.roles import LastModel, TeacherSelection
from holdfast.models.heads import ProxyModel
from holdfast.models.incremental import IncrementalModel, ModelSpec, Output
from holdfast.protocol.enrolment import Preset
from holdfast.protocol.messages import Extras, Phase
from holdfast.seeding import torch_generator
from holdfast.settings import STRICT

BEYOND = 2.0  # more than any cosine
SPREAD = 0.3  # length of the noise that makes proxies of one mean, which has length 1


def class_sums(context: ClientContext, ids: Tensor) -> Extras:
    """The sums of the unit features of these images (and of their mirror images) under the client's model, by class."""
    features = F.normalize(context.features(context.model, ids), dim=1)
    if context.transform.flip:
        features = features + F.normalize(context.features(context.model, ids, mirrored=True), dim=1)
    labels = context.positions_of(ids)
    sums = torch.zeros(len(context.registry.names), features.shape[1]).index_add_(0, labels, features)
    return Extras("class sums", {"sums": sums, "counts": torch.bincount(labels, minlength=len(sums))})


def class_means(extras: Sequence[Extras]) -> tuple[Tensor, Tensor]:
    """The unit class means (C, d) that all clients' sums add up to, and which classes have one (C,)."""
    sums = torch.stack([e.tensors["sums"].double() for e in extras]).sum(dim=0)
    known = torch.stack([e.tensors["counts"] for e in extras]).sum(dim=0) > 0
    return F.normalize(sums, dim=1).float(), known


class Replay(Method):
    """A method whose clients keep exemplars and distil from the last model of the growth before."""

    @property
    def keeps_memory(self) -> bool:
        return True

    def teacher_selection(self) -> TeacherSelection:
        return LastModel()


@dataclass(frozen=True, config=STRICT)
class NearestMean(Replay):
    """What iCaRL, those who build on it and LGA can answer by: the head, or the nearest mean of exemplars. For that the
    clients of a task's last round send, class by class, the sum of their exemplars' unit features under the new global
    model and their number; the server adds them up. A class that none of them holds keeps its mean of before; one that
    has none at all (new classes in mid-task, or where none of these clients holds it) is the answer where the head says
    so."""

    inference: Literal["head", "nme"] = Field(
        default="head", description="who answers: the head, or the nearest mean of exemplars"
    )

    def network(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        return IncrementalModel(spec, rng)

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        model = self.network(spec, rng)
        if self.inference == "nme":
            model.kinds = {"mean": ((model.features,), 0.0)}
        return model

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return model.note_names

    def collects_extras(self, phase: Phase) -> bool:
        return self.inference == "nme" and phase == "finish"

    def finish_task(self, context: ClientContext) -> Extras | None:
        return class_sums(context, context.exemplars)

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        if extras:
            means, known = class_means(extras)
            before = model.noted("mean")
            model.note("mean", torch.where(known[:, None].to(before.device), means.to(before), before))

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        output = model(images)
        logits: Tensor = output.logits
        if self.inference == "head" or not logits.shape[1]:
            return logits
        means = model.noted("mean")
        cosines = F.normalize(output.features, dim=1) @ means.T  # of unit length both: the largest is the nearest
        said = F.one_hot(logits.argmax(dim=1), logits.shape[1]).bool()
        return torch.where(means.any(dim=1), cosines, torch.where(said, BEYOND, -BEYOND))

    @property
    def scores_are_logits(self) -> bool:
        return self.inference == "head"  # cosines are near or far, but nothing says how near is how probable


def mean_of(extras: Sequence[Extras], name: str) -> Tensor:
    """One tensor of all clients' extras, averaged by their numbers of images."""
    counts = torch.stack([e.tensors["images"] for e in extras]).double()
    values = torch.stack([e.tensors[name].double() for e in extras])
    mean: Tensor = torch.tensordot(counts / counts.sum(), values, dims=1).float()
    return mean


def old_blocks(model: IncrementalModel) -> frozenset[str]:
    """The names of the parts of the head that are not of the newest growth."""
    newest = f"blocks.{len(model.blocks) - 1}."
    return frozenset(n for n in model.state_dict() if n.startswith("blocks.") and not n.startswith(newest))


def stage_without(context: ClientContext, fixed: frozenset[str], ids: Tensor) -> Stage:
    """Ordinary training of all parameters but these."""
    for name, parameter in context.model.named_parameters():
        parameter.requires_grad_(name not in fixed)
    return context.stage(ids)


def place_proxies(model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
    """New classes' proxies: the mean of the class's unit features over all clients, with noise that makes several of
    one, as long as the old proxies are on average. Centres that every client finds by itself would be in another order
    at each, and their mean would be nothing. A class that no client told of keeps its random ones."""
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


def tuned_classifier(context: ClientContext, epochs: int, rate: float) -> dict[str, Tensor]:
    """All proxies after some epochs on the client's exemplars, which are balanced; the rest of the model stays as it
    is, its statistics too. Only where there are exemplars of old and of new classes, for without both there is nothing
    to balance: so nothing in the first task, as published."""
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
            nca(model.scale * model(batch.images).logits, batch.labels).backward()
            optimiser.step()
    return {name: weight.detach().cpu().clone() for name, weight in proxies.items()}


def merge_classifiers(model: IncrementalModel, extras: Sequence[Extras]) -> None:
    """The mean of all proxies over the clients that tuned them, by their numbers of exemplars."""
    tuned = [e for e in extras if any(name.startswith("blocks.") for name in e.tensors)]
    for name in (name for name in (tuned[0].tensors if tuned else ()) if name.startswith("blocks.")):
        model.get_parameter(name).data.copy_(mean_of(tuned, name))


@dataclass(frozen=True, config=STRICT)
class ProxyMethod(NearestMean):
    """What PODNet and AFC, which has PODNet's classifier, do alike."""

    tune_epochs: int = Field(default=20, ge=0, description="epochs of the balanced fine-tuning")
    tune_rate: float = Field(default=0.05, gt=0, description="learning rate of the balanced fine-tuning")
    clamp: float = Field(default=5.0, gt=0, description="largest entry of a gradient that is let through")

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
        """Where the new classes lie; in the first task nowhere yet, and proxies begin at random."""
        return class_sums(context, context.data) if len(context.registry.growths) > 1 else None

    def finish_task(self, context: ClientContext) -> Extras | None:
        """The tuned classifier, and what the answers by the nearest mean want; the features do not change by tuning."""
        found = tuned_classifier(context, self.tune_epochs, self.tune_rate)
        if self.inference == "nme":
            found |= class_sums(context, context.exemplars).tensors
        return Extras("classifier", {**found, "images": torch.tensor(len(context.exemplars))}) if found else None

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        if not extras or extras[0].kind == "class sums":
            place_proxies(model, extras, seed, round_index)
            return
        merge_classifiers(model, extras)
        if self.inference == "nme":
            super().merge(model, extras, seed, round_index)

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        assert isinstance(model, ProxyModel)
        return model.scale * super().predict(model, images)

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        assert isinstance(context.model, ProxyModel)
        output = context.model(batch.images)
        terms = {"classification": nca(context.model.scale * output.logits, batch.labels)}
        if context.predecessor is not None:
            with torch.no_grad():
                teacher = context.predecessor(batch.images)
            growths = context.registry.growths
            more = (sum(growths) / growths[-1]) ** 0.5  # sqrt(C / Ct)
            terms |= {name: more * term for name, term in self.distilled(context, output, teacher).items()}
        return terms

    def distilled(self, context: ClientContext, output: Output, teacher: Output) -> Losses:
        """What is kept of the old model; it counts the more the more classes are old."""
        raise NotImplementedError

    def stages(self, context: ClientContext) -> Iterable[Stage]:
        yield replace(stage_without(context, self.fixed(context.model), context.everything), clamp=self.clamp)
