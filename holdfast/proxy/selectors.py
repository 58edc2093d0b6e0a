"""Who picks the old models that clients distil from: nobody, the calendar, chance, or LGA's proxy."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from holdfast.models.encoder import GradientEncoder
from holdfast.protocol.checks import Refusal
from holdfast.protocol.codec import Snapshot, Weights, tensor_bytes
from holdfast.protocol.messages import GlobalModel, PrototypeShare, Teachers
from holdfast.seeding import generator


class TeacherSelector(Protocol):
    """Sees every global model and, if it is a proxy, every share; answers with teachers."""

    sent: ClassVar[int]  # models that a client gets in the first round of a growth; at most one in later rounds
    is_party: ClassVar[bool]  # a proxy of its own, to which the server sends every global model

    @property
    def encoder(self) -> GradientEncoder | None:
        """What clients are handed once, when they join."""
        ...

    def teachers(self, growth: int) -> Teachers:
        """What selected clients are sent while this is the last growth."""
        ...

    def admit(
        self, growths: tuple[int, ...], shares: Sequence[tuple[int, PrototypeShare]]
    ) -> tuple[list[PrototypeShare], list[Refusal]]:
        """Checks what came in a round, by whom; returns the usable shares without their senders, and what was refused.
        Whoever sends a share is known on arrival only, and never to the pool."""
        ...

    def judge(self, model: GlobalModel, shares: Sequence[PrototypeShare]) -> dict[str, Any]:
        """Takes in the shares of a round and its new global model; returns what the record should say about it."""
        ...

    def gallery(self) -> dict[bytes, Tensor]:
        """The prototypes as the proxy sees them, by their fingerprints."""
        ...

    def snapshot(self) -> dict[str, Snapshot]:
        """What it remembers, for a checkpoint; old models are parts of their own, so that they are written once."""
        ...

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        """Remembers it again."""
        ...


def encoder_bytes(selector: TeacherSelector) -> int:
    """The size of what a client is handed when it joins."""
    return tensor_bytes(selector.encoder.state_dict()) if selector.encoder else 0


def copied(model: Weights) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.items()}


def numbered(name: str, parts: Mapping[str, Snapshot]) -> dict[int, Snapshot]:
    """The parts called `name.<number>`, by their numbers."""
    return {int(key.removeprefix(f"{name}.")): part for key, part in parts.items() if key.startswith(f"{name}.")}


class LastModelSelector:
    """The last global model of a growth is the teacher of the next."""

    sent: ClassVar[int] = 1
    is_party: ClassVar[bool] = False

    def __init__(self) -> None:
        self.encoder: GradientEncoder | None = None
        self.chosen: dict[int, Weights] = {}

    def teachers(self, growth: int) -> Teachers:
        first_round = growth not in self.chosen  # no model of this growth has been judged yet
        sent = self.sent if first_round else min(self.sent, 1)
        return Teachers({g: self.chosen[g] for g in range(max(0, growth - sent), growth) if g in self.chosen})

    def admit(
        self, growths: tuple[int, ...], shares: Sequence[tuple[int, PrototypeShare]]
    ) -> tuple[list[PrototypeShare], list[Refusal]]:
        return [], [Refusal(client, "not asked", "a share, but there is no proxy for it") for client, _ in shares]

    def judge(self, model: GlobalModel, shares: Sequence[PrototypeShare]) -> dict[str, Any]:
        if model.growths:
            self.keep(len(model.growths) - 1, model.weights)
        return {}

    def gallery(self) -> dict[bytes, Tensor]:
        return {}

    def snapshot(self) -> dict[str, Snapshot]:
        return {f"model.{growth}": (dict(model), {}) for growth, model in self.chosen.items()}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        self.chosen = {number: tensors for number, (tensors, _) in numbered("model", parts).items()}

    def keep(self, growth: int, model: Weights) -> None:
        """Makes this the model of its growth, and drops what no client will be sent any more."""
        self.chosen[growth] = copied(model)
        for old in [g for g in self.chosen if g < growth - 1]:
            del self.chosen[old]


class NullSelector(LastModelSelector):
    """For methods that do not distil: nothing is kept and nothing is sent."""

    sent = 0

    def judge(self, model: GlobalModel, shares: Sequence[PrototypeShare]) -> dict[str, Any]:
        return {}


TWO = 2  # the models of the last two growths: in the first round of a growth the alarm decides between them


class RandomModelSelector(LastModelSelector):
    """Without the proxy (w/oPSR): the teacher is drawn from the global models of a growth, each as likely."""

    sent = TWO

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.seen: dict[int, int] = {}  # growth -> models so far

    def judge(self, model: GlobalModel, shares: Sequence[PrototypeShare]) -> dict[str, Any]:
        # The k-th model replaces the one that is kept with probability 1/k: in the end all are equally likely, and only
        # one has to be stored.
        growth = len(model.growths) - 1
        if growth < 0:
            return {}
        self.seen[growth] = self.seen.get(growth, 0) + 1
        draw = int(generator(self.seed, "proxy", "any", growth, self.seen[growth]).bit_generator.random_raw())
        if draw % self.seen[growth] == 0:
            self.keep(growth, model.weights)
        return {}

    def snapshot(self) -> dict[str, Snapshot]:
        return {**super().snapshot(), "seen": ({}, {"growths": list(self.seen.items())})}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        super().restore(parts)
        self.seen = dict(parts["seen"][1]["growths"])
