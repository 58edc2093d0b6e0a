"""What a method needs from the other roles, as plain values: how clients notice new classes, who picks the old model
that they distil from, and which prototypes they share. The parties are built from these values."""

from dataclasses import dataclass, field
from typing import Literal

from holdfast.protocol.checks import Form

DetectorKind = Literal["auto", "fixed", "oracle"]


@dataclass(frozen=True)
class NoTeachers:
    """No distillation: no old model is kept or sent."""


@dataclass(frozen=True)
class LastModel:
    """The last global model of a growth is the teacher of the next."""


@dataclass(frozen=True)
class RandomModel:
    """The teacher is drawn uniformly from the global models of a growth (w/oPSR)."""


@dataclass(frozen=True)
class PrototypeSelection:
    """LGA's proxy: how it reconstructs, augments and selects."""

    iterations: int  # of L-BFGS
    augmented: int  # augmented features per prototype, upsilon; 0: only its own features
    capacity: int | None = None  # class outputs of the encoding network; the data set's number of classes if None
    start: str = "smooth"  # or white
    rate: float = 1.0  # of L-BFGS
    snapshots: int = 1  # last iterates that are used as prototypes (D28: 1)
    radius: float = 0.1  # xi
    root: bool = False  # omega as the square root of the mean variance (N8)
    patience: int = 1  # first rounds of a growth that are not scored
    select: bool = True  # True: the best model; False: the last one


TeacherSelection = NoTeachers | LastModel | RandomModel | PrototypeSelection


@dataclass(frozen=True)
class Perturbation:
    """How prototype images are perturbed (Eqs. 13-14)."""

    noise: float  # in the latent features, epsilon
    steps: int
    rate: float = 1.0


@dataclass(frozen=True)
class PrototypeSharing:
    """How clients make the prototypes that they share with the proxy, and which clients share them."""

    perturbation: Perturbation | None  # None: gradients of the images themselves
    late: bool = False  # may a client that was not selected when it noticed new classes share them later?


@dataclass(frozen=True)
class ExtrasForm:
    """What the tensors of a client's extras must look like; optional ones come all or not at all."""

    required: Form = field(default_factory=dict)
    optional: Form = field(default_factory=dict)
