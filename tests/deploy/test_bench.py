"""`holdfast bench deploy` on one small message."""

import pytest

pytest.importorskip("flwr")

from holdfast.bench import deploy


def test_bytes_on_the_wire_are_those_of_the_messages() -> None:
    told: list[str] = []
    report = deploy.measure(told.append, sites=[2], megabytes=[1.0])
    [ratio] = report.ratios
    assert ratio.holds
    assert 1.0 < ratio.value < 1.02
    facts = report.facts["2 sites, 1 MB"]
    assert 0 < facts["round"] < 60
    assert len(told) == 2
