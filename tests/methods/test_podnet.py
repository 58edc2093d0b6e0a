"""PODNet: facts of its losses and of what it trains; see also test_podnet_proxies.py."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import Answers, client_of, grown_federation, maps_of, model_of
from torch import Tensor

from holdfast.client.training import train
from holdfast.losses import nca, pod_flat, pod_spatial
from holdfast.methods.podnet import PODNet
from holdfast.models.heads import ProxyModel
from holdfast.seeding import torch_generator
from holdfast.simulation.federation import Federation


@pytest.fixture
def grown(small: dict[str, Any]) -> Federation:
    """A head of two growths, of classes 0 to 2 and 3 to 5."""
    return grown_federation("podnet", small, (3, 3))


SCORES = 2 * torch.randn(12, 5, generator=torch_generator(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 2, 2])


@pytest.mark.parametrize("classes", [2, 5, 30])
def test_equal_similarities_give_ln_c(classes: int) -> None:
    for level in (-2.0, 0.0, 7.0):
        labels = torch.arange(8) % classes
        assert float(nca(torch.full((8, classes), level), labels)) == pytest.approx(math.log(classes), rel=1e-6)


def test_the_loss_by_hand() -> None:
    """After the largest score is taken off: -s_y + ln(1 + sum of e^s_j over the others)."""
    expected = 0.0
    for row, label in zip(SCORES.tolist(), LABELS.tolist(), strict=True):
        shifted = [s - max(row) for s in row]
        others = sum(math.exp(s) for j, s in enumerate(shifted) if j != label)
        expected += (math.log(1 + others) - shifted[label]) / 12
    assert float(nca(SCORES, LABELS)) == pytest.approx(expected)


def test_it_is_cross_entropy_where_the_target_is_largest_and_more_elsewhere() -> None:
    for i in range(12):
        for label in range(5):
            target = torch.tensor([label])
            mine, usual = nca(SCORES[i : i + 1], target), F.cross_entropy(SCORES[i : i + 1], target)
            if label == int(SCORES[i].argmax()):
                torch.testing.assert_close(mine, usual)
            else:
                assert float(mine) > float(usual)


def test_a_margin_taken_from_every_class_changes_nothing_and_has_no_slope() -> None:
    margin = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    scores = SCORES.clone().requires_grad_()
    value = nca(scores - margin, LABELS)
    torch.testing.assert_close(value, nca(SCORES, LABELS))
    value.backward()
    assert margin.grad is not None
    assert float(margin.grad) == pytest.approx(0, abs=1e-12)
    own = SCORES.clone()
    own[torch.arange(12), LABELS] -= 0.6
    assert float(nca(own, LABELS)) > float(value.detach()) + 0.1


def test_the_slope_of_the_loss_by_differences() -> None:
    assert torch.autograd.gradcheck(lambda x: nca(x, LABELS), (SCORES.clone().requires_grad_(),))


def test_a_sure_and_right_answer_costs_nothing_and_stays_finite() -> None:
    scores = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    value = nca(scores, torch.tensor([0]))
    value.backward()
    assert float(value.detach()) == 0
    assert scores.grad is not None
    assert scores.grad.isfinite().all()


def test_the_distillation_of_maps_by_loops() -> None:
    mine, theirs = maps_of(2), maps_of(3)
    expected = 0.0
    for a, b in zip(mine, theirs, strict=True):
        for n in range(3):
            vectors = []
            for image in (a[n].tolist(), b[n].tolist()):
                rows = [sum(x * x for x in row) for channel in image for row in channel]
                columns = [sum(row[w] ** 2 for row in channel) for channel in image for w in range(len(channel[0]))]
                length = math.sqrt(sum(x * x for x in rows + columns))
                vectors.append([x / length for x in rows + columns])
            expected += math.dist(*vectors) / 3 / 2
    assert float(pod_spatial(mine, theirs)) == pytest.approx(expected, abs=2e-6)


def test_the_distillation_of_features_by_loops() -> None:
    mine, theirs = (torch.randn(4, 6, generator=torch_generator(s), dtype=torch.float64) for s in (4, 5))
    expected = 0.0
    for a, b in zip(mine.tolist(), theirs.tolist(), strict=True):
        product = sum(x * y for x, y in zip(a, b, strict=True))
        expected += (1 - product / math.hypot(*a) / math.hypot(*b)) / 4
    assert float(pod_flat(mine, theirs)) == pytest.approx(expected)


def test_equal_maps_and_features_cost_nothing_and_pull_nowhere() -> None:
    """Neither in float64 nor in float32, and not for maps that are zero everywhere: a root has no slope at 0."""
    for kind in (torch.float64, torch.float32):
        maps = [m.to(kind).requires_grad_() for m in [*maps_of(2), torch.zeros(3, 2, 2, 2)]]
        value = pod_spatial(maps, [m.detach().clone() for m in maps])
        value.backward()
        assert float(value.detach()) == pytest.approx(0, abs=1e-7)
        assert all(m.grad is not None and float(m.grad.abs().max()) < 1e-6 for m in maps)
        features = torch.randn(4, 6, generator=torch_generator(4), dtype=kind, requires_grad=True)
        flat = pod_flat(features, features.detach().clone())
        flat.backward()
        assert float(flat.detach()) == pytest.approx(0, abs=1e-6)
        assert features.grad is not None
        assert float(features.grad.abs().max()) < 1e-6


def test_the_slopes_of_the_distillations_by_differences_and_none_for_the_teacher() -> None:
    mine, theirs = maps_of(2), [m.requires_grad_() for m in maps_of(3)]
    leaves = tuple(m.requires_grad_() for m in mine)
    assert torch.autograd.gradcheck(lambda *maps: pod_spatial(list(maps), theirs), leaves)
    pod_spatial(mine, theirs).backward()
    assert all(m.grad is None for m in theirs)


def test_features_are_the_last_map_before_its_relu_and_the_scale_begins_at_one() -> None:
    model = model_of(PODNet(), ProxyModel, (2,)).eval()
    with torch.no_grad():
        output = model(torch.randn(4, 3, 16, 16, generator=torch_generator(7)))
    assert bool((output.features < 0).any())
    torch.testing.assert_close(output.features, output.maps[-1].flatten(2).mean(dim=2))
    assert float(model.scale.detach()) == 1
    assert "log_scale" not in PODNet().fixed(model)


def test_a_fixed_scale_is_neither_trained_nor_sent(small: dict[str, Any]) -> None:
    """The authors' nearest-mean evaluation has a scale of 9."""
    federation = grown_federation("podnet", small, (3,), scale=9.0)
    context = client_of(federation, (0, 1), {}, epochs=1)
    model, method = context.model, PODNet(scale=9.0)
    assert isinstance(model, ProxyModel)
    assert float(model.scale.detach()) == pytest.approx(9)
    assert "log_scale" in method.fixed(model)
    before = model.log_scale.detach().clone()
    [stage] = method.stages(context)
    train(method, context, stage, {})
    assert torch.equal(model.log_scale.detach(), before)
    images = torch.randn(4, 3, 16, 16, generator=torch_generator(7))
    torch.testing.assert_close(method.predict(model, images), 9 * model(images).logits)


