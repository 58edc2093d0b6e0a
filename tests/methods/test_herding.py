"""Herding against brute force, and quotas."""

import pytest
import torch
import torch.nn.functional as F

from holdfast.client.memory import quota
from holdfast.methods.herding import herd
from holdfast.seeding import torch_generator


def brute_force(features: torch.Tensor, count: int) -> list[int]:
    """iCaRL's definition: each next exemplar brings the mean of the chosen nearest to the mean of all."""
    unit = F.normalize(features.double(), dim=1)
    chosen: list[int] = []
    for k in range(1, count + 1):
        distances = {
            i: float((unit.mean(0) - (unit[[*chosen, i]].sum(0) / k)).norm())
            for i in range(len(unit))
            if i not in chosen
        }
        chosen.append(min(distances, key=lambda i: distances[i]))
    return chosen


@pytest.mark.parametrize("seed", range(5))
def test_herding_equals_brute_force(seed: int) -> None:
    features = torch.randn(40, 7, generator=torch_generator(seed)) + 1
    assert herd(features, 25).tolist() == brute_force(features, 25)


def test_no_image_twice_and_every_image_if_asked() -> None:
    features = torch.ones(6, 3)  # all alike: the greedy rule alone would choose the first for ever
    assert sorted(herd(features, 10).tolist()) == list(range(6))


def test_a_shorter_list_is_the_beginning_of_a_longer_one() -> None:
    features = torch.randn(30, 4, generator=torch_generator(9))
    assert herd(features, 20)[:8].tolist() == herd(features, 8).tolist()


def test_none_wanted_or_none_there() -> None:
    assert herd(torch.randn(5, 3), 0).tolist() == []
    assert herd(torch.empty(0, 3), 4).tolist() == []


def test_quota() -> None:
    assert quota(2000, 6) == 333
    assert quota(0, 6) == 0
    assert quota(5, 6) == 0
    assert quota(100, 0) == 0
