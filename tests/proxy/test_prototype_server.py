"""Teacher selectors and LGA's proxy: teachers by growth, the pool, augmentation, selection."""

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.methods.roles import PrototypeSelection
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.transform import Transform
from holdfast.privacy.encode import prototype_gradients
from holdfast.protocol.codec import Weights
from holdfast.protocol.messages import GlobalModel, PrototypeShare
from holdfast.proxy.prototype_server import PrototypeServer, SelectorSetup
from holdfast.proxy.selectors import LastModelSelector, NullSelector, RandomModelSelector, encoder_bytes
from holdfast.seeding import torch_generator

SPEC = ModelSpec("convnet", "batch", 16)
SETUP = SelectorSetup(SPEC, Transform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), False), 6, 7, torch.device("cpu"))


def proxy_of(**changes: Any) -> PrototypeServer:
    settings = {
        "capacity": 6,
        "iterations": 40,
        "start": "smooth",
        "rate": 1.0,
        "snapshots": 1,
        "augmented": 5,
        "radius": 0.1,
        "root": False,
        "patience": 0,
        "select": True,
    }
    return PrototypeServer(
        SETUP, PrototypeSelection(**{**settings, **changes}), IncrementalModel(SPEC, torch_generator(0))
    )


def model_of(growths: tuple[int, ...], favourite: int | None = None) -> Weights:
    """A global model; with a favourite it answers that class whatever it is shown."""
    model = IncrementalModel(SPEC, torch_generator(1))
    for g, classes in enumerate(growths):
        model.grow(classes, torch_generator(2, g))
    if favourite is not None:
        with torch.no_grad():
            for block in model.blocks:
                block.weight.zero_()  # type: ignore[union-attr,operator]
                block.bias.zero_()  # type: ignore[union-attr,operator]
            bias = torch.cat([torch.zeros(classes) for classes in growths])
            bias[favourite] = 1.0
            for block, part in zip(model.blocks, bias.split(list(growths)), strict=True):
                block.bias.copy_(part)  # type: ignore[union-attr,operator]
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def shares_of(
    proxy: PrototypeServer, labels: list[int], count: int = 10, variance: float = 0.5
) -> list[PrototypeShare]:
    images = torch.rand(len(labels), 3, 16, 16, generator=torch_generator(9, *labels))
    gradients = prototype_gradients(proxy.encoder, images, torch.tensor(labels))
    return [
        PrototypeShare({name: g[i].clone() for name, g in gradients.items()}, count, torch.full((128,), variance))
        for i in range(len(labels))
    ]


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


def test_the_last_model_of_a_growth_teaches_the_next() -> None:
    """Where clients have to notice a growth, they are also sent the model of the growth before in its first round."""
    proxy, noticed = LastModelSelector(), proxy_of(select=False)
    models = {g: [model_of((2,) * (g + 1), favourite=k) for k in range(2)] for g in range(4)}
    for g, both in models.items():
        for round_index, model in enumerate(both):
            for chooser, in_first_round in ((proxy, 1), (noticed, 2)):
                sent = chooser.teachers(g).models  # before this round's model is judged
                count = 1 if round_index else in_first_round
                assert list(sent) == list(range(max(0, g - count), g))
                assert all(same(sent[old], models[old][-1]) for old in sent)
                chooser.judge(GlobalModel(2 * g + round_index, (2,) * (g + 1), model), [])
    assert proxy.teachers(4).before(4) == noticed.teachers(4).before(4) == 3
    assert noticed.teachers(4).before(3) == 2
    assert noticed.teachers(4).before(1) == 2  # such a client has missed two growths: the oldest that is sent
    assert noticed.teachers(3).before(2) == 2  # in later rounds everyone has the model of the growth just finished
    assert proxy.teachers(0).before(0) is None


def test_who_does_not_distil_is_sent_nothing() -> None:
    proxy = NullSelector()
    proxy.judge(GlobalModel(0, (2,), model_of((2,))), [])
    assert proxy.teachers(1).size == 0
    assert encoder_bytes(proxy) == 0


