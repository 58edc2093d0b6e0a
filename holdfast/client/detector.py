"""How a client learns that new classes have come: the schedule tells it, or the entropies of its own images do."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from holdfast.protocol.messages import Snapshot
from holdfast.simulation.plan import Plan

IMAGES = 512  # a detector looks no further; more would not make it surer


@dataclass(frozen=True)
class Observation:
    """What a client's detector sees in a round: the entropies of its current images under the global model."""

    mean: float  # Eq. 8
    images: np.ndarray  # of the first of them, in the client's own order


@dataclass(frozen=True)
class Observed:
    """What all clients' detectors see in a round. Clients with the same images see the same."""

    which: np.ndarray  # (clients,) into `seen`; -1 for a client without images
    seen: list[Observation]


class Detector(Protocol):
    """All clients' detectors together; each client's decision depends on its own entropies alone."""

    def notice(self, number: int, observe: Callable[[], Observed]) -> np.ndarray:
        """The clients that believe in this round that new classes have come to them, ascending."""
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

    def notice(self, number: int, observe: Callable[[], Observed]) -> np.ndarray:
        timeline = self.plan.timeline
        arrivals = timeline.arriving(number)
        told: np.ndarray = timeline.client[arrivals[timeline.brings[arrivals]]]
        return told

    def snapshot(self) -> dict[str, Snapshot]:
        return {}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        pass


class Fixed:
    """The paper's detector: the average entropy has risen by 1.2 since the client last had images; it starts at 0."""

    threshold = 1.2  # r_e

    def __init__(self) -> None:
        self.last = np.zeros(0)

    def notice(self, number: int, observe: Callable[[], Observed]) -> np.ndarray:
        observed = observe()
        last = np.zeros(len(observed.which))
        last[: len(self.last)] = self.last
        means = np.array([*(seen.mean for seen in observed.seen), math.nan])[observed.which]  # -1 is the last: nothing
        self.last = np.where(np.isnan(means), last, means)
        return np.flatnonzero(means - last >= self.threshold)

    def snapshot(self) -> dict[str, Snapshot]:
        return {"last": ({"entropies": torch.from_numpy(self.last)}, {})}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        self.last = parts["last"][0]["entropies"].numpy()


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
        # Clients that have seen the same since their last alarm are a group: what one of them decides, all do.
        self.group = np.zeros(0, dtype=np.int32)  # of each client
        self.seen: list[list[np.ndarray]] = [[]]  # by each group, the last alarm included

    def notice(self, number: int, observe: Callable[[], Observed]) -> np.ndarray:
        observed = observe()
        group = np.zeros(len(observed.which), dtype=np.int32)
        group[: len(self.group)] = self.group
        sights = len(observed.seen) + 1
        pairs, member = np.unique(group.astype(np.int64) * sights + observed.which + 1, return_inverse=True)
        seen: list[list[np.ndarray]] = [[]]  # nobody's first group
        alarms, groups = [], []
        fresh: dict[int, int] = {}  # which -> the group of those who were alarmed by it
        for old, which in zip((pairs // sights).tolist(), (pairs % sights - 1).tolist(), strict=True):
            before, alarmed = self.seen[old], False
            if which >= 0:
                now = observed.seen[which].images
                alarmed = not before or self._other(before, now)
                before = [now] if alarmed else [*before, now][-self.rounds :]
            alarms.append(alarmed)
            if not before:
                groups.append(0)
                continue
            if alarmed and which in fresh:
                groups.append(fresh[which])
                continue
            groups.append(len(seen))
            if alarmed:
                fresh[which] = len(seen)
            seen.append(before)
        self.seen, self.group = seen, np.array(groups, dtype=np.int32)[member]
        return np.flatnonzero(np.array(alarms)[member])

    def snapshot(self) -> dict[str, Snapshot]:
        # Apart, because clients seldom change their group; and groups may have seen the same: that is written once.
        distinct = {id(values): values for seen in self.seen for values in seen}
        place = {key: str(i) for i, key in enumerate(distinct)}
        tensors = {place[key]: torch.from_numpy(values.copy()) for key, values in distinct.items()}
        groups = [[place[id(values)] for values in seen] for seen in self.seen]
        return {"groups": ({"of": torch.from_numpy(self.group)}, {}), "seen": (tensors, {"by": groups})}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        tensors, facts = parts["seen"]
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        self.seen = [[arrays[name] for name in names] for names in facts["by"]]
        self.group = parts["groups"][0]["of"].numpy()

    def _other(self, before: list[np.ndarray], now: np.ndarray) -> bool:
        """Do these entropies go together with none of those before?"""
        if len(before[-1]) != len(now):
            return True
        limit = min(0.5, max(0.2, self.chance / math.sqrt(len(now))))
        return len(before) > self.pause and all(together(then, now) < limit for then in before)


def detector_of(kind: str, plan: Plan) -> Detector:
    """The detector of a name: auto, fixed or oracle."""
    if kind == "oracle":
        return Told(plan)
    return Fixed() if kind == "fixed" else Auto()


def together(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two rounds' entropies, image by image, apart from slow trends (classes come in blocks); 1 if
    either has nothing but trends, which tells no change."""
    a, b = _without_trend(a), _without_trend(b)
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale > 0 else 1.0


def _without_trend(values: np.ndarray) -> np.ndarray:
    """Each value less the median of itself and four neighbours on each side (a mean would leave a spike at every border
    of two classes, and borders are where they were), then less the mean of all."""
    values = values.astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(values, 4, mode="symmetric"), 9)
    apart = values - np.median(windows, axis=1)
    centred: np.ndarray = apart - apart.mean()
    return centred
