"""What a method sees on a client while it works on a job: data, memory, model, batches and its own chance."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.data.images import ImageSet
from holdfast.models.encoder import GradientEncoder
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.passes import one_pass
from holdfast.models.transform import Transform
from holdfast.protocol.messages import Inbox, State, Weights
from holdfast.seeding import torch_generator
from holdfast.simulation.plan import Plan
from holdfast.simulation.timeline import Arrival

if TYPE_CHECKING:
    from holdfast.methods.base import Method

FrozenModel = Callable[[str, tuple[int, ...], Weights], IncrementalModel]  # role, growths, weights


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
    clamp: float | None = None  # the largest entry of a gradient that is let through


@dataclass(frozen=True)
class World:
    """What every client of a simulation shares: the images, the plan, the method and its settings."""

    method: "Method"
    plan: Plan
    classes: tuple[str, ...]
    train: ImageSet
    test: ImageSet
    transform: Transform
    spec: ModelSpec
    training: Training
    memory: int  # exemplars a client may keep
    seed: int
    device: torch.device
    encoder: GradientEncoder | None = None  # the proxy's gift to every client that joins

    def holding(self, arrival: Arrival) -> Tensor:
        """The training images of an arrival."""
        if arrival.images is not None:
            return torch.tensor(arrival.images, dtype=torch.int64)
        return torch.cat([self.train.by_class[c] for c in arrival.classes] or [torch.empty(0, dtype=torch.int64)])


class Local:
    """What a method sees on a client while it works on a job."""

    def __init__(
        self, world: World, state: State, inbox: Inbox, model: IncrementalModel, frozen: "FrozenModel"
    ) -> None:
        self.world, self.state, self.job, self.model = world, state, inbox.job, model
        self.registry = self.job.registry
        self.positions = self.registry.positions(world.classes)
        self.growth_of = self.registry.growth_of.to(world.device)
        self._teachers, self._frozen = inbox.teachers, frozen
        self.scratch: dict[str, Tensor] = {}  # what a method finds once and uses in every batch of this job

    @cached_property
    def teacher(self) -> IncrementalModel | None:
        """The old model to distil from: the best of the growth before the last that this client has noticed."""
        arrivals = self.world.plan.arrivals[self.state.client][: self.state.noticed]
        known = self.positions[[c for arrival in arrivals for c in arrival.classes]]
        known = known[known >= 0]
        return self._before(int(self.registry.growth_of[known].max())) if len(known) else None

    @cached_property
    def predecessor(self) -> IncrementalModel | None:
        """The old model for methods that know when a task begins: the last of the growth before the newest."""
        return self._before(len(self.registry.growths) - 1)

    def _before(self, growth: int) -> IncrementalModel | None:
        older = self._teachers.before(growth)
        if older is None:
            return None
        return self._frozen("teacher", self.registry.growths[: older + 1], self._teachers.models[older])

    @cached_property
    def broadcast(self) -> IncrementalModel:
        """The global model as it came, untouched by this round's training."""
        return self._frozen("broadcast", self.registry.growths, self.job.weights)

    @cached_property
    def class_counts(self) -> tuple[int, int]:
        """How many classes this client has old (in its memory only) and new (in its current data): C^o_l and C^t_l."""
        labels = self.world.train.labels
        return len(labels[self.memory].unique()), len(labels[self.data].unique())

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

    def images_of(self, c: int) -> Tensor:
        """What this client has of a class: its current images, or else its exemplars."""
        now = self.data[self.world.train.labels[self.data] == c]
        return now if len(now) else self.state.memory.get(c, now).long()

    @cached_property
    def exemplars(self) -> Tensor:
        """Everything in the client's memory, of classes it still has data of as well: balanced, once a task is over."""
        return self._known(torch.cat([*self.state.memory.values(), torch.empty(0, dtype=torch.int64)]).long())

    @cached_property
    def has_old_and_new(self) -> bool:
        """Are there exemplars of the newest growth's classes and of older ones?"""
        growths = self.registry.growth_of[self.positions[self.world.train.labels[self.exemplars]]]
        newest = growths == len(self.registry.growths) - 1
        return bool(newest.any()) and not bool(newest.all())

    def features(self, model: IncrementalModel, rows: Tensor, mirrored: bool = False) -> Tensor:
        """The features (N, d) of these images, or of their mirror images, under a model, on the CPU."""

        def question(pixels: Tensor) -> Tensor:
            features: Tensor = model(pixels.flip(3) if mirrored else pixels).features
            return features

        return one_pass(model, self.world.train, self.world.transform, rows, question)

    def _known(self, rows: Tensor) -> Tensor:
        """Those of `rows` whose class has a place in the head."""
        return rows[self.positions[self.world.train.labels[rows]] >= 0]

    def generator(self, *purpose: str | int) -> torch.Generator:
        """This client's own chance, for one purpose in this round."""
        return torch_generator(self.world.seed, "round", self.job.round, "client", self.state.client, *purpose)

    def batches(self, rows: Tensor, epoch: int) -> Iterator[Batch]:
        """All of `rows` once, in random order, augmented."""
        order = torch.randperm(len(rows), generator=self.generator("batches", epoch))
        augment = self.generator("augment", epoch)
        for chosen in rows[order].split(self.world.training.batch):
            yield self.augmented(chosen, augment)

    def labels_of(self, rows: Tensor) -> Tensor:
        """The head positions of these images' classes, on the device."""
        return self.positions[self.world.train.labels[rows]].to(self.world.device)

    def augmented(self, rows: Tensor, rng: torch.Generator) -> Batch:
        """One batch of these images, augmented."""
        images = self.world.train.images[rows].to(self.world.device)
        return Batch(self.world.transform.augmented(images, rng), self.labels_of(rows), rows)

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
