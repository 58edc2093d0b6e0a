"""AFC: facts of its discrepancy and of its importances; its classifier is PODNet's."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clients import client_of, federation_of, grown_federation, maps_of
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.losses import channel_discrepancy, nca
from holdfast.methods.afc import AFC, ImportantModel, importance_sums
from holdfast.methods.context import Batch, ClientContext
from holdfast.protocol.messages import Extras
from holdfast.seeding import torch_generator
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds

CHANNELS = (32, 64, 128, 128)


@pytest.fixture
def grown(small: dict[str, Any]) -> Federation:
    """A head of two growths, of classes 0 to 2 and 3 to 5."""
    return grown_federation("afc", small, (3, 3))


def by_channel(mine: list[Tensor], theirs: list[Tensor]) -> list[list[list[float]]]:
    """The distance of squared maps of unit length, by stage, sample and channel."""
    found = []
    for a, b in zip(mine, theirs, strict=True):
        found.append([])
        for n in range(len(a)):
            found[-1].append([])
            for c in range(a.shape[1]):
                units = []
                for image in (a[n, c], b[n, c]):
                    squares = [float(x) ** 2 for x in image.flatten()]
                    length = math.sqrt(sum(x * x for x in squares))
                    units.append([x / length for x in squares])
                found[-1][-1].append(math.dist(*units))
    return found


def test_with_every_importance_one_it_is_the_plain_distance_of_channels() -> None:
    distances = by_channel(maps_of(2), maps_of(3))
    ones = [torch.ones(2), torch.ones(5)]
    stages = [sum(map(sum, stage)) / (3 * channels) for stage, channels in zip(distances, (2, 5), strict=True)]
    assert float(channel_discrepancy(maps_of(2), maps_of(3), ones)) == pytest.approx(sum(stages) / 2, abs=2e-6)


def test_importances_weight_their_channels() -> None:
    """Mean over stages, samples and channels of the importance times the distance."""
    distances = by_channel(maps_of(2), maps_of(3))
    weights = [[0.5, 1.5], [0.0, 3.0, 1.0, 0.25, 0.75]]
    expected = 0.0
    for stage, weight in zip(distances, weights, strict=True):
        for sample in stage:
            expected += sum(w * d for w, d in zip(weight, sample, strict=True)) / (3 * len(weight)) / 2
    found = channel_discrepancy(maps_of(2), maps_of(3), [torch.tensor(w, dtype=torch.float64) for w in weights])
    assert float(found) == pytest.approx(expected, abs=2e-6)
    apart = maps_of(2)
    apart[1][:, 0] += 5
    moved = channel_discrepancy(apart, maps_of(3), [torch.tensor(w, dtype=torch.float64) for w in weights])
    assert float(moved) == pytest.approx(float(found))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_a_student_that_is_its_teacher_costs_nothing_and_is_not_pulled(kind: torch.dtype) -> None:
    maps = [m.to(kind).requires_grad_() for m in [*maps_of(2), torch.zeros(3, 2, 2, 2)]]
    importance = [torch.full((m.shape[1],), 3.0, dtype=kind) for m in maps]
    value = channel_discrepancy(maps, [m.detach().clone() for m in maps], importance)
    value.backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-7)
    assert all(m.grad is not None and float(m.grad.abs().max()) < 1e-6 for m in maps)


def test_the_slope_of_the_discrepancy_by_differences_and_none_for_the_teacher() -> None:
    theirs = [m.requires_grad_() for m in maps_of(3)]
    leaves = tuple(m.requires_grad_() for m in maps_of(2))
    ones = [torch.ones(2, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *maps: channel_discrepancy(list(maps), theirs, ones), leaves)
    channel_discrepancy(list(leaves), theirs, ones).backward()
    assert all(m.grad is None for m in theirs)


@pytest.mark.parametrize(("growths", "factor"), [((3, 3), 4 * 2**0.5), ((2, 2, 2), 4 * 3**0.5), ((5, 1), 4 * 6**0.5)])
def test_the_loss_is_classification_and_four_roots_of_the_discrepancy(
    grown: Federation, growths: tuple[int, ...], factor: float
) -> None:
    """There is no term for the features."""
    context = client_of(grown, (3, 4), {})
    model = context.model.eval()
    assert isinstance(model, ImportantModel)
    rng = torch_generator(6)
    for buffer in model.importance:
        buffer.copy_(torch.rand(len(buffer), generator=rng) * 2)
    model.log_scale.data.fill_(math.log(2.0))
    batch = next(context.batches(context.data, 0))
    output = model(batch.images)
    other = SimpleNamespace(maps=[m.detach() + 0.3 for m in output.maps])
    view: Any = SimpleNamespace(
        model=model, predecessor=lambda images: other, registry=SimpleNamespace(growths=growths)
    )
    found = AFC().loss(view, batch)
    assert set(found) == {"classification", "discrepancy"}
    torch.testing.assert_close(found["classification"], nca(2 * output.logits, batch.labels))
    torch.testing.assert_close(
        found["discrepancy"], factor * channel_discrepancy(output.maps, other.maps, model.importance)
    )
    view.predecessor = None
    assert set(AFC().loss(view, batch)) == {"classification"}
    view.predecessor = lambda images: SimpleNamespace(maps=[m.detach() for m in output.maps])
    assert float(AFC().loss(view, batch)["discrepancy"].detach()) == pytest.approx(0, abs=1e-5)


def test_it_is_optimised_as_published() -> None:
    preset, method = AFC().preset, AFC()
    assert (preset.lr, preset.momentum, preset.weight_decay, preset.schedule) == (0.1, 0.9, 5e-4, "cosine")
    assert (method.strength, method.tune_epochs, method.tune_rate, method.clamp) == (4, 20, 0.05, 5)


def squared_slopes(context: ClientContext, batch: Batch) -> list[Tensor]:
    """Sum over pixels of the squared slope of the loss, for each image and channel (B, c), as hooks see it."""
    assert isinstance(context.model, ImportantModel)
    seen: list[Tensor] = []
    slopes: dict[int, Tensor] = {}

    def watch(_: Any, __: Any, output: Tensor) -> None:
        place = len(seen)
        seen.append(output)
        output.register_hook(lambda slope: slopes.__setitem__(place, slope))

    handles = [norm.register_forward_hook(watch) for norm in context.model.backbone.norms]  # type: ignore[union-attr]
    nca(context.model.scale * context.model(batch.images).logits, batch.labels).backward()
    for handle in handles:
        handle.remove()
    return [slopes[i].flatten(2).square().sum(dim=2) for i in range(len(seen))]


def test_importances_are_summed_over_images_by_an_independent_route(grown: Federation) -> None:
    """32 images in batches of 10, 10, 10 and 2: each counts by its own loss, whatever batch it is in."""
    rows = grown.data.train.by_class
    context = client_of(grown, (3, 4), {0: rows[0][:8]}, batch=10)
    assert len(context.everything) == 32
    found = importance_sums(context)
    batches = list(context.batches(context.everything, 0))
    assert [len(batch.labels) for batch in batches] == [10, 10, 10, 2]
    expected = [torch.zeros(channels) for channels in CHANNELS]
    for batch in batches:
        for total, slope in zip(expected, squared_slopes(context, batch), strict=True):
            total += len(batch.labels) ** 2 * slope.sum(dim=0)
    for stage, total in enumerate(expected):
        assert bool(total.any())
        mine = found[f"importance{stage}"]
        torch.testing.assert_close(mine, total, rtol=1e-3, atol=1e-4 * float(total.mean()))  # sums, not means


def test_the_last_stage_in_closed_form(grown: Federation) -> None:
    """A feature is the mean of its map, so a pixel's slope is the feature's over the number of pixels."""
    context = client_of(grown, (3,), {}, batch=12)
    model = context.model.eval()
    assert isinstance(model, ImportantModel)
    batch = next(context.batches(context.everything, 0))
    output = model(batch.images)
    features = output.features.detach().requires_grad_()
    [slope] = torch.autograd.grad(nca(model.scale * model.classify(features), batch.labels), features)
    expected = (slope.square() / output.maps[-1][0, 0].numel()).mean(dim=0)
    mine = importance_sums(context)["importance3"]
    torch.testing.assert_close(mine / mine.mean(), expected / expected.mean(), rtol=1e-3, atol=1e-4)


def test_the_pass_moves_no_statistics_and_no_weights(grown: Federation) -> None:
    context = client_of(grown, (3, 4), {})
    before = {name: tensor.clone() for name, tensor in context.model.state_dict().items()}
    importance_sums(context)
    assert all(torch.equal(tensor, before[name]) for name, tensor in context.model.state_dict().items())


def test_a_client_with_one_image_does_not_drown_one_with_a_full_batch(grown: Federation) -> None:
    """The slopes of a batch's mean go with one over its size (X), their squares with the square of that. The server
    adds unnormalised sums: a client with one image must not count a hundred times as much as one with twelve."""
    rows = grown.data.train.by_class
    many = client_of(grown, (3,), {}, batch=12)
    totals = importance_sums(many)
    for image in rows[3][:4].tolist():
        one = importance_sums(client_of(grown, (3,), {}, images=(image,), batch=12))
        for stage in range(4):
            assert float(one[f"importance{stage}"].mean()) < 4 * float(totals[f"importance{stage}"].mean())


def test_importances_are_found_after_the_fine_tuning(grown: Federation) -> None:
    rows = grown.data.train.by_class
    memory = {0: rows[0][:4], 3: rows[3][:4]}
    found = AFC(tune_rate=1.0).finish_task(client_of(grown, (3,), memory))
    assert found is not None
    assert int(found.tensors["images"]) == 8
    tuned = client_of(grown, (3,), memory)
    weights = {name: t for name, t in found.tensors.items() if name.startswith("blocks.")}
    assert len(weights) == 2
    tuned.model.load_state_dict(weights, strict=False)
    untuned = importance_sums(client_of(grown, (3,), memory))
    for name, total in importance_sums(tuned).items():
        torch.testing.assert_close(found.tensors[name], total, rtol=1e-4, atol=0)
        assert not torch.allclose(found.tensors[name], untuned[name], rtol=1e-2, atol=0)
    without = AFC().finish_task(client_of(grown, (3,), {}))  # no classifier, but importances
    assert set(without.tensors) == {f"importance{stage}" for stage in range(4)}
    assert bool(without.tensors["importance0"].any())


def told(federation: Federation, values: list[Tensor], images: int) -> Extras:
    proxies = {name: t for name, t in federation.server.weights.items() if name.startswith("blocks.")}
    importances = {f"importance{stage}": value for stage, value in enumerate(values)}
    return Extras("classifier and importances", {**proxies, **importances, "images": torch.tensor(images)})


def test_the_server_adds_sums_and_makes_every_layers_mean_one(grown: Federation) -> None:
    """Sums are added, however many exemplars a client has; a later task starts anew; a layer of zeros is left alone."""
    model, rng = grown.server.model, torch_generator(9)
    assert isinstance(model, ImportantModel)
    first, second = ([torch.rand(c, generator=rng) * (k + 1) for k, c in enumerate(CHANNELS)] for _ in range(2))
    AFC().merge(model, [told(grown, first, 5), told(grown, second, 500)], 0, 0)
    for a, b, found in zip(first, second, model.importance, strict=True):
        total = (a + b).double()
        torch.testing.assert_close(found.double(), total / (total.sum() / len(total)), rtol=1e-5, atol=1e-6)
        assert float(found.mean()) == pytest.approx(1)
    AFC().merge(model, [told(grown, [*first[:3], torch.zeros(128)], 5)], 0, 0)
    for a, found in zip(first[:3], model.importance, strict=False):
        torch.testing.assert_close(found, a / a.mean())
    assert model.importance[3].tolist() == [1.0] * 128
    was = [buffer.clone() for buffer in model.importance]
    AFC().merge(model, [], 0, 0)
    assert all(torch.equal(buffer, before) for buffer, before in zip(model.importance, was, strict=True))


def test_clients_neither_train_nor_send_importances_and_old_proxies(grown: Federation) -> None:
    fixed = {"blocks.0.weight", *(f"importance{stage}" for stage in range(4))}
    assert AFC().fixed(grown.server.model) == fixed
    context = client_of(grown, (3,), {})
    [stage] = AFC().stages(context)
    assert stage.clamp == 5.0
    assert [name for name, p in context.model.named_parameters() if not p.requires_grad] == ["blocks.0.weight"]


def test_in_a_run_importances_change_at_the_end_of_a_task_alone(small: dict[str, Any]) -> None:
    federation = federation_of("afc", small, tune_epochs=1)
    model = federation.server.model
    assert isinstance(model, ImportantModel)
    was = [buffer.clone() for buffer in model.importance]
    assert all(bool((buffer == 1).all()) for buffer in was)
    for done in run_rounds(federation, Serial()):
        ends = federation.plan.ends_task(done.line["round"] - 1)
        for buffer, before in zip(model.importance, was, strict=True):
            assert torch.equal(buffer, before) != ends
            assert float(buffer.mean()) == pytest.approx(1, rel=1e-5)
        was = [buffer.clone() for buffer in model.importance]