def terms(growths: tuple[int, ...], taught: bool, **method: Any) -> dict[str, Tensor]:
    answers, teacher = (
        Answers(
            logits=SCORES,
            features=torch.randn(3, 6, generator=torch_generator(s), dtype=torch.float64),
            maps=maps_of(s),
        )
        for s in (2, 3)
    )
    model = model_of(PODNet(), ProxyModel, ())
    model.forward = answers.forward  # type: ignore[method-assign]
    model.log_scale.data.fill_(math.log(2.5))
    context: Any = SimpleNamespace(
        model=model, predecessor=teacher if taught else None, registry=SimpleNamespace(growths=growths)
    )
    return PODNet(**method).loss(context, SimpleNamespace(images=torch.zeros(12, 1), labels=LABELS))  # type: ignore[arg-type]


def test_the_first_task_is_classification_of_scaled_scores_alone() -> None:
    found = terms((5,), taught=False)
    assert set(found) == {"classification"}
    torch.testing.assert_close(found["classification"], nca(2.5 * SCORES, LABELS), check_dtype=False)


@pytest.mark.parametrize(("growths", "factor"), [((2, 2), 2**0.5), ((2, 2, 2), 3**0.5), ((6, 1, 2), 4.5**0.5)])
def test_distillation_grows_with_the_root_of_all_classes_over_new_ones(growths: tuple[int, ...], factor: float) -> None:
    found = terms(growths, taught=True)
    features = [torch.randn(3, 6, generator=torch_generator(s), dtype=torch.float64) for s in (2, 3)]
    torch.testing.assert_close(found["spatial"], factor * 3 * pod_spatial(maps_of(2), maps_of(3)))
    torch.testing.assert_close(found["flat"], factor * pod_flat(*features))
    torch.testing.assert_close(found["classification"], nca(2.5 * SCORES, LABELS), check_dtype=False)
    other = terms(growths, taught=True, spatial=5.0, flat=0.5)
    torch.testing.assert_close(other["spatial"], found["spatial"] * 5 / 3)
    torch.testing.assert_close(other["flat"], found["flat"] / 2)


