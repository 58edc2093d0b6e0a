"""Averaging, growing, evaluating."""

from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from holdfast.data.images import Images, ImageSet
from holdfast.methods import METHODS
from holdfast.models.incremental import ModelSpec
from holdfast.models.passes import one_pass
from holdfast.models.transform import Transform
from holdfast.protocol.messages import Reply
from holdfast.seeding import torch_generator
from holdfast.server.server import Server, average

PLAIN = Transform((0.0,) * 3, (1.0,) * 3, flip=False)


def reply(seed: int, samples: int = 1) -> Reply:
    weights = {"w": torch.randn(50, generator=torch_generator(seed)), "count": torch.tensor(seed)}
    return Reply(weights, samples)


def server() -> Server:
    method = METHODS["fedavg"]()
    return Server(method.build_model(ModelSpec("convnet", "batch", 16), torch_generator(0)), seed=0)


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


def test_nobody_trained_leaves_the_model_alone() -> None:
    host = server()
    host.grow(("a",))
    before = {name: tensor.clone() for name, tensor in host.weights.items()}
    host.aggregate([Reply(), Reply()], "uniform")
    assert all(torch.equal(before[name], tensor) for name, tensor in host.weights.items())


def test_who_did_not_train_is_left_out_of_the_mean() -> None:
    host = server()
    weights = {name: tensor + 1 for name, tensor in host.weights.items()}
    host.aggregate([Reply(), Reply(weights, 5)], "uniform")
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


def scores(host: Server, test: ImageSet, rows: torch.Tensor) -> torch.Tensor:
    return one_pass(host.model, test, PLAIN, rows, lambda pixels: host.model(pixels).logits)


def test_confusion_equals_scikit_learn_and_asks_only_among_seen_classes() -> None:
    host = server()
    host.grow(("d", "c", "b", "a"))  # head order is not the data set's order
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=torch_generator(1))
    test = ImageSet(Images(images), torch.arange(40) % 4)
    seen = [2, 0, 1]
    counts = host.confusion(test, ("a", "b", "c", "d"), seen, partial(scores, host, test))
    host.model.eval()
    with torch.no_grad():
        logits = host.model(PLAIN.plain(images)).logits
    guess = torch.tensor(seen)[logits[:, [1, 3, 2]].argmax(dim=1)]  # head positions of c, a, b
    rows = np.isin(test.labels.numpy(), seen)
    expected = confusion_matrix(test.labels.numpy()[rows], guess.numpy()[rows], labels=seen)
    assert np.array_equal(counts[:, :-1].numpy(), expected)
    assert counts[:, -1].tolist() == [0, 0, 0]


def test_images_of_unknown_classes_are_wrong_and_without_any_class_unanswered() -> None:
    host = server()
    test = ImageSet(Images(torch.zeros(4, 3, 16, 16, dtype=torch.uint8)), torch.tensor([0, 0, 1, 1]))
    assert host.confusion(test, ("a", "b"), [0, 1], partial(scores, host, test)).tolist() == [[0, 0, 2], [0, 0, 2]]
    host.grow(("b",))
    assert host.confusion(test, ("a", "b"), [0, 1], partial(scores, host, test)).tolist() == [[0, 2, 0], [0, 2, 0]]


def test_evaluation_leaves_the_model_as_it_was() -> None:
    host = server()
    host.grow(("a", "b"))
    host.model.train()
    before = {name: tensor.clone() for name, tensor in host.weights.items()}
    test = ImageSet(Images(torch.zeros(4, 3, 16, 16, dtype=torch.uint8)), torch.tensor([0, 0, 1, 1]))
    host.confusion(test, ("a", "b"), [0, 1], partial(scores, host, test))
    assert host.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in host.weights.items())
