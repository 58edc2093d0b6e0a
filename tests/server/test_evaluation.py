"""How well the global model does: counts of true and predicted classes."""

from functools import partial

import numpy as np
import torch
from sklearn.metrics import confusion_matrix

from holdfast.data.images import Images, ImageSet
from holdfast.methods import METHODS
from holdfast.models.incremental import ModelSpec
from holdfast.models.passes import in_chunks
from holdfast.models.transform import Transform
from holdfast.seeding import torch_generator
from holdfast.server.evaluation import confusion
from holdfast.server.server import Server

PLAIN = Transform((0.0,) * 3, (1.0,) * 3, flip=False)


def server() -> Server:
    method = METHODS["fedavg"]()
    return Server(method.build_model(ModelSpec("convnet", "batch", 16), torch_generator(0)), seed=0)


def scores(host: Server, test: ImageSet, rows: torch.Tensor) -> torch.Tensor:
    return in_chunks(
        host.model, lambda some: PLAIN.plain(test.pixels(some)), rows, lambda pixels: host.model(pixels).logits
    )


def test_confusion_equals_scikit_learn_and_asks_only_among_seen_classes() -> None:
    host = server()
    host.grow(("d", "c", "b", "a"))  # head order is not the data set's order
    images = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8, generator=torch_generator(1))
    test = ImageSet(Images(images), torch.arange(40) % 4)
    seen = [2, 0, 1]
    counts = confusion(host.registry, test, ("a", "b", "c", "d"), seen, partial(scores, host, test))
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
    assert confusion(host.registry, test, ("a", "b"), [0, 1], partial(scores, host, test)).tolist() == [
        [0, 0, 2],
        [0, 0, 2],
    ]
    host.grow(("b",))
    assert confusion(host.registry, test, ("a", "b"), [0, 1], partial(scores, host, test)).tolist() == [
        [0, 2, 0],
        [0, 2, 0],
    ]


def test_evaluation_leaves_the_model_as_it_was() -> None:
    host = server()
    host.grow(("a", "b"))
    host.model.train()
    before = {name: tensor.clone() for name, tensor in host.weights.items()}
    test = ImageSet(Images(torch.zeros(4, 3, 16, 16, dtype=torch.uint8)), torch.tensor([0, 0, 1, 1]))
    confusion(host.registry, test, ("a", "b"), [0, 1], partial(scores, host, test))
    assert host.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in host.weights.items())
