"""iCaRL: facts of its loss, its exemplars and its nearest mean."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import Answers, client_of, federation_of, grown_federation, model_of
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.losses import weighted_binary_cross_entropy
from holdfast.methods.afc import AFC
from holdfast.methods.answers import InferenceChoice, class_means, class_sums
from holdfast.methods.geodl import GeoDL
from holdfast.methods.icarl import ICaRL
from holdfast.methods.lga import LGA
from holdfast.methods.podnet import PODNet
from holdfast.models.incremental import IncrementalModel
from holdfast.protocol.messages import Extras
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds


def loss_of(logits: Tensor, labels: Tensor, teacher: Tensor | None) -> Tensor:
    context: Any = SimpleNamespace(
        model=Answers(logits=logits), predecessor=None if teacher is None else Answers(logits=teacher)
    )
    batch: Any = SimpleNamespace(images=torch.zeros(len(labels), 1), labels=labels)
    [(_, value)] = ICaRL().loss(context, batch).items()
    return value


LOGITS = 2 * torch.randn(8, 5, generator=torch_generator(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 4, 4, 3, 1])
TEACHER = 2 * torch.randn(8, 3, generator=torch_generator(2), dtype=torch.float64)


def test_zero_logits_give_ln_2_whatever_the_targets() -> None:
    for seed in range(3):
        targets = torch.randint(0, 2, (6, 7), generator=torch_generator(seed))
        value = weighted_binary_cross_entropy(torch.zeros(6, 7), targets, torch.ones(6))
        assert float(value) == pytest.approx(math.log(2))
    assert float(loss_of(torch.zeros(8, 5), LABELS, None)) == pytest.approx(math.log(2))
    assert float(loss_of(torch.zeros(8, 5), LABELS, torch.tensor([[40.0, -40.0, 40.0]] * 8))) == pytest.approx(
        math.log(2)
    )


def test_the_first_task_is_the_plain_binary_loss() -> None:
    expected = 0.0
    for i in range(8):
        for c in range(5):
            o = float(LOGITS[i, c])
            expected += math.log1p(math.exp(-o)) if c == LABELS[i] else math.log1p(math.exp(o))
    assert float(loss_of(LOGITS, LABELS, None)) == pytest.approx(expected / 40)


def test_old_targets_are_the_teachers_for_every_sample() -> None:
    """Images of new classes and exemplars alike; the mean goes over samples and all classes."""
    expected = 0.0
    for i in range(8):
        for c in range(5):
            s = 1 / (1 + math.exp(-float(LOGITS[i, c])))
            target = 1 / (1 + math.exp(-float(TEACHER[i, c]))) if c < 3 else float(LABELS[i] == c)
            expected -= target * math.log(s) + (1 - target) * math.log(1 - s)
    assert float(loss_of(LOGITS, LABELS, TEACHER)) == pytest.approx(expected / 40)


def test_no_gradient_on_old_outputs_where_student_is_teacher() -> None:
    logits = LOGITS.clone().requires_grad_()
    loss_of(logits, LABELS, LOGITS[:, :3]).backward()
    assert logits.grad is not None
    assert float(logits.grad[:, :3].abs().max()) < 1e-15
    hard = F.one_hot(LABELS, 5)[:, 3:]
    torch.testing.assert_close(logits.grad[:, 3:], (LOGITS[:, 3:].sigmoid() - hard) / 40)


def test_the_teacher_gets_no_gradient() -> None:
    logits, teacher = LOGITS.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    loss_of(logits, LABELS, teacher).backward()
    assert teacher.grad is None


def test_the_hard_label_of_an_exemplar_never_counts_and_that_of_a_new_image_does() -> None:
    whole = loss_of(LOGITS, LABELS, TEACHER)
    for i in range(8):
        for other in range(5):
            changed = LABELS.clone()
            changed[i] = other
            same = float(loss_of(LOGITS, changed, TEACHER)) == float(whole)
            both_old = LABELS[i] < 3 and other < 3
            assert same == bool(both_old or other == LABELS[i]), (i, other)


def test_the_gradient_by_differences() -> None:
    logits = LOGITS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(x, LABELS, TEACHER), (logits,))


def test_herding_follows_the_official_recursion_on_unit_features() -> None:
    """w starts as the mean; take the largest w.f, then w += mean - f; nothing twice."""
    features = torch.randn(12, 6, generator=torch_generator(3), dtype=torch.float64) * torch.arange(1, 13)[:, None]
    unit = [f / f.norm() for f in features]
    mean = torch.stack(unit).mean(dim=0)
    wanted, chosen = mean, []
    for _ in range(9):
        best = max((i for i in range(12) if i not in chosen), key=lambda i: float(wanted @ unit[i]))
        chosen.append(best)
        wanted = wanted + mean - unit[best]
    assert ICaRL().exemplars(features, 9).tolist() == chosen
    assert sorted(ICaRL().exemplars(features, 99).tolist()) == list(range(12))
    assert ICaRL().exemplars(features, 4).tolist() == chosen[:4]  # so a list may be cut at its end


@pytest.mark.parametrize("flip", [False, True])
def test_class_sums_add_unit_features_of_images_and_their_mirror_images(small: dict[str, Any], flip: bool) -> None:
    federation = grown_federation("icarl", small, (3,), inference="nme")
    federation.enrolment = replace(federation.enrolment, transform=replace(federation.enrolment.transform, flip=flip))
    rows = federation.data.train.by_class
    context = client_of(federation, (2,), {0: rows[0][:4], 2: rows[2][:3]})
    found = ICaRL(inference="nme").finish_task(context).tensors
    assert found["counts"].tolist() == [4, 0, 3]
    model = context.model.eval()
    for c, count in ((0, 4), (1, 0), (2, 3)):
        total = torch.zeros(model.features, dtype=torch.float64)
        for row in rows[c][:count]:
            image = federation.enrolment.transform.plain(federation.data.train.images[row][None])
            for seen in [image, torch.from_numpy(image.numpy()[..., ::-1].copy())][: 1 + flip]:
                feature = model(seen).features[0].detach().double()
                total += feature / feature.norm()
        torch.testing.assert_close(found["sums"][c].double(), total, rtol=1e-4, atol=1e-5)


def test_a_client_without_exemplars_adds_nothing(small: dict[str, Any]) -> None:
    federation = grown_federation("icarl", small, (2,), inference="nme")
    found = class_sums(client_of(federation, (0, 1), {}), torch.empty(0, dtype=torch.int64))
    assert not found.tensors["sums"].any()
    assert found.tensors["counts"].tolist() == [0, 0]
    assert class_means([found])[1].tolist() == [False, False]


def test_the_server_pools_all_clients_exemplars_and_keeps_the_mean_of_a_class_that_nobody_has() -> None:
    method = ICaRL(inference="nme")
    model = model_of(method, IncrementalModel, (2, 1)).eval()
    d = model.features
    rng = torch_generator(6)
    before = F.normalize(torch.randn(3, d, generator=rng), dim=1)
    model.note("mean", before)
    features = F.normalize(torch.randn(5, d, generator=rng, dtype=torch.float64), dim=1)
    zero = torch.zeros(d)
    first = torch.stack([features[:2].sum(0).float(), zero, zero])  # two images of class 0
    second = torch.stack([features[2].float(), zero, features[3:].sum(0).float()])  # one of it, two of class 2
    counts = (torch.tensor([2, 0, 0]), torch.tensor([1, 0, 2]))
    extras = [Extras("class sums", {"sums": s, "counts": n}) for s, n in zip((first, second), counts, strict=True)]
    method.merge(model, extras, 0, 0)
    means = model.noted("mean")
    for c, mine in ((0, features[:3]), (2, features[3:])):
        mean = mine.mean(dim=0)
        torch.testing.assert_close(means[c].double(), mean / mean.norm(), rtol=1e-5, atol=1e-6)
    assert torch.equal(means[1], before[1])
    method.merge(model, [], 0, 0)
    assert torch.equal(model.noted("mean"), means)


@pytest.mark.parametrize("method", [ICaRL, GeoDL, PODNet, AFC, LGA])
def test_the_nearest_mean_answers_and_the_head_for_a_class_without_one(method: type[InferenceChoice]) -> None:
    nearest = method(inference="nme")
    model = model_of(nearest, IncrementalModel, (2, 2)).eval()
    images = torch.randn(40, 3, 16, 16, generator=torch_generator(7))
    output = model(images)
    said = output.logits.argmax(dim=1).tolist()
    assert nearest.predict(model, images).argmax(dim=1).tolist() == said  # no class has a mean yet
    means = F.normalize(output.features[[0, 3, 5, 8]].detach(), dim=1)
    missing = max(set(said), key=said.count)
    for lacking in (set(), {missing}, {missing, (missing + 1) % 4}):
        model.note("mean", torch.stack([0 * mean if c in lacking else mean for c, mean in enumerate(means)]))
        found = nearest.predict(model, images).argmax(dim=1).tolist()
        for i in range(40):
            unit = (output.features[i] / output.features[i].norm()).detach()
            distances = {c: float((unit - means[c]).norm()) for c in range(4) if c not in lacking}
            assert found[i] == (said[i] if said[i] in lacking else min(distances, key=lambda c: distances[c]))
    assert torch.equal(method(inference="head").predict(model, images), output.logits)


def test_a_run_ends_with_the_means_of_its_last_clients_and_distils_from_the_last_model(small: dict[str, Any]) -> None:
    """The means come from the exemplars of the last round's clients under the final model; the teacher of a task is
    the global model as the task before left it."""
    federation = federation_of("icarl", small, inference="nme")
    ends: list[dict[str, Tensor]] = []
    taught: dict[int, list[dict[str, Tensor]]] = {0: [], 1: [], 2: []}

    class Watching(ICaRL):
        def loss(self, context: Any, batch: Any) -> Any:
            if context.predecessor is not None:
                weights = {name: t.clone() for name, t in context.predecessor.state_dict().items()}
                taught[federation.plan.task_of_round(context.job.round_index)].append(weights)
            return super().loss(context, batch)

    federation.method = Watching(inference="nme")
    for done in run_rounds(federation, Serial()):
        if federation.plan.ends_task(done.line["round"] - 1):
            ends.append({name: t.clone() for name, t in federation.server.weights.items()})
    assert not taught[0]
    for task in (1, 2):
        assert taught[task]
        for weights in taught[task]:
            assert set(weights) == set(ends[task - 1])
            assert all(torch.equal(weights[name], tensor) for name, tensor in ends[task - 1].items())
    model, fed = federation.server.model.eval(), federation
    sums = torch.zeros(6, model.features, dtype=torch.float64)
    for client in fed.plan.selected[-1]:
        for name, rows in federation.population.state(client).memory.items():
            features = (
                model(fed.enrolment.transform.plain(fed.data.train.images[rows.long()])).features.detach().double()
            )
            position = federation.server.registry.position[name]
            sums[position] += F.normalize(features, dim=1).sum(dim=0)
    told = sums.any(dim=1)
    assert told.any()
    torch.testing.assert_close(model.noted("mean")[told].double(), F.normalize(sums[told], dim=1), rtol=1e-4, atol=1e-5)


def test_means_are_asked_for_at_the_end_of_a_task_and_only_where_they_answer(small: dict[str, Any]) -> None:
    assert not ICaRL(inference="head").collects_extras("finish")
    nearest = ICaRL(inference="nme")
    assert nearest.collects_extras("finish")
    assert not nearest.collects_extras("begin")
    assert nearest.fixed(model_of(nearest, IncrementalModel, (2, 1))) == {"notes.0.mean", "notes.1.mean"}
    sent = [
        [
            done.line["bytes"]["server"]["extras"]
            for done in run_rounds(federation_of("icarl", small, inference=how), Serial())
        ]
        for how in ("head", "nme")
    ]
    assert not any(sent[0])
    assert [bool(extras) for extras in sent[1]] == [False, True] * 3


@pytest.mark.parametrize("memory", [0, 1])
def test_clients_with_hardly_any_memory_take_part(small: dict[str, Any], memory: int) -> None:
    federation = federation_of("icarl", {**small, "plan": {**small["plan"], "memory": memory}}, inference="nme")
    assert math.isfinite([done.line for done in run_rounds(federation, Serial())][-1]["losses"]["classification"])
