"""How a client learns that new classes have come: a message tells it, or the entropies of its own images do.

A detector decides for one client. What it remembers is the client's: a history of observations, which a decision takes
and gives back."""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from holdfast.methods.roles import DetectorKind

IMAGES = 512  # a detector looks no further; more would not make it surer


@dataclass(frozen=True, eq=False)
class Observation:
    """What a client's detector sees in a round: the entropies of its current images under the global model."""

    mean: float  # Eq. 8
    images: np.ndarray  # of the first of them, in the client's own order


History = tuple[Observation, ...]  # what a detector remembers, oldest first


def observation_of(entropies: np.ndarray) -> Observation:
    """What a detector sees of these entropies (N,)."""
    return Observation(float(entropies.mean()), entropies[:IMAGES])


class Detector(Protocol):
    """Decides for one client whether new classes have come to it."""

    observes: bool  # does it look at entropies?

    def decide(self, history: History, now: Observation) -> tuple[bool, History]:
        """Is this an alarm? And what to remember."""
        ...


class OracleDetector:
    """Decides nothing by itself: a `TransitionNotice` tells the client in the very round."""

    observes = False

    def decide(self, history: History, now: Observation) -> tuple[bool, History]:
        return False, ()


class ThresholdDetector:
    """The paper's detector: the average entropy has risen by 1.2 since the client last had images; it starts at 0."""

    observes = True
    threshold = 1.2  # r_e

    def decide(self, history: History, now: Observation) -> tuple[bool, History]:
        last = history[-1].mean if history else 0.0
        return now.mean - last >= self.threshold, (now,)


class CorrelationDetector:
    """Are these other images than before? An image that is hard for one global model is hard for the next, so the
    entropies of the same images go up and down together from round to round, and those of other images do not. That
    depends neither on the number of classes nor on how sure a model is of what it has never seen: the average entropy
    often rises more in mid-task than when new classes come. A client's first images are always new. Two observations
    after an alarm are left out, because a model that has just begun to learn a class changes too much; only a change in
    the number of images is believed at once."""

    observes = True
    pause = 2  # observations after an alarm
    rounds = 4  # whose entropies are kept since the last alarm, that one included
    chance = 3.5  # standard deviations of a correlation by chance

    def decide(self, history: History, now: Observation) -> tuple[bool, History]:
        if not history or self._other(history, now.images):
            return True, (now,)
        return False, (*history, now)[-self.rounds :]

    def _other(self, history: History, now: np.ndarray) -> bool:
        """Do these entropies go together with none of those before?"""
        if len(history[-1].images) != len(now):
            return True
        limit = min(0.5, max(0.2, self.chance / math.sqrt(len(now))))
        return len(history) > self.pause and all(correlation(then.images, now) < limit for then in history)


def detector_of(kind: DetectorKind) -> Detector:
    """The detector of a name: auto, fixed or oracle."""
    if kind == "oracle":
        return OracleDetector()
    return ThresholdDetector() if kind == "fixed" else CorrelationDetector()


def correlation(a: np.ndarray, b: np.ndarray) -> float:
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
