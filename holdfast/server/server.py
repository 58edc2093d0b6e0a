"""The global server: it holds the global model and the registry, grows the head, writes jobs and averages replies."""

from collections.abc import Iterable, Mapping, Sequence

from holdfast.methods.base import Method
from holdfast.models.incremental import IncrementalModel, grow_to
from holdfast.protocol.codec import Snapshot, Weights
from holdfast.protocol.messages import Announcement, Broadcast, GlobalModel, Job, Phase, Reply, TaskEnded
from holdfast.protocol.registry import Registry
from holdfast.seeding import torch_generator
from holdfast.server.aggregation import average


class Server:
    """The global server as a party. It sees replies and announcements, never a prototype share."""

    def __init__(self, model: IncrementalModel, seed: int, weighting: str = "uniform") -> None:
        self.model, self.seed, self.weighting = model, seed, weighting
        self.registry = Registry()
        self.announced: tuple[str, ...] = ()  # new classes by which the head grows in the next round
        self.last_growth = 0  # the round of it

    @property
    def weights(self) -> Weights:
        return self.model.state_dict()

    @property
    def latest_growth(self) -> int:
        """The index of the last growth; -1 before the first."""
        return len(self.registry.growths) - 1

    def grow(self, names: Iterable[str], round_index: int = 0) -> tuple[str, ...]:
        """Gives those of these class names that are new their places. The server draws the new rows, so all clients
        start from the same."""
        new = self.registry.unknown(names)
        if new:
            self.model.grow(len(new), torch_generator(self.seed, "growth", len(self.registry.growths)))
            self.registry = self.registry.grown(new)
            self.last_growth = round_index
        return new

    def hear(self, announcements: Sequence[Announcement]) -> None:
        """Takes in the announcements of a round, in the order of the clients."""
        self.announced = self.registry.unknown(name for one in announcements for name in one.names)

    # messages

    def broadcast(self, round_index: int, with_model: bool) -> Broadcast:
        return Broadcast(round_index, self.registry, self._copied() if with_model else {})

    def job(self, round_index: int, phase: Phase, progress: float, step: float) -> Job:
        return Job(round_index, progress, step, self.registry, self._copied(), phase)

    def task_ended(self, round_index: int) -> TaskEnded:
        return TaskEnded(round_index, self.registry, self._copied())

    def global_model(self, round_index: int) -> GlobalModel:
        return GlobalModel(round_index, self.registry.growths, self.weights)

    def _copied(self) -> Weights:
        """The weights as they are now, whatever is trained later."""
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    # replies

    def aggregate(self, replies: Sequence[Reply]) -> None:
        """Replaces the model by the mean of those clients that trained; keeps it if none did."""
        trained = [reply for reply in replies if reply.weights]
        if trained:
            # What no client sends is fixed, and stays to the bit.
            self.model.load_state_dict({**self.weights, **average(trained, self.weighting)})

    def merge(self, method: Method, replies: Sequence[Reply], round_index: int) -> None:
        """Has the method put the clients' extras together."""
        extras = [reply.extras for reply in replies if reply.extras]
        method.merge(self.model, extras, self.seed, round_index)

    # to a checkpoint and back

    def snapshot(self) -> dict[str, Snapshot]:
        facts = {"announced": self.announced, "last_growth": self.last_growth}
        return {"model": (dict(self.weights), {**self.registry.to_facts(), **facts})}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        weights, facts = parts["model"]
        self.registry = Registry(tuple(facts["names"]), tuple(facts["growths"]))
        self.announced, self.last_growth = tuple(facts["announced"]), facts["last_growth"]
        grow_to(self.model, self.registry.growths, torch_generator(0, "buffer"))
        self.model.load_state_dict(weights)