def test_identical_models_make_both_distillations_zero(grown: Federation) -> None:
    context = client_of(grown, (3, 4), {})
    context.predecessor = context.model.eval()
    found = PODNet().loss(context, next(context.batches(context.data, 0)))
    assert float(found["spatial"].detach()) == pytest.approx(0, abs=1e-6)
    assert float(found["flat"].detach()) == pytest.approx(0, abs=1e-5)


def test_it_is_optimised_as_published() -> None:
    preset, method = PODNet().preset, PODNet()
    assert (preset.lr, preset.momentum, preset.weight_decay, preset.schedule) == (0.1, 0.9, 5e-4, "cosine")
    assert (method.spatial, method.flat, method.tune_epochs, method.tune_rate, method.clamp) == (3, 1, 20, 0.05, 5)


def test_no_parameter_moves_by_more_than_the_clamp_times_the_rate(grown: Federation) -> None:
    plain = replace(grown.enrolment.training.optimiser, weight_decay=0.0)
    context = client_of(grown, (3, 4), {}, epochs=1, batch=1000, optimiser=plain)
    before = [p.detach().clone() for p in context.model.parameters()]
    [stage] = PODNet(clamp=1e-3).stages(context)
    train(PODNet(), context, stage, {})
    moved = [float((p.detach() - was).abs().max()) for p, was in zip(context.model.parameters(), before, strict=True)]
    assert max(moved) == pytest.approx(0.1 * 1e-3, rel=1e-2)


@pytest.mark.parametrize("name", ["podnet", "afc"])
def test_the_server_has_the_means_that_nearest_answers_want(small: dict[str, Any], name: str) -> None:
    federation = grown_federation(name, small, (3, 3), inference="nme", tune_epochs=0)
    method, model, rows = federation.method, federation.server.model, federation.data.train.by_class
    sent = [method.finish_task(client_of(federation, (3,), {c: rows[c][:4]})) for c in (0, 3)]
    method.merge(model, [one for one in sent if one], 0, 0)
    assert model.noted("mean").norm(dim=1).tolist() == pytest.approx([1, 0, 0, 1, 0, 0])


def test_old_proxies_are_frozen_and_gradients_clamped_in_the_main_phase(grown: Federation) -> None:
    context = client_of(grown, (3, 4), {})
    [stage] = PODNet().stages(context)
    assert stage.clamp == 5.0
    trained = {name for name, p in context.model.named_parameters() if p.requires_grad}
    every = {name for name, _ in context.model.named_parameters()}
    assert every - trained == {"blocks.0.weight"}
    assert PODNet().fixed(context.model) == {"blocks.0.weight"}
