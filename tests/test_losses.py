"""LGA's equations against numbers by hand, autograd and brute force, and N1-N17 of docs/departures.md."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast import losses
from holdfast.seeding import torch_generator


def case(seed: int = 0, samples: int = 12, classes: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and the growth of each class, in float64."""
    rng = torch_generator(seed)
    logits = 3 * torch.randn(samples, classes, generator=rng, dtype=torch.float64)
    return logits, torch.randint(0, classes, (samples,), generator=rng), torch.tensor([0, 0, 1, 1, 1, 2])[:classes]


def test_softmax_gradient_is_what_autograd_says() -> None:
    logits, labels, _ = case()
    logits.requires_grad_()
    F.cross_entropy(logits, labels, reduction="sum").backward()
    expected = logits.grad.gather(1, labels[:, None]).squeeze(1).abs()  # type: ignore[union-attr]
    torch.testing.assert_close(losses.softmax_gradient(logits, labels), expected)


@pytest.mark.parametrize("gap", [20.0, 30.0, 60.0])
def test_softmax_gradient_is_exact_where_float_probabilities_are_one(gap: float) -> None:
    logits = torch.tensor([[gap, 0.0, 0.0]])
    value = float(losses.softmax_gradient(logits, torch.tensor([0])))
    assert value == pytest.approx(2 / (math.exp(gap) + 2), rel=1e-5)
    assert float(logits.softmax(1)[0, 0]) == 1.0  # so 1 - p would be 0


def test_sigmoid_gradient() -> None:
    logits = torch.tensor([[0.0, 5.0], [-2.0, 30.0]])
    values = losses.sigmoid_gradient(logits, torch.tensor([0, 1]))
    assert values.tolist() == pytest.approx([0.5, 1 / (1 + math.exp(30))], rel=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "exponent"), [(0, 6, 0.0), (6, 6, 0.5), (12, 6, 2 / 3), (6, 0, 1.0), (0, 0, 0.0)]
)
def test_sharpening(old: int, new: int, exponent: float) -> None:
    assert losses.sharpening(old, new) == pytest.approx(exponent)


def test_weights_by_hand() -> None:
    gradients = torch.tensor([0.25, 0.81, 0.09, 0.49], dtype=torch.float64)
    weights = losses.group_balanced_weights(gradients, torch.tensor([0, 0, 3, 3]), 0.5)
    assert weights.tolist() == pytest.approx([0.5 / 0.7, 0.9 / 0.7, 0.3 / 0.5, 0.7 / 0.5])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.integers(1, 40), st.floats(0.01, 100))
def test_weights_have_mean_one_in_every_group_and_ignore_a_groups_scale(
    seed: int, exponent: float, samples: int, scale: float
) -> None:
    rng = torch_generator(seed)
    gradients = torch.rand(samples, generator=rng, dtype=torch.float64) + 1e-3
    groups = torch.randint(0, 5, (samples,), generator=rng)
    weights = losses.group_balanced_weights(gradients, groups, exponent)
    for group in groups.unique():
        assert float(weights[groups == group].mean()) == pytest.approx(1)
    assert float(weights.sum()) == pytest.approx(samples)
    first = groups == groups[0]
    scaled = torch.where(first, gradients * scale, gradients)
    torch.testing.assert_close(losses.group_balanced_weights(scaled, groups, exponent), weights)


def test_weights_of_saturated_and_single_groups_are_one() -> None:
    gradients = torch.tensor([0.0, 0.0, 0.3, 1e-30])
    weights = losses.group_balanced_weights(gradients, torch.tensor([0, 0, 1, 2]), 0.5)
    assert weights.tolist() == pytest.approx([1, 1, 1, 1])
    assert losses.group_balanced_weights(gradients, torch.tensor([0, 0, 0, 0]), 0.0).tolist() == [1, 1, 1, 1]


def test_the_first_task_is_exactly_cross_entropy() -> None:
    logits, labels, growth = case()
    weights = losses.group_balanced_weights(
        losses.softmax_gradient(logits, labels), growth[labels], losses.sharpening(0, 6)
    )
    torch.testing.assert_close(
        losses.weighted_cross_entropy(logits, labels, weights), losses.cross_entropy(logits, labels)
    )


def test_gradient_of_the_balanced_loss_is_the_weighted_one() -> None:
    """d L_CB / d o_y = w_i (p_y - 1) / B: the weights carry no gradient (N17)."""
    logits, labels, growth = case()
    logits.requires_grad_()
    weights = losses.group_balanced_weights(losses.softmax_gradient(logits, labels), growth[labels], 0.5)
    losses.weighted_cross_entropy(logits, labels, weights).backward()
    at_label = logits.grad.gather(1, labels[:, None]).squeeze(1)  # type: ignore[union-attr]
    p = logits.detach().softmax(1).gather(1, labels[:, None]).squeeze(1)
    torch.testing.assert_close(at_label, weights * (p - 1) / len(labels))