def test_any_round_draws_every_round_alike_and_repeatably() -> None:
    counts = [0, 0, 0, 0]
    for seed in range(200):
        proxy, again = RandomModelSelector(seed), RandomModelSelector(seed)
        for round_index in range(4):
            model = {"round": torch.tensor(round_index)}
            proxy.judge(GlobalModel(round_index, (2,), model), [])
            again.judge(GlobalModel(round_index, (2,), model), [])
        chosen = int(proxy.teachers(1).models[0]["round"])
        assert chosen == int(again.teachers(1).models[0]["round"])
        counts[chosen] += 1
    assert min(counts) > 30  # 50 expected; four standard deviations are 24


def test_labels_statistics_and_order_come_from_the_pool_alone() -> None:
    proxy = proxy_of(iterations=2)
    shares = shares_of(proxy, [0, 1] * 5)
    line = proxy.judge(GlobalModel(3, (2,), model_of((2,))), shares)
    assert line["prototypes"] == 10
    assert sorted(p.label for p in proxy.pools[0]) == [0] * 5 + [1] * 5
    order = [p.fingerprint for p in proxy.pools[0]]
    assert set(order) == {s.fingerprint for s in shares}
    assert order != [s.fingerprint for s in shares]  # shuffled; the same order by chance once in 3.6 million
    again = proxy_of(iterations=2)
    again.judge(GlobalModel(3, (2,), model_of((2,))), shares)
    assert [p.fingerprint for p in again.pools[0]] == order
    assert all(torch.equal(a.images, b.images) for a, b in zip(proxy.pools[0], again.pools[0], strict=True))


def everything(proxy: PrototypeServer) -> dict[str, tuple[dict[str, bytes], dict[str, Any]]]:
    """All that the proxy remembers, to the bit."""
    parts = proxy.snapshot().items()
    return {
        key: ({n: hashlib.sha256(t.numpy().tobytes()).digest() for n, t in tensors.items()}, facts)
        for key, (tensors, facts) in parts
    }


@pytest.mark.parametrize("alike", [False, True])
def test_the_order_in_which_shares_arrive_changes_no_bit(alike: bool) -> None:
    """Nor does it where clients send the same gradient with different numbers of images and different variances."""
    shares = shares_of(proxy_of(), [0, 1, 0, 1, 1])
    gradients = [shares[0 if alike else i].gradient for i in range(5)]
    variances = torch.rand(5, 128, generator=torch_generator(4))
    shares = [
        PrototypeShare(gradient, count, variance)
        for gradient, count, variance in zip(gradients, (10, 7, 3, 8, 5), variances, strict=True)
    ]
    found = []
    for order in (range(5), range(4, -1, -1), (2, 0, 4, 1, 3)):
        proxy = proxy_of(iterations=2)
        line = proxy.judge(GlobalModel(3, (2,), model_of((2,))), [shares[i] for i in order])
        assert line["prototypes"] == 5
        found.append((line, everything(proxy)))
    assert found[0] == found[1]
    assert found[0] == found[2]


def test_variances_are_pooled_by_count_and_omega_is_their_mean() -> None:
    proxy = proxy_of(iterations=1)
    first, second, single = (shares_of(proxy, [0], n, v)[0] for n, v in ((10, 0.2), (30, 0.6), (1, 9.0)))
    other = shares_of(proxy, [1], 5, 0.1)[0]
    proxy.judge(GlobalModel(0, (2,), model_of((2,))), [first, second, single, other])
    assert float(proxy.variances[0][1][0]) == pytest.approx((10 * 0.2 + 30 * 0.6) / 40)  # one image has no variance
    assert proxy.omega((2,)) == pytest.approx((0.5 + 0.1) / 2)
    proxy.judge(GlobalModel(1, (2, 2), model_of((2, 2))), shares_of(proxy, [3], 5, 0.9))
    assert proxy.omega((2, 2)) == pytest.approx((0.5 + 0.1 + 0.9) / 3)  # class 2 is unknown and does not count
    assert proxy_of(root=True).omega((2,)) == 0.0


