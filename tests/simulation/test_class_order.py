"""Class orders."""

import numpy as np
import pytest

from holdfast.errors import HoldfastError
from holdfast.simulation.class_order import ICARL, class_order

NAMES = [str(c) for c in range(100)]

# What one permutation right after seeding with 1993 gives (docs/departures.md, Class orders).
BARE = [68, 56, 78, 8, 23, 84, 90, 65, 74, 76, 40, 89, 3, 92, 55, 9, 26, 80, 43, 38]


def test_natural() -> None:
    assert class_order("natural", NAMES) == list(range(100))


def test_icarl_is_what_its_script_draws() -> None:
    """The script shuffles the 500 indices of each of the 100 classes before it shuffles the classes."""
    rng = np.random.RandomState(1993)
    for _ in range(100):
        rng.shuffle(np.arange(500))
    order = np.arange(100)
    rng.shuffle(order)
    assert class_order("icarl", NAMES) == order.tolist() == ICARL


def test_seed1993_is_the_published_list_and_works_for_any_number() -> None:
    assert class_order("seed1993", NAMES)[:20] == BARE
    assert sorted(class_order("seed1993", NAMES[:37])) == list(range(37))
    # The list of ImageNet's 1,000 classes that circulates with the same seed begins so; 200 are TinyImageNet's.
    thousand = class_order("seed1993", [str(i) for i in range(1000)])
    assert thousand[:12] == [54, 7, 894, 512, 126, 337, 988, 11, 284, 493, 133, 783]
    assert sorted(thousand) == list(range(1000))
    assert class_order("seed1993", [str(i) for i in range(200)])[:6] == [168, 136, 51, 9, 183, 101]


def test_random_depends_on_its_seed() -> None:
    assert class_order("random:1", NAMES) == class_order("random:1", NAMES)
    assert class_order("random:1", NAMES) != class_order("random:2", NAMES)
    assert sorted(class_order("random:1", NAMES)) == list(range(100))


def test_lists_by_index_and_by_name() -> None:
    assert class_order([2, 0, 1], ["a", "b", "c"]) == [2, 0, 1]
    assert class_order(["c", "a", "b"], ["a", "b", "c"]) == [2, 0, 1]


@pytest.mark.parametrize(
    "order", ["icarl", "random", "random:x", "alphabetic", [0, 1], [0, 1, 1], [0, 1, 3], ["a", "b", "d"]]
)
def test_impossible_orders_are_refused(order: str | list[int] | list[str]) -> None:
    with pytest.raises(HoldfastError, match=r"plan\.order"):
        class_order(order, ["a", "b", "c"])
