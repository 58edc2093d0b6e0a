"""Averaging, growing, listening, and what the server sends."""

import numpy as np
import pytest
import torch

from holdfast.methods import METHODS
from holdfast.models.incremental import ModelSpec
from holdfast.protocol.messages import Announcement, Reply
from holdfast.seeding import torch_generator
from holdfast.server.aggregation import Aggregation, average
from holdfast.server.server import Server


def reply(seed: int, samples: int = 1) -> Reply:
    weights = {"w": torch.randn(50, generator=torch_generator(seed)), "count": torch.tensor(seed)}
    return Reply(weights, samples)


def server(weighting: str = "uniform") -> Server:
    settings = Aggregation({"uniform": "mean"}.get(weighting, weighting))
    method = METHODS["fedavg"]()
    return Server(method.build_model(ModelSpec("convnet", "batch", 16), torch_generator(0)), 0, settings)


def test_mean_in_float64_and_counters_copied() -> None:
    merged = average([reply(1), reply(2), reply(3)], "uniform")
    exact = np.mean([reply(i).weights["w"].double().numpy() for i in (1, 2, 3)], axis=0)
    assert torch.equal(merged["w"], torch.from_numpy(exact).float())
    assert merged["count"] == 1


def test_sample_weighting() -> None:
    merged = average([reply(1, samples=3), reply(2, samples=1)], "samples")
    torch.testing.assert_close(merged["w"], 0.75 * reply(1).weights["w"] + 0.25 * reply(2).weights["w"])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("clients", [1, 3, 7, 10])
def test_equal_clients_equal_one_to_the_bit(clients: int, weighting: str) -> None:
    merged = average([reply(1, samples=13)] * clients, weighting)
    assert torch.equal(merged["w"], reply(1).weights["w"])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_nobody_trained_leaves_the_model_alone(weighting: str) -> None:
    host = server(weighting)
    host.grow(("a",))
    before = {name: tensor.clone() for name, tensor in host.weights.items()}
    host.aggregate([(0, Reply()), (1, Reply())])
    assert all(torch.equal(before[name], tensor) for name, tensor in host.weights.items())


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_who_did_not_train_is_left_out_of_the_mean(weighting: str) -> None:
    host = server(weighting)
    weights = {name: tensor + 1 for name, tensor in host.weights.items()}
    host.aggregate([(0, Reply()), (1, Reply(weights, 5))])
    assert all(torch.equal(weights[name], tensor) for name, tensor in host.weights.items())


def test_growth_gives_names_positions_and_remembers_when() -> None:
    host = server()
    host.grow(("a", "b"))
    host.grow(())
    host.grow(("c",))
    assert host.registry.position == {"a": 0, "b": 1, "c": 2}
    assert host.registry.growth_of.tolist() == [0, 0, 1]
    assert host.registry.unknown(["c", "d", "a", "d"]) == ("d",)
    assert host.registry.positions(("c", "x", "a")).tolist() == [2, -1, 0]
    assert host.model.growths == [2, 1]


def test_growth_ignores_what_is_known_and_remembers_its_round() -> None:
    host = server()
    assert host.latest_growth == -1
    assert host.grow(("a", "b"), 2) == ("a", "b")
    assert host.grow(("b", "c", "c", "a"), 5) == ("c",)
    assert host.grow(("c", "a"), 7) == ()
    assert (host.latest_growth, host.last_growth) == (1, 5)
    assert host.registry.growths == (2, 1)


def test_announcements_are_heard_in_the_order_of_the_clients() -> None:
    host = server()
    host.grow(("a",))
    host.hear([Announcement(0, ("c", "a")), Announcement(0, ("b", "c")), Announcement(0, ("a",))])
    assert host.announced == ("c", "b")
    host.hear(())
    assert host.announced == ()


def test_what_is_sent_stays_as_it_was_when_the_model_goes_on() -> None:
    host = server()
    host.grow(("a", "b"))
    sent = [host.broadcast(0, with_model=True), host.job(0, "train", 0.0, 0.5), host.task_ended(0)]
    before = {name: tensor.clone() for name, tensor in host.weights.items()}
    host.aggregate([(0, Reply({name: tensor + 1 for name, tensor in host.weights.items()}, 5))])
    for message in sent:
        assert message.registry == host.registry
        assert set(message.weights) == set(before)
        assert all(torch.equal(before[name], tensor) for name, tensor in message.weights.items())
    assert not host.broadcast(0, with_model=False).weights
    model = host.global_model(3)
    assert (model.round_index, model.growths) == (3, (2,))
    assert all(torch.equal(host.weights[name], tensor) for name, tensor in model.weights.items())
