"""What a method sees on a client during a job: data, memory, model, batches and the client's own random streams. It is
built from one client only; it has no access to the plan, the test set or other clients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from holdfast.models.incremental import IncrementalModel
from holdfast.models.passes import in_chunks
from holdfast.protocol.codec import Weights
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.messages import Inbox
from holdfast.protocol.state import ClientState, Holdings
from holdfast.seeding import torch_generator

FrozenModel = Callable[[str, tuple[int, ...], Weights], IncrementalModel]  # role, growths, weights


class ImageSource(Protocol):
    """Gives access to a client's images by their ids."""

    @property
    def classes(self) -> Sequence[str]:
        """The class names that the results of `class_of` index."""
        ...

    def class_of(self, ids: Tensor) -> Tensor:
        """The index of each image's class (N,)."""
        ...

    def pixels(self, ids: Tensor) -> Tensor:
        """The images (N, 3, S, S) as uint8."""
        ...

    def identity(self, ids: Tensor) -> Tensor:
        """Ids that are the same for an image in the data and for its copy in the memory."""
        ...


@dataclass(frozen=True)
class Batch:
    """Augmented images with their labels and ids."""

    images: Tensor  # (B, 3, S, S) normalised
    labels: Tensor  # (B,) head positions
    ids: Tensor  # (B,) of the client's images


@dataclass
class Stage:
    """One optimisation: its epochs, batches, optimiser and learning rate."""

    epochs: int
    batches: Callable[[int], Iterable[Batch]]  # by epoch
    optimiser: torch.optim.Optimizer
    rate: Callable[[int], float]  # learning rate by epoch
    clamp: float | None = None  # largest absolute value of a gradient's entries


