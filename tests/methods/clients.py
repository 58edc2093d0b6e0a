"""What the tests of methods share: federations, single clients, and models that are grown or only answer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.experiment import build_federation, plan_of
from holdfast.methods.base import Method
from holdfast.methods.context import ClientContext
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.protocol.messages import Inbox, Job
from holdfast.protocol.state import ClientState
from holdfast.seeding import torch_generator
from holdfast.simulation.federation import Federation

Kind = TypeVar("Kind", bound=IncrementalModel)


def federation_of(name: str, settings: dict[str, Any], **method: Any) -> Federation:
    """A federation under the method of this name with these fields."""
    config = load_config({**settings, "method": {"name": name, **method}})
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


def grown_federation(name: str, settings: dict[str, Any], growths: tuple[int, ...], **method: Any) -> Federation:
    """The same before its first round, with a head that has grown by so many classes at a time, in their order."""
    federation = federation_of(name, settings, **method)
    start = 0
    for classes in growths:
        federation.server.grow(federation.data.classes[start : start + classes])
        start += classes
    return federation


def client_of(
    federation: Federation,
    current: tuple[int, ...],
    memory: dict[int, Tensor],
    images: tuple[int, ...] | None = None,
    noticed: int = 0,
    **train: Any,
) -> ClientContext:
    """A client with these classes (or only these images) as its data and this memory, under the federation's model."""
    names, train_set = federation.data.classes, federation.data.train
    rows = {c: train_set.by_class[c] for c in current}
    if images is not None:
        rows = {c: ids[torch.isin(ids, torch.tensor(images))] for c, ids in rows.items()}
    state = ClientState(
        0,
        (tuple(names[c] for c in current),),
        {names[c]: ids for c, ids in rows.items()},
        {names[c]: ids for c, ids in memory.items()},
        noticed=noticed,
    )
    work = federation.work()
    work.enrolment = replace(work.enrolment, training=replace(work.enrolment.training, **train))
    job = Job(0, 0.0, 1.0, federation.server.registry, federation.server.weights)
    return work.context(state, Inbox(job))


def model_of(method: Method, kind: type[Kind], growths: tuple[int, ...]) -> Kind:
    """The method's own model, which is of this kind, with these growths."""
    model = method.build_model(ModelSpec("convnet", "batch", 16), torch_generator(4))
    assert isinstance(model, kind)
    for classes in growths:
        model.grow(classes, torch_generator(5, len(model.blocks)))
    return model


class Answers(torch.nn.Module):
    """A model that answers every question with the same given outputs."""

    def __init__(self, growths: tuple[int, ...] = (), **outputs: Any) -> None:
        super().__init__()
        self.growths, self.outputs = list(growths), SimpleNamespace(**outputs)

    def forward(self, images: Tensor) -> SimpleNamespace:
        return self.outputs


def maps_of(seed: int) -> list[Tensor]:
    """Random maps of three images, from two stages."""
    rng = torch_generator(seed)
    return [
        torch.randn(3, channels, height, width, generator=rng, dtype=torch.float64)
        for channels, height, width in ((2, 4, 3), (5, 2, 2))
    ]
