"""LGA's losses as a method uses them, its teachers, its prototypes and its switches."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import Answers, federation_of
from torch import Tensor

from holdfast.client.prototypes import nearest_to_mean
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.methods.lga import LGA, LGAPaper
from holdfast.methods.roles import Perturbation, PrototypeSharing
from holdfast.models.incremental import ModelSpec
from holdfast.models.transform import Transform
from holdfast.proxy.prototype_server import PrototypeServer, SelectorSetup, build_selector
from holdfast.proxy.selectors import RandomModelSelector
from holdfast.seeding import torch_generator
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds

quick_federation = partial(federation_of, "lga", iterations=3, perturb_steps=2)


def run_all(federation: Federation) -> list[dict[str, Any]]:
    return [done.line for done in run_rounds(federation, Serial())]


def terms(method: LGA, old: int, new: int, teacher: Tensor | None, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
    context: Any = SimpleNamespace(
        model=Answers(logits=logits),
        teacher=None if teacher is None else Answers(logits=teacher),
        class_counts=(old, new),
        registry=SimpleNamespace(growths=(2, 2)),
        growth_of=torch.tensor([0, 0, 1, 1]),
    )
    batch: Any = SimpleNamespace(images=torch.zeros(len(labels), 1), labels=labels)
    return method.loss(context, batch)


LOGITS = torch.randn(10, 4, generator=torch_generator(1), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 3, 0, 2, 3, 2, 1, 3])
TEACHER = torch.randn(10, 2, generator=torch_generator(2), dtype=torch.float64)


def test_without_old_classes_and_teacher_it_is_plain_classification() -> None:
    """The first task, and every newcomer: e = 0, all weights 1."""
    found = terms(LGA(form="softmax"), 0, 4, None, LOGITS, LABELS)
    assert set(found) == {"compensation"}
    torch.testing.assert_close(found["compensation"], F.cross_entropy(LOGITS, LABELS))
    found = terms(LGA(form="sigmoid"), 0, 4, None, LOGITS, LABELS)
    hard = F.one_hot(LABELS, 4).double()
    torch.testing.assert_close(found["compensation"], F.binary_cross_entropy_with_logits(LOGITS, hard))


def test_the_sigmoid_form_by_an_independent_route() -> None:
    """Section 4: V = 1 - s_y, e = Co / (Co + Ct), means by growth, both terms averaged over samples and classes."""
    found = terms(LGA(form="sigmoid"), 2, 2, TEACHER, LOGITS, LABELS)
    weights = []
    for i in range(10):
        group = [j for j in range(10) if (LABELS[j] < 2) == (LABELS[i] < 2)]
        sharp = [(1 - torch.sigmoid(LOGITS[j, LABELS[j]])) ** 0.5 for j in group]
        weights.append((1 - torch.sigmoid(LOGITS[i, LABELS[i]])) ** 0.5 / (sum(sharp) / len(sharp)))
    first = second = torch.zeros((), dtype=torch.float64)
    for i in range(10):
        for c in range(4):
            s = torch.sigmoid(LOGITS[i, c])
            y = torch.tensor(float(LABELS[i] == c), dtype=torch.float64)
            soft = torch.sigmoid(TEACHER[i, c]) if c < 2 else y
            first = first - weights[i] * (y * s.log() + (1 - y) * (1 - s).log()) / 40
            second = second - weights[i] * (soft * s.log() + (1 - soft) * (1 - s).log()) / 40
    torch.testing.assert_close(found["compensation"], first)
    torch.testing.assert_close(found["distillation"], second)


def test_switches_and_weights_change_what_they_name() -> None:
    whole = terms(LGA(form="softmax"), 2, 2, TEACHER, LOGITS, LABELS)
    unweighted = terms(LGA(form="softmax", cbl=False), 2, 2, TEACHER, LOGITS, LABELS)
    torch.testing.assert_close(unweighted["compensation"], F.cross_entropy(LOGITS, LABELS))
    torch.testing.assert_close(unweighted["distillation"], whole["distillation"])  # keeps its weights
    weights = softmax_weights()
    torch.testing.assert_close(
        whole["compensation"], (weights * F.cross_entropy(LOGITS, LABELS, reduction="none")).mean()
    )
    for form in ("softmax", "sigmoid"):
        icarl = terms(LGA(form=form, sdl=False), 2, 2, TEACHER, LOGITS, LABELS)  # type: ignore[arg-type]
        expected = F.binary_cross_entropy_with_logits(LOGITS[:, :2], TEACHER.sigmoid())
        torch.testing.assert_close(icarl["distillation"], expected)
    scaled = terms(LGA(form="softmax", gamma1=2.0, gamma2=0.5), 2, 2, TEACHER, LOGITS, LABELS)
    torch.testing.assert_close(scaled["compensation"], 2 * whole["compensation"])
    torch.testing.assert_close(scaled["distillation"], whole["distillation"] / 2)
    assert set(terms(LGA(gamma2=0.0), 2, 2, TEACHER, LOGITS, LABELS)) == {"compensation"}


def softmax_weights() -> Tensor:
    """Eqs. 2-5 by loops: V = 1 - p_y, e = 2 / (2 + 2), means by growth."""
    gap = [(1 - LOGITS[i].softmax(0)[LABELS[i]]) ** 0.5 for i in range(10)]
    groups = [[j for j in range(10) if (LABELS[j] < 2) == (LABELS[i] < 2)] for i in range(10)]
    return torch.stack([gap[i] / (sum(gap[j] for j in groups[i]) / len(groups[i])) for i in range(10)])  # type: ignore[arg-type]


def test_the_readings_differ_in_their_distillation() -> None:
    found = {
        sd: float(terms(LGA(form="softmax", sd=sd), 2, 2, TEACHER, LOGITS, LABELS)["distillation"])  # type: ignore[arg-type]
        for sd in ("full", "renorm", "literal")
    }
    assert len(set(found.values())) == 3
    soft = torch.cat([TEACHER.softmax(1), F.one_hot(LABELS, 4).double()[:, 2:]], dim=1)
    p, floored = LOGITS.softmax(1), soft.clamp(min=1e-4)
    full = (torch.xlogy(soft, soft) - soft * p.log()).sum(dim=1)
    literal = (p * (p / floored).log()).sum(dim=1)
    for sd, terms_ in (("full", full), ("literal", literal)):
        assert found[sd] == pytest.approx(float((softmax_weights() * terms_).mean())), sd
    paper = LGAPaper()
    assert (paper.form, paper.sd, paper.detector, paper.start) == ("softmax", "literal", "fixed", "white")
    assert float(terms(paper, 2, 2, TEACHER, LOGITS, LABELS)["distillation"]) == found["literal"]


def test_without_its_parts_it_is_federated_averaging_with_replay(small: dict[str, Any]) -> None:
    """With gamma2 = 0 and without CBL, LGA is FedAvg with replay."""
    bare = quick_federation(small, form="softmax", gamma2=0.0, cbl=False, psr=False)
    lines = run_all(bare)
    replay = federation_of("fedavg", small, replay=True)
    expected = run_all(replay)
    for name, tensor in replay.server.weights.items():
        torch.testing.assert_close(bare.server.weights[name], tensor, rtol=1e-3, atol=1e-4)
    assert [line["trained"] for line in lines] == [line["trained"] for line in expected]


def test_the_nearest_image_is_found_by_brute_force() -> None:
    features = torch.randn(20, 5, generator=torch_generator(6), dtype=torch.float64)
    unit = [f / f.norm() for f in features]
    mean = sum(unit) / len(unit)  # type: ignore[arg-type]
    distances = [float((u - mean).norm()) for u in unit]
    assert nearest_to_mean(features) == min(range(20), key=lambda i: distances[i])


@pytest.mark.parametrize("method", ["lga", "lga_paper", "lga_code", "glfc"])
def test_only_in_the_first_round_of_a_task_the_alarm_decides_the_teacher(small: dict[str, Any], method: str) -> None:
    """Algorithm 1: from the second round on every client distils from the best model of the task just finished."""
    options = {"detector": "oracle", "iterations": 2, "perturb_steps": 1}
    plan_settings = {**small["plan"], "rounds": 3, "move_on": 0.5, "selected": 5}
    federation = federation_of(method, {**small, "plan": plan_settings}, **options)
    plan, kind = federation.plan, type(federation.method)
    used: dict[tuple[int, int], int | None] = {}

    class Watching(kind):  # type: ignore[misc, valid-type]
        def loss(self, context: Any, batch: Any) -> Any:
            width = None if context.teacher is None else len(context.teacher.growths)
            used[context.job.round_index, context.state.client] = width
            return super().loss(context, batch)

    federation.method = Watching(**options)
    run_all(federation)
    stayed_in_first_round = stayed_later = 0
    for (number, client), width in used.items():
        task = plan.task_of_round(number)
        arrival = plan.arrivals[client][plan.current(client, number)]
        alarm = arrival.round_index == number and bool(arrival.classes)
        first_round = number == plan.rounds_of(task).start
        # A teacher of growth g knows growths 0 to g. In the second task there is only one, whatever the alarm says.
        expected = max(1, task - 1) if first_round and not alarm else task
        assert width == (expected or None if task else None), (number, client)
        stayed = task > 0 and not arrival.classes  # its old data has left: memory only
        stayed_in_first_round += stayed and first_round and task > 1
        stayed_later += stayed and not first_round
    assert stayed_in_first_round
    assert stayed_later


def test_two_models_are_sent_in_the_first_round_of_a_growth_only(small: dict[str, Any]) -> None:
    federation = quick_federation({**small, "plan": {**small["plan"], "rounds": 3}}, detector="oracle")
    sent = []
    for _ in run_rounds(federation, Serial()):
        sent.append(sorted(federation.selector.teachers(federation.server.latest_growth).models))
    assert sent == [[], [], [], [0], [0], [0], [1], [1], [1]]  # what the next round of the same growth is sent
    federation.server.grow(["one more"])
    assert sorted(federation.selector.teachers(federation.server.latest_growth).models) == [1, 2]


@pytest.mark.parametrize("growth", ["schedule", "announce"])
def test_prototypes_are_shared_once_in_the_round_they_are_noticed(small: dict[str, Any], growth: str) -> None:
    federation = quick_federation(
        {**small, "plan": {**small["plan"], "growth": growth, "rounds": 3}}, detector="oracle"
    )
    lines = run_all(federation)
    plan, each = federation.plan, None
    for number, line in enumerate(lines):
        sent = line["bytes"]["proxy"]["shares"]
        new = [c for c in plan.selected[number] if plan.arrivals[c][plan.current(c, number)].round_index == number]
        classes = sum(len(plan.arrivals[c][plan.current(c, number)].classes) for c in new)
        if growth == "schedule":
            assert bool(sent) == bool(classes)
            each = sent // classes if classes and each is None else each
            assert sent == (each or 0) * classes
    assert any(line["bytes"]["proxy"]["shares"] for line in lines)
    labels = [p.label for pool in federation.selector.pools.values() for p in pool]  # type: ignore[attr-defined]
    assert set(labels) <= set(range(6))
    assert set(federation.selector.pools) == {0, 1, 2}  # type: ignore[attr-defined]
    assert any("prototype.ids" in state.notes for state in federation.population.states.values())


def test_late_shares_enlarge_the_pool(small: dict[str, Any]) -> None:
    settings = {**small, "plan": {**small["plan"], "rounds": 4}}
    totals = []
    for shares in ("first_round", "when_selected"):
        lines = run_all(quick_federation(settings, detector="oracle", shares=shares))
        totals.append(sum(line["bytes"]["proxy"]["shares"] for line in lines))
    assert totals[1] > totals[0] > 0


def test_a_capacity_that_is_too_small_is_refused(small: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError, match="capacity=5 is too small for 6 classes"):
        quick_federation(small, capacity=5)


@pytest.mark.parametrize("switch", ["cbl", "sdl", "psr", "sbm", "ssa", "npb"])
def test_every_ablation_is_named(switch: str) -> None:
    assert LGA(**{switch: False}).label == f"lga w/o {switch}"


HOME = SelectorSetup(
    ModelSpec("convnet", "batch", 16), Transform((0.5,) * 3, (0.25,) * 3, False), 6, 7, torch.device("cpu")
)
REACHING: list[tuple[dict[str, Any], str, object]] = [
    ({"ssa": False}, "augmented", 0),
    ({"augmented": 3}, "augmented", 3),
    ({"sbm": False}, "select", False),
    ({"omega": "sqrt"}, "root", True),
    ({"start": "white"}, "start", "white"),
    ({"snapshots": 3}, "snapshots", 3),
    ({"iterations": 9}, "iterations", 9),
    ({"rate": 0.1}, "rate", 0.1),
    ({"radius": 0.2}, "radius", 0.2),
    ({"patience": 6}, "patience", 6),
    ({"capacity": 50}, "capacity", 50),
]


@pytest.mark.parametrize(("option", "field", "value"), REACHING, ids=str)
def test_what_is_set_reaches_the_proxy(option: dict[str, Any], field: str, value: object) -> None:
    set_, plain = (build_selector(LGA(**one), HOME) for one in (option, {}))
    assert isinstance(set_, PrototypeServer)
    assert isinstance(plain, PrototypeServer)
    assert getattr(set_.settings, field) == value
    assert getattr(plain.settings, field) != value


def test_what_is_set_reaches_the_clients() -> None:
    set_ = LGA(latent_noise=0.3, perturb_steps=7, perturb_rate=0.2)
    assert set_.prototypes() == PrototypeSharing(Perturbation(0.3, 7, 0.2))
    assert LGA(npb=False).prototypes() == PrototypeSharing(None)
    assert LGA(npb=False, shares="when_selected").prototypes() == PrototypeSharing(None, late=True)
    assert LGA(psr=False).prototypes() is None
    assert isinstance(build_selector(LGA(psr=False), HOME), RandomModelSelector)
    assert [LGA(observed=how).observes_augmented for how in ("plain", "augmented")] == [False, True]  # type: ignore[arg-type]


def test_without_the_proxy_a_federation_has_teachers_and_sends_no_prototypes(small: dict[str, Any]) -> None:
    lines = run_all(quick_federation(small, psr=False))
    assert not any(line["bytes"]["proxy"]["shares"] for line in lines)
    assert lines[-1]["bytes"]["proxy"]["teachers"] > 0


@pytest.mark.parametrize("partition", ["disjoint", "dirichlet:0.3"])
def test_clients_with_hardly_any_images_take_part(small: dict[str, Any], partition: str) -> None:
    plan = {**small["plan"], "partition": partition, "clients": 8, "selected": 8, "memory": 3}
    settings = {**small, "data": {**small["data"], "train_per_class": 3}, "plan": plan}
    lines = run_all(quick_federation(settings, detector="oracle", shares="when_selected"))
    assert any(line["bytes"]["proxy"]["shares"] for line in lines)


def test_groups_that_fit_into_memory_give_the_same_images(
    monkeypatch: pytest.MonkeyPatch, small: dict[str, Any]
) -> None:
    """A round with many prototypes is reconstructed group by group."""
    found = []
    for most in (100, 2):
        monkeypatch.setattr("holdfast.proxy.prototype_server.group_size", lambda size, most=most: most)
        federation = federation_of("lga", small, iterations=5)
        run_all(federation)
        found.append(federation.selector.gallery())
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 2
    for mark, image in found[0].items():
        torch.testing.assert_close(image, found[1][mark], atol=1e-4, rtol=0)
