"""The global server: it holds the global model and the registry, grows the head, writes jobs and aggregates replies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from holdfast.errors import HoldfastError
from holdfast.methods.base import Method
from holdfast.models.incremental import IncrementalModel, grow_to
from holdfast.protocol.checks import Refusal, misfit
from holdfast.protocol.codec import Snapshot, Weights
from holdfast.protocol.messages import Announcement, Broadcast, GlobalModel, Job, Phase, Reply, TaskEnded
from holdfast.protocol.registry import Registry
from holdfast.seeding import torch_generator
from holdfast.server.aggregation import Aggregation, aggregate, clipped, update_norms
from holdfast.server.optimiser import ServerOptimiser
from holdfast.server.validation import ReplyCheck, model_form, reply_check

OUTLIERS = 3  # replies of which a median says something
MEAN = Aggregation()


class Server:
    """The global server as a party. It sees replies and announcements, never a prototype share."""

    def __init__(self, model: IncrementalModel, seed: int, aggregation: Aggregation = MEAN) -> None:
        self.model, self.seed, self.aggregation = model, seed, aggregation
        self.optimiser = ServerOptimiser(aggregation)
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

    def check(self, method: Method, round_index: int, phase: Phase, max_samples: int) -> ReplyCheck:
        """What a usable reply to a job of this round and phase looks like, by the model as it is now."""
        return reply_check(method, self.model, round_index, phase, max_samples)

    def aggregate(self, replies: Sequence[tuple[int, Reply]]) -> list[Refusal]:
        """Moves the model to the aggregate of those clients that trained; keeps it if none did. The replies are checked
        already and in the order of client numbers; returns those that were left out as outliers."""
        trained = [(client, reply) for client, reply in replies if reply.weights]
        kept, refused = self._without_outliers(trained)
        if kept:
            merged = aggregate([reply for _, reply in kept], self.aggregation, self.trainable)
            moved = self.optimiser.step(self.weights, merged, self.trainable)
            # What no client sends is fixed, and stays to the bit.
            self.model.load_state_dict({**self.weights, **moved})
        return refused

    @property
    def trainable(self) -> frozenset[str]:
        """The names of the model's parameters; batch statistics and notes are none."""
        return frozenset(name for name, _ in self.model.named_parameters())

    def _without_outliers(
        self, replies: Sequence[tuple[int, Reply]]
    ) -> tuple[Sequence[tuple[int, Reply]], list[Refusal]]:
        """Leaves out, or shortens, updates that are longer than `outlier` times the median of the round."""
        times = self.aggregation.outlier
        if times is None or len(replies) < OUTLIERS:
            return replies, []
        base = self.weights
        norms = update_norms([reply.weights for _, reply in replies], base, self.trainable)
        most = times * median(norms)
        kept: list[tuple[int, Reply]] = []
        refused: list[Refusal] = []
        for (client, reply), norm in zip(replies, norms, strict=True):
            if norm <= most or not most:
                kept.append((client, reply))
                continue
            longer = f"its update has the length {norm:.3g}, more than {times:g} times the median of the round"
            if self.aggregation.clip:
                kept.append((client, replace(reply, weights=clipped(reply.weights, base, most / norm))))
                refused.append(Refusal(client, "clipped", f"{longer}; it was shortened"))
            else:
                refused.append(Refusal(client, "outlier", longer))
        return kept, refused

    def merge(self, method: Method, replies: Sequence[Reply], round_index: int) -> None:
        """Has the method put the clients' extras together."""
        extras = [reply.extras for reply in replies if reply.extras]
        method.merge(self.model, extras, self.seed, round_index)

    def require_finite(self, round_index: int) -> None:
        """Raises an error if the model is not fit to be sent, saved or reported, whatever made it so."""
        problem = misfit("the global model", self.weights, model_form(self.weights))
        if problem is not None:
            raise HoldfastError(
                f"after round {round_index + 1} {problem.reason}; lower train.lr, train.server_rate or the method's "
                "own rates and run again; the rounds before it are in the record"
            )

    # to a checkpoint and back

    def snapshot(self) -> dict[str, Snapshot]:
        facts = {"announced": self.announced, "last_growth": self.last_growth}
        return {"model": (dict(self.weights), {**self.registry.to_facts(), **facts}), **self.optimiser.snapshot()}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        weights, facts = parts["model"]
        self.registry = Registry(tuple(facts["names"]), tuple(facts["growths"]))
        self.announced, self.last_growth = tuple(facts["announced"]), facts["last_growth"]
        grow_to(self.model, self.registry.growths, torch_generator(0, "buffer"))
        self.model.load_state_dict(weights)
        self.optimiser.restore(parts, next(self.model.parameters()).device)
