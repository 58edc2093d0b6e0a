"""SS-IL: facts of its separated softmax, its task-wise distillation and its batches."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import Answers, client_of, federation_of, grown_federation
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.losses import distillation_by_growth, separated_cross_entropy
from holdfast.methods.ssil import SSIL
from holdfast.seeding import torch_generator
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds


@pytest.fixture
def grown(small: dict[str, Any]) -> Federation:
    """Forty images a class, and a head of two growths, of classes 0 to 3 and 4 to 5."""
    return grown_federation("ssil", {**small, "data": {**small["data"], "train_per_class": 40}}, (4, 2))


def terms(
    logits: Tensor, labels: Tensor, growths: tuple[int, ...], teacher: Tensor | None, **method: Any
) -> dict[str, Tensor]:
    context: Any = SimpleNamespace(
        model=Answers(growths, logits=logits),
        predecessor=None if teacher is None else Answers(growths[:-1], logits=teacher),
        registry=SimpleNamespace(growths=growths),
    )
    return SSIL(**method).loss(context, SimpleNamespace(images=torch.zeros(len(labels), 1), labels=labels))  # type: ignore[arg-type]


LOGITS = 2 * torch.randn(9, 7, generator=torch_generator(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 6, 4])
TEACHER = 2 * torch.randn(9, 4, generator=torch_generator(2), dtype=torch.float64)
GROWTHS = (1, 3, 3)  # old classes 0 to 3, new ones 4 to 6


def test_the_first_task_is_plain_cross_entropy() -> None:
    found = terms(LOGITS, LABELS, (7,), None)
    assert set(found) == {"classification"}
    torch.testing.assert_close(found["classification"], F.cross_entropy(LOGITS, LABELS))


def test_old_and_new_samples_compete_among_their_own_by_loops() -> None:
    """A label of a new class is its place after the old ones, not its remainder by the task's size."""
    expected = 0.0
    for row, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        rivals = row[4:] if label >= 4 else row[:4]
        expected += (math.log(sum(math.exp(o) for o in rivals)) - row[label]) / 9
    assert float(separated_cross_entropy(LOGITS, LABELS, 4)) == pytest.approx(expected)
    assert float(terms(LOGITS, LABELS, GROWTHS, TEACHER)["classification"]) == pytest.approx(expected)


@pytest.mark.parametrize(("new", "kept"), [(128, 32), (3, 1), (5, 0), (0, 4)])
def test_equal_logits_give_the_logarithms_of_both_numbers_of_classes(new: int, kept: int) -> None:
    labels = torch.cat([4 + torch.arange(new) % 3, torch.arange(kept) % 4])
    value = separated_cross_entropy(torch.full((new + kept, 7), 1.5), labels, 4)
    assert float(value) == pytest.approx((new * math.log(3) + kept * math.log(4)) / (new + kept), rel=1e-5)


def test_neither_kind_of_sample_moves_the_others_outputs() -> None:
    logits = LOGITS.clone().requires_grad_()
    separated_cross_entropy(logits, LABELS, 4).backward()
    assert logits.grad is not None
    fresh = LABELS >= 4
    assert not logits.grad[fresh][:, :4].any()
    assert not logits.grad[~fresh][:, 4:].any()
    expected = (LOGITS[fresh][:, 4:].softmax(1) - F.one_hot(LABELS[fresh] - 4, 3)) / 9
    torch.testing.assert_close(logits.grad[fresh][:, 4:], expected)
    expected = (LOGITS[~fresh][:, :4].softmax(1) - F.one_hot(LABELS[~fresh], 4)) / 9
    torch.testing.assert_close(logits.grad[~fresh][:, :4], expected)


def test_distillation_is_a_sum_over_tasks_times_the_temperature_squared_by_loops() -> None:
    expected = 0.0
    for mine, theirs in zip(LOGITS.tolist(), TEACHER.tolist(), strict=True):
        for start, end in ((0, 1), (1, 4)):
            q = [math.exp(o / 2) for o in theirs[start:end]]
            p = [math.exp(o / 2) for o in mine[start:end]]
            expected += 4 * sum(x / sum(q) * math.log(x / sum(q) / (y / sum(p))) for x, y in zip(q, p, strict=True)) / 9
    assert float(distillation_by_growth(LOGITS, TEACHER, 2.0, [1, 3])) == pytest.approx(expected)
    assert float(terms(LOGITS, LABELS, GROWTHS, TEACHER)["distillation"]) == pytest.approx(expected)


def test_tasks_are_distributions_of_their_own() -> None:
    """What is added to all outputs of one task counts for nothing; new outputs have no part in it."""
    moved = LOGITS.clone()
    moved[:, :2] += 5
    moved[:, 4:] -= 3
    whole = distillation_by_growth(LOGITS, TEACHER, 2.0, [2, 2])
    torch.testing.assert_close(distillation_by_growth(moved, TEACHER, 2.0, [2, 2]), whole)
    assert float((distillation_by_growth(moved, TEACHER, 2.0, [4]) - whole).abs()) > 0.1


def test_distillation_is_zero_where_student_is_teacher_and_pulls_nowhere() -> None:
    logits = LOGITS.clone().requires_grad_()
    value = distillation_by_growth(logits, LOGITS[:, :4], 2.0, [1, 3])
    value.backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-12)
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) < 1e-12


def test_slopes_by_differences_and_none_for_the_teacher() -> None:
    teacher = TEACHER.clone().requires_grad_()
    logits = LOGITS.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: distillation_by_growth(x, teacher, 2.0, [1, 3]), (logits,))
    assert torch.autograd.gradcheck(lambda x: separated_cross_entropy(x, LABELS, 4), (logits,))
    distillation_by_growth(logits, teacher, 2.0, [1, 3]).backward()
    assert teacher.grad is None


