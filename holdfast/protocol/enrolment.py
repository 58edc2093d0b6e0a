"""What a client is told once, when it joins: the method, the network, how to train, and how much it may keep."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from holdfast.models.incremental import ModelSpec
from holdfast.models.transform import Transform
from holdfast.protocol.codec import Facts, pack, unpack

MAX_IMAGE_SIZE = 1024
AUTO = 0  # a batch size that each client chooses from the number of its images
STEPS = 8  # per epoch, that a client should have at least
BATCHES = (128, 64, 32, 16, 8)  # from which it chooses


@dataclass(frozen=True)
class Preset:
    """How a loss wants to be optimised, as fractions of a task, so that it means the same at every scale."""

    lr: float
    momentum: float
    weight_decay: float
    schedule: str  # cosine, or steps: times gamma at each milestone
    milestones: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1


@dataclass(frozen=True)
class Training:
    """How long and how fast a client trains."""

    epochs: int
    batch: int  # or AUTO
    optimiser: Preset
    precision: str = "fp32"  # or bf16, fp16: mixed precision on a GPU

    def for_images(self, count: int) -> "Training":
        """The same for a client with so many images: AUTO becomes the largest batch that gives it 8 steps per epoch, or
        the smallest batch if it has too few images for that."""
        fitting = (batch for batch in BATCHES if math.ceil(count / batch) >= STEPS)
        return self if self.batch != AUTO else replace(self, batch=next(fitting, BATCHES[-1]))

    def rate(self, progress: float) -> float:
        """The learning rate when this fraction of the task is over."""
        if self.optimiser.schedule == "cosine":
            return self.optimiser.lr * (1 + math.cos(math.pi * progress)) / 2
        drops = sum(progress >= milestone - 1e-9 for milestone in self.optimiser.milestones)
        return self.optimiser.lr * self.optimiser.gamma**drops


@dataclass(frozen=True)
class Enrolment:
    """From the global server to a client that joins: everything that it needs to work on its own."""

    kind: ClassVar[str] = "enrolment"

    client: int  # the client's own number in this federation
    method: Mapping[str, Any]  # its name and its hyper-parameters
    spec: ModelSpec
    transform: Transform
    training: Training
    memory: int  # exemplars that the client may keep
    seed: int
    max_samples: int = 1_000_000  # images that it may say it has trained on

    def to_bytes(self) -> bytes:
        facts = {name: getattr(self, name) for name in ("client", "memory", "seed", "max_samples")}
        parts = {name: asdict(getattr(self, name)) for name in ("spec", "transform", "training")}
        return pack(self.kind, {}, {**facts, **parts, "method": dict(self.method)})

    @staticmethod
    def from_bytes(blob: bytes) -> "Enrolment":
        facts = Facts("enrolment", unpack("enrolment", blob)[1])
        spec, training = (Facts("enrolment", facts.table(name)) for name in ("spec", "training"))
        optimiser = Facts("enrolment", training.table("optimiser"))
        return Enrolment(
            facts.integer("client"),
            facts.table("method"),
            ModelSpec(
                spec.text("backbone"),
                spec.text("norm"),
                spec.integer("image_size", 1, MAX_IMAGE_SIZE),
                spec.integer("width", 8, 1024),
                spec.integer("freeze", 0, 1000),
            ),
            _transform(Facts("enrolment", facts.table("transform"))),
            Training(
                training.integer("epochs", 1, 1_000_000),
                training.integer("batch", AUTO, 1_000_000),
                Preset(
                    optimiser.number("lr"),
                    optimiser.number("momentum"),
                    optimiser.number("weight_decay"),
                    optimiser.text("schedule"),
                    optimiser.numbers("milestones"),
                    optimiser.number("gamma"),
                ),
                training.text("precision"),
            ),
            facts.integer("memory"),
            facts.integer("seed", most=2**63 - 1),
            facts.integer("max_samples", 1),
        )


def _transform(facts: Facts) -> Transform:
    mean, std = facts.numbers("mean"), facts.numbers("std")
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != 3 or (name == "std" and min(values) <= 0):
            raise facts.wrong(name)
    return Transform((mean[0], mean[1], mean[2]), (std[0], std[1], std[2]), facts.flag("flip"))
