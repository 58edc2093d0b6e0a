"""The Gaussian answer: its sums, its covariance and its scores."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from clients import client_of, grown_federation, model_of
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from holdfast.methods.answers import InferenceChoice, gaussian_scores, scatter_sums, shrunk
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.icarl import ICaRL
from holdfast.methods.kelp import Kelp
from holdfast.methods.lga import LGA
from holdfast.methods.podnet import PODNet
from holdfast.models.incremental import IncrementalModel
from holdfast.protocol.messages import Extras
from holdfast.seeding import torch_generator

D = 6


def features_of(labels: Sequence[int], seed: int = 1, d: int = D) -> Tensor:
    """Unit features near a direction of their class."""
    rng = torch_generator(seed)
    directions = torch.randn(max(labels) + 1, d, generator=torch_generator(99))
    return F.normalize(directions[torch.tensor(labels)] + 0.7 * torch.randn(len(labels), d, generator=rng), dim=1)


def extras_of(features: Tensor, labels: Sequence[int], classes: int) -> Extras:
    return Extras("class sums", scatter_sums(features, torch.tensor(labels), classes))


# what clients send


def test_the_scatter_is_the_sum_over_classes_of_the_covariance_about_the_own_mean() -> None:
    labels = [0, 0, 0, 2, 2, 3]
    features = features_of(labels)
    found = scatter_sums(features, torch.tensor(labels), 5)
    expected = np.zeros((D, D))
    for c in (0, 2):  # a single image has no scatter
        mine = features.double().numpy()[np.array(labels) == c]
        expected += np.cov(mine.T, bias=True)
    np.testing.assert_allclose(found["scatter"].numpy(), expected, atol=1e-6)
    assert found["counts"].tolist() == [3, 0, 2, 1, 0]
    assert int(found["spread"]) == 2
    torch.testing.assert_close(found["sums"][2], features[3:5].sum(dim=0))
    assert not found["sums"][[1, 4]].any()


def test_scatter_by_hand() -> None:
    features = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.6, 0.8], [0.6, 0.8]])
    found = scatter_sums(features, torch.tensor([1, 1, 0, 0, 0]), 2)
    # class 1: about (1/2, 1/2); class 0: about (0.4, 13/15), by (-0.4, 2/15) once and (0.2, -1/15) twice
    one = torch.tensor([[0.25, -0.25], [-0.25, 0.25]])
    other = torch.tensor([[0.16 + 0.08, -0.16 / 3 - 0.08 / 3], [-0.16 / 3 - 0.08 / 3, 4 / 225 + 2 / 225]]) / 3
    torch.testing.assert_close(found["scatter"], one + other)


def test_two_clients_sums_are_those_of_their_union_where_they_should_be() -> None:
    """Sums and counts always; the scatter if no class is at both, as it is about each client's own mean."""
    labels = [0, 0, 0, 1, 1, 1, 2, 2]
    features = features_of(labels)
    whole = scatter_sums(features, torch.tensor(labels), 3)
    for first, apart in (([0, 1, 2], True), ([0, 1, 3, 6], False)):
        rest = [i for i in range(8) if i not in first]
        parts = [scatter_sums(features[ids], torch.tensor(labels)[ids], 3) for ids in (first, rest)]
        for name in ("sums", "counts"):
            torch.testing.assert_close(parts[0][name] + parts[1][name], whole[name])
        same = torch.allclose(parts[0]["scatter"] + parts[1]["scatter"], whole["scatter"], atol=1e-6)
        assert same == apart
    assert int(whole["spread"]) == 3


@pytest.mark.parametrize("flip", [False, True])
def test_a_client_sends_sums_over_data_and_exemplars_alone(small: dict[str, Any], flip: bool) -> None:
    federation = grown_federation("kelp", small, (3,))
    federation.enrolment = replace(federation.enrolment, transform=replace(federation.enrolment.transform, flip=flip))
    rows = federation.data.train.by_class
    context = client_of(federation, (2,), {0: rows[0][:4], 2: rows[2][:3]})
    model = context.model.eval()
    extras = Kelp().finish_task(context)
    assert extras is not None
    d = model.features
    assert {name: tuple(t.shape) for name, t in extras.tensors.items()} == {
        "sums": (3, d),
        "counts": (3,),
        "scatter": (d, d),
        "spread": (),
    }
    assert extras.tensors["counts"].tolist() == [4 * (1 + flip), 0, 12 * (1 + flip)]
    for c, ids in ((0, rows[0][:4]), (2, rows[2])):
        images = federation.enrolment.transform.plain(federation.data.train.images[ids])
        seen = torch.cat([images, images.flip(3)]) if flip else images
        total = F.normalize(model(seen).features.detach().double(), dim=1).sum(dim=0)
        torch.testing.assert_close(extras.tensors["sums"][c].double(), total, rtol=1e-4, atol=1e-5)