@pytest.mark.parametrize("labels", [[4, 5, 6, 6], [0, 1, 3, 3]])
def test_newcomers_and_stayers_have_one_of_the_two_terms(labels: list[int]) -> None:
    logits = LOGITS[:4].clone().requires_grad_()
    found = terms(logits, torch.tensor(labels), GROWTHS, TEACHER[:4])
    mine = slice(4, 7) if labels[0] >= 4 else slice(0, 4)
    expected = F.cross_entropy(LOGITS[:4, mine], torch.tensor(labels) - mine.start)
    torch.testing.assert_close(found["classification"], expected)
    torch.stack(list(found.values())).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert bool(logits.grad[:, :4].any())  # distillation, for newcomers too


def test_a_task_of_one_class_and_a_batch_of_one_image_are_finite() -> None:
    found = terms(LOGITS[:1, :3], torch.tensor([2]), (1, 1, 1), TEACHER[:1, :2])
    assert float(found["classification"]) == pytest.approx(0)
    assert float(found["distillation"]) == pytest.approx(0)


def test_memory_takes_the_first_images() -> None:
    features = torch.randn(9, 5, generator=torch_generator(3))
    assert SSIL().exemplars(features, 4).tolist() == [0, 1, 2, 3]
    assert SSIL().exemplars(features, 99).tolist() == list(range(9))


def test_a_quarter_as_many_exemplars_join_each_batch_and_go_round(grown: Federation) -> None:
    """80 new images in batches of 16 are five batches with four exemplars each: six exemplars, each three times or
    four."""
    rows, labels = grown.data.train.by_class, grown.data.train.labels
    memory = {0: rows[0][:3], 2: rows[2][:3]}
    context = client_of(grown, (4, 5), memory, batch=16)
    batches = list(SSIL().batches(context, 0))
    fresh = [batch.ids[labels[batch.ids] >= 4].tolist() for batch in batches]
    kept = [batch.ids[labels[batch.ids] < 4].tolist() for batch in batches]
    assert [len(part) for part in fresh] == [16] * 5
    assert [len(part) for part in kept] == [4] * 5
    assert sorted(row for part in fresh for row in part) == sorted(context.data.tolist())
    times = Counter(row for part in kept for row in part)
    assert set(times) == set(torch.cat(list(memory.values())).tolist())
    assert set(times.values()) == {3, 4}
    assert all(torch.equal(batch.labels, labels[batch.ids]) for batch in batches)
    assert [batch.ids.tolist() for batch in SSIL().batches(context, 1)] != [batch.ids.tolist() for batch in batches]


def test_the_last_new_images_and_another_ratio_have_their_exemplars_too(grown: Federation) -> None:
    rows, labels = grown.data.train.by_class, grown.data.train.labels
    context = client_of(grown, (4,), {1: rows[1][:30]}, batch=12)
    for ratio, part in ((4, 3), (2, 6), (50, 1)):
        batches = list(SSIL(ratio=ratio).batches(context, 0))
        assert [int((labels[batch.ids] >= 4).sum()) for batch in batches] == [12, 12, 12, 4]
        assert [int((labels[batch.ids] < 4).sum()) for batch in batches] == [part] * 4
        assert max(Counter(row for batch in batches for row in batch.ids.tolist()).values()) == 1


def test_newcomers_train_on_their_data_and_stayers_on_their_memory(grown: Federation) -> None:
    rows = grown.data.train.by_class
    newcomer = client_of(grown, (4,), {}, batch=16)
    seen = [row for batch in SSIL().batches(newcomer, 0) for row in batch.ids.tolist()]
    assert sorted(seen) == rows[4].tolist()
    stayer = client_of(grown, (), {0: rows[0][:3], 1: rows[1][:2]}, batch=16)
    seen = [row for batch in SSIL().batches(stayer, 0) for row in batch.ids.tolist()]
    assert sorted(seen) == [*rows[0][:3].tolist(), *rows[1][:2].tolist()]


def test_the_rate_is_divided_by_the_number_of_the_task(grown: Federation) -> None:
    """The second task: half of the cosine from 0.1, with momentum 0.9 and weight decay 1e-4."""
    context = client_of(grown, (4,), {}, epochs=4)
    [stage] = SSIL().stages(context)
    expected = [0.1 * (1 + math.cos(math.pi * epoch / 4)) / 2 / 2 for epoch in range(4)]
    assert [stage.rate(epoch) for epoch in range(4)] == pytest.approx(expected)
    [group] = stage.optimiser.param_groups
    assert (group["momentum"], group["weight_decay"]) == (0.9, 1e-4)
    grown.server.grow(("one more",))
    [third] = SSIL().stages(client_of(grown, (4,), {}, epochs=4))
    assert third.rate(0) == pytest.approx(0.1 / 3)


def test_in_a_run_memories_hold_first_images_and_the_first_task_is_not_distilled(small: dict[str, Any]) -> None:
    federation = federation_of("ssil", small)
    lines = [done.line for done in run_rounds(federation, Serial())]
    assert [set(line["losses"]) for line in lines[:2]] == [{"classification"}] * 2
    assert all(set(line["losses"]) == {"classification", "distillation"} for line in lines[2:])
    kept = [
        (name, rows.tolist())
        for client in range(len(federation.plan.arrivals))
        for name, rows in federation.population.state(client).memory.items()
    ]
    assert kept
    for name, rows in kept:
        assert rows == federation.data.train.by_class[federation.data.classes.index(name)][: len(rows)].tolist()
