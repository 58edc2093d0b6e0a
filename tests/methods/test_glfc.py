"""GLFC: two groups of samples, halves of two losses, and a proxy without augmentation."""

import math
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from clients import Answers, federation_of
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.methods.glfc import GLFC
from holdfast.models.incremental import ModelSpec
from holdfast.models.transform import Transform
from holdfast.proxy.prototype_server import Prototype, PrototypeServer, SelectorSetup, build_selector
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds

quick_federation = partial(federation_of, "glfc", iterations=3, perturb_steps=2, detector="oracle")
LOGITS = torch.randn(9, 5, generator=torch_generator(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 2, 3, 1])
TEACHER = torch.randn(9, 3, generator=torch_generator(2), dtype=torch.float64)


def client(
    logits: Tensor = LOGITS, teacher: Tensor | None = TEACHER, kept: tuple[int, ...] = (0, 2)
) -> Any:  # what `loss` needs of a ClientContext
    return SimpleNamespace(
        model=Answers(logits=logits),
        teacher=None if teacher is None else Answers(logits=teacher),
        memory=torch.tensor([10 * c for c in kept], dtype=torch.int64),
        labels_of=lambda rows: rows // 10,
    )


def batch(labels: Tensor = LABELS) -> Any:
    return SimpleNamespace(images=torch.zeros(len(labels), 1), labels=labels)


def gradient_of(form: str, i: int) -> float:
    own = LOGITS[i, LABELS[i]]
    if form == "sigmoid":
        return abs(1 / (1 + math.exp(-own)) - 1)
    return 1 - math.exp(own) / sum(math.exp(o) for o in LOGITS[i])


@pytest.mark.parametrize("form", ["sigmoid", "softmax"])
def test_weights_are_gradients_over_the_mean_of_the_group(form: Literal["sigmoid", "softmax"]) -> None:
    found = GLFC(gradient=form).weights(client(), LOGITS, batch())
    groups = [[i for i in range(9) if (int(LABELS[i]) in (0, 2)) == old] for old in (True, False)]
    assert [len(group) for group in groups] == [4, 5]
    for group in groups:
        mean = sum(gradient_of(form, i) for i in group) / len(group)
        assert float(found[group].mean()) == pytest.approx(1)
        for i in group:
            assert float(found[i]) == pytest.approx(gradient_of(form, i) / mean)


def test_both_losses_by_an_independent_route() -> None:
    """Half of w BCE to the labels, half of BCE to the teacher's sigmoids on its own outputs, which has no weights."""
    found = GLFC().loss(client(), batch())
    weights = GLFC().weights(client(), LOGITS, batch())
    assert float((weights - 1).abs().max()) > 0.1
    first = second = 0.0
    for i in range(9):
        for c in range(5):
            s = 1 / (1 + math.exp(-LOGITS[i, c]))
            y = float(LABELS[i] == c)
            soft = 1 / (1 + math.exp(-TEACHER[i, c])) if c < 3 else y
            first -= float(weights[i]) * (y * math.log(s) + (1 - y) * math.log(1 - s)) / 45
            second -= (soft * math.log(s) + (1 - soft) * math.log(1 - s)) / 45
    assert set(found) == {"compensation", "distillation"}
    assert float(found["compensation"]) == pytest.approx(first / 2)
    assert float(found["distillation"]) == pytest.approx(second / 2)


def test_without_an_old_model_the_first_loss_counts_in_full() -> None:
    alone = GLFC().loss(client(teacher=None), batch())
    assert set(alone) == {"compensation"}
    torch.testing.assert_close(alone["compensation"], 2 * GLFC().loss(client(), batch())["compensation"])


def test_without_memory_it_is_plain_binary_cross_entropy() -> None:
    """The first task, and every newcomer."""
    hard = F.one_hot(LABELS, 5).double()
    found = GLFC().loss(client(teacher=None, kept=()), batch())
    torch.testing.assert_close(found["compensation"], F.binary_cross_entropy_with_logits(LOGITS, hard))
    newcomer = GLFC().loss(client(kept=()), batch())
    torch.testing.assert_close(newcomer["compensation"], F.binary_cross_entropy_with_logits(LOGITS, hard) / 2)


