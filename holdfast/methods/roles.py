"""What a method wants of the other roles, as plain values: how clients notice new classes, who picks the old model that
they distil from, and what prototypes they share. The parties build themselves from these."""

from dataclasses import dataclass
from typing import Literal

DetectorKind = Literal["auto", "fixed", "oracle"]


@dataclass(frozen=True)
class NoTeachers:
    """Nobody distils: nothing is kept and nothing is sent."""


@dataclass(frozen=True)
class LastModel:
    """The last global model of a growth is the teacher of the next."""


@dataclass(frozen=True)
class RandomModel:
    """The teacher is drawn from the global models of a growth, each as likely (w/oPSR)."""


@dataclass(frozen=True)
class PrototypeSelection:
    """LGA's proxy: how it reconstructs, augments and selects."""

    iterations: int  # of L-BFGS
    augmented: int  # features made of each prototype, upsilon; 0: none but its own
    capacity: int | None = None  # class outputs of the encoding network; as many as the data set has, if not given
    start: str = "smooth"  # or white
    rate: float = 1.0  # of L-BFGS
    snapshots: int = 1  # last iterates that count as prototypes (D28: 1)
    radius: float = 0.1  # xi
    root: bool = False  # omega as the square root of the mean variance (N8)
    patience: int = 1  # first rounds of a growth that count for nothing
    select: bool = True  # the best model; if not, the last


TeacherSelection = NoTeachers | LastModel | RandomModel | PrototypeSelection


@dataclass(frozen=True)
class Perturbation:
    """How prototype images are perturbed (Eqs. 13-14)."""

    noise: float  # in the latent feature, epsilon
    steps: int
    rate: float = 1.0


@dataclass(frozen=True)
class PrototypeSharing:
    """How clients make the prototypes that they share with the proxy, and who does."""

    perturbation: Perturbation | None  # None: gradients of the images themselves
    late: bool = False  # does a client that was not selected when it noticed new classes share them when it is next?
