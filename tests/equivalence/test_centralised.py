"""A federation of one client with all classes is ordinary training, to the bit; equal clients are one."""

from typing import Any

import torch
import torch.nn.functional as F

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.methods.context import ClientContext
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.transform import Transform
from holdfast.seeding import torch_generator
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds

SETTINGS: dict[str, Any] = {
    "seed": 5,
    "data": {"name": "digits", "classes": 3, "train_per_class": 20, "test_per_class": 5, "size": 16},
    "plan": {"tasks": 1, "clients": 1, "selected": 1, "rounds": 3, "class_share": 1.0},
    "train": {"epochs": 2, "batch": 16, "lr": 0.05, "momentum": 0.8, "weight_decay": 1e-3},
}


def trained(settings: dict[str, Any]) -> Federation:
    config = load_config(settings)
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    for _ in run_rounds(federation, Serial()):
        pass
    return federation


def centralised() -> dict[str, torch.Tensor]:
    """The same training, written down as one would without a federation."""
    data = load_data(load_config(SETTINGS).data)
    model = IncrementalModel(ModelSpec("convnet", "batch", 16), torch_generator(5, "model"))
    model.grow(3, torch_generator(5, "growth", 0))
    transform = Transform(data.mean, data.std, data.flip)
    for round_index in range(3):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, weight_decay=1e-3)
        for epoch in range(2):
            done = torch.tensor((round_index + epoch / 2) / 3, dtype=torch.float64)
            optimiser.param_groups[0]["lr"] = 0.05 * (1 + float(torch.cos(torch.pi * done))) / 2
            order = torch.randperm(
                60, generator=torch_generator(5, "round", round_index, "client", 0, "batches", epoch)
            )
            chance = torch_generator(5, "round", round_index, "client", 0, "augment", epoch)
            for rows in order.split(16):
                loss = F.cross_entropy(
                    model(transform.augmented(data.train.images[rows], chance)).logits, data.train.labels[rows]
                )
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
    return model.state_dict()


def test_one_client_with_all_classes_is_centralised_sgd_to_the_bit() -> None:
    federated = trained(SETTINGS).server.weights
    for name, tensor in centralised().items():
        assert torch.equal(federated[name], tensor), name


def test_equal_clients_equal_one(monkeypatch: Any) -> None:
    """Clients that hold the same and draw the same send the same; their mean is what one of them sends."""

    def everyones(self: ClientContext, *purpose: str | int) -> torch.Generator:
        return torch_generator(5, "round", self.job.round_index, "client", 0, *purpose)

    monkeypatch.setattr(ClientContext, "generator", everyones)
    three = trained({**SETTINGS, "plan": {**SETTINGS["plan"], "clients": 3, "selected": 3}}).server.weights
    for name, tensor in trained(SETTINGS).server.weights.items():
        assert torch.equal(three[name], tensor), name
