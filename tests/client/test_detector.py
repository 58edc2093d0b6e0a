"""Detectors: what they notice, what they miss, and that nothing is lost by either."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.client.detector import (
    IMAGES,
    CorrelationDetector,
    Detector,
    History,
    OracleDetector,
    ThresholdDetector,
    correlation,
    detector_of,
    observation_of,
)
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.losses import entropy
from holdfast.protocol.messages import Broadcast, InferenceRequest
from holdfast.results.summary import detection
from holdfast.server.clients import Opened
from holdfast.simulation.federation import Federation, SimulatedClients
from holdfast.simulation.rounds import run_rounds

RNG = np.random.Generator(np.random.PCG64(1))


@pytest.fixture(autouse=True)
def _same_chance_for_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RNG", np.random.Generator(np.random.PCG64(1)))


def asked(detector: Detector, rounds: list[np.ndarray | None]) -> list[int]:
    """The rounds in which a client with these entropies is alarmed; without images it observes nothing (N14)."""
    found: list[int] = []
    history: History = ()
    for round_index, values in enumerate(rounds):
        if values is not None:
            alarm, history = detector.decide(history, observation_of(values))
            found += [round_index] * alarm
    return found


def flat(*means: float | None) -> list[np.ndarray | None]:
    return [None if mean is None else np.full(4, mean) for mean in means]


def test_the_papers_threshold() -> None:
    assert asked(ThresholdDetector(), flat(1.3, 0.2, 1.39, 1.41, 0.1)) == [0]
    assert asked(ThresholdDetector(), flat(1.3, 0.2, 1.4, 2.61)) == [0, 2, 3]  # at least 1.2
    assert asked(ThresholdDetector(), flat(1.1, 1.2, 2.3)) == []  # the first value is a rise from 0
    # Without images the last value is carried on.
    assert asked(ThresholdDetector(), flat(1.5, 0.2, None, None, 1.5)) == [0, 4]
    assert asked(ThresholdDetector(), flat(np.log(3), 0.0)) == []  # it cannot notice three classes or fewer (N13)


def same_images(rounds: int, images: int = 300) -> list[np.ndarray | None]:
    """Entropies of the same images under successive models: hard images stay hard; the level wanders."""
    hardness = RNG.gamma(2.0, 0.3, images)
    return [np.abs(hardness * RNG.uniform(0.5, 1.5) + 0.15 * RNG.standard_normal(images)) for _ in range(rounds)]


@pytest.mark.parametrize("classes", [2, 5, 10, 20])
def test_correlation_notices_other_images_whatever_the_number_of_classes(classes: int) -> None:
    """At least 99 in 100 at once; no false alarm."""
    ceiling, found = np.log(classes), []
    for _ in range(100):
        rounds = [*same_images(6), *same_images(5), None, *same_images(4)]
        rounds = [None if r is None else np.minimum(r, ceiling) for r in rounds]
        found += asked(CorrelationDetector(), rounds)
    assert set(found) == {0, 6, 12}
    assert len(found) >= 297


def test_correlation_is_not_misled_by_a_model_that_becomes_less_sure() -> None:
    values = same_images(1)[0]
    assert values is not None
    assert asked(CorrelationDetector(), [values * k for k in (1.0, 0.1, 0.5, 3.0, 0.01)]) == [0]


def test_correlation_leaves_out_two_rounds_after_an_alarm_but_for_another_number_of_images() -> None:
    first, second = same_images(3), same_images(3)
    assert asked(CorrelationDetector(), [first[0], first[1], *second]) == [0]
    assert asked(CorrelationDetector(), [*first, *second]) == [0, 3]
    smaller = same_images(3, images=200)
    assert asked(CorrelationDetector(), [first[0], *smaller]) == [0, 1]


@pytest.mark.parametrize("kind", ["auto", "fixed"])
def test_a_decision_depends_on_its_arguments_alone(kind: Any) -> None:
    """One detector may decide for any number of clients: what it remembers is in the history that it gives back."""
    rounds = [*same_images(4), *(values + 2 for values in same_images(4) if values is not None)]
    shared = detector_of(kind)
    histories: list[History] = [(), ()]
    found: list[list[int]] = [[], []]
    for round_index, values in enumerate(rounds):
        assert values is not None
        for client in (0, 1) if round_index >= 3 else (0,):  # the second comes later
            alarm, after = shared.decide(histories[client], observation_of(values))
            assert shared.decide(histories[client], observation_of(values))[0] == alarm
            histories[client] = after
            found[client] += [round_index] * alarm
    assert 4 in found[0]
    assert found[1]
    assert found[0] == asked(detector_of(kind), rounds)
    assert [n - 3 for n in found[1]] == asked(detector_of(kind), rounds[3:])
    assert max(map(len, histories)) <= 4  # what a client has to remember does not grow with the rounds


def test_the_oracle_never_decides_by_itself() -> None:
    oracle = detector_of("oracle")
    assert isinstance(oracle, OracleDetector)
    assert not oracle.observes
    assert asked(oracle, [*same_images(3), *same_images(3)]) == []
    assert all(detector_of(kind).observes for kind in ("auto", "fixed"))


def test_an_observation_has_the_mean_of_all_images_and_the_entropies_of_the_first() -> None:
    values = RNG.gamma(2.0, 0.3, IMAGES + 100)
    values[IMAGES:] += 5
    observation = observation_of(values)
    assert observation.mean == pytest.approx(values.mean())
    np.testing.assert_array_equal(observation.images, values[:IMAGES])


@pytest.mark.parametrize("images", [1, 2, 5])
def test_correlation_copes_with_hardly_any_images(images: int) -> None:
    assert asked(CorrelationDetector(), same_images(5, images))[0] == 0
    assert asked(CorrelationDetector(), [np.zeros(images)] * 4) == [0]


@pytest.mark.parametrize("spread", [0.01, 0.1, 0.5])
def test_classes_that_come_in_blocks_do_not_look_alike(spread: float) -> None:
    """Other images in blocks of the same sizes, whose entropies rise alike from class to class."""
    blocks, found = np.repeat([0.2, 1.0, 1.8], 100), []
    for _ in range(200):
        a, b = (blocks + spread * RNG.standard_normal(300) for _ in range(2))
        assert np.corrcoef(a, b)[0, 1] > 0.5
        found.append(correlation(a, b))
        assert correlation(a, 2 * a + 1) == pytest.approx(1.0)
    assert abs(np.mean(found)) < 0.05
    assert np.quantile(found, 0.99) < 0.2  # below which images are others


def federation_of(small: dict[str, Any], detector: str) -> Federation:
    method = {"name": "lga", "detector": detector, "iterations": 2, "perturb_steps": 1, "shares": "when_selected"}
    config = load_config({**small, "plan": {**small["plan"], "rounds": 4}, "method": method})
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


class ChosenAlarms(SimulatedClients):
    """Clients whose alarms a test chooses: client -> rounds."""

    def __init__(self, federation: Federation, engine: Serial, alarms: dict[int, set[int]]) -> None:
        super().__init__(federation, engine, federation.work())
        self.alarms = alarms

    def open_round(self, broadcast: Broadcast, selected: Sequence[int], observers: np.ndarray) -> Opened:
        chosen = [client for client, rounds in sorted(self.alarms.items()) if broadcast.round_index in rounds]
        observe = self.population.observe

        def observe_and_be_told(*arguments: Any) -> tuple[int, np.ndarray]:
            return observe(*arguments)[0], np.array(chosen, dtype=np.int64)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.population, "observe", observe_and_be_told)
            return super().open_round(broadcast, selected, observers)


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
    plan, data, server, population = federation.plan, federation.data, federation.server, federation.population
    server.grow([data.classes[c] for c in plan.tasks[0]])
    request = InferenceRequest("entropies", server.registry.growths, server.weights)
    work, everybody = federation.work(), np.arange(len(plan.arrivals))
    population.begin_round(0)
    observed, alarmed = population.observe(
        CorrelationDetector(), everybody, lambda groups: Serial().infer(work, request, groups)
    )
    for client in plan.present(0):
        (observation,) = population.histories[population.group[client]]
        rows = torch.cat([data.train.by_class[c] for c in plan.arrivals[client][0].classes])
        server.model.eval()
        with torch.no_grad():
            alone = entropy(server.model(federation.enrolment.transform.plain(data.train.images[rows])).logits)
        assert observation.mean == pytest.approx(float(alone.mean()), rel=1e-5)
        np.testing.assert_allclose(observation.images, alone.numpy(), rtol=1e-4)
    assert alarmed.tolist() == plan.present(0)
    assert observed == len(alarmed) < len(everybody)
    assert all(population.histories[population.group[client]] == () for client in set(everybody) - set(alarmed))


def test_missed_and_repeated_alarms_lose_nothing(small: dict[str, Any]) -> None:
    """A client that misses a transition keeps it in its queue; one that is alarmed again has nothing left to do."""
    federation = federation_of(small, "auto")
    plan = federation.plan
    client = next(c for c, a in enumerate(plan.arrivals) if len([x for x in a if x.classes]) == 3)
    rounds = [a.round_index for a in plan.arrivals[client] if a.classes]
    alarms = {c: {a.round_index for a in arrivals if a.classes} for c, arrivals in enumerate(plan.arrivals)}
    alarms[client] = {rounds[0], rounds[0] + 1, rounds[2]}  # a repetition, and the second transition missed
    counting = Counting()
    lines = [d.line for d in run_rounds(federation, counting, clients=ChosenAlarms(federation, counting, alarms))]
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
    held = {federation.data.classes[c] for a in plan.arrivals[client] for c in a.classes}
    assert set(federation.population.state(client).memory) == held
    for sharer, count in counting.shares.items():
        assert count <= len({c for a in plan.arrivals[sharer] for c in a.classes})
    assert sum(counting.shares.values()) > 0


@pytest.mark.parametrize("detector", ["auto", "fixed", "oracle"])
def test_the_record_tells_how_detectors_did(small: dict[str, Any], detector: str) -> None:
    federation = federation_of(small, detector)
    lines = [done.line for done in run_rounds(federation, Serial())]
    found = detection(lines)
    plan = federation.plan
    assert found["transitions"] == sum(bool(a.classes) for arrivals in plan.arrivals for a in arrivals)
    if detector == "oracle":
        assert (found["hits"], found["false_alarms"]) == (found["transitions"], 0)
    if detector == "fixed":
        assert lines[0]["detector"]["hits"] == []  # ln 2 < 1.2: it cannot notice two classes at first contact (N13)