def test_the_best_model_is_kept_and_ties_go_to_the_later() -> None:
    proxy = proxy_of(iterations=2)
    bad, good = model_of((2,), favourite=1), model_of((2,), favourite=0)
    shares = shares_of(proxy, [0, 0, 0, 1])
    kept = [
        proxy.judge(GlobalModel(round_index, (2,), model), shares if round_index == 0 else [])["kept_round"]
        for round_index, model in enumerate([bad, good, bad, good, bad])
    ]
    assert kept == [1, 2, 2, 4, 4]
    assert proxy.scores[0] == 0.75
    assert same(proxy.teachers(1).models[0], good)
    last = proxy_of(iterations=2, select=False)
    for round_index, model in enumerate([good, bad]):
        last.judge(GlobalModel(round_index, (2,), model), shares if round_index == 0 else [])
    assert same(last.teachers(1).models[0], bad)


def test_with_nothing_to_score_by_the_last_model_is_kept() -> None:
    proxy = proxy_of()
    for round_index, favourite in enumerate((0, 1)):
        line = proxy.judge(GlobalModel(round_index, (2,), model_of((2,), favourite=favourite)), [])
        assert (line["score"], line["kept_round"]) == (None, round_index + 1)


def test_a_larger_pool_scores_the_kept_model_again() -> None:
    proxy = proxy_of(iterations=2)
    zero, one = model_of((2,), favourite=0), model_of((2,), favourite=1)
    assert proxy.judge(GlobalModel(0, (2,), zero), shares_of(proxy, [0]))["kept_score"] == 1.0
    line = proxy.judge(GlobalModel(1, (2,), one), shares_of(proxy, [1, 1, 1]))
    assert line["score"] == 0.75  # the old model's 1.0 was on the smaller pool; here it has 0.25
    assert line["kept_round"] == 2


def test_each_growth_starts_anew_and_the_old_best_stays() -> None:
    proxy = proxy_of(iterations=2)
    proxy.judge(GlobalModel(0, (2,), model_of((2,), favourite=0)), shares_of(proxy, [0]))
    line = proxy.judge(GlobalModel(1, (2, 2), model_of((2, 2), favourite=0)), shares_of(proxy, [2]))
    assert (line["score"], line["kept_round"]) == (0.0, 2)  # a model of the new growth, however bad
    assert same(proxy.teachers(1).models[0], model_of((2,), favourite=0))


def test_first_rounds_may_count_for_nothing() -> None:
    proxy = proxy_of(iterations=2, patience=1)
    good, bad = model_of((2,), favourite=0), model_of((2,), favourite=1)
    lines = [
        proxy.judge(GlobalModel(round_index, (2,), model), shares_of(proxy, [0, 0, 1]) if round_index == 0 else [])
        for round_index, model in enumerate([good, bad, bad])
    ]
    assert [line["score"] for line in lines] == pytest.approx([0.0, 1 / 3, 1 / 3])
    assert lines[-1]["kept_round"] == 3
    more = proxy_of(iterations=2, patience=1)  # a pool that grows does not make the first round count after all
    more.judge(GlobalModel(0, (2,), good), shares_of(more, [0, 0, 1]))
    assert more.judge(GlobalModel(1, (2,), bad), shares_of(more, [0]))["kept_round"] == 2


def test_noise_is_common_to_all_rounds_and_bounded() -> None:
    proxy = proxy_of(iterations=2)
    proxy.judge(GlobalModel(0, (2,), model_of((2,))), shares_of(proxy, [0, 1, 1], variance=4.0))
    labels, features = torch.tensor([p.label for p in proxy.pools[0]]), torch.zeros(3, 1, 128)
    first = proxy._noise((2,), labels, features)
    assert first.shape == (3, 5, 128)
    assert torch.equal(first, proxy._noise((2,), labels, features))
    assert float(first.square().sum(dim=-1).max()) <= 0.1 * 128 * 4.0 * (1 + 1e-5)
    assert proxy.score((2,), model_of((2,))) == proxy.score((2,), model_of((2,)))


