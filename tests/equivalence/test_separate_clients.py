"""The test that carries the design: separate clients, each with private images, equal the simulation bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from separate import SeparateClients

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.methods import METHODS
from holdfast.protocol.codec import kind_of
from holdfast.simulation.federation import Federation, SimulatedClients
from holdfast.simulation.rounds import run_rounds

QUICK: dict[str, Any] = {"iterations": 3, "perturb_steps": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lga", "lga_paper", "lga_code", "glfc"), QUICK),
    "dytox": {"width": 32, "heads": 4, "depth": 2, "tune_epochs": 2},
    "fedavg": {"replay": True},
    "podnet": {"inference": "nme", "tune_epochs": 2},
    "afc": {"tune_epochs": 2},
    "icarl": {"inference": "nme"},
}


def federation_of(settings: dict[str, Any]) -> Federation:
    config = load_config(settings)
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


class Heard(SimulatedClients):
    """The simulated clients, with what they send written down."""

    def __init__(self, federation: Federation) -> None:
        super().__init__(federation, Serial(), federation.work())
        self.replies: list[bytes] = []
        self.shares: list[bytes] = []

    def train(self, *arguments: Any) -> Any:
        answers, shares = super().train(*arguments)
        self.replies += [answer.to_bytes() for _, answer in answers]
        self.shares += [share.to_bytes() for _, share in shares]
        return answers, shares

    def collect_extras(self, *arguments: Any) -> Any:
        answers = super().collect_extras(*arguments)
        self.replies += [answer.to_bytes() for _, answer in answers]
        return answers


def compare(settings: dict[str, Any], folder: Path, keep_pixels: bool = False) -> None:
    together, apart = federation_of(settings), federation_of(settings)
    simulated = Heard(together)
    separate = SeparateClients(apart, folder, keep_pixels, as_billed=True)
    first = run_rounds(together, Serial(), clients=simulated)
    second = run_rounds(apart, Serial(), clients=separate)
    for one, other in zip(first, second, strict=True):
        assert {**one.line, "seconds": 0} == {**other.line, "seconds": 0}
        for name, tensor in together.server.weights.items():
            assert torch.equal(tensor, apart.server.weights[name]), (one.line["round"], name)
    replies = [blob for blob in separate.to_server if kind_of(blob) in ("reply", "failure")]
    assert replies == simulated.replies
    assert separate.to_proxy == simulated.shares
    for number, private in enumerate(separate.private):
        client = separate.client(number)
        if keep_pixels:
            expected = together.population.state(number)
            for name, ids in expected.memory.items():
                kept = client.images.pixels(client.state.memory[name].long())
                assert torch.equal(kept, together.data.train.pixels(ids.long())), (number, name)
            assert list(client.state.memory) == list(expected.memory)
        else:
            assert private.with_rows(client.state).to_bytes() == together.population.state(number).to_bytes(), number
    assert together.population.states


@pytest.mark.parametrize("name", METHODS)
def test_every_method(small: dict[str, Any], tmp_path: Path, name: str) -> None:
    plan = {**small["plan"], "partition": "dirichlet:0.5", "move_on": 0.6, "zo_data": "memory"}
    compare({**small, "seed": 3, "plan": plan, "method": {"name": name, **OPTIONS.get(name, {})}}, tmp_path)


THREE = ("fedavg", "lga", "podnet")
VARIANTS: dict[str, dict[str, Any]] = {
    "shared, irregular joins": {"join": "irregular"},
    "disjoint, announced": {"partition": "disjoint", "growth": "announce"},
    "dirichlet, irregular joins, announced": {"partition": "dirichlet:0.5", "join": "irregular", "growth": "announce"},
    "shared, only selected clients observe": {"observe": "selected"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", THREE)
def test_every_kind_of_federation(small: dict[str, Any], tmp_path: Path, name: str, variant: str) -> None:
    plan = {**small["plan"], "move_on": 0.6, **VARIANTS[variant]}
    compare({**small, "plan": plan, "method": {"name": name, **OPTIONS[name]}}, tmp_path)


def test_augmented_observations(small: dict[str, Any], tmp_path: Path) -> None:
    plan = {**small["plan"], "partition": "dirichlet:0.5", "join": "irregular"}
    compare({**small, "plan": plan, "method": {"name": "lga", **QUICK, "observed": "augmented"}}, tmp_path)


# Round, client, classes that come, classes that leave. Data changes in mid-task, stays or is replaced, a class comes to
# a client again (with images it has kept and others), leaves without another coming, a client has none.
STREAM = [
    (1, "east", "ab", ""),
    (1, "north", "bc", ""),
    (2, "south", "c", ""),
    (3, "east", "cd", "ab"),
    (4, "north", "", "bc"),
    (4, "south", "da", ""),
    (5, "east", "b", "cd"),
    (5, "north", "ab", ""),
    (6, "south", "", "c"),
    (6, "north", "c", "b"),
]


FAULTS: dict[str, Any] = {
    "drop": {"probability": 0.2},
    "delay": {"probability": 0.2, "seconds": 40},
    "duplicate": 0.2,
    "crash": {"clients": [2]},
    "label_flip": 0.5,
    "nan": 0.2,
    "scale": 0.2,
    "poison_share": 0.5,
    "bad_share": 0.2,
}


@pytest.mark.parametrize("name", THREE)
def test_where_much_goes_wrong(small: dict[str, Any], tmp_path: Path, name: str) -> None:
    """Crashes and wrong labels happen inside of each client, everything else on its way."""
    plan = {**small["plan"], "partition": "dirichlet:0.5", "move_on": 0.6, "deadline": 30.0, "quorum": 2}
    compare({**small, "seed": 3, "plan": plan, "faults": FAULTS, "method": {"name": name, **OPTIONS[name]}}, tmp_path)


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federated folder with an arrivals.toml."""
    top = tmp_path_factory.mktemp("stream")
    rng = np.random.Generator(np.random.PCG64(4))
    for client in {client for _, client, *_ in STREAM}:
        for name in {name for _, who, names, _ in STREAM for name in names if who == client}:
            place = top / "clients" / client / name
            place.mkdir(parents=True)
            shade = 40 + 50 * "abcd".index(name)
            for i in range(9):
                pixels = rng.integers(0, 60, (16, 16, 3)) + shade
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{i}.png")
    lines = [
        f"[[arrival]]\nround = {n}\nclient = '{who}'\nclasses = {list(names)}\nleaves = {list(leaves)}"
        for n, who, names, leaves in STREAM
    ]
    (top / "arrivals.toml").write_text("rounds = 7\n" + "\n".join(lines))
    return top


@pytest.mark.parametrize("keep_pixels", [False, True])
@pytest.mark.parametrize("growth", ["schedule", "announce"])
@pytest.mark.parametrize("name", THREE)
def test_a_stream(
    small: dict[str, Any], stream: Path, tmp_path: Path, name: str, growth: str, keep_pixels: bool
) -> None:
    """With ids alone, and with memories that keep the pixels of their exemplars."""
    settings = {
        "data": {"name": f"folder:{stream}", "size": 16},
        "plan": {"selected": 2, "rounds": 2, "memory": 10, "growth": growth},
        "train": {"epochs": 1, "batch": 4},
        "method": {"name": name, **OPTIONS[name]},
    }
    compare(settings, tmp_path, keep_pixels)
