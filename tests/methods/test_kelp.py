"""KELP: facts of its loss; and the same prior as an option of other methods."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import Answers, client_of, federation_of, grown_federation, maps_of
from torch import Tensor

from holdfast.config import load_config
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import run_to_folder
from holdfast.losses import log_counts, log_odds, nca, pod_flat, pod_spatial
from holdfast.methods.fedavg import FedAvg
from holdfast.methods.geodl import GeoDL
from holdfast.methods.kelp import Kelp
from holdfast.methods.lga import LGA
from holdfast.methods.podnet import PODNet
from holdfast.methods.shared import tuned_classifier
from holdfast.seeding import torch_generator
from holdfast.simulation.rounds import run_rounds

LOGITS = 2 * torch.randn(8, 5, generator=torch_generator(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 4, 4, 3, 1])
COUNTS = torch.tensor([90, 3, 0, 1, 40])
OLD = 2 * torch.randn(8, 3, generator=torch_generator(2), dtype=torch.float64)


def context_of(model: Any, predecessor: Any = None, growths: tuple[int, ...] = (3, 2), **more: Any) -> Any:
    return SimpleNamespace(
        model=model, predecessor=predecessor, counts=COUNTS, registry=SimpleNamespace(growths=growths), **more
    )


def batch_of(labels: Tensor = LABELS) -> Any:
    return SimpleNamespace(images=torch.zeros(len(labels), 1), labels=labels)


def adjusted_by_hand(logits: Tensor, tau: float, absent: float = 0.1) -> float:
    """-log of n_y^tau e^o_y / sum_c n_c^tau e^o_c, the mean over the samples."""
    total = 0.0
    for i, y in enumerate(LABELS.tolist()):
        masses = [max(float(COUNTS[c]), absent) ** tau * math.exp(float(logits[i, c])) for c in range(5)]
        total -= math.log(masses[y] / sum(masses))
    return total / len(LABELS)


# the prior


def test_the_prior_is_the_logarithm_of_the_counts_and_a_missing_class_counts_a_little() -> None:
    expected = [math.log(90), math.log(3), math.log(0.1), 0.0, math.log(40)]
    assert log_counts(COUNTS, 0.1).tolist() == pytest.approx(expected, rel=1e-6)
    assert log_counts(COUNTS, 0.5)[2].item() == pytest.approx(math.log(0.5))


def test_the_odds_are_those_of_a_class_against_all_others() -> None:
    expected = [math.log(90 / 44), math.log(3 / 131), math.log(0.1 / 134), math.log(1 / 133), math.log(40 / 94)]
    assert log_odds(COUNTS, 0.1).tolist() == pytest.approx(expected, rel=1e-6)
    alone = log_odds(torch.tensor([7, 0]), 0.1)  # a client with a single class
    assert alone.tolist() == pytest.approx([math.log(7 / 0.1), math.log(0.1 / 7)], rel=1e-6)


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0, 2.0])
def test_the_loss_is_the_cross_entropy_of_counts_times_exponentials(tau: float) -> None:
    for found in (
        Kelp(prior=tau, absent=0.1).loss(context_of(Answers(logits=LOGITS)), batch_of()),
        FedAvg(prior=tau).loss(context_of(Answers(logits=LOGITS)), batch_of()),
        GeoDL(prior=tau).loss(context_of(Answers(logits=LOGITS)), batch_of()),
    ):
        assert set(found) == {"classification"}
        assert float(found["classification"]) == pytest.approx(adjusted_by_hand(LOGITS, tau), rel=1e-6)


def test_its_gradient_is_the_adjusted_probability_minus_the_label() -> None:
    logits = LOGITS.clone().requires_grad_()
    Kelp().loss(context_of(Answers(logits=logits)), batch_of())["classification"].backward()
    masses = COUNTS.double().clamp(min=0.1) * LOGITS.exp()
    expected = (masses / masses.sum(dim=1, keepdim=True) - F.one_hot(LABELS, 5)) / 8
    torch.testing.assert_close(logits.grad, expected, rtol=1e-6, atol=1e-8)
    again = LOGITS.clone().requires_grad_()
    context = context_of(None)

    def loss(outputs: Tensor) -> Tensor:
        context.model = Answers(logits=outputs)
        return Kelp().loss(context, batch_of())["classification"]

    assert torch.autograd.gradcheck(loss, (again,))


def test_a_class_that_the_client_lacks_is_hardly_pushed_down() -> None:
    slopes = []
    for tau in (0.0, 1.0):
        logits = torch.zeros(8, 5, dtype=torch.float64, requires_grad=True)
        Kelp(prior=tau).loss(context_of(Answers(logits=logits)), batch_of(torch.zeros(8, dtype=torch.int64)))[
            "classification"
        ].backward()
        assert logits.grad is not None
        slopes.append(float(logits.grad[:, 2].sum()))
    assert slopes[0] == pytest.approx(1 / 5)
    assert slopes[1] == pytest.approx(0.1 / 134.1, rel=1e-6)


def test_the_counts_are_those_of_data_and_of_exemplars_of_other_classes(small: dict[str, Any]) -> None:
    federation = grown_federation("kelp", small, (2, 2))
    rows = federation.data.train.by_class
    context = client_of(federation, (2,), {0: rows[0][:5], 2: rows[2][:3]})
    assert context.counts.tolist() == [5, 0, 12, 0]
    assert int(context.counts.sum()) == len(context.everything)
    assert context.counts_of(context.exemplars).tolist() == [5, 0, 3, 0]


# held features


def test_features_and_maps_are_held_with_a_weight_that_grows_with_the_classes() -> None:
    rng = torch_generator(3)
    mine, theirs = (torch.randn(3, 6, generator=rng, dtype=torch.float64) for _ in range(2))
    student = Answers(logits=LOGITS[:3], features=mine, maps=maps_of(4))
    teacher = Answers(logits=OLD[:3], features=theirs, maps=maps_of(5))
    found = Kelp(flat=2.0, spatial=3.0).loss(context_of(student, teacher), batch_of(LABELS[:3]))
    weight = math.sqrt(5 / 2)
    cosines = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(mine, theirs, strict=True)]
    assert float(found["flat"]) == pytest.approx(weight * 2 * sum(1 - c for c in cosines) / 3)
    torch.testing.assert_close(found["spatial"], weight * 3 * pod_spatial(maps_of(4), maps_of(5)))
    torch.testing.assert_close(found["flat"], weight * 2 * pod_flat(mine, theirs))
    for fields, names in (({"flat": 0.0}, {"spatial"}), ({"spatial": 0.0}, {"flat"}), ({"flat": 0, "spatial": 0}, {})):
        terms = Kelp(**fields).loss(context_of(student, teacher), batch_of(LABELS[:3]))  # type: ignore[arg-type]
        assert set(terms) == {"classification", *names}


def test_the_first_task_has_nothing_to_hold() -> None:
    assert set(Kelp().loss(context_of(Answers(logits=LOGITS)), batch_of())) == {"classification"}


# the prior in other methods


def test_podnet_adds_it_to_the_scaled_scores() -> None:
    """After the scale: exp(scale s + tau log n) = n^tau exp(scale s)."""
    from holdfast.models.heads import ProxyModel

    class Scaled(ProxyModel):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.log_scale = torch.nn.Parameter(torch.tensor(0.7))

        def forward(self, images: Tensor) -> Any:
            return SimpleNamespace(logits=LOGITS)

    [value] = PODNet(prior=0.5).loss(context_of(Scaled()), batch_of()).values()
    shift = 0.5 * torch.tensor([math.log(max(n, 0.1)) for n in COUNTS.tolist()])
    torch.testing.assert_close(value, nca(math.exp(0.7) * LOGITS + shift, LABELS), check_dtype=False)


def test_podnets_fine_tuning_has_the_prior_of_the_exemplars(small: dict[str, Any]) -> None:
    """A class that the client lacks is pushed away less."""
    federation = grown_federation("podnet", small, (2, 2))
    rows = federation.data.train.by_class
    moved = []
    for tau in (0.0, 1.0):
        context = client_of(federation, (2,), {0: rows[0][:3], 2: rows[2][:3]})
        before = {name: t.clone() for name, t in context.model.state_dict().items()}
        prior = PODNet(prior=tau).local_prior(context, context.exemplars)
        if tau:
            assert isinstance(prior, Tensor)
            expected = [math.log(3), math.log(0.1), math.log(3), math.log(0.1)]
            assert prior.tolist() == pytest.approx(expected, rel=1e-6)
        tuned = tuned_classifier(context, 3, 0.05, prior)
        moved.append(float((tuned["blocks.1.weight"][1] - before["blocks.1.weight"][1]).norm()))
    assert moved[1] < 0.5 * moved[0]


def lga_loss(method: LGA, teacher: Any = None) -> dict[str, Tensor]:
    context = context_of(
        Answers(logits=LOGITS), teacher=teacher, class_counts=(2, 2), growth_of=torch.tensor([0, 0, 0, 1, 1])
    )
    return method.loss(context, batch_of())


def test_lgas_sigmoids_get_the_odds_and_its_weights_are_gradients_of_the_adjusted_loss() -> None:
    shifted = LOGITS + log_odds(COUNTS, 0.1)
    own = torch.tensor([1 / (1 + math.exp(float(shifted[i, y]))) for i, y in enumerate(LABELS.tolist())]).double()
    sharp = own**0.5  # half of the client's classes are old
    groups = torch.tensor([int(y >= 3) for y in LABELS.tolist()])
    weights = torch.stack([sharp[i] / sharp[groups == groups[i]].mean() for i in range(8)])
    expected = 0.0
    for i, y in enumerate(LABELS.tolist()):
        for c in range(5):
            o = float(shifted[i, c])
            expected += float(weights[i]) * math.log1p(math.exp(-o if c == y else o))
    found = lga_loss(LGA(prior=1.0))
    assert float(found["compensation"]) == pytest.approx(expected / 40, rel=1e-6)


def test_lgas_distillation_is_adjusted_where_labels_are_its_targets_and_plain_where_the_teachers_outputs_are() -> None:
    found = lga_loss(LGA(prior=1.0, cbl=False), Answers(logits=OLD))
    shifted = LOGITS + log_odds(COUNTS, 0.1)
    weights = LGA(prior=1.0).weights(
        context_of(None, class_counts=(2, 2), growth_of=torch.tensor([0, 0, 0, 1, 1])), shifted, LABELS
    )
    outputs = torch.cat([LOGITS[:, :3], shifted[:, 3:]], dim=1)
    targets = torch.cat([OLD.sigmoid(), F.one_hot(LABELS, 5)[:, 3:].double()], dim=1)
    terms = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    torch.testing.assert_close(found["distillation"], (weights[:, None] * terms).mean())


def test_lgas_softmax_gets_the_counts() -> None:
    found = lga_loss(LGA(form="softmax", cbl=False, prior=1.0))
    assert float(found["compensation"]) == pytest.approx(adjusted_by_hand(LOGITS, 1.0), rel=1e-6)


# in a federation


def test_with_the_head_nothing_but_the_model_leaves_a_client(small: dict[str, Any]) -> None:
    lines = {
        how: [done.line for done in run_rounds(federation_of("kelp", small, inference=how), Serial())]
        for how in ("head", "gauss", "both")
    }
    assert not any(line["bytes"]["server"]["extras"] for line in lines["head"])
    plain = [done.line for done in run_rounds(federation_of("fedavg", small, replay=True), Serial())]
    for line, usual in zip(lines["head"], plain, strict=True):
        for way in ("down", "up", "observed", "task_end", "announced"):
            assert line["bytes"]["server"][way] == usual["bytes"]["server"][way]
        assert line["bytes"]["proxy"]["shares"] == 0
        assert "answers" not in line
    assert [bool(line["bytes"]["server"]["extras"]) for line in lines["gauss"]] == [False, True] * 3
    assert [bool(line["bytes"]["server"]["extras"]) for line in lines["both"]] == [False, True] * 3


def test_every_answer_is_recorded_after_every_task_and_one_of_them_is_the_methods(small: dict[str, Any]) -> None:
    """The same training, whichever answer is chosen."""
    found = {}
    for how in ("head", "gauss", "both"):
        found[how] = [done.line for done in run_rounds(federation_of("kelp", small, inference=how), Serial())]
    for i, line in enumerate(found["gauss"]):
        assert ("answers" in line) == (i % 2 == 1)
        if "answers" in line:
            assert set(line["answers"]) == {"head", "mean", "gauss", "both"}
            for how, lines in found.items():
                assert line["answers"][how] == lines[i]["accuracy"], how


def test_a_script_prints_the_accuracy_by_every_answer(small: dict[str, Any], tmp_path: Path) -> None:
    config = load_config({**small, "method": {"name": "kelp"}, "run": {"engine": "serial"}})
    result = run_to_folder(config, tmp_path / "run").result
    table = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "answers.py"))["table"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table([tmp_path / "run"]).splitlines()[2:]]
    assert [row[2] for row in rows] == ["head", "mean", "gauss", "both"]
    [gauss] = [row for row in rows if row[2] == "gauss"]
    accuracies = (result.average_accuracy, result.last_accuracy)
    assert gauss == ["glyphs", "kelp", "gauss", "1", *(f"{100 * value:.1f}" for value in accuracies)]


def test_plain_averaging_without_exemplars_has_no_nearest_mean(small: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError, match=r"needs exemplars.*method\.replay=true"):
        federation_of("fedavg", small, inference="nme")
    lines = [done.line for done in run_rounds(federation_of("fedavg", small, inference="gauss"), Serial())]
    assert set(lines[-1]["answers"]) == {"head", "mean", "gauss", "both"}