class ClientContext:
    """One client working on one job. Images are addressed by the client's own ids, classes by head position or name;
    the order of images is the client's own, and no result depends on the values of ids."""

    def __init__(
        self,
        enrolment: Enrolment,
        images: ImageSource,
        state: ClientState,
        inbox: Inbox,
        model: IncrementalModel,
        frozen: FrozenModel,
        secret: int | None = None,
    ) -> None:
        self.enrolment, self.images, self.state = enrolment, images, state
        self.job, self.model = inbox.job, model
        self.registry = self.job.registry
        self.transform, self.seed = enrolment.transform, enrolment.seed
        self._secret = self.seed if secret is None else secret
        self.device = model.device
        self.growth_of = self.registry.growth_of.to(self.device)
        self.notes: dict[str, Tensor] = dict(state.notes)  # what a method writes here is kept for the client's next job
        self.scratch: dict[str, Tensor] = {}  # what a method computes once and uses in every batch of this job
        self._positions = self.registry.positions(images.classes)
        self._teachers, self._frozen = inbox.teachers, frozen
        self.training = enrolment.training.for_images(len(self.everything))

    # old models

    @cached_property
    def teacher(self) -> IncrementalModel | None:
        """The old model to distil from (Algorithm 1): the best of the growth just finished. In the first round of a
        growth the proxy also sends the best of the growth before that, and a client that has not noticed the new
        classes yet distils from that one."""
        noticed = {name for arrival in self.state.arrivals[: self.state.noticed] for name in arrival}
        newest = len(self.registry.growths) - 1
        has_noticed = not noticed.isdisjoint(self.registry.names[sum(self.registry.growths[:-1]) :])
        return self._before(newest if has_noticed else newest - 1)

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
        """The global model as received, unchanged by this round's training."""
        return self._frozen("broadcast", self.registry.growths, self.job.weights)

    # images

    @cached_property
    def data_by_class(self) -> dict[str, Tensor]:
        """The current images of each class that is in the head."""
        return self._known(self.state.data)

    @cached_property
    def exemplars_by_class(self) -> dict[str, Tensor]:
        """The exemplars of each class that is in the head, best first."""
        return self._known(self.state.memory)

    def _known(self, held: Holdings) -> dict[str, Tensor]:
        return {name: ids.long() for name, ids in held.items() if len(ids) and name in self.registry.position}

    @cached_property
    def data(self) -> Tensor:
        """The current images of known classes."""
        return joined(self.data_by_class.values())

    @cached_property
    def memory(self) -> Tensor:
        """The exemplars of classes that are not in the current data."""
        return joined(ids for name, ids in self.exemplars_by_class.items() if name not in self.data_by_class)

    @cached_property
    def everything(self) -> Tensor:
        """Current data, then exemplars of the other classes."""
        return torch.cat([self.data, self.memory])

    @cached_property
    def counts(self) -> Tensor:
        """How many images of each class the client trains on, in `everything` (C,), on the device."""
        return self.counts_of(self.everything)

    @cached_property
    def exemplars(self) -> Tensor:
        """All exemplars, including those of classes in the current data; balanced once a task is over."""
        return joined(self.exemplars_by_class.values())

    @cached_property
    def class_counts(self) -> tuple[int, int]:
        """The client's numbers of old classes (only in its memory) and new ones (in its current data): C^o_l and
        C^t_l."""
        return len(self.exemplars_by_class.keys() - self.data_by_class.keys()), len(self.data_by_class)

    @cached_property
    def has_old_and_new(self) -> bool:
        """Are there exemplars of the newest growth's classes and of older ones?"""
        places = [self.registry.position[name] for name in self.exemplars_by_class]
        newest = [place >= sum(self.registry.growths[:-1]) for place in places]
        return any(newest) and not all(newest)

    @property
    def quota(self) -> int:
        """Exemplars per class once all classes that the client has now are in its memory."""
        classes = len({*self.state.memory, *self.data_by_class})
        return self.enrolment.memory // classes if classes else 0

    def positions_of(self, ids: Tensor) -> Tensor:
        """The head positions of these images' classes, on the CPU."""
        return self._positions[self.images.class_of(ids)]

    def labels_of(self, ids: Tensor) -> Tensor:
        """The same on the device."""
        return self.positions_of(ids).to(self.device)

    def counts_of(self, ids: Tensor) -> Tensor:
        """How many of these images there are of each class (C,), on the device."""
        return torch.bincount(self.positions_of(ids), minlength=len(self.registry.names)).to(self.device)

    def without(self, ids: Tensor, left_out: Tensor) -> Tensor:
        """`ids` without the images of `left_out`, whether these are in the data, in the memory or in both."""
        return ids[~torch.isin(self.images.identity(ids), self.images.identity(left_out))]

    # passes and batches

    def infer(self, model: torch.nn.Module, ids: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of `compute` for these images without augmentation, in evaluation mode, in chunks, on the CPU."""

        def pixels(chunk: Tensor) -> Tensor:
            return self.transform.plain(self.images.pixels(chunk).to(self.device))

        return in_chunks(model, pixels, ids, compute)

    def features(self, model: IncrementalModel, ids: Tensor, mirrored: bool = False) -> Tensor:
        """The features (N, d) of these images, or of their mirror images, under a model, on the CPU."""

        def compute(pixels: Tensor) -> Tensor:
            features: Tensor = model(pixels.flip(3) if mirrored else pixels).features
            return features

        return self.infer(model, ids, compute)

    def generator(self, *purpose: str | int) -> torch.Generator:
        """This client's own random stream, for one purpose in this round."""
        return self._stream(self.seed, purpose)

    def secret_generator(self, *purpose: str | int) -> torch.Generator:
        """The same from a seed that no other party knows, for noise that protects; in a simulation the same seed."""
        return self._stream(self._secret, purpose)

    def _stream(self, seed: int, purpose: Sequence[str | int]) -> torch.Generator:
        return torch_generator(seed, "round", self.job.round_index, "client", self.state.client, *purpose)

    def batches(self, ids: Tensor, epoch: int) -> Iterator[Batch]:
        """All of `ids` once, in random order, augmented."""
        order = torch.randperm(len(ids), generator=self.generator("batches", epoch))
        augment = self.generator("augment", epoch)
        for chosen in ids[order].split(self.training.batch):
            yield self.augmented(chosen, augment)

    def augmented(self, ids: Tensor, rng: torch.Generator) -> Batch:
        """One batch of these images, augmented."""
        images = self.images.pixels(ids).to(self.device)
        return Batch(self.transform.augmented(images, rng), self.labels_of(ids), ids)

    def stage(self, ids: Tensor) -> Stage:
        """Ordinary local training over `ids`: SGD on all parameters, with the scheduled learning rate."""
        training, job = self.training, self.job
        return Stage(
            epochs=training.epochs,
            batches=lambda epoch: self.batches(ids, epoch),
            optimiser=torch.optim.SGD(
                self.model.parameters(),
                lr=training.optimiser.lr,
                momentum=training.optimiser.momentum,
                weight_decay=training.optimiser.weight_decay,
            ),
            rate=lambda epoch: training.rate(job.progress + job.step * epoch / training.epochs),
        )


def joined(parts: Iterable[Tensor]) -> Tensor:
    """These ids concatenated; an empty tensor if there are none."""
    return torch.cat([*parts, torch.empty(0, dtype=torch.int64)]).long()
