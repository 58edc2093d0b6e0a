"""States and messages that travel as safetensors and JSON give the same bits as those that stay in memory."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.client.training import ClientWork, Outcome
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.protocol.codec import MalformedMessage, pack, unpack
from holdfast.protocol.messages import Inbox, InferenceRequest, Job, PrototypeShare, Reply, Teachers
from holdfast.protocol.state import ClientState
from holdfast.simulation.engine import ImageGroup
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds


class ThroughBytes(Serial):
    """Everything that enters or leaves a client goes through bytes."""

    def map(self, work: ClientWork, states: Sequence[ClientState], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        for state, inbox in zip(states, inboxes, strict=True):
            job, teachers = Job.from_bytes(inbox.job.to_bytes()), Teachers.from_bytes(inbox.teachers.to_bytes())
            after, reply, shares = work(ClientState.from_bytes(state.to_bytes()), Inbox(job, teachers))
            travelled = tuple(PrototypeShare.from_bytes(share.to_bytes()) for share in shares)
            yield ClientState.from_bytes(after.to_bytes()), Reply.from_bytes(reply.to_bytes()), travelled

    def infer(self, work: ClientWork, request: InferenceRequest, groups: Sequence[ImageGroup]) -> list[Tensor]:
        return super().infer(work, InferenceRequest.from_bytes(request.to_bytes()), groups)


def run(settings: dict[str, Any], engine: Any) -> tuple[Federation, list[dict[str, Any]]]:
    config = load_config(settings)
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    lines = [{k: v for k, v in one.line.items() if k != "seconds"} for one in run_rounds(federation, engine)]
    return federation, lines


METHODS: list[dict[str, Any]] = [{"name": "fedavg", "replay": True}, {"name": "lga", "iterations": 3}]


@pytest.mark.parametrize("growth", ["schedule", "announce"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_round_trip_changes_no_bit(small: dict[str, Any], method: dict[str, Any], growth: str) -> None:
    settings = {**small, "plan": {**small["plan"], "growth": growth}, "method": method}
    direct, lines = run(settings, Serial())
    travelled, travelled_lines = run(settings, ThroughBytes())
    assert lines == travelled_lines
    for name, tensor in direct.server.weights.items():
        assert torch.equal(tensor, travelled.server.weights[name]), name
    for client in range(len(direct.plan.arrivals)):
        state = direct.population.state(client)
        assert state.memory
        assert state.to_bytes() == travelled.population.state(client).to_bytes(), client


def test_a_blob_of_another_kind_is_refused() -> None:
    blob = pack("reply", {"x": torch.zeros(2)}, {"samples": 1})
    with pytest.raises(MalformedMessage, match="expected a job"):
        unpack("job", blob)


def test_notes_travel_with_the_state() -> None:
    state = ClientState(
        3,
        (("b", "a"), (), ("c",)),
        {"c": torch.tensor([9, 1])},
        {"b": torch.tensor([4, 2], dtype=torch.int32)},
        stored=1,
        noticed=3,
        shared=2,
        notes={"importance": torch.ones(2, 3)},
    )
    back = ClientState.from_bytes(state.to_bytes())
    assert (back.client, back.arrivals) == (3, (("b", "a"), (), ("c",)))
    assert (back.stored, back.noticed, back.shared) == (1, 3, 2)
    assert torch.equal(back.data["c"], state.data["c"])
    assert torch.equal(back.memory["b"], state.memory["b"])
    assert back.memory["b"].dtype == torch.int32
    assert torch.equal(back.notes["importance"], torch.ones(2, 3))
