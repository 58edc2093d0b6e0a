"""How a client learns that new classes have come: the schedule tells it, or the entropies of its own images do."""

from collections.abc import Callable, Mapping
from typing import Protocol

from holdfast.data.schedule import Plan

Entropies = Mapping[int, float]  # client -> average entropy (Eq. 8) of its current images under the global model


class Detector(Protocol):
    """All clients' detectors together; each client's decision depends on its own entropies alone."""

    def notice(self, number: int, entropies: Callable[[], Entropies]) -> list[int]:
        """The clients that believe in this round that new classes have come to them."""
        ...


class Told:
    """The oracle: the schedule tells every client in the very round."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def notice(self, number: int, entropies: Callable[[], Entropies]) -> list[int]:
        return [client for client, arrival in self.plan.arriving.get(number, []) if arrival.classes]


class Fixed:
    """The paper's detector: the entropy has risen by 1.2 since the last round in which the client had images."""

    threshold = 1.2  # r_e

    def __init__(self) -> None:
        self.last: dict[int, float] = {}

    def notice(self, number: int, entropies: Callable[[], Entropies]) -> list[int]:
        now = entropies()
        risen = [client for client, h in now.items() if h - self.last.get(client, 0.0) >= self.threshold]
        self.last.update(now)
        return risen


class Auto(Fixed):
    pass
