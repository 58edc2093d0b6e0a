"""PODNet's proxies: how near they are, where they begin and how they are tuned."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from clients import client_of, federation_of, grown_federation, model_of
from torch import Tensor

from holdfast.engines.serial import Serial
from holdfast.losses import nca
from holdfast.methods.podnet import PODNet
from holdfast.methods.shared import place_proxies, tuned_classifier
from holdfast.models.heads import PROXIES, ProxyBlock, ProxyModel
from holdfast.protocol.messages import Extras
from holdfast.seeding import torch_generator
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds


@pytest.fixture
def grown(small: dict[str, Any]) -> Federation:
    """A head of two growths, of classes 0 to 2 and 3 to 5."""
    return grown_federation("podnet", small, (3, 3))


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


def sums_of(sums: Tensor, counts: list[int]) -> Extras:
    return Extras("class sums", {"sums": sums, "counts": torch.tensor(counts)})


def test_new_proxies_surround_the_mean_over_all_clients_and_are_as_long_as_the_old() -> None:
    model = model_of(PODNet(), ProxyModel, (2, 2, 3))
    with torch.no_grad():
        for weight, length in zip(model.proxies[:2], (2.0, 4.0), strict=True):
            weight.copy_(length * F.normalize(weight, dim=2))
    before = [weight.detach().clone() for weight in model.proxies]
    rng = torch_generator(8)
    a, b = (torch.randn(7, model.features, generator=rng) for _ in range(2))
    a[6] = b[6] = b[5] = 0
    place_proxies(model, [sums_of(a, [1] * 6 + [0]), sums_of(b, [2] * 5 + [0, 0])], seed=3, round_index=9)
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
        model = model_of(PODNet(), ProxyModel, (2,))
        sums = torch.randn(2, model.features, generator=torch_generator(9))
        place_proxies(model, [sums_of(sums, [3, 3])], seed=seed, round_index=0)
        found.append(model.proxies[0].detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    model = model_of(PODNet(), ProxyModel, (2,))
    was = model.proxies[0].detach().clone()
    PODNet().merge(model, [], 1, 0)
    assert torch.equal(model.proxies[0], was)


def test_clients_tell_of_their_data_under_the_broadcast_model_and_stayers_of_nothing(grown: Federation) -> None:
    rows, fed = grown.data.train.by_class, grown
    context = client_of(grown, (3, 5), {0: rows[0][:4]})
    found = PODNet().begin_task(context).tensors
    assert found["counts"].tolist() == [0, 0, 0, 12, 0, 12]
    with torch.no_grad():
        features = context.model.eval()(fed.enrolment.transform.plain(fed.data.train.images[rows[5]])).features.double()
    expected = torch.stack([f / f.norm() for f in features]).sum(dim=0)
    torch.testing.assert_close(found["sums"][5].double(), expected, rtol=1e-4, atol=1e-5)
    stayer = PODNet().begin_task(client_of(grown, (), {0: rows[0][:4]})).tensors
    assert not stayer["sums"].any()
    assert not stayer["counts"].any()


def test_one_step_of_fine_tuning_by_hand(grown: Federation) -> None:
    """All proxies go down the slope at rate 0.05; nothing else moves, statistics included."""
    rows = grown.data.train.by_class
    context = client_of(grown, (3,), {c: rows[c][:2] for c in (0, 1, 3)}, batch=16)
    assert isinstance(context.model, ProxyModel)
    context.model.log_scale.data.fill_(0.7)
    batch = next(context.batches(context.exemplars, 0))
    before = {name: tensor.clone() for name, tensor in context.model.state_dict().items()}
    context.model.eval()
    scores = context.model.classify(context.model(batch.images).features.detach())
    slopes = torch.autograd.grad(nca(math.exp(0.7) * scores, batch.labels), context.model.proxies)
    tuned = tuned_classifier(context, epochs=1, rate=0.05)
    assert set(tuned) == {"blocks.0.weight", "blocks.1.weight"}
    for i, slope in enumerate(slopes):
        assert bool(slope.any())
        torch.testing.assert_close(tuned[f"blocks.{i}.weight"], before[f"blocks.{i}.weight"] - 0.05 * slope)
    changed = {name for name, tensor in context.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == set(tuned)


def test_fine_tuning_lowers_the_loss_and_the_server_weights_by_exemplars(grown: Federation) -> None:
    rows, method = grown.data.train.by_class, PODNet(tune_epochs=4)
    extras = []
    for memory in ({0: rows[0][:6], 3: rows[3][:6]}, {1: rows[1][:1], 4: rows[4][:2]}):
        context = client_of(grown, (3,), memory)
        images = context.transform.plain(context.images.pixels(context.exemplars))
        labels = context.labels_of(context.exemplars)
        before = nca(context.model.eval()(images).logits, labels).detach()
        sent = method.finish_task(context)
        assert float(nca(context.model(images).logits, labels).detach()) < float(before)
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
    rows = grown.data.train.by_class
    assert PODNet().finish_task(client_of(grown, (3,), {})) is None
    both = {0: rows[0][:2], 3: rows[3][:2]}
    assert PODNet(tune_epochs=0).finish_task(client_of(grown, (3,), both)) is None
    assert PODNet(tune_epochs=1).finish_task(client_of(grown, (3,), both)) is not None


def test_clients_with_old_or_new_exemplars_alone_tune_nothing_and_tell_their_class_sums(grown: Federation) -> None:
    rows = grown.data.train.by_class
    for c in (0, 3):  # a stayer, a newcomer
        assert PODNet().finish_task(client_of(grown, (3,), {c: rows[c][:4]})) is None
        sent = PODNet(inference="nme").finish_task(client_of(grown, (3,), {c: rows[c][:4]}))
        assert sent is not None
        assert set(sent.tensors) == {"sums", "counts", "images"}
        assert int(sent.tensors["counts"][c]) == 4


def test_the_first_task_is_not_fine_tuned(small: dict[str, Any]) -> None:
    federation = grown_federation("podnet", small, (3,))
    rows = federation.data.train.by_class
    assert PODNet().finish_task(client_of(federation, (0,), {0: rows[0][:2], 1: rows[1][:2]})) is None


def test_in_a_run_old_proxies_move_only_after_a_task_and_only_they_do_then(small: dict[str, Any]) -> None:
    federation = federation_of("podnet", small, tune_epochs=1)
    plan, server = federation.plan, federation.server
    states: list[tuple[int, str, dict[str, Tensor]]] = []

    class Watching(PODNet):
        def merge(self, model: Any, extras: Any, seed: int, round_index: int) -> None:
            if not extras:
                assert plan.task_of_round(round_index) == 0
                return
            for when in ("before", "after"):
                kept = {name: t.clone() for name, t in model.state_dict().items()}
                states.append((round_index, f"{when} {extras[0].kind}", kept))
                if when == "before":
                    super().merge(model, extras, seed, round_index)

    federation.method = Watching(tune_epochs=1)
    for done in run_rounds(federation, Serial()):
        later = plan.task_of_round(done.line["round"] - 1) > 0
        assert (later and plan.ends_task(done.line["round"] - 1)) == any(
            number == done.line["round"] - 1 and when == "after classifier" for number, when, _ in states
        )
    kinds = ("class sums", "classifier", "class sums", "classifier")  # none in the first task
    assert [when for _, when, _ in states] == [f"{when} {kind}" for kind in kinds for when in ("before", "after")]
    for start, (_, when, was) in enumerate(states[:-1]):
        now = states[start + 1][2]
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
