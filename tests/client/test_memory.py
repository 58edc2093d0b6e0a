"""The exemplar memory: how many images of each class are kept, among which they are chosen, and what goes first."""

import pytest
import torch
from torch import Tensor

from holdfast.client.memory import candidates, quota, truncated, update_memory
from holdfast.methods.herding import herd
from holdfast.protocol.state import Holdings


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def plain(held: Holdings) -> dict[str, list[int]]:
    return {name: some.tolist() for name, some in held.items()}


class Largest:
    """A ranking by hand: larger ids first. It writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[int], int]] = []

    def __call__(self, name: str, some: Tensor, count: int) -> Tensor:
        self.asked.append((name, some.tolist(), count))
        return some.sort(descending=True).values[:count]


@pytest.mark.parametrize(
    ("size", "classes", "expected"), [(12, 1, 12), (12, 5, 2), (12, 12, 1), (12, 13, 0), (0, 3, 0), (12, 0, 0)]
)
def test_every_class_has_the_same_quota(size: int, classes: int, expected: int) -> None:
    assert quota(size, classes) == expected


def test_candidates_are_the_data_and_then_older_exemplars_that_are_not_in_it() -> None:
    memory = {"owl": ids(7, 3, -2).int(), "fox": ids(9).int()}
    found = candidates(memory, {"owl": ids(1, 3, 2), "elk": ids(5, 4)})
    # In the order of the data, then in that of the memory; fox is not in the data, so nothing of it is chosen anew.
    assert plain(found) == {"owl": [1, 3, 2, 7, -2], "elk": [5, 4]}
    assert list(found) == ["owl", "elk"]
    assert all(some.dtype == torch.int64 for some in found.values())
    assert candidates(memory, {}) == {}


def test_an_update_ranks_what_has_come_and_cuts_what_was_there() -> None:
    memory = {"owl": ids(7, 3, 5, 1).int(), "fox": ids(9, 2, 8, 6).int()}
    data = {"owl": ids(4, 7, 11), "elk": ids(20, 22, 21)}
    best = Largest()
    after = update_memory(memory, data, 9, best)
    assert best.asked == [("owl", [4, 7, 11, 3, 5, 1], 3), ("elk", [20, 22, 21], 3)]  # 9 over three classes
    # fox loses its last ones, whatever a ranking would say of them; old classes keep their places.
    assert plain(after) == {"owl": [11, 7, 5], "fox": [9, 2, 8], "elk": [22, 21, 20]}
    assert list(after) == ["owl", "fox", "elk"]
    assert all(some.dtype == torch.int32 for some in after.values())
    assert plain(memory) == {"owl": [7, 3, 5, 1], "fox": [9, 2, 8, 6]}
    assert plain(data) == {"owl": [4, 7, 11], "elk": [20, 22, 21]}


def test_a_first_update_may_keep_fewer_than_the_quota_allows() -> None:
    assert plain(update_memory({}, {"owl": ids(2, 1), "elk": ids(3, 4, 5, 6, 7)}, 8, Largest())) == {
        "owl": [2, 1],
        "elk": [7, 6, 5, 4],
    }


def test_an_update_with_nothing_changes_nothing() -> None:
    memory = {"owl": ids(7, 3).int(), "fox": ids(9, 2).int()}
    assert plain(update_memory(memory, {}, 4, Largest())) == plain(memory)
    assert update_memory({}, {}, 4, Largest()) == {}


def test_without_room_every_class_is_known_and_nothing_is_kept() -> None:
    best = Largest()
    after = update_memory({"owl": ids(7).int()}, {"elk": ids(1, 2)}, 1, best)
    assert plain(after) == {"owl": [], "elk": []}
    assert [count for _, _, count in best.asked] == [0]


def test_truncation_keeps_the_best_of_every_class() -> None:
    memory = {"owl": ids(7, 3, 5, 1), "fox": ids(9), "elk": ids(2, 8, 6)}
    assert plain(truncated(memory, 8)) == {"owl": [7, 3], "fox": [9], "elk": [2, 8]}
    assert plain(truncated(memory, 100)) == plain(memory)
    assert plain(truncated(memory, 2)) == {"owl": [], "fox": [], "elk": []}
    assert truncated({}, 5) == {}


@pytest.mark.parametrize("seed", range(5))
def test_an_update_is_the_truncation_of_a_deeper_ranking(seed: int) -> None:
    """Which is why a simulation may rank a class once for clients with different quotas."""
    rng = torch.Generator().manual_seed(seed)
    features = torch.randn(60, 6, generator=rng)
    size = 30

    def herded(_: str, some: Tensor, count: int) -> Tensor:
        return some[herd(features[some], count)]

    def deeper(_: str, some: Tensor, count: int) -> Tensor:
        return herded(_, some, 2 * count + 3)

    arrivals = [{"owl": torch.arange(20), "fox": torch.arange(20, 30)}, {"elk": torch.arange(30, 50)}]
    arrivals += [{"hen": torch.arange(50, 60), "cow": torch.randperm(50, generator=rng)[:7]}]
    memory: Holdings = {}
    for data in arrivals:
        after = update_memory(memory, data, size, herded)
        assert plain(after) == plain(update_memory(memory, data, size, deeper))
        memory = after
    # One class after another and all at once come to the same, as long as no class comes again.
    alone = {name: herded(name, some, size) for data in arrivals for name, some in data.items()}
    assert plain(memory) == plain(truncated(alone, size))
    assert [len(some) for some in memory.values()] == [6, 6, 6, 6, 6]
