"""What travels where: the global server's channel never carries a prototype or the encoding network."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from holdfast.client.training import ClientWork, Outcome
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.experiment import build_federation, bytes_of, plan_of
from holdfast.protocol.codec import unpack
from holdfast.protocol.messages import Inbox, Job, PrototypeShare
from holdfast.protocol.state import ClientState
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds
from holdfast.simulation.traffic import by_task


class Wiretap(Serial):
    """Hears every byte on both channels."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.server: list[bytes] = []
        self.shares: list[PrototypeShare] = []

    def map(self, work: ClientWork, states: Sequence[ClientState], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        for state, inbox in zip(states, inboxes, strict=True):
            outcome = work(state, inbox)
            self.jobs.append(inbox.job)
            self.server += [inbox.job.to_bytes(), outcome[1].to_bytes()]
            self.shares += outcome[2]
            yield outcome

    def heard(self) -> np.ndarray:
        """Every piece of eight bytes, which is two floats, at every place where a float can begin."""
        pieces = [
            np.frombuffer(blob[offset : offset + (len(blob) - offset) // 8 * 8], dtype=np.uint64)
            for blob in self.server
            for offset in (0, 4)
        ]
        return np.unique(np.concatenate(pieces))


def pieces(tensor: Tensor) -> np.ndarray:
    """The same of a tensor, without zeros."""
    blob = tensor.detach().contiguous().numpy().tobytes()
    found = np.frombuffer(blob[: len(blob) // 8 * 8], dtype=np.uint64)
    return found[found != 0]


def known(these: np.ndarray, heard: np.ndarray) -> np.ndarray:
    """Which of these pieces are among those heard (which are sorted)."""
    places = np.searchsorted(heard, these).clip(max=len(heard) - 1)
    return np.asarray(heard[places] == these)


def settings_of(small: dict[str, Any]) -> dict[str, Any]:
    return {**small, "method": {"name": "lga", "detector": "oracle", "iterations": 2, "perturb_steps": 1}}


@pytest.fixture(scope="module")
def tapped(small: dict[str, Any]) -> tuple[Federation, Wiretap]:
    """A federation that has played its rounds, and what was heard of it."""
    config = load_config(settings_of(small))
    data = load_data(config.data)
    federation, tap = build_federation(config, data, plan_of(config, data)), Wiretap()
    list(run_rounds(federation, tap))
    return federation, tap


def test_the_servers_channel_carries_no_share_and_no_encoder(tapped: tuple[Federation, Wiretap]) -> None:
    federation, tap = tapped
    assert tap.shares
    assert federation.selector.encoder is not None
    heard = tap.heard()
    secrets = [part for share in tap.shares for part in (*share.gradient.values(), share.variance)]
    secrets += list(federation.selector.encoder.parameters())
    for secret in secrets:
        assert not known(pieces(secret), heard).any()
    for weights in tap.jobs[-1].weights.values():  # the tap would have heard them
        if weights.is_floating_point():
            assert known(pieces(weights), heard).all()
    assert not hasattr(federation.server, "encoder")


def test_a_share_says_neither_who_nor_which_class(tapped: tuple[Federation, Wiretap]) -> None:
    federation, tap = tapped
    assert federation.selector.encoder is not None
    parameters = {name for name, _ in federation.selector.encoder.named_parameters()}
    assert tap.shares
    for share in tap.shares:
        tensors, facts = unpack("share", share.to_bytes())
        assert set(facts) == {"kind", "count"}
        assert set(tensors) == {*parameters, "variance"}


@pytest.mark.parametrize("name", ["podnet", "icarl"])
def test_visits_extras_and_what_is_not_sent_are_counted(small: dict[str, Any], name: str) -> None:
    """PODNet asks before and after each task and does not send old proxies; iCaRL with a head does neither."""
    config = load_config({**small, "method": {"name": name}})
    data = load_data(config.data)
    plan = plan_of(config, data)
    federation = build_federation(config, data, plan)
    extras = [0]

    class Counting(Serial):
        def map(self, work: ClientWork, states: Sequence[ClientState], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
            for outcome in super().map(work, states, inboxes):
                found = outcome[1].extras
                extras[-1] += sum(t.numel() * t.element_size() for t in found.tensors.values()) if found else 0
                yield outcome

    lines = []
    for done in run_rounds(federation, Counting()):
        lines.append(done.line)
        extras.append(0)
    assert [line["bytes"]["server"]["extras"] for line in lines] == extras[:-1]
    assert (sum(extras) > 0) == (name == "podnet")
    for line, expected in zip(lines, bytes_of(config, data, plan), strict=True):
        assert line["bytes"]["server"]["down"] == expected["server"]["down"]
        if len(line["trained"]) == len(line["selected"]):
            assert line["bytes"]["server"]["up"] == expected["server"]["up"]


def test_the_record_counts_what_was_sent_and_arithmetic_foretells_it(small: dict[str, Any]) -> None:
    config = load_config(settings_of(small))
    data = load_data(config.data)
    plan = plan_of(config, data)
    federation = build_federation(config, data, plan)
    lines = [done.line for done in run_rounds(federation, Wiretap())]
    foretold = bytes_of(config, data, plan)
    for line, expected in zip(lines, foretold, strict=True):
        assert line["bytes"]["proxy"] == expected["proxy"]
        assert line["bytes"]["server"]["down"] == expected["server"]["down"]
        if len(line["trained"]) == len(line["selected"]):
            assert line["bytes"]["server"]["up"] == expected["server"]["up"]
    totals = by_task(plan, foretold)
    assert sum(t["shares"] for t in totals) == sum(line["bytes"]["proxy"]["shares"] for line in lines) > 0
