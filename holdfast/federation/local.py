"""What a method sees on a client while it works on a job: data, memory, model, batches and its own chance."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.data.augment import Transform
from holdfast.data.images import ImageSet
from holdfast.data.schedule import Arrival, Plan
from holdfast.federation.messages import Job, State
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.seeding import torch_generator

if TYPE_CHECKING:
    from holdfast.methods.base import Method


@dataclass(frozen=True)
class Preset:
    """How a loss wants to be optimised, as parts of a task, so that it means the same at every scale."""

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
    batch: int
    optimiser: Preset

    def rate(self, progress: float) -> float:
        """The learning rate when this part of the task is over."""
        if self.optimiser.schedule == "cosine":
            return self.optimiser.lr * (1 + math.cos(math.pi * progress)) / 2
        drops = sum(progress >= milestone - 1e-9 for milestone in self.optimiser.milestones)
        return self.optimiser.lr * self.optimiser.gamma**drops


@dataclass(frozen=True)
class Batch:
    """Augmented images and what they are."""

    images: Tensor  # (B, 3, S, S) normalised
    labels: Tensor  # (B,) head positions
    rows: Tensor  # (B,) indices into the training set


@dataclass
class Stage:
    """One optimisation over some batches: how long, over what, with what, at which rate."""

    epochs: int
    batches: Callable[[int], Iterable[Batch]]  # by epoch
    optimiser: torch.optim.Optimizer
    rate: Callable[[int], float]  # learning rate by epoch


@dataclass(frozen=True)
class World:
    """What every client of a simulation shares: the images, the plan, the method and its settings."""

    method: "Method"
    plan: Plan
    classes: tuple[str, ...]
    train: ImageSet
    transform: Transform
    spec: ModelSpec
    training: Training
    memory: int  # exemplars a client may keep
    seed: int
    device: torch.device

    def holding(self, arrival: Arrival) -> Tensor:
        """The training images of an arrival."""
        if arrival.images is not None:
            return torch.tensor(arrival.images, dtype=torch.int64)
        return torch.cat([self.train.by_class[c] for c in arrival.classes] or [torch.empty(0, dtype=torch.int64)])


class Local:
    """What a method sees on a client while it works on a job."""

    def __init__(self, world: World, state: State, job: Job, model: IncrementalModel) -> None:
        self.world, self.state, self.job, self.model = world, state, job, model
        self.registry = job.registry
        self._positions = job.registry.positions(world.classes)

    @cached_property
    def data(self) -> Tensor:
        """The current images of known classes."""
        arrivals = self.world.plan.arrivals[self.state.client]
        current = arrivals[self.world.plan.current(self.state.client, self.job.round)]
        return self._known(self.world.holding(current))

    @cached_property
    def memory(self) -> Tensor:
        """The exemplars of classes that the current data does not have."""
        present = set(self.world.train.labels[self.data].unique().tolist())
        kept = [rows for c, rows in self.state.memory.items() if c not in present]
        return self._known(torch.cat([*kept, torch.empty(0, dtype=torch.int64)]).long())

    @property
    def everything(self) -> Tensor:
        """Current data, then exemplars."""
        return torch.cat([self.data, self.memory])

    def _known(self, rows: Tensor) -> Tensor:
        """Those of `rows` whose class has a place in the head."""
        return rows[self._positions[self.world.train.labels[rows]] >= 0]

    def generator(self, *purpose: str | int) -> torch.Generator:
        """This client's own chance, for one purpose in this round."""
        return torch_generator(self.world.seed, "round", self.job.round, "client", self.state.client, *purpose)

    def batches(self, rows: Tensor, epoch: int) -> Iterator[Batch]:
        """All of `rows` once, in random order, augmented."""
        order = torch.randperm(len(rows), generator=self.generator("batches", epoch))
        augment = self.generator("augment", epoch)
        for chosen in rows[order].split(self.world.training.batch):
            images = self.world.train.images[chosen].to(self.world.device)
            labels = self._positions[self.world.train.labels[chosen]].to(self.world.device)
            yield Batch(self.world.transform.augmented(images, augment), labels, chosen)

    def stage(self, rows: Tensor) -> Stage:
        """Ordinary local training over `rows`: SGD on all parameters, at the rate of this part of the task."""
        training, job = self.world.training, self.job
        return Stage(
            epochs=training.epochs,
            batches=lambda epoch: self.batches(rows, epoch),
            optimiser=torch.optim.SGD(
                self.model.parameters(),
                lr=training.optimiser.lr,
                momentum=training.optimiser.momentum,
                weight_decay=training.optimiser.weight_decay,
            ),
            rate=lambda epoch: training.rate(job.progress + job.step * epoch / training.epochs),
        )
