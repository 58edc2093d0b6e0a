"""FedProx: cross-entropy and mu/2 |w - w_global|^2 (Li et al., 2020)."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import federation_of

from holdfast.engines.serial import Serial
from holdfast.methods.fedprox import FedProx
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds


def net(seed: int) -> IncrementalModel:
    model = IncrementalModel(ModelSpec("convnet", "group", 16), torch_generator(seed))
    model.grow(2, torch_generator(seed, "a"))
    model.grow(3, torch_generator(seed, "b"))
    return model


IMAGES = torch.randn(6, 3, 16, 16, generator=torch_generator(1))
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


def terms(method: FedProx, model: IncrementalModel, reference: IncrementalModel) -> dict[str, torch.Tensor]:
    context: Any = SimpleNamespace(model=model, broadcast=reference.requires_grad_(False))
    batch: Any = SimpleNamespace(images=IMAGES, labels=LABELS)
    return method.loss(context, batch)


def test_the_distance_is_half_mu_times_the_sum_of_all_squares() -> None:
    model, reference = net(2), net(3)
    found = terms(FedProx(mu=0.3), model, reference)
    total = 0.0
    for name, mine in model.named_parameters():
        total += float((mine.detach().double() - reference.get_parameter(name).double()).square().sum())
    assert total > 1
    assert float(found["proximity"].detach()) == pytest.approx(0.15 * total, rel=1e-5)
    torch.testing.assert_close(found["classification"], F.cross_entropy(model(IMAGES).logits, LABELS))
    assert set(found) == {"classification", "proximity"}


def test_its_gradient_is_mu_times_the_way_from_the_global_model() -> None:
    model, reference = net(2), net(3)
    terms(FedProx(mu=0.3), model, reference)["proximity"].backward()
    for name, mine in model.named_parameters():
        torch.testing.assert_close(mine.grad, 0.3 * (mine.detach() - reference.get_parameter(name)), msg=name)
    assert all(theirs.grad is None for theirs in reference.parameters())


def test_at_the_global_model_there_is_neither_distance_nor_pull() -> None:
    model = net(2)
    distance = terms(FedProx(mu=5.0), model, net(2))["proximity"]
    distance.backward()
    assert float(distance.detach()) == 0
    assert not any(mine.grad.any() for mine in model.parameters() if mine.grad is not None)


def test_one_image_has_a_loss() -> None:
    context: Any = SimpleNamespace(model=net(2), broadcast=net(3))
    batch: Any = SimpleNamespace(images=IMAGES[:1], labels=LABELS[:1])
    assert all(bool(value.isfinite()) for value in FedProx().loss(context, batch).values())


@pytest.mark.parametrize("replay", [True, False])
def test_without_mu_it_is_federated_averaging_to_the_bit(small: dict[str, Any], replay: bool) -> None:
    mine = federation_of("fedprox", small, mu=0.0, replay=replay)
    lines = [done.line for done in run_rounds(mine, Serial())]
    plain = federation_of("fedavg", small, replay=replay)
    expected = [done.line for done in run_rounds(plain, Serial())]
    assert [line["trained"] for line in lines] == [line["trained"] for line in expected]
    for name, tensor in plain.server.weights.items():
        assert torch.equal(mine.server.weights[name], tensor), name


def test_local_models_end_nearer_to_the_global_one_the_larger_mu_is(small: dict[str, Any]) -> None:
    """The reference of a round is the model that came, not the one that moves: the mean goes less far from it."""
    moved = []
    for mu in (0.0, 1.0, 5.0):
        federation = federation_of("fedprox", {**small, "train": {"epochs": 3, "batch": 16, "lr": 0.05}}, mu=mu)
        rounds = run_rounds(federation, Serial())
        next(rounds)
        before = {name: p.detach().clone() for name, p in federation.server.model.named_parameters()}
        next(rounds)
        after = dict(federation.server.model.named_parameters())
        moved.append(sum(float((after[name].detach() - p).square().sum()) for name, p in before.items()) ** 0.5)
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 0.85 * moved[0]


def test_the_reference_is_the_model_that_came_in_this_round(small: dict[str, Any]) -> None:
    """The only step of a round begins at the reference, so its distance is 0 in all rounds; a second one's is not."""
    for epochs, apart in ((1, False), (2, True)):
        federation = federation_of("fedprox", {**small, "train": {"epochs": epochs, "batch": 1000}}, mu=0.1)
        assert [done.line["losses"]["proximity"] > 0 for done in run_rounds(federation, Serial())] == [apart] * 6
