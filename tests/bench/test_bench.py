"""The benchmarks run and report what they measured; how fast the machine is, no test checks."""

import json
from typing import Any

import pytest

from holdfast.bench import Ratio, Report, clients, data, engine, reconstruct
from holdfast.cli import app


def told(_: str) -> None:
    pass


def test_a_ratio_knows_its_bound() -> None:
    assert Ratio("speed", 1.7, 1.7).holds
    assert not Ratio("speed", 1.69, 1.7).holds
    assert Ratio("cost", 1.3, 1.3, at_most=True).holds
    assert not Ratio("cost", 1.31, 1.3, at_most=True).holds
    assert Ratio("cost", 2.0, 1.3, at_most=True).to_json() == {
        "name": "cost",
        "value": 2.0,
        "at_most": 1.3,
        "holds": False,
    }


def test_decoding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(data, "FILES", 300)
    monkeypatch.setattr(data, "cores", lambda: 2)
    app(["bench", "data", "--json"], standalone_mode=False)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    speeds = found["images_a_second"]
    assert found["ratios"][0]["value"] == pytest.approx(speeds["2"] / speeds["1"])


def test_reconstruction(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PROTOTYPES": 6, "SINGLE": 2, "PUBLISHED": 1, "STEPS": 2, "ITERATIONS": 4}.items():
        monkeypatch.setattr(reconstruct, name, value)
    found = reconstruct.measure(told)
    seconds = found.facts["seconds_an_image"]
    assert found.ratios[0].value == pytest.approx(seconds["one_by_one"] / seconds["together"])
    assert seconds["published"] > 0


def test_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CLIENTS": 2, "IMAGES": 4, "TEST": 4}.items():
        monkeypatch.setattr(engine, name, value)
    monkeypatch.setattr(engine, "COUNTED", {"convnet": 1})
    monkeypatch.setattr(engine, "EPOCHS", {"convnet": 1})
    monkeypatch.setattr(engine, "cores", lambda: 2)
    found: Report = engine.measure(["convnet"], told)
    [facts] = found.facts["networks"].values()
    assert facts["ratio"] == pytest.approx(facts["bare_seconds"][0] / facts["round_seconds"][0])
    assert 0 < sum(facts["phases"].values()) <= facts["round_seconds"][0] + 0.001


def test_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "IMAGES", 2)
    found = clients.run_one(500)
    assert found["clients"] == 500
    assert 0 < found["round_seconds"] <= found["slowest_seconds"]
    assert found["memory_bytes"] > 1e8
