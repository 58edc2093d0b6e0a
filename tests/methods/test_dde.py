"""DDE: neighbours in the old feature space, distillation, the head effect at inference."""

import copy
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import Answers, client_of, federation_of, grown_federation
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.losses import distillation, neighbour_cross_entropy
from holdfast.methods import dde
from holdfast.methods.context import ClientContext
from holdfast.methods.dde import DDE, DirectedModel, nearest_others
from holdfast.models.incremental import ModelSpec
from holdfast.protocol.messages import Extras
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds

LOGITS = torch.randn(6, 4, generator=torch_generator(1), dtype=torch.float64)
LABELS = torch.tensor([0, 3, 1, 2, 2, 0])


def test_probabilities_are_halved_with_the_neighbours() -> None:
    neighbours = torch.rand(6, generator=torch_generator(2), dtype=torch.float64)
    expected = 0.0
    for i in range(6):
        own = math.exp(LOGITS[i, LABELS[i]]) / sum(math.exp(o) for o in LOGITS[i])
        expected -= math.log((own + float(neighbours[i])) / 2) / 6
    assert float(neighbour_cross_entropy(LOGITS, LABELS, neighbours)) == pytest.approx(expected)


def test_a_sample_that_is_its_own_neighbour_has_its_cross_entropy() -> None:
    own = LOGITS.softmax(1).gather(1, LABELS[:, None]).squeeze(1)
    torch.testing.assert_close(neighbour_cross_entropy(LOGITS, LABELS, own), F.cross_entropy(LOGITS, LABELS))


def test_neighbours_have_no_gradient_and_the_samples_is_the_closed_form() -> None:
    """d/do = -p_y (onehot - p) / (p_y + n) for each sample."""
    logits = LOGITS.clone().requires_grad_()
    neighbours = torch.rand(6, generator=torch_generator(2), dtype=torch.float64).requires_grad_()
    neighbour_cross_entropy(logits, LABELS, neighbours).backward()
    assert neighbours.grad is None
    p = LOGITS.softmax(1)
    own = p.gather(1, LABELS[:, None])
    expected = -own * (F.one_hot(LABELS, 4) - p) / (own + neighbours.detach()[:, None]) / 6
    torch.testing.assert_close(logits.grad, expected)


def test_impossible_labels_stay_finite() -> None:
    logits = torch.tensor([[300.0, 0.0]], requires_grad=True)
    loss = neighbour_cross_entropy(logits, torch.tensor([1]), torch.zeros(1))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-math.log(1e-12), rel=1e-3)
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("at_a_time", [4, 1024])
def test_neighbours_are_the_nearest_others_of_the_pool_by_brute_force(
    monkeypatch: pytest.MonkeyPatch, at_a_time: int
) -> None:
    monkeypatch.setattr(dde, "ROWS", at_a_time)
    unit = F.normalize(torch.randn(15, 6, generator=torch_generator(3), dtype=torch.float64), dim=1)
    for pool in (list(range(15)), [1, 4, 5, 9, 14]):
        found = nearest_others(unit, torch.tensor(pool), 4)
        assert found.shape == (15, 4)
        for i in range(15):
            others = sorted((j for j in pool if j != i), key=lambda j: float((unit[i] - unit[j]).norm()))
            assert found[i].tolist() == others[:4]


@pytest.mark.parametrize("images", [2, 3, 10, 11])
def test_with_fewer_images_there_are_fewer_neighbours(images: int) -> None:
    unit = F.normalize(torch.randn(images, 5, generator=torch_generator(4)), dim=1)
    found = nearest_others(unit, torch.arange(images), 10)
    assert found.shape == (images, min(10, images - 1))
    assert all(i not in found[i].tolist() and len(set(found[i].tolist())) == found.shape[1] for i in range(images))