@pytest.mark.parametrize("form", ["sigmoid", "softmax"])
def test_equal_gradients_weigh_one(form: Literal["sigmoid", "softmax"]) -> None:
    same = torch.full((9, 5), 0.7, dtype=torch.float64)
    torch.testing.assert_close(GLFC(gradient=form).weights(client(), same, batch()), torch.ones(9).double())


def test_scaling_a_groups_gradients_changes_no_weight_and_groups_do_not_mix() -> None:
    moved = LOGITS.clone()
    moved[torch.isin(LABELS, torch.tensor([0, 2]))] += 3.0
    a, b = (GLFC().weights(client(), logits, batch()) for logits in (LOGITS, moved))
    fresh = ~torch.isin(LABELS, torch.tensor([0, 2]))
    torch.testing.assert_close(a[fresh], b[fresh])
    assert float(b[~fresh].mean()) == pytest.approx(1)


def test_weights_and_targets_have_no_gradient() -> None:
    logits = LOGITS.clone().requires_grad_()
    teacher = TEACHER.clone().requires_grad_()
    found = GLFC().loss(client(logits, teacher), batch())
    weights = GLFC().weights(client(), LOGITS, batch())
    sum(found.values()).backward()  # type: ignore[union-attr]
    assert teacher.grad is None
    s, hard = LOGITS.sigmoid(), F.one_hot(LABELS, 5).double()
    soft = torch.cat([TEACHER.sigmoid(), hard[:, 3:]], dim=1)
    torch.testing.assert_close(logits.grad, (weights[:, None] * (s - hard) + (s - soft)) / 90)


def test_a_saturated_group_and_single_images_stay_finite() -> None:
    sure = torch.full((2, 5), -200.0)
    sure[0, 0] = sure[1, 3] = 200.0
    assert GLFC().weights(client(), sure, batch(torch.tensor([0, 3]))).tolist() == [1, 1]
    for label in (0, 3):  # of a stayer, who has nothing but its memory; of a client with one new image
        one = batch(torch.tensor([label]))
        assert GLFC().weights(client(), LOGITS[:1], one).tolist() == pytest.approx([1.0])
        assert all(bool(v.isfinite()) for v in GLFC().loss(client(LOGITS[:1], TEACHER[:1]), one).values())


def test_the_proxys_score_is_plain_accuracy_on_the_prototypes() -> None:
    home = SelectorSetup(
        ModelSpec("convnet", "group", 16), Transform((0.5,) * 3, (0.25,) * 3, False), 6, 0, torch.device("cpu")
    )
    proxy = build_selector(GLFC(), home)
    assert isinstance(proxy, PrototypeServer)
    assert (proxy.settings.augmented, proxy.settings.select, proxy.settings.snapshots) == (0, True, 1)
    model = GLFC().build_model(home.spec, torch_generator(4)).eval()
    for classes in (3, 3):
        model.grow(classes, torch_generator(5, classes))
    images = torch.rand(12, 1, 3, 16, 16, generator=torch_generator(6))
    with torch.no_grad():
        guesses = [int(model((image - 0.5) / 0.25).logits.argmax()) for image in images]
    truths = [guess if i % 3 else (guess + 1) % 6 for i, guess in enumerate(guesses)]
    proxy.pools[1] = [Prototype(image, label, b"") for image, label in zip(images, truths, strict=True)]
    proxy.variances = {c: (50, torch.full((128,), 1e4)) for c in range(6)}  # would drown the features, if it were used
    assert proxy.score((3, 3), model.state_dict()) == pytest.approx(8 / 12)


def test_every_task_has_a_best_model_of_its_own(small: dict[str, Any]) -> None:
    """As published the best score is never reset; here a later task may choose again."""
    federation = quick_federation(small)
    lines = [done.line for done in run_rounds(federation, Serial())]
    assert all(line["bytes"]["proxy"]["shares"] > 0 for line in lines[::2])  # the first round of each task
    assert lines[2]["bytes"]["proxy"]["teachers"] > 0 == lines[0]["bytes"]["proxy"]["teachers"]
    for task in range(3):
        assert lines[2 * task + 1]["proxy"]["kept_round"] in (2 * task + 1, 2 * task + 2)
    assert {"compensation"} == set(lines[0]["losses"])
    assert {"compensation", "distillation"} == set(lines[-1]["losses"])
