"""Shares that cannot be right are refused at the proxy's door, each for its reason, and nobody else's."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_prototype_server import everything, model_of, proxy_of, shares_of

from holdfast.protocol.messages import GlobalModel, PrototypeShare
from holdfast.proxy.selectors import NullSelector
from holdfast.proxy.validation import MOST_IMAGES

GROWTHS = (3,)


def with_gradient(
    change: Callable[[torch.Tensor], torch.Tensor], name: str
) -> Callable[[PrototypeShare], PrototypeShare]:
    return lambda share: replace(share, gradient={**share.gradient, name: change(share.gradient[name])})


def with_variance(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[PrototypeShare], PrototypeShare]:
    return lambda share: replace(share, variance=change(share.variance))


WRONG: dict[str, tuple[str, Callable[[PrototypeShare], PrototypeShare]]] = {
    "one nan variance": ("not finite", with_variance(lambda v: torch.cat([v[:-1], v.new_tensor([float("nan")])]))),
    "infinite variance": ("not finite", with_variance(lambda v: v / 0)),
    "negative variance": ("range", with_variance(lambda v: -v)),
    "huge variance": ("range", with_variance(lambda v: v * 1e30)),
    "short variance": ("shape", with_variance(lambda v: v[:-1])),
    "float64 variance": ("type", with_variance(lambda v: v.double())),
    "nan gradient": ("not finite", with_gradient(lambda g: g * float("nan"), "convs.0.weight")),
    "times 1e30": ("range", with_gradient(lambda g: g * 1e30, "linear.weight")),
    "larger than a probability": ("range", with_gradient(lambda g: g * 3, "linear.bias")),
    "turned round": ("label", with_gradient(lambda g: -g, "linear.bias")),
    "half of it": ("label", with_gradient(lambda g: torch.where(g > 0, g / 2, g), "linear.bias")),
    "no label": ("label", with_gradient(torch.zeros_like, "linear.bias")),
    "another shape": ("shape", with_gradient(lambda g: g[None], "convs.1.bias")),
    "whole numbers": ("type", with_gradient(lambda g: g.long(), "convs.1.bias")),
    "another name": ("names", lambda share: replace(share, gradient={**share.gradient, "more": torch.ones(1)})),
    "no images": ("samples", lambda share: replace(share, count=0)),
    "too many images": ("samples", lambda share: replace(share, count=MOST_IMAGES + 1)),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_kind_of_bad_share_is_refused_and_the_rest_is_as_without_it(name: str) -> None:
    kind, spoil = WRONG[name]
    proxy, without = proxy_of(iterations=2), proxy_of(iterations=2)
    good = shares_of(proxy, [0, 1, 2])
    bad = spoil(shares_of(proxy, [1])[0])
    admitted, refused = proxy.admit(GROWTHS, [(4, good[0]), (7, bad), (4, good[1]), (5, good[2])])
    assert [(one.client, one.kind) for one in refused] == [(7, kind)]
    line = proxy.judge(GlobalModel(0, GROWTHS, model_of(GROWTHS)), admitted)
    assert line == without.judge(GlobalModel(0, GROWTHS, model_of(GROWTHS)), good)
    assert everything(proxy) == everything(without)


@pytest.mark.parametrize("name", WRONG)
def test_the_pool_refuses_what_nobody_has_admitted(name: str) -> None:
    proxy, without = proxy_of(iterations=2), proxy_of(iterations=2)
    good, bad = shares_of(proxy, [0, 1]), WRONG[name][1](shares_of(proxy, [1])[0])
    line = proxy.judge(GlobalModel(0, GROWTHS, model_of(GROWTHS)), [bad, *good])
    assert line == {**without.judge(GlobalModel(0, GROWTHS, model_of(GROWTHS)), good), "refused": 1}
    assert everything(proxy) == everything(without)


def test_a_class_that_the_head_does_not_have_is_refused() -> None:
    proxy = proxy_of()
    [share] = shares_of(proxy, [3])
    assert proxy.admit((3,), [(0, share)])[1][0].kind == "label"
    assert proxy.admit((3, 1), [(0, share)])[0] == [share]


def test_two_hundred_copies_are_one_share() -> None:
    """One per client, class and round; what comes after as many as there are classes is not looked at."""
    proxy = proxy_of()
    first, other = shares_of(proxy, [1, 2])
    shares = [(3, first)] * 200 + [(3, other), (6, first)]
    admitted, refused = proxy.admit(GROWTHS, shares)
    assert admitted == [first, first]  # one of client 3 and one of client 6
    assert [(one.client, one.kind) for one in refused] == [(3, "duplicate"), (3, "duplicate"), (3, "too many")]


def test_without_a_proxy_a_share_has_no_place() -> None:
    admitted, refused = NullSelector().admit((3,), [(2, shares_of(proxy_of(), [0])[0])])
    assert admitted == []
    assert refused[0].client == 2
