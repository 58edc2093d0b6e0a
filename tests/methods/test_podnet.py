"""PODNet: facts of its losses, its proxies and its fine-tuning (methods.md, section 3.4)."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.data.timeline import Arrival
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.federation.client import ClientWork
from holdfast.federation.local import Local
from holdfast.federation.messages import Extras, Inbox, Job, State
from holdfast.losses import nca, pod_flat, pod_spatial
from holdfast.methods.podnet import PODNet
from holdfast.methods.shared import place_proxies, tuned_classifier
from holdfast.models.heads import PROXIES, ProxyBlock, ProxyModel
from holdfast.models.incremental import ModelSpec
from holdfast.rounds import Federation, play
from holdfast.seeding import torch_generator


def federation_of(settings: dict[str, Any], **method: Any) -> Federation:
    config = load_config({**settings, "method": {"name": "podnet", **method}})
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


def client_of(federation: Federation, current: tuple[int, ...], memory: dict[int, Tensor], **train: Any) -> Local:
    """A client with these classes as its data and this memory, under the federation's model."""
    world = federation.world
    plan = replace(world.plan, arrivals=((Arrival(0, current),),))
    work = ClientWork(replace(world, plan=plan, training=replace(world.training, **train)))
    job = Job(0, 0.0, 1.0, federation.server.registry, federation.server.weights)
    model = work._load("student", job.registry.growths, job.weights).train().requires_grad_(True)
    return Local(work.world, State(0, memory), Inbox(job), model, work._frozen)


def proxy_model(growths: tuple[int, ...]) -> ProxyModel:
    model = PODNet().build_model(ModelSpec("convnet", "batch", 16), torch_generator(4))
    assert isinstance(model, ProxyModel)
    for classes in growths:
        model.grow(classes, torch_generator(5, len(model.blocks)))
    return model


@pytest.fixture
def grown(small: dict[str, Any]) -> Federation:
    """A head of two growths, of classes 0 to 2 and 3 to 5."""
    federation = federation_of(small)
    federation.server.grow(federation.world.classes[:3])
    federation.server.grow(federation.world.classes[3:])
    return federation


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


def maps_of(seed: int) -> list[Tensor]:
    rng = torch_generator(seed)
    return [
        torch.randn(3, channels, height, width, generator=rng, dtype=torch.float64)
        for channels, height, width in ((2, 4, 3), (5, 2, 2))
    ]


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


def test_a_class_is_as_near_as_its_proxies_the_nearest_counting_most() -> None:
    block = ProxyBlock(5, 3)
    rng = torch_generator(6)
    with torch.no_grad():
        block.weight.copy_(3 * torch.randn(3, 10, 5, generator=rng))
        features = 4 * torch.randn(4, 5, generator=rng)
        found = block(features)
        for i in range(4):
            for c in range(3):
                similarity = [
                    -(float((F.normalize(features[i], dim=0) - w / w.norm()).norm()) ** 2) for w in block.weight[c]
                ]
                total = sum(math.exp(s) for s in similarity)
                expected = sum(math.exp(s) / total * s for s in similarity)
                assert float(found[i, c]) == pytest.approx(expected, rel=1e-4)
    assert PROXIES == 10


def test_features_are_the_last_map_before_its_relu_and_the_scale_begins_at_one() -> None:
    model = proxy_model((2,)).eval()
    with torch.no_grad():
        output = model(torch.randn(4, 3, 16, 16, generator=torch_generator(7)))
    assert bool((output.features < 0).any())
    torch.testing.assert_close(output.features, output.maps[-1].flatten(2).mean(dim=2))
    assert float(model.scale.detach()) == 1
    assert "log_scale" not in PODNet().fixed(model)


class Answers(torch.nn.Module):
    """A model that answers with given outputs; its scale is 2.5."""

    def __init__(self, output: SimpleNamespace) -> None:
        super().__init__()
        self.output = output

    def forward(self, images: Tensor) -> SimpleNamespace:
        return self.output


def terms(growths: tuple[int, ...], taught: bool, **method: Any) -> dict[str, Tensor]:
    answers, teacher = (
        SimpleNamespace(
            logits=SCORES,
            features=torch.randn(3, 6, generator=torch_generator(s), dtype=torch.float64),
            maps=maps_of(s),
        )
        for s in (2, 3)
    )
    model = proxy_model(())
    model.forward = Answers(answers).forward  # type: ignore[method-assign]
    model.log_scale.data.fill_(math.log(2.5))
    local: Any = SimpleNamespace(
        model=model, predecessor=Answers(teacher) if taught else None, registry=SimpleNamespace(growths=growths)
    )
    return PODNet(**method).loss(local, SimpleNamespace(images=torch.zeros(12, 1), labels=LABELS))  # type: ignore[arg-type]


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
    local = client_of(grown, (3, 4), {})
    local.predecessor = local.model.eval()
    found = PODNet().loss(local, next(local.batches(local.data, 0)))
    assert float(found["spatial"].detach()) == pytest.approx(0, abs=1e-6)
    assert float(found["flat"].detach()) == pytest.approx(0, abs=1e-5)