def test_soft_labels_replace_only_the_teachers_own_entries() -> None:
    teacher = torch.tensor([[0.7, 0.3], [0.1, 0.9], [0.5, 0.5]])
    soft = losses.soft_labels(torch.tensor([0, 2, 3]), 4, teacher)
    assert torch.equal(soft, torch.tensor([[0.7, 0.3, 0, 0], [0.1, 0.9, 1, 0], [0.5, 0.5, 0, 1]]))
    assert soft.sum(1).tolist() == pytest.approx([1, 2, 2])  # N7


def test_the_minimum_of_target_first_distillation() -> None:
    """2 ln 2 for a sample of a new class, whose soft label sums to 2; 0 for an exemplar (N7)."""
    soft = torch.tensor([[0.25, 0.75, 1.0, 0.0], [0.25, 0.75, 0.0, 0.0]], dtype=torch.float64)
    at_best = (soft / soft.sum(1, keepdim=True)).clamp(min=1e-300).log()
    per_sample = [
        float(losses.semantic_distillation(at_best[i : i + 1], soft[i : i + 1], torch.ones(1))) for i in (0, 1)
    ]
    assert per_sample == pytest.approx([2 * math.log(2), 0.0], abs=1e-12)
    for seed in range(20):
        moved = at_best.clamp(min=-50) + torch.randn(2, 4, generator=torch_generator(seed), dtype=torch.float64)
        for i in (0, 1):
            value = float(losses.semantic_distillation(moved[i : i + 1], soft[i : i + 1], torch.ones(1)))
            assert value >= per_sample[i] - 1e-12


def test_summing_raw_slices_is_the_whole_vector() -> None:
    """N6: the split by task of Eq. 6 changes nothing unless slices are made distributions of their own."""
    logits, labels, growth = case()
    teacher = torch.randn(12, 5, generator=torch_generator(9), dtype=torch.float64).softmax(1)
    soft, p = losses.soft_labels(labels, 6, teacher), logits.softmax(1)
    total = 0.0
    for i in range(12):
        for g in range(3):
            for j in torch.nonzero(growth == g).flatten().tolist():
                if soft[i, j] > 0:
                    total += float(soft[i, j] * (soft[i, j].log() - p[i, j].log()))
    value = losses.semantic_distillation(logits, soft, torch.ones(12, dtype=torch.float64))
    assert float(value) == pytest.approx(total / 12)


def test_literal_distillation_by_brute_force_and_finite() -> None:
    logits, labels, _ = case()
    teacher = torch.randn(12, 5, generator=torch_generator(9), dtype=torch.float64).softmax(1)
    soft, p = losses.soft_labels(labels, 6, teacher), logits.softmax(1)
    floored = soft.clamp(min=1e-4)
    pairs = [(i, j) for i in range(12) for j in range(6)]
    expected = sum(float(p[i, j]) * (math.log(p[i, j]) - math.log(floored[i, j])) for i, j in pairs)
    value = losses.semantic_distillation_literal(logits, soft, torch.ones(12, dtype=torch.float64))
    assert float(value) == pytest.approx(expected / 12)
    assert math.isfinite(float(losses.semantic_distillation_literal(100 * logits, soft, torch.ones(12).double())))


def test_distillation_by_growth() -> None:
    logits, _, growth = case()
    labels = torch.tensor([0, 1, 2, 3, 4, 5] * 2)
    teacher = torch.randn(12, 5, generator=torch_generator(9), dtype=torch.float64)
    ones = torch.ones(12, dtype=torch.float64)
    value = losses.semantic_distillation_by_growth(logits, labels, teacher, ones, growth)
    expected = 0.0
    for i in range(12):
        for g in (0, 1):
            columns = growth == g
            q, p = teacher[i][columns[:5]].softmax(0), logits[i][columns].softmax(0)
            expected += float((q * (q / p).log()).sum())
        # The newest slice has one class: its own distribution is certain, and the cross-entropy 0.
    assert float(value) == pytest.approx(expected / 12)
    same = losses.semantic_distillation_by_growth(logits[:, :5], labels.clamp(max=4), logits[:, :5], ones, growth[:5])
    assert float(same) == pytest.approx(0, abs=1e-12)
    # A new slice of three: cross-entropy inside it, for its own samples only.
    alone = losses.semantic_distillation_by_growth(
        logits, labels, logits[:, :2], ones, torch.tensor([0, 0, 1, 1, 1, 1])
    )
    inside = F.cross_entropy(logits[:, 2:][labels >= 2], labels[labels >= 2] - 2, reduction="sum")
    assert float(alone) == pytest.approx(float(inside) / 12)