def test_distillation_is_a_quarter_of_t_squared_kl() -> None:
    teacher = torch.randn(6, 3, generator=torch_generator(5), dtype=torch.float64)
    kl = 0.0
    for i in range(6):
        q, p = ([math.exp(float(o[i, c]) / 2) for c in range(3)] for o in (teacher, LOGITS))
        kl += sum(a / sum(q) * math.log(a / sum(q) / (b / sum(p))) for a, b in zip(q, p, strict=True)) / 6
    assert float(distillation(LOGITS, teacher, 2.0)) == pytest.approx(kl)
    context: Any = SimpleNamespace(
        model=Answers(logits=LOGITS),
        predecessor=Answers(logits=teacher),
        scratch={},
        data=torch.arange(6),
        memory=torch.arange(0),
    )
    batch: Any = SimpleNamespace(images=torch.zeros(6, 1), labels=LABELS, rows=torch.arange(6))
    found = DDE(neighbours=0).loss(context, batch)
    assert float(found["distillation"]) == pytest.approx(0.25 * 4 * kl)
    torch.testing.assert_close(found["classification"], F.cross_entropy(LOGITS, LABELS))  # K = 0
    assert float(DDE(beta=2.0).loss(context, batch)["distillation"]) == pytest.approx(2 * 4 * kl)
    context.predecessor = None
    first = DDE().loss(context, batch)
    assert set(first) == {"classification"}
    torch.testing.assert_close(first["classification"], F.cross_entropy(LOGITS, LABELS))


def test_without_neighbours_none_are_sought(small: dict[str, Any]) -> None:
    """K = 0, through the road that training takes: a mover in the second task has cross-entropy of its own images."""
    federation = grown_federation("dde", small, (3, 3))
    rows = federation.data.train.by_class
    for neighbours in (0, 2):
        context = client_of(federation, (3, 4), {0: rows[0][:2]})
        context.predecessor = grown_federation("dde", small, (3,)).server.model.eval()
        [stage] = DDE(neighbours=neighbours).stages(context)
        assert ("near" in context.scratch) == bool(neighbours)
        batch = next(iter(stage.batches(0)))
        context.model.eval()
        own = F.cross_entropy(context.model(batch.images).logits, batch.labels)
        same = torch.equal(DDE(neighbours=neighbours).loss(context, batch)["classification"], own)
        assert same == (neighbours == 0)


Case = tuple[ClientContext, Any, Tensor, torch.nn.Module, Tensor]  # client, batch, its loss, model after it, its logits


@pytest.fixture(scope="module")
def second_task() -> list[Case]:
    """The first batches of some movers, stayers and newcomers in a second task's second round, as DDE saw them."""
    settings: dict[str, Any] = {
        "data": {"name": "glyphs", "classes": 4, "train_per_class": 8, "test_per_class": 4, "size": 16},
        "plan": {
            "tasks": 2,
            "clients": 5,
            "join_per_task": 2,
            "selected": 5,
            "rounds": 2,
            "move_on": 0.5,
            "memory": 8,
            "class_share": 1.0,
            "zo_data": "memory",
        },
        "train": {"epochs": 1, "batch": 12},
    }
    federation = federation_of("dde", settings, neighbours=3)
    cases: dict[int, Case] = {}
    plain = DDE.loss

    class Watching(DDE):
        def loss(self, context: Any, batch: Any) -> Any:
            logits = copy.deepcopy(context.model)(batch.images).logits.detach()
            found = plain(self, context, batch)
            # In this round the global model is no longer the old one.
            if context.job.round_index == 3 and context.state.client not in cases:
                model = copy.deepcopy(context.model).eval()
                assert context.model.training
                cases[context.state.client] = context, batch, found["classification"].detach(), model, logits
            return found

    federation.method = Watching(neighbours=3)
    list(run_rounds(federation, Serial()))
    return list(cases.values())


