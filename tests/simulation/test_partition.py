"""How a class's images are dealt to its holders."""

import numpy as np
import pytest

from holdfast.seeding import generator
from holdfast.simulation.partition import split


def test_an_even_split_gives_everybody_as_many_but_one() -> None:
    parts = split(list(range(103)), 4, 0.0, generator(0))
    assert sorted(map(len, parts)) == [25, 26, 26, 26]
    assert sorted(image for part in parts for image in part) == list(range(103))


def test_the_smaller_alpha_the_more_uneven() -> None:
    def spread(alpha: float) -> float:
        return float(
            np.mean([np.std([len(p) for p in split(list(range(1000)), 5, alpha, generator(s))]) for s in range(20)])
        )

    assert spread(0.1) > 1.5 * spread(1.0) > 1.5 * 1.5 * spread(100.0)


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_more_holders_than_images_leave_some_with_none(alpha: float) -> None:
    parts = split([7, 8, 9], 5, alpha, generator(1))
    assert len(parts) == 5
    assert sorted(image for part in parts for image in part) == [7, 8, 9]