def test_it_is_optimised_as_published() -> None:
    preset, method = PODNet().preset, PODNet()
    assert (preset.lr, preset.momentum, preset.weight_decay, preset.schedule) == (0.1, 0.9, 5e-4, "cosine")
    assert (method.spatial, method.flat, method.tune_epochs, method.tune_rate, method.clamp) == (3, 1, 20, 0.05, 5)


def test_old_proxies_are_frozen_and_gradients_clamped_in_the_main_phase(grown: Federation) -> None:
    local = client_of(grown, (3, 4), {})
    [stage] = PODNet().stages(local)
    assert stage.clamp == 5.0
    trained = {name for name, p in local.model.named_parameters() if p.requires_grad}
    every = {name for name, _ in local.model.named_parameters()}
    assert every - trained == {"blocks.0.weight"}
    assert PODNet().fixed(local.model) == {"blocks.0.weight"}


def sums_of(sums: Tensor, counts: list[int]) -> Extras:
    return Extras("class sums", {"sums": sums, "counts": torch.tensor(counts)})


def test_new_proxies_surround_the_mean_over_all_clients_and_are_as_long_as_the_old() -> None:
    model = proxy_model((2, 2, 3))
    with torch.no_grad():
        for weight, length in zip(model.proxies[:2], (2.0, 4.0), strict=True):
            weight.copy_(length * F.normalize(weight, dim=2))
    before = [weight.detach().clone() for weight in model.proxies]
    rng = torch_generator(8)
    a, b = (torch.randn(7, model.features, generator=rng) for _ in range(2))
    a[6] = b[6] = b[5] = 0
    place_proxies(model, [sums_of(a, [1] * 6 + [0]), sums_of(b, [2] * 5 + [0, 0])], seed=3, number=9)
    old, newest = model.proxies[:2], model.proxies[2].detach()
    assert all(torch.equal(weight, was) for weight, was in zip(old, before, strict=False))
    for place, mean in ((0, a[4] + b[4]), (1, a[5])):
        cosines = F.cosine_similarity(newest[place], mean[None], dim=1)
        assert float(cosines.min()) > 0.9
        assert len(newest[place].unique(dim=0)) == 10
    torch.testing.assert_close(newest[:2].norm(dim=2), torch.full((2, 10), 3.0))
    assert torch.equal(newest[2], before[2][2])  # nobody told of this class