def expected(context: ClientContext, batch: Any, model: torch.nn.Module, logits: Tensor, old: torch.nn.Module) -> float:
    """Image by image: neighbours among the new ones by loops, own probability of the augmented image, theirs of plain
    ones."""
    new = context.data.tolist()

    def seen(row: int) -> Tensor:
        return context.transform.plain(context.images.pixels(torch.tensor([row])))

    features = {row: F.normalize(old(seen(row)).features[0], dim=0) for row in context.everything.tolist()}
    total = 0.0
    for i, row in enumerate(batch.ids.tolist()):
        y = int(batch.labels[i])
        others = sorted((r for r in new if r != row), key=lambda r: float((features[r] - features[row]).norm()))
        theirs = [float(model(seen(r)).logits[0].softmax(0)[y]) for r in others[:3]]
        p = (float(logits[i].softmax(0)[y]) + sum(theirs) / len(theirs)) / 2
        total -= math.log(p) / len(batch.labels)
    return total


def teacher_of(context: ClientContext) -> torch.nn.Module:
    """The old model, from the message: the buffers of the client are long overwritten."""
    old = DDE().build_model(context.enrolment.spec, torch_generator(0)).eval()
    old.grow(2, torch_generator(0))
    old.load_state_dict(dict(context._teachers.models[0]))
    return old


def movers(cases: list[Case]) -> Iterator[Case]:
    yield from (case for case in cases if len(case[0].data) and len(case[0].memory))


@torch.no_grad()
def test_new_images_and_exemplars_share_with_their_new_neighbours(second_task: list[Case]) -> None:
    checked = 0
    for context, batch, found, model, logits in movers(second_task):
        fresh = torch.isin(batch.ids, context.data)
        assert fresh.any()
        checked += not fresh.all()
        assert float(found) == pytest.approx(expected(context, batch, model, logits, teacher_of(context)), rel=1e-4)
        assert abs(float(found) - float(F.cross_entropy(logits, batch.labels))) > 1e-4
    assert checked


def test_a_client_with_nothing_but_its_memory_has_ordinary_cross_entropy(second_task: list[Case]) -> None:
    stayers = [case for case in second_task if not len(case[0].data)]
    assert stayers
    for _, batch, found, _, logits in stayers:
        torch.testing.assert_close(found, F.cross_entropy(logits, batch.labels))


def test_a_newcomer_has_ordinary_cross_entropy(second_task: list[Case]) -> None:
    """A client without old data has no effect of old data to keep."""
    newcomers = [case for case in second_task if not len(case[0].memory)]
    assert newcomers
    for _, batch, found, _, logits in newcomers:
        torch.testing.assert_close(found, F.cross_entropy(logits, batch.labels))


def test_one_new_image_has_no_neighbours_and_ordinary_cross_entropy(second_task: list[Case]) -> None:
    context, batch, _, _, _ = next(movers(second_task))
    alone = copy.copy(context)
    alone.scratch, alone.data = {}, context.data[:1]
    alone.model = DDE().build_model(context.enrolment.spec, torch_generator(0))
    alone.model.grow(4, torch_generator(0))
    list(DDE().stages(alone))
    assert "near" not in alone.scratch
    logits = alone.model(batch.images).logits
    torch.testing.assert_close(DDE().classification(alone, batch, logits), F.cross_entropy(logits, batch.labels))


def finishing(features: Tensor, batch: int) -> Any:
    """What `finish_task` needs of a ClientContext whose image number i has features[i]."""
    rows = torch.arange(len(features))
    return SimpleNamespace(
        data=rows,
        memory=rows[:0],
        everything=rows,
        model=None,
        registry=SimpleNamespace(growths=(2, 2)),
        features=lambda model, some: features[some],
        generator=lambda *purpose: torch_generator(0, *purpose),
        training=SimpleNamespace(batch=batch),
    )


@pytest.mark.parametrize(("images", "batch", "steps"), [(1, 4, 1), (8, 4, 2), (21, 4, 6)])
def test_the_direction_is_a_running_sum_of_batch_means(images: int, batch: int, steps: int) -> None:
    """Of equal features f, n steps of h <- 0.9 h + f from 0 are f (1 - 0.9^n) / (1 - 0.9)."""
    feature = torch.tensor([1.0, -2.0, 0.5])
    found = DDE().finish_task(finishing(feature.expand(images, 3), batch))
    assert found is not None
    assert int(found.tensors["steps"]) == steps
    torch.testing.assert_close(found.tensors["direction"], feature * (1 - 0.9**steps) / 0.1)