def test_sigmoid_losses_by_hand() -> None:
    logits = torch.zeros(3, 4)
    weights = torch.tensor([1.0, 2.0, 0.0])
    targets = F.one_hot(torch.tensor([0, 1, 2]), 4)
    assert float(losses.weighted_binary_cross_entropy(logits, targets, weights)) == pytest.approx(math.log(2))
    logits, labels, _ = case()
    hard = F.one_hot(labels, 6).double()
    s = torch.sigmoid(logits)
    expected = -(hard * s.log() + (1 - hard) * (1 - s).log()).mean()
    torch.testing.assert_close(losses.weighted_binary_cross_entropy(logits, hard, torch.ones(12).double()), expected)


def test_distillation_of_icarl_has_no_gradient_where_student_is_teacher() -> None:
    logits, _, _ = case()
    logits.requires_grad_()
    losses.distillation_binary_cross_entropy(logits, torch.sigmoid(logits[:, :4])).backward()
    assert float(logits.grad.abs().max()) < 1e-15  # type: ignore[union-attr]


@pytest.mark.parametrize("form", ["full", "literal", "by growth", "sigmoid"])
def test_gradients_by_differences(form: str) -> None:
    logits, labels, growth = case(samples=4)
    logits.requires_grad_()
    teacher = torch.randn(4, 5, generator=torch_generator(2), dtype=torch.float64)
    soft, weights = (
        losses.soft_labels(labels, 6, teacher.softmax(1)),
        torch.rand(4, dtype=torch.float64, generator=torch_generator(3)),
    )
    functions = {
        "full": lambda x: losses.semantic_distillation(x, soft, weights),
        "literal": lambda x: losses.semantic_distillation_literal(x, soft, weights),
        "by growth": lambda x: losses.semantic_distillation_by_growth(x, labels, teacher, weights, growth),
        "sigmoid": lambda x: losses.weighted_binary_cross_entropy(x, soft, weights),
    }
    assert torch.autograd.gradcheck(functions[form], (logits,))


def test_entropy_by_hand_and_its_ceiling() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(0.9), math.log(0.1), -torch.inf, -torch.inf]])
    expected = [math.log(4), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)]
    assert losses.entropy(logits).tolist() == pytest.approx(expected, rel=1e-6)
    assert losses.entropy(torch.tensor([[200.0, 0.0, 0.0]])).tolist() == [0.0]
    assert float(losses.entropy(case()[0]).max()) <= math.log(6)
    assert math.log(3) < 1.2  # why a fixed threshold cannot work for few classes (N13)


def test_the_augmentation_scale_is_the_running_mean_over_all_classes() -> None:
    rng = torch_generator(4)
    per_class = torch.rand(9, generator=rng, dtype=torch.float64)
    scale, old = 0.0, 0
    for size in (2, 3, 4):
        scale = losses.augmentation_scale(scale, old, per_class[old : old + size])
        old += size
        assert scale == pytest.approx(float(per_class[:old].mean()))
    assert losses.augmentation_scale(123.0, 0, torch.tensor([0.5])) == pytest.approx(0.5)  # omega^0 is not used
    assert losses.augmentation_scale(0.3, 7, torch.full((5,), 0.3)) == pytest.approx(0.3)  # constant values
    assert losses.augmentation_scale(0.0, 0, torch.zeros(0)) == 0.0


def test_noise_is_brought_back_into_its_ball_and_left_alone_inside() -> None:
    rng = torch_generator(5)
    variance = torch.rand(1, 1, 64, generator=rng, dtype=torch.float64)
    draws = torch.randn(50, 5, 64, generator=rng, dtype=torch.float64) * variance.sqrt()
    bound = 0.1 * variance.sum()
    for omega in (0.05, 0.31, 2.0):
        noise = losses.bounded_noise(omega * draws, variance, 0.1)
        lengths = noise.square().sum(dim=-1)
        assert (lengths <= bound * (1 + 1e-9)).all()
        outside = (omega * draws).square().sum(dim=-1) > bound
        torch.testing.assert_close(noise[~outside], (omega * draws)[~outside])
        torch.testing.assert_close(lengths[outside], bound.expand(int(outside.sum())))
        torch.testing.assert_close(F.normalize(noise, dim=-1), F.normalize(omega * draws, dim=-1))
    assert not losses.bounded_noise(torch.zeros(3, 4), torch.zeros(3, 4), 0.1).any()