def test_the_server_needs_the_sums_over_clients_and_no_clients_own() -> None:
    """So secure aggregation, which shows the server only the total, changes nothing."""
    method = Kelp()
    d = model_of(method, IncrementalModel, (2, 2)).features
    labels = ([0, 0, 1, 1, 1], [1, 1, 3, 3, 0])
    parts = [extras_of(features_of(some, seed, d), some, 4) for seed, some in enumerate(labels)]
    together = Extras(
        "class sums", {name: parts[0].tensors[name] + parts[1].tensors[name] for name in parts[0].tensors}
    )
    models = [model_of(method, IncrementalModel, (2, 2)) for _ in range(2)]
    method.merge(models[0], parts, 0, 0)
    method.merge(models[1], [together], 0, 0)
    for name in ("mean", "row"):
        torch.testing.assert_close(models[0].noted(name), models[1].noted(name), rtol=1e-3, atol=1e-4)


# what the server makes of them


def asked(method: InferenceChoice, extras: Sequence[Extras], growths: tuple[int, ...]) -> IncrementalModel:
    model = model_of(method, IncrementalModel, growths).eval()
    method.merge(model, extras, 0, 0)
    return model


@pytest.mark.parametrize("amount", [0.001, 0.3, 1.0])
def test_scores_are_scikit_learns_shrunken_discriminants(amount: float) -> None:
    """Its covariance is the mean of the classes' where all count alike."""
    method = Kelp(shrink=amount)
    d = model_of(method, IncrementalModel, (4,)).features
    labels = [0] * 5 + [1] * 40 + [2] * 11 + [3] * 200
    features = features_of(labels, d=d)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=amount, priors=[0.25] * 4)
    theirs.fit(features.double().numpy(), labels)
    model = asked(method, [extras_of(features, labels, 4)], (4,))
    queries = features_of([0, 1, 2, 3] * 10, seed=7, d=d)
    found = gaussian_scores(queries, model.noted("mean"), model.noted("row"))
    expected = torch.from_numpy(theirs.decision_function(queries.double().numpy()))
    tops = (found - found.amax(dim=1, keepdim=True), expected - expected.amax(dim=1, keepdim=True))
    torch.testing.assert_close(tops[0].double(), tops[1], rtol=1e-3, atol=1e-3)
    assert found.argmax(dim=1).tolist() == theirs.predict(queries.double().numpy()).tolist()


def test_shrinking_keeps_the_trace_and_makes_a_singular_covariance_one_that_can_be_inverted() -> None:
    line = torch.outer(torch.arange(4.0), torch.arange(4.0)).double()
    found = shrunk(line, 0.3)
    assert float(found.trace()) == pytest.approx(float(line.trace()))
    assert torch.linalg.eigvalsh(found).min().item() == pytest.approx(0.3 * 14 / 4)
    torch.testing.assert_close(shrunk(line, 1.0), 3.5 * torch.eye(4).double())
    assert torch.equal(shrunk(torch.zeros(4, 4).double(), 0.3), torch.eye(4).double())


def test_clients_with_one_image_per_class_give_the_nearest_mean() -> None:
    """Nothing has a scatter: no division by zero, and the identity for a covariance."""
    method = Kelp()
    d = model_of(method, IncrementalModel, (3,)).features
    features = features_of([0, 1, 2], d=d)
    parts = [extras_of(features[i : i + 1], [i], 3) for i in range(3)]
    model = asked(method, parts, (3,))
    assert torch.equal(model.noted("row"), model.noted("mean"))
    images = torch.randn(20, 3, 16, 16, generator=torch_generator(7))
    unit = F.normalize(model(images).features, dim=1)
    assert method.predict(model, images).argmax(dim=1).tolist() == torch.cdist(unit, features).argmin(dim=1).tolist()