@pytest.mark.parametrize("root", [False, True])
def test_noise_is_omega_times_a_deviation_and_each_features_own(root: bool) -> None:
    proxy = proxy_of(iterations=2, root=root)
    proxy.judge(GlobalModel(0, (2,), model_of((2,))), shares_of(proxy, [0, 1, 1], variance=0.04))
    omega = 0.2 if root else 0.04
    assert proxy.omega((2,)) == pytest.approx(omega)
    noise = proxy._noise((2,), torch.tensor([0, 1, 1]), torch.zeros(3, 1, 128))
    assert len(noise.flatten(0, 1).unique(dim=0)) == 15
    assert float(noise.std()) == pytest.approx(omega * 0.2, rel=0.1)


def test_without_augmentation_the_prototypes_themselves_are_scored() -> None:
    proxy = proxy_of(augmented=0, iterations=30)
    labels = [0, 1, 1]
    proxy.judge(GlobalModel(0, (2,), model_of((2,))), shares_of(proxy, labels))
    model = IncrementalModel(SPEC, torch_generator(1))
    model.grow(2, torch_generator(2, 0))
    model.eval()
    images = torch.cat([p.images for p in proxy.pools[0]])
    truth = torch.tensor([p.label for p in proxy.pools[0]])
    with torch.no_grad():
        found = model((images - 0.5) / 0.25).logits.argmax(dim=1)
    assert proxy.score((2,), model_of((2,))) == pytest.approx(float((found == truth).double().mean()))


def test_shares_that_do_not_fit_the_encoding_network_are_refused_and_counted() -> None:
    proxy = proxy_of()
    good, other = shares_of(proxy, [1, 2])
    bad = [
        replace(other, gradient={name: g for name, g in other.gradient.items() if name != "linear.bias"}),
        replace(other, gradient={**other.gradient, "linear.bias": torch.zeros(7)}),
        replace(other, gradient={**other.gradient, "more": torch.zeros(1)}),
        replace(other, variance=torch.zeros(3)),
    ]
    line = proxy.judge(GlobalModel(0, (3,), model_of((3,))), [*bad, good])
    assert (line["refused"], line["prototypes"]) == (4, 1)


def test_a_gradient_without_a_label_is_refused_and_counted() -> None:
    proxy = proxy_of(iterations=2)
    good = shares_of(proxy, [1])[0]
    bad = PrototypeShare({name: torch.zeros_like(part) for name, part in good.gradient.items()}, 3, good.variance)
    line = proxy.judge(GlobalModel(0, (2,), model_of((2,))), [bad, good])
    assert (line["refused"], line["prototypes"]) == (1, 1)


def test_the_proxys_pictures_resemble_what_was_sent() -> None:
    proxy = proxy_of(iterations=80)
    images = torch.nn.functional.interpolate(torch.rand(2, 3, 4, 4, generator=torch_generator(3)), 16, mode="bilinear")
    gradients = prototype_gradients(proxy.encoder, images, torch.tensor([0, 1]))
    shares = [PrototypeShare({n: g[i].clone() for n, g in gradients.items()}, 5, torch.ones(128)) for i in range(2)]
    proxy.judge(GlobalModel(0, (2,), model_of((2,))), shares)
    for share, image in zip(shares, images, strict=True):
        found: Tensor = proxy.gallery()[share.fingerprint]
        assert float((found - image).square().mean()) < 0.01


def test_the_encoder_that_newcomers_get_has_four_bytes_per_parameter() -> None:
    proxy = proxy_of()
    assert encoder_bytes(proxy) == sum(4 * p.numel() for p in proxy.encoder.parameters())
