"""How a client learns that new classes have come: the schedule tells it, or the entropies of its own images do."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from holdfast.data.schedule import Plan
from holdfast.federation.messages import Snapshot

IMAGES = 512  # a detector looks no further; more would not make it surer


@dataclass(frozen=True)
class Observation:
    """What a client's detector sees in a round: the entropies of its current images under the global model."""

    mean: float  # Eq. 8
    images: np.ndarray  # of the first of them, in the client's own order


class Detector(Protocol):
    """All clients' detectors together; each client's decision depends on its own entropies alone."""

    def notice(self, number: int, observe: Callable[[], Mapping[int, Observation]]) -> list[int]:
        """The clients that believe in this round that new classes have come to them."""
        ...

    def snapshot(self) -> dict[str, Snapshot]:
        """What it remembers, for a checkpoint."""
        ...

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        """Remembers it again."""
        ...


class Told:
    """The oracle: the schedule tells every client in the very round."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def notice(self, number: int, observe: Callable[[], Mapping[int, Observation]]) -> list[int]:
        return [client for client, arrival in self.plan.arriving.get(number, []) if arrival.classes]

    def snapshot(self) -> dict[str, Snapshot]:
        return {}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        pass


class Fixed:
    """The paper's detector: the average entropy has risen by 1.2 since the client last had images; it starts at 0."""

    threshold = 1.2  # r_e

    def __init__(self) -> None:
        self.last: dict[int, float] = {}

    def notice(self, number: int, observe: Callable[[], Mapping[int, Observation]]) -> list[int]:
        now = {client: seen.mean for client, seen in observe().items()}
        risen = [client for client, h in now.items() if h - self.last.get(client, 0.0) >= self.threshold]
        self.last.update(now)
        return risen

    def snapshot(self) -> dict[str, Snapshot]:
        return {"last": ({}, {"clients": list(self.last), "entropies": list(self.last.values())})}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        facts = parts["last"][1]
        self.last = dict(zip(facts["clients"], facts["entropies"], strict=True))


class Auto:
    """Are these other images than before? An image that is hard for one global model is hard for the next, so the
    entropies of the same images go up and down together from round to round, and those of other images do not. That
    depends neither on the number of classes nor on how sure a model is of what it has never seen: the average entropy
    often rises more in mid-task than when new classes come. A client's first images are always new. Two rounds after an
    alarm are left out, because a model that has just begun to learn a class changes too much; only a change in the
    number of images is believed at once."""

    pause = 2  # rounds after an alarm
    rounds = 4  # whose entropies are kept since the last alarm
    chance = 3.5  # standard deviations of a correlation by chance

    def __init__(self) -> None:
        self.seen: dict[int, list[np.ndarray]] = {}  # client -> what it saw since its last alarm, the alarm included

    def notice(self, number: int, observe: Callable[[], Mapping[int, Observation]]) -> list[int]:
        alarmed = []
        for client, now in observe().items():
            before = self.seen.get(client, [])
            if not before or self._other(before, now.images):
                alarmed.append(client)
                before = []
            self.seen[client] = [*before, now.images][-self.rounds :]
        return alarmed

    def snapshot(self) -> dict[str, Snapshot]:
        # Clients with the same images see the same entropies: these are written once.
        distinct = {id(values): values for seen in self.seen.values() for values in seen}
        place = {key: str(i) for i, key in enumerate(distinct)}
        tensors = {place[key]: torch.from_numpy(values.copy()) for key, values in distinct.items()}
        clients = [[client, [place[id(values)] for values in seen]] for client, seen in self.seen.items()]
        return {"seen": (tensors, {"clients": clients})}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        tensors, facts = parts["seen"]
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        self.seen = {client: [arrays[name] for name in names] for client, names in facts["clients"]}

    def _other(self, before: list[np.ndarray], now: np.ndarray) -> bool:
        """Do these entropies go together with none of those before?"""
        if len(before[-1]) != len(now):
            return True
        limit = min(0.5, max(0.2, self.chance / math.sqrt(len(now))))
        return len(before) > self.pause and all(together(then, now) < limit for then in before)


def together(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two rounds' entropies, image by image, apart from slow trends (classes come in blocks); 1 if
    either has nothing but trends, which tells no change."""
    a, b = _without_trend(a), _without_trend(b)
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else 1.0


def _without_trend(values: np.ndarray, width: int = 9) -> np.ndarray:
    """Each value less the mean of its neighbours, then less the mean of all."""
    window = np.ones(width)
    values = values.astype(np.float64)
    apart = (
        values
        - np.convolve(values, window, "full")[width // 2 :][: len(values)]
        / (np.convolve(np.ones_like(values), window, "full")[width // 2 :][: len(values)])
    )
    centred: np.ndarray = apart - apart.mean()
    return centred