def test_a_class_that_nobody_has_now_keeps_its_mean_under_the_new_covariance() -> None:
    method = Kelp()
    model = model_of(method, IncrementalModel, (2, 1))
    d = model.features
    first, second = [0, 0, 0, 1, 1, 1], [0, 0, 2, 2]
    method.merge(model, [extras_of(features_of(first, d=d), first, 3)], 0, 0)
    before = model.noted("mean").clone()
    told = extras_of(features_of(second, 5, d), second, 3)
    method.merge(model, [told], 0, 1)
    assert torch.equal(model.noted("mean")[1], before[1])
    assert not torch.equal(model.noted("mean")[0], before[0])
    covariance = shrunk(told.tensors["scatter"].double() / 2, 0.3)
    expected = model.noted("mean").double() @ torch.linalg.inv(covariance)
    torch.testing.assert_close(model.noted("row").double(), expected, rtol=1e-3, atol=1e-3)
    kept = {name: model.noted(name).clone() for name in ("mean", "row")}
    method.merge(model, [], 0, 2)
    assert all(torch.equal(model.noted(name), tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("name", ["gauss", "both"])
@pytest.mark.parametrize("method", [Kelp, FedAvg, ICaRL, LGA, PODNet])
def test_the_head_predicts_a_class_without_a_mean(method: type[InferenceChoice], name: Any) -> None:
    choice = method(inference=name)
    model = model_of(choice, IncrementalModel, (2, 2)).eval()
    images = torch.randn(40, 3, 16, 16, generator=torch_generator(7))
    output = model(images)
    said = output.logits.argmax(dim=1).tolist()
    assert choice.predict(model, images).argmax(dim=1).tolist() == said  # no class has a mean yet
    missing = max(set(said), key=said.count)
    unit = F.normalize(output.features, dim=1).detach()
    means = torch.stack([0 * unit[0] if c == missing else unit[3 * c] for c in range(4)])
    model.note("mean", means)
    model.note("row", 50 * means)
    found = choice.predict(model, images).argmax(dim=1).tolist()
    assert [c == missing for c in found] == [c == missing for c in said]
    assert torch.isfinite(choice.predict(model, images)).all()
    head = choice.answers(model, images)["head"].detach().log_softmax(dim=1)
    for i in (i for i in range(40) if said[i] != missing):
        scores = {c: 50 * float(unit[i] @ means[c] - means[c] @ means[c] / 2) for c in range(4) if c != missing}
        if name == "both":
            scores = {c: score + float(head[i, c]) for c, score in scores.items()}
        assert found[i] == max(scores, key=lambda c: scores[c])


def test_the_answers_are_those_that_the_sums_allow() -> None:
    assert FedAvg().answer_names == ()
    assert ICaRL(inference="nme").answer_names == ("head", "nme")
    images = torch.randn(5, 3, 16, 16, generator=torch_generator(7))
    for choice in (ICaRL(inference="nme"), PODNet(inference="gauss"), Kelp(inference="both")):
        model = model_of(choice, IncrementalModel, (2, 2)).eval()
        model.note("mean", torch.rand(4, model.features, generator=torch_generator(8)))
        found = choice.answers(model, images)
        assert tuple(found) == choice.answer_names
        assert torch.equal(found[choice.inference], choice.predict(model, images))
        assert torch.equal(found["head"], replace(choice, inference="head").predict(model, images))


def test_the_nearest_of_the_gaussians_means_is_by_cosine() -> None:
    choice = Kelp()
    model = model_of(choice, IncrementalModel, (3,)).eval()
    images = torch.randn(30, 3, 16, 16, generator=torch_generator(7))
    unit = F.normalize(model(images).features, dim=1).detach()
    means = torch.stack([0.1 * unit[1], unit[4], 3 * unit[9]])
    model.note("mean", means)
    expected = F.cosine_similarity(unit[:, None], means[None], dim=2).argmax(dim=1)
    assert torch.equal(choice.answers(model, images)["mean"].argmax(dim=1), expected)


@pytest.mark.parametrize("method", [Kelp, ICaRL])
def test_a_model_without_classes_answers_nothing(method: type[InferenceChoice]) -> None:
    choice = method(inference="gauss")
    model = model_of(choice, IncrementalModel, ())
    assert choice.predict(model, torch.zeros(2, 3, 16, 16)).shape == (2, 0)


def test_podnet_sends_its_classifier_and_the_sums_together(small: dict[str, Any]) -> None:
    federation = grown_federation("podnet", small, (2, 2), inference="gauss", tune_epochs=1)
    rows = federation.data.train.by_class
    context = client_of(federation, (2,), {0: rows[0][:3], 2: rows[2][:3]})
    method = PODNet(inference="gauss", tune_epochs=1)
    extras = method.finish_task(context)
    assert extras is not None
    expected = Kelp().finish_task(client_of(federation, (2,), {0: rows[0][:3], 2: rows[2][:3]}))
    assert expected is not None
    for name, tensor in expected.tensors.items():
        assert torch.equal(extras.tensors[name], tensor), name
    model = federation.server.model
    method.merge(model, [extras], 0, 0)
    assert model.noted("row").any(dim=1).tolist() == [True, False, True, False]
    assert torch.equal(model.get_parameter("blocks.0.weight"), extras.tensors["blocks.0.weight"])