def test_all_clients_get_the_same_proxies_and_they_depend_on_the_seed() -> None:
    found = []
    for seed in (1, 1, 2):
        model = proxy_model((2,))
        sums = torch.randn(2, model.features, generator=torch_generator(9))
        place_proxies(model, [sums_of(sums, [3, 3])], seed=seed, number=0)
        found.append(model.proxies[0].detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    model = proxy_model((2,))
    was = model.proxies[0].detach().clone()
    PODNet().merge(model, [], 1, 0)
    assert torch.equal(model.proxies[0], was)


def test_clients_tell_of_their_data_under_the_broadcast_model_and_stayers_of_nothing(grown: Federation) -> None:
    rows, world = grown.world.train.by_class, grown.world
    local = client_of(grown, (3, 5), {0: rows[0][:4]})
    found = PODNet().begin_task(local).tensors
    assert found["counts"].tolist() == [0, 0, 0, 12, 0, 12]
    with torch.no_grad():
        features = local.model.eval()(world.transform.plain(world.train.images[rows[5]])).features.double()
    expected = torch.stack([f / f.norm() for f in features]).sum(dim=0)
    torch.testing.assert_close(found["sums"][5].double(), expected, rtol=1e-4, atol=1e-5)
    stayer = PODNet().begin_task(client_of(grown, (), {0: rows[0][:4]})).tensors
    assert not stayer["sums"].any()
    assert not stayer["counts"].any()


def test_one_step_of_fine_tuning_by_hand(grown: Federation) -> None:
    """All proxies go down the slope at rate 0.05; nothing else moves, statistics included."""
    rows = grown.world.train.by_class
    local = client_of(grown, (3,), {c: rows[c][:2] for c in (0, 1, 3)}, batch=16)
    assert isinstance(local.model, ProxyModel)
    batch = next(local.batches(local.exemplars, 0))
    before = {name: tensor.clone() for name, tensor in local.model.state_dict().items()}
    local.model.eval()
    scores = local.model.classify(local.model(batch.images).features.detach())
    slopes = torch.autograd.grad(nca(scores, batch.labels), local.model.proxies)
    tuned = tuned_classifier(local, epochs=1, rate=0.05)
    assert set(tuned) == {"blocks.0.weight", "blocks.1.weight"}
    for i, slope in enumerate(slopes):
        assert bool(slope.any())
        torch.testing.assert_close(tuned[f"blocks.{i}.weight"], before[f"blocks.{i}.weight"] - 0.05 * slope)
    changed = {name for name, tensor in local.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(tuned)


def test_fine_tuning_lowers_the_loss_and_the_server_weights_by_exemplars(grown: Federation) -> None:
    rows, method = grown.world.train.by_class, PODNet(tune_epochs=4)
    extras = []
    for memory in ({0: rows[0][:6], 3: rows[3][:6]}, {4: rows[4][:3]}):
        local = client_of(grown, (3,), memory)
        images = local.world.transform.plain(local.world.train.images[local.exemplars])
        labels = local.labels_of(local.exemplars)
        before = nca(local.model.eval()(images).logits, labels).detach()
        sent = method.finish_task(local)
        assert float(nca(local.model(images).logits, labels).detach()) < float(before)
        assert sent is not None
        extras.append(sent)
    assert [int(e.tensors["images"]) for e in extras] == [12, 3]
    backbone = {n: t.clone() for n, t in grown.server.weights.items() if not n.startswith("blocks.")}
    method.merge(grown.server.model, extras, 0, 0)
    for name in ("blocks.0.weight", "blocks.1.weight"):
        first, second = (e.tensors[name].double() for e in extras)
        torch.testing.assert_close(grown.server.weights[name].double(), 0.8 * first + 0.2 * second, rtol=0, atol=1e-6)
    assert all(torch.equal(grown.server.weights[name], tensor) for name, tensor in backbone.items())


def test_without_exemplars_or_epochs_nothing_is_tuned(grown: Federation) -> None:
    rows = grown.world.train.by_class
    assert PODNet().finish_task(client_of(grown, (3,), {})) is None
    assert PODNet(tune_epochs=0).finish_task(client_of(grown, (3,), {0: rows[0][:2]})) is None


def test_the_first_task_is_not_fine_tuned(small: dict[str, Any]) -> None:
    federation = federation_of(small)
    federation.server.grow(federation.world.classes[:3])
    rows = federation.world.train.by_class
    assert PODNet().finish_task(client_of(federation, (0,), {0: rows[0][:2], 1: rows[1][:2]})) is None


def test_in_a_run_old_proxies_move_only_after_a_task_and_only_they_do_then(small: dict[str, Any]) -> None:
    federation = federation_of(small, tune_epochs=1)
    plan, server = federation.world.plan, federation.server
    moments: list[tuple[int, str, dict[str, Tensor]]] = []

    class Watching(PODNet):
        def merge(self, model: Any, extras: Any, seed: int, number: int) -> None:
            if not extras:
                assert plan.task_of_round(number) == 0
                return
            for when in ("before", "after"):
                kept = {name: t.clone() for name, t in model.state_dict().items()}
                moments.append((number, f"{when} {extras[0].kind}", kept))
                if when == "before":
                    super().merge(model, extras, seed, number)

    federation.world = replace(federation.world, method=Watching(tune_epochs=1))
    for done in play(federation, Serial()):
        later = plan.task_of_round(done.line["round"] - 1) > 0
        assert (later and plan.ends_task(done.line["round"] - 1)) == any(
            number == done.line["round"] - 1 and when == "after classifier" for number, when, _ in moments
        )
    kinds = ("class sums", "class sums", "classifier", "class sums", "classifier")  # none after the first task
    assert [when for _, when, _ in moments] == [f"{when} {kind}" for kind in kinds for when in ("before", "after")]
    for start, (_, when, was) in enumerate(moments[:-1]):
        now = moments[start + 1][2]
        changed = {name for name in was if not torch.equal(was[name], now[name])}
        newest = max(int(name.split(".")[1]) for name in was if name.startswith("blocks."))
        blocks = {f"blocks.{i}.weight" for i in range(newest + 1)}
        if when == "before class sums":
            assert changed == {f"blocks.{newest}.weight"}
        elif when == "after class sums":
            assert changed & blocks == {f"blocks.{newest}.weight"}
            assert "log_scale" in changed
        elif when == "before classifier":
            assert changed == blocks
    assert len(server.model.blocks) == 3


def test_a_federation_of_stayers_newcomers_and_single_images_trains(small: dict[str, Any]) -> None:
    plan = {**small["plan"], "partition": "dirichlet:0.3", "move_on": 0.6, "memory": 3, "clients": 6, "selected": 6}
    federation = federation_of({**small, "plan": plan, "train": {"epochs": 1, "batch": 4}}, tune_epochs=1)
    lines = [done.line for done in play(federation, Serial())]
    assert math.isfinite(sum(lines[-1]["losses"].values()))