def test_the_direction_is_no_class_more_than_another() -> None:
    """A client's images lie class by class; batches must mix them, or the last ones would outweigh all others."""
    features = torch.eye(2).repeat_interleave(60, dim=0)
    found = DDE().finish_task(finishing(features, 6))
    assert found is not None
    first, last = found.tensors["direction"].tolist()
    assert 0.5 < last / first < 2


def directed(direction: Tensor | None = None) -> DirectedModel:
    model = DirectedModel(ModelSpec("convnet", "group", 16), torch_generator(6))
    for classes in (2, 3):
        model.grow(classes, torch_generator(7, classes))
    if direction is not None:
        model.direction.copy_(direction)
    return model.eval().requires_grad_(False)


def test_the_server_adds_directions_by_their_steps_and_makes_them_unit() -> None:
    model = directed()
    a, b = torch.zeros(128), torch.zeros(128)
    a[0], b[1] = 3.0, 2.0
    extras = [Extras("head direction", {"direction": h, "steps": torch.tensor(steps)}) for h, steps in ((a, 2), (b, 4))]
    DDE().merge(model, extras, seed=0, round_index=0)
    assert model.direction[:3].tolist() == pytest.approx([6 / 10, 8 / 10, 0])
    before = model.direction.clone()
    DDE().merge(model, [], seed=0, round_index=1)
    assert torch.equal(model.direction, before)


IMAGES = torch.randn(5, 3, 16, 16, generator=torch_generator(8))


def test_prediction_removes_half_of_what_lies_along_the_direction() -> None:
    direction = F.normalize(torch.randn(128, generator=torch_generator(9)), dim=0)
    model = directed(direction)
    features = model(IMAGES).features
    for alpha in (0.5, 1.0):
        less = torch.stack([x - alpha * (x @ direction) * direction for x in features])
        found = DDE(alpha=alpha).predict(model, IMAGES)
        torch.testing.assert_close(found, model.classify(less), atol=1e-5, rtol=1e-4)
        assert float((found - model(IMAGES).logits).abs().max()) > 1e-3
    torch.testing.assert_close(DDE().predict(model, IMAGES), DDE(alpha=0.5).predict(model, IMAGES))


def test_prediction_is_plain_without_alpha_without_direction_and_across_it() -> None:
    direction = F.normalize(torch.randn(128, generator=torch_generator(9)), dim=0)
    plain = directed()(IMAGES).logits
    assert torch.equal(DDE(alpha=0.0).predict(directed(direction), IMAGES), plain)
    assert torch.equal(DDE().predict(directed(), IMAGES), plain)
    x = directed()(IMAGES[:1]).features[0]
    across = F.normalize(direction - (direction @ x) / (x @ x) * x, dim=0)
    found = DDE().predict(directed(across), IMAGES[:1])
    torch.testing.assert_close(found, plain[:1], atol=1e-5, rtol=1e-5)


def test_the_direction_is_found_when_a_task_ends_and_left_alone_until_the_next(small: dict[str, Any]) -> None:
    federation = federation_of("dde", small)
    seen, lines = [], []
    for done in run_rounds(federation, Serial()):
        seen.append(federation.server.weights["direction"].clone())
        lines.append(done.line)
    for i in (0, 1, 2):  # the first task has no direction, for nothing is older
        assert not seen[i].any()
        assert not lines[i]["bytes"]["server"]["extras"]
    for i in (3, 5):
        assert float(seen[i].norm()) == pytest.approx(1, rel=1e-5)
        assert bool(lines[i]["bytes"]["server"]["extras"])
        assert not lines[i - 1]["bytes"]["server"]["extras"]
    assert torch.equal(seen[3], seen[4])
    assert not torch.equal(seen[4], seen[5])
