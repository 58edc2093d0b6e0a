"""Detectors: what they notice, what they miss, and that nothing is lost by either."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.client.detector import Auto, Fixed, Observation, Observed, together
from holdfast.client.training import ClientWork
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.losses import entropy
from holdfast.models.passes import Question
from holdfast.results.summary import detection
from holdfast.simulation.rounds import Federation, play

RNG = np.random.Generator(np.random.PCG64(1))


@pytest.fixture(autouse=True)
def _same_chance_for_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RNG", np.random.Generator(np.random.PCG64(1)))


def seen(values: np.ndarray) -> Observation:
    return Observation(float(values.mean()), values)


def asked(detector: Any, rounds: list[np.ndarray | None]) -> list[int]:
    """The rounds in which a client with these entropies is alarmed."""
    found = []
    for number, values in enumerate(rounds):
        # Client 0 never has images; client 1 is the one in question.
        observed = Observed(np.array([-1, -1 if values is None else 0]), [] if values is None else [seen(values)])
        alarmed = detector.notice(number, lambda observed=observed: observed)
        assert 0 not in alarmed
        found += [number] * (1 in alarmed)
    return found


def flat(*means: float | None) -> list[np.ndarray | None]:
    return [None if mean is None else np.full(4, mean) for mean in means]


def test_the_papers_threshold() -> None:
    assert asked(Fixed(), flat(1.3, 0.2, 1.39, 1.41, 0.1)) == [0]
    assert asked(Fixed(), flat(1.3, 0.2, 1.4, 2.61)) == [0, 2, 3]  # at least 1.2
    assert asked(Fixed(), flat(1.1, 1.2, 2.3)) == []  # the first value is a rise from 0
    assert asked(Fixed(), flat(1.5, 0.2, None, None, 1.5)) == [0, 4]  # without images the last value is carried on
    assert asked(Fixed(), flat(np.log(3), 0.0)) == []  # it cannot notice three classes or fewer (N13)


def same_images(rounds: int, images: int = 300) -> list[np.ndarray | None]:
    """Entropies of the same images under successive models: hard images stay hard; the level wanders."""
    hardness = RNG.gamma(2.0, 0.3, images)
    return [np.abs(hardness * RNG.uniform(0.5, 1.5) + 0.15 * RNG.standard_normal(images)) for _ in range(rounds)]


@pytest.mark.parametrize("classes", [2, 5, 10, 20])
def test_auto_notices_other_images_whatever_the_number_of_classes(classes: int) -> None:
    """At least 99 in 100 at once; no false alarm."""
    ceiling, found = np.log(classes), []
    for _ in range(100):
        rounds = [*same_images(6), *same_images(5), None, *same_images(4)]
        rounds = [None if r is None else np.minimum(r, ceiling) for r in rounds]
        found += asked(Auto(), rounds)
    assert set(found) == {0, 6, 12}
    assert len(found) >= 297


def test_auto_is_not_misled_by_a_model_that_becomes_less_sure() -> None:
    values = same_images(1)[0]
    assert values is not None
    assert asked(Auto(), [values * k for k in (1.0, 0.1, 0.5, 3.0, 0.01)]) == [0]


def test_auto_leaves_out_two_rounds_after_an_alarm_but_for_another_number_of_images() -> None:
    first, second = same_images(3), same_images(3)
    assert asked(Auto(), [first[0], first[1], *second]) == [0]
    assert asked(Auto(), [*first, *second]) == [0, 3]
    smaller = same_images(3, images=200)
    assert asked(Auto(), [first[0], *smaller]) == [0, 1]


@pytest.mark.parametrize("images", [1, 2, 5])
def test_auto_copes_with_hardly_any_images(images: int) -> None:
    assert asked(Auto(), same_images(5, images))[0] == 0
    assert asked(Auto(), [np.zeros(images)] * 4) == [0]


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5])
def test_classes_that_come_in_blocks_do_not_look_alike(spread: float) -> None:
    """Other images in blocks of the same sizes, whose entropies rise alike from class to class."""
    blocks, found = np.repeat([0.2, 1.0, 1.8], 100), []
    for _ in range(200):
        a, b = (blocks + spread * RNG.standard_normal(300) for _ in range(2))
        assert np.corrcoef(a, b)[0, 1] > 0.5
        found.append(together(a, b))
        assert together(a, 2 * a + 1) == pytest.approx(1.0)
    assert abs(np.mean(found)) < 0.05
    assert np.quantile(found, 0.99) < 0.2  # below which images are others


def federation_of(small: dict[str, Any], detector: str) -> Federation:
    method = {"name": "lga", "detector": detector, "iterations": 2, "perturb_steps": 1, "shares": "when_selected"}
    config = load_config({**small, "plan": {**small["plan"], "rounds": 4}, "method": method})
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


class Listening:
    """Alarms that a test chooses: client -> rounds."""

    def __init__(self, alarms: dict[int, set[int]]) -> None:
        self.alarms = alarms

    def notice(self, number: int, observe: Any) -> np.ndarray:
        observe()
        return np.array([client for client, rounds in self.alarms.items() if number in rounds], dtype=np.int64)


class Counting(Serial):
    """Serial, but counts how many prototypes each client shares."""

    def __init__(self) -> None:
        self.shares: dict[int, int] = {}

    def map(self, work: Any, states: Any, inboxes: Any) -> Any:
        for outcome in super().map(work, states, inboxes):
            client = outcome[0].client
            self.shares[client] = self.shares.get(client, 0) + len(outcome[2])
            yield outcome


def test_entropies_are_means_over_each_clients_own_images(small: dict[str, Any]) -> None:
    federation = federation_of(small, "auto")
    world, server = federation.world, federation.server
    server.grow(tuple(world.classes[c] for c in world.plan.tasks[0]))
    question = Question("entropies", server.registry.growths, server.weights)
    observed = federation.population.observe(0, lambda rows: Serial().ask(ClientWork(world), question, rows))
    for client in world.plan.present(0):
        observation = observed.seen[observed.which[client]]
        rows = world.holding(world.plan.arrivals[client][0])
        server.model.eval()
        with torch.no_grad():
            alone = entropy(server.model(world.transform.plain(world.train.images[rows])).logits)
        assert observation.mean == pytest.approx(float(alone.mean()), rel=1e-5)
        np.testing.assert_allclose(observation.images, alone.numpy(), rtol=1e-4)
    assert np.flatnonzero(observed.which >= 0).tolist() == world.plan.present(0)


def test_missed_and_repeated_alarms_lose_nothing(small: dict[str, Any]) -> None:
    """A client that misses a transition keeps it in its queue; one that is alarmed again has nothing left to do."""
    federation = federation_of(small, "oracle")
    plan = federation.world.plan
    client = next(c for c, a in enumerate(plan.arrivals) if len([x for x in a if x.classes]) == 3)
    rounds = [a.round for a in plan.arrivals[client] if a.classes]
    alarms = {c: {a.round for a in arrivals if a.classes} for c, arrivals in enumerate(plan.arrivals)}
    alarms[client] = {rounds[0], rounds[0] + 1, rounds[2]}  # a repetition, and the second transition missed
    federation = replace(federation, detector=Listening(alarms))
    counting = Counting()
    lines = [done.line for done in play(federation, counting)]
    events = [line["detector"] for line in lines]
    assert client in events[rounds[0]]["hits"]
    assert events[rounds[0] + 1]["false_alarms"] == [client]
    assert events[rounds[1]]["misses"] == [client]
    assert events[rounds[2]]["late"] == [[client, rounds[2] - rounds[1]]]
    assert federation.population.state(client).noticed == len(plan.arrivals[client])
    found = detection(lines)
    assert found["false_alarms"] == 1
    assert found["late"] == 1
    assert found["never"] == 0
    assert found["hits"] == found["transitions"] - 1  # type: ignore[operator]
    # All classes are remembered, and nobody shares one twice.
    assert set(federation.population.state(client).memory) == {c for a in plan.arrivals[client] for c in a.classes}
    for sharer, count in counting.shares.items():
        assert count <= len({c for a in plan.arrivals[sharer] for c in a.classes})
    assert sum(counting.shares.values()) > 0


@pytest.mark.parametrize("detector", ["auto", "fixed", "oracle"])
def test_the_record_tells_how_detectors_did(small: dict[str, Any], detector: str) -> None:
    federation = federation_of(small, detector)
    lines = [done.line for done in play(federation, Serial())]
    found = detection(lines)
    plan = federation.world.plan
    assert found["transitions"] == sum(bool(a.classes) for arrivals in plan.arrivals for a in arrivals)
    if detector == "oracle":
        assert (found["hits"], found["false_alarms"]) == (found["transitions"], 0)
    if detector == "fixed":
        assert lines[0]["detector"]["hits"] == []  # ln 2 < 1.2: it cannot notice two classes at first contact (N13)
