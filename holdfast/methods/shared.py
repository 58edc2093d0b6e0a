"""What several methods do alike: class means of clients put together, and a classifier made of proxies."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.federation.local import Local, Preset, Stage
from holdfast.federation.messages import Extras
from holdfast.federation.proxy import LastRound, Proxy, ProxyHome
from holdfast.losses import nca
from holdfast.methods.base import CE, STRICT, Method
from holdfast.models.heads import ProxyModel
from holdfast.models.incremental import IncrementalModel
from holdfast.seeding import torch_generator

SPREAD = 0.3  # length of the noise that makes proxies of one mean, which has length 1


def class_sums(local: Local, rows: Tensor) -> Extras:
    """The sums of the unit features of these images (and of their mirror images) under the client's model, by class."""
    features = F.normalize(local.features(local.model, rows), dim=1)
    if local.world.transform.flip:
        features = features + F.normalize(local.features(local.model, rows, mirrored=True), dim=1)
    labels = local.positions[local.world.train.labels[rows]]
    sums = torch.zeros(len(local.registry.names), features.shape[1]).index_add_(0, labels, features)
    return Extras("class sums", {"sums": sums, "counts": torch.bincount(labels, minlength=len(sums))})


def class_means(extras: Sequence[Extras]) -> tuple[Tensor, Tensor]:
    """The unit class means (C, d) that all clients' sums add up to, and which classes have one (C,)."""
    sums = torch.stack([e.tensors["sums"].double() for e in extras]).sum(dim=0)
    known = torch.stack([e.tensors["counts"] for e in extras]).sum(dim=0) > 0
    return F.normalize(sums, dim=1).float(), known


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


def stage_without(local: Local, fixed: frozenset[str], rows: Tensor) -> Stage:
    """Ordinary training of all parameters but these."""
    for name, parameter in local.model.named_parameters():
        parameter.requires_grad_(name not in fixed)
    return local.stage(rows)


def place_proxies(model: IncrementalModel, extras: Sequence[Extras], seed: int, number: int) -> None:
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
    noise = torch.randn(newest.shape, generator=torch_generator(seed, "proxies", number)) / newest.shape[2] ** 0.5
    proxies = length * F.normalize(means[start:, None, :] + SPREAD * noise, dim=2)
    with torch.no_grad():
        newest.copy_(torch.where(known[start:, None, None].to(newest.device), proxies.to(newest), newest))


def tuned_classifier(local: Local, epochs: int, rate: float) -> dict[str, Tensor]:
    """All proxies after some epochs on the client's exemplars, which are balanced; the rest of the model stays as it
    is, its statistics too. Nothing in the first task, as published: there is nothing to balance."""
    if len(local.registry.growths) < 2 or not len(local.exemplars) or not epochs:
        return {}
    model = local.model.eval()
    assert isinstance(model, ProxyModel)
    model.requires_grad_(False)
    proxies = {f"blocks.{i}.weight": weight.requires_grad_() for i, weight in enumerate(model.proxies)}
    decay = local.world.training.optimiser.weight_decay
    optimiser = torch.optim.SGD(list(proxies.values()), lr=rate, momentum=0.9, weight_decay=decay)
    for epoch in range(epochs):
        for batch in local.batches(local.exemplars, epoch):
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
class ProxyMethod(Method):
    """What PODNet and AFC, which has PODNet's classifier, do alike."""

    tune_epochs: int = Field(default=20, ge=0, description="epochs of the balanced fine-tuning")
    tune_rate: float = Field(default=0.05, gt=0, description="learning rate of the balanced fine-tuning")
    clamp: float = Field(default=5.0, gt=0, description="largest entry of a gradient that is let through")

    @property
    def preset(self) -> Preset:
        return replace(CE, weight_decay=5e-4)

    @property
    def keeps_memory(self) -> bool:
        return True

    def build_proxy(self, home: ProxyHome) -> Proxy:
        return LastRound()

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return old_blocks(model)

    def begin_task(self, local: Local) -> Extras:
        return class_sums(local, local.data)

    def stages(self, local: Local) -> Iterable[Stage]:
        yield replace(stage_without(local, self.fixed(local.model), local.everything), clamp=self.clamp)
