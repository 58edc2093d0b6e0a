"""The quirks of the authors' code, against what was measured of it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clients import client_of, grown_federation

from holdfast.losses import cumulative_weights, group_balanced_weights
from holdfast.methods.base import BCE
from holdfast.methods.lga import LGA
from holdfast.methods.lga_code import LGACode, drops_in_round
from holdfast.protocol.enrolment import Preset
from holdfast.seeding import torch_generator


def test_the_rate_falls_only_in_the_rounds_of_its_milestones() -> None:
    """D18, ten rounds of twenty epochs: 2.0 but for 0.4 in round 5, 0.08 from epoch 10 of round 7, 0.016 in round 9."""
    preset: Preset = BCE
    expected = {(number, epoch): 2.0 for number in range(10) for epoch in range(20)}
    expected |= dict.fromkeys(((5, epoch) for epoch in range(20)), 0.4)
    expected |= dict.fromkeys(((7, epoch) for epoch in range(10, 20)), 0.08)
    expected |= dict.fromkeys(((9, epoch) for epoch in range(20)), 0.016)
    for (number, epoch), rate in expected.items():
        start = number / 10
        drops = drops_in_round(preset.milestones, start, start + epoch / 200)
        assert 2.0 * preset.gamma**drops == pytest.approx(rate), (number, epoch)


def test_old_groups_add_up() -> None:
    """D4: at the sixth task the mean weights are about 5.1, 4.0, 2.9, 1.9, 1.1 from oldest to newest, and 1 for new."""
    rng = torch_generator(0)
    groups = torch.randint(0, 6, (60_000,), generator=rng)
    gradients = torch.rand(60_000, generator=rng, dtype=torch.float64)
    weights = cumulative_weights(gradients, groups, 5, 5 / 6)
    means = [float(weights[groups == k].mean()) for k in range(6)]
    assert means == pytest.approx([5, 4, 3, 2, 1, 1], abs=0.05)  # equally hard groups; harder old ones give the 5.1


def test_old_groups_by_hand() -> None:
    gradients = torch.tensor([0.25, 0.81, 0.16, 0.36], dtype=torch.float64)
    weights = cumulative_weights(gradients, torch.tensor([0, 1, 1, 2]), 2, 2 / 3)
    v = gradients ** (2 / 3)  # D3: t / (t + 1) with t counted from zero
    both = (v[0] + v[1] + v[2]) / 3
    expected = [1 + v[0] / both, v[1] / both, v[2] / both, 1.0]
    assert weights.tolist() == pytest.approx([float(x) for x in expected])


def test_the_first_task_weighs_everything_alike() -> None:
    gradients = torch.rand(8, generator=torch_generator(1))
    assert torch.equal(cumulative_weights(gradients, torch.zeros(8, dtype=torch.int64), 0, 0.0), torch.ones(8))


def test_the_jumping_rate_is_what_a_client_trains_with(small: dict[str, Any]) -> None:
    """Round 6 of ten has none of the milestones, so the rate is the first one again; ordinary steps would have 0.2."""
    context = client_of(grown_federation("lga_code", small, (3, 3)), (3,), {}, epochs=20)
    context.job = replace(context.job, progress=0.6, step=0.1)
    [stage] = LGACode().stages(context)
    assert {stage.rate(epoch) for epoch in range(20)} == {1.0}


def test_saturated_groups_add_one() -> None:
    """N2: a group whose gradients are all 0 is not reweighted; an absent growth changes nothing."""
    gradients = torch.tensor([0.0, 0.0, 0.5, 0.25], dtype=torch.float64)
    weights = cumulative_weights(gradients, torch.tensor([0, 0, 2, 3]), 3, 1.0)
    # Growth 0 is in the groups {0}, {0, 1} (both saturated) and {0, 1, 2} (mean 1/6); growth 2 in the last alone.
    assert weights.tolist() == pytest.approx([2.0, 2.0, 3.0, 1.0])


LOGITS = 8 * torch.randn(10, 4, generator=torch_generator(2), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 0, 2, 3, 2, 1, 3])


def context_of(old: int, new: int) -> Any:
    return SimpleNamespace(
        registry=SimpleNamespace(growths=(2, 2)), growth_of=torch.tensor([0, 0, 1, 1]), class_counts=(old, new)
    )


def test_weights_are_clamped_once_there_is_a_memory() -> None:
    """D5: between 0.5 and 5."""
    raw = LGACode(clamp=False).weights(context_of(1, 3), LOGITS, LABELS)
    assert float(raw.min()) < 0.5
    assert torch.equal(LGACode().weights(context_of(1, 3), LOGITS, LABELS), raw.clamp(0.5, 5))


@pytest.mark.parametrize("method", [LGACode(), LGA(), LGA(groups="cumulative"), LGA(exponent="federation")])
def test_a_newcomer_weighs_exactly_one(method: LGA) -> None:
    """D3: the authors' code reweights only once a client has a memory."""
    assert torch.equal(method.weights(context_of(0, 4), LOGITS, LABELS), torch.ones(10, dtype=torch.float64))


def test_the_pieces_are_options_of_lga() -> None:
    context, gradients = context_of(1, 3), torch.sigmoid(-LOGITS.gather(1, LABELS[:, None]).squeeze(1))
    groups = context.growth_of[LABELS]
    pieces: dict[str, Any] = {"groups": "cumulative", "exponent": "federation", "clamp": True}
    assert torch.equal(LGA(**pieces).weights(context, LOGITS, LABELS), LGACode().weights(context, LOGITS, LABELS))
    own = LGA(groups="own", exponent="client", clamp=False)
    expected = group_balanced_weights(gradients, groups, 1 / 4)
    assert torch.equal(own.weights(context, LOGITS, LABELS), expected)
    federation = LGA(groups="own", exponent="federation", clamp=False)
    assert torch.equal(federation.weights(context, LOGITS, LABELS), group_balanced_weights(gradients, groups, 1 / 2))
    cumulative = LGA(groups="cumulative", exponent="client", clamp=False)
    assert torch.equal(cumulative.weights(context, LOGITS, LABELS), cumulative_weights(gradients, groups, 1, 1 / 4))


def test_its_defaults() -> None:
    method = LGACode()
    assert (method.form, method.detector, method.preset) == ("sigmoid", "fixed", BCE)
