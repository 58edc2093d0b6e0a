"""What `holdfast methods` says that clients send, against the messages of real runs."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.methods import METHODS
from holdfast.methods.sends import sends, sends_line
from holdfast.protocol.messages import Reply
from holdfast.simulation.federation import SimulatedClients
from holdfast.simulation.rounds import run_rounds

QUICK = {"iterations": 2, "perturb_steps": 1, "detector": "oracle"}  # who notices nothing shares nothing
OPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lga", "lga_paper", "lga_code", "glfc"), QUICK),
    "dytox": {"width": 32, "heads": 4, "depth": 2, "tune_epochs": 1},
    "podnet": {"tune_epochs": 1},
    "afc": {"tune_epochs": 1},
}
CASES = [*((name, OPTIONS.get(name, {})) for name in METHODS), ("icarl", {"inference": "nme"})]


class Listening(SimulatedClients):
    """The simulated clients, with all that they send."""

    replies: list[Reply]
    shares: int = 0

    def train(self, *arguments: Any) -> Any:
        replies, shares = super().train(*arguments)
        self.replies += [answer for _, answer in replies]
        self.shares += len(shares)
        return replies, shares

    def collect_extras(self, *arguments: Any) -> Any:
        replies = super().collect_extras(*arguments)
        self.replies += [answer for _, answer in replies]
        return replies


@pytest.mark.parametrize(("name", "options"), CASES)
def test_what_a_method_sends_is_what_its_clients_send(
    small: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    plan = {**small["plan"], "tasks": 2, "clients": 3, "rounds": 1, "class_share": 1.0, "move_on": 1.0}
    data_settings = {**small["data"], "classes": 4, "train_per_class": 6}
    config = load_config({**small, "data": data_settings, "plan": plan, "method": {"name": name, **options}})
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    clients = Listening(federation, Serial(), federation.work())
    clients.replies = []
    lines = [done.line for done in run_rounds(federation, Serial(), clients=clients)]
    said = sends(config.method)
    assert said["server"][0] == "its model"
    assert any(reply.weights for reply in clients.replies)
    kinds = {reply.extras.kind for reply in clients.replies if reply.extras}
    assert bool(kinds) == (len(said["server"]) > 1) == any(line["bytes"]["server"]["extras"] > 0 for line in lines)
    for word in {word for kind in kinds for word in kind.split(" and ")}:
        assert word in said["server"][1]
    assert bool(clients.shares) == bool(said["proxy"]) == any(line["bytes"]["proxy"]["shares"] > 0 for line in lines)


def test_the_command_says_it(holdfast: Callable[..., tuple[int, str, str]]) -> None:
    listed = json.loads(holdfast("methods", "--json")[1])
    assert set(listed) == set(METHODS)
    assert listed["fedavg"] == {"about": METHODS["fedavg"].about, "sends": {"server": ["its model"], "proxy": []}}
    assert "proxy: the gradient of a perturbed image" in " ".join(holdfast("methods")[1].split())
    assert sends_line(METHODS["bic"]()) == "server: its model, bias correction at a task's end"
