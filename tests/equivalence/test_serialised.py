"""States and messages that travel as safetensors and JSON give the same bits as those that stay in memory."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch

from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, plan_of
from holdfast.federation.client import ClientWork
from holdfast.federation.messages import Job, Reply, State, pack, unpack
from holdfast.rounds import Federation, play


class ThroughBytes:
    """Everything that enters or leaves a client goes through bytes."""

    def map(self, work: ClientWork, states: Sequence[State], jobs: Iterable[Job]) -> Iterator[tuple[State, Reply]]:
        for state, job in zip(states, jobs, strict=True):
            after, reply = work(State.from_bytes(state.to_bytes()), Job.from_bytes(job.to_bytes()))
            yield State.from_bytes(after.to_bytes()), Reply.from_bytes(reply.to_bytes())


def played(settings: dict[str, Any], engine: Any) -> tuple[Federation, list[dict[str, Any]]]:
    config = load_config(settings)
    data = load_data(config.data)
    federation = build_federation(config, data, plan_of(config, data))
    lines = [{k: v for k, v in played.line.items() if k != "seconds"} for played in play(federation, engine)]
    return federation, lines


@pytest.mark.parametrize("growth", ["schedule", "announce"])
def test_a_round_trip_changes_no_bit(small: dict[str, Any], growth: str) -> None:
    settings = {**small, "plan": {**small["plan"], "growth": growth}, "method": {"name": "fedavg", "replay": True}}
    direct, lines = played(settings, Serial())
    travelled, travelled_lines = played(settings, ThroughBytes())
    assert lines == travelled_lines
    for name, tensor in direct.server.weights.items():
        assert torch.equal(tensor, travelled.server.weights[name]), name
    for client, state in direct.states.items():
        other = travelled.states[client]
        assert (state.stored, list(state.memory)) == (other.stored, list(other.memory))
        assert all(torch.equal(rows, other.memory[c]) for c, rows in state.memory.items())
    assert any(state.memory for state in direct.states.values())


def test_client_work_changes_neither_state_nor_job(small: dict[str, Any]) -> None:
    federation, _ = played({**small, "method": {"name": "fedavg", "replay": True}}, Serial())

    class Watching:
        def map(self, work: ClientWork, states: Sequence[State], jobs: Iterable[Job]) -> Iterator[tuple[State, Reply]]:
            for state, job in zip(states, jobs, strict=True):
                before = state.to_bytes(), job.to_bytes()
                outcome = work(state, job)
                again = work(state, job)
                assert (state.to_bytes(), job.to_bytes()) == before
                assert outcome[1].to_bytes() == again[1].to_bytes()
                yield outcome

    watched, _ = played({**small, "method": {"name": "fedavg", "replay": True}}, Watching())
    for name, tensor in federation.server.weights.items():
        assert torch.equal(tensor, watched.server.weights[name]), name


def test_a_blob_of_another_kind_is_refused() -> None:
    blob = pack("reply", {"x": torch.zeros(2)}, {"samples": 1})
    with pytest.raises(ValueError, match="expected a job"):
        unpack("job", blob)


def test_notes_travel_with_the_state() -> None:
    state = State(3, {7: torch.tensor([4, 2], dtype=torch.int32)}, 1, {"importance": torch.ones(2, 3)})
    back = State.from_bytes(state.to_bytes())
    assert (back.client, back.stored) == (3, 1)
    assert torch.equal(back.memory[7], state.memory[7])
    assert torch.equal(back.notes["importance"], torch.ones(2, 3))
