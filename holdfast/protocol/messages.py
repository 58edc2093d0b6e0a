"""Every message that crosses a boundary between clients, global server and proxy.

Enrolments, broadcasts, jobs, notices, replies and announcements travel on the global server's channel; the encoder,
teachers and prototype shares on the proxy's; global models go from the server to the proxy on a channel of their own.
Each type has `to_bytes` and `from_bytes`; those that a run bills have a `size`, the bytes of their tensors."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self, Union, get_args

from torch import Tensor

from holdfast.protocol.codec import (
    Facts,
    MalformedMessage,
    Weights,
    kind_of,
    pack,
    part,
    prefixed,
    tensor_bytes,
    unpack,
)
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.registry import Registry

# What a selected client is asked for: extras before a task's training, training, or extras after its last round.
Phase = Literal["begin", "train", "finish"]
COUNT_BYTES = 8  # of an integer on the wire


@dataclass(frozen=True)
class Encoder:
    """From the proxy to a client that joins: the weights of the gradient encoding network."""

    kind: ClassVar[str] = "encoder"

    weights: Weights

    @property
    def size(self) -> int:
        return tensor_bytes(self.weights)

    def to_bytes(self) -> bytes:
        return pack(self.kind, self.weights, {})

    @staticmethod
    def from_bytes(blob: bytes) -> "Encoder":
        return Encoder(unpack("encoder", blob)[0])


@dataclass(frozen=True)
class _RoundMessage:
    """A message that says no more than in which round it is."""

    kind: ClassVar[str]
    size: ClassVar[int] = 0

    round_index: int

    def to_bytes(self) -> bytes:
        return pack(self.kind, {}, {"round_index": self.round_index})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        return cls(Facts(cls.kind, unpack(cls.kind, blob)[1]).integer("round_index"))


@dataclass(frozen=True)
class _ModelMessage:
    """A message with the classes known in a round and the global model."""

    kind: ClassVar[str]

    round_index: int
    registry: Registry
    weights: Weights = field(default_factory=dict)

    @property
    def size(self) -> int:
        return tensor_bytes(self.weights)

    def to_bytes(self) -> bytes:
        return pack(self.kind, self.weights, {"round_index": self.round_index, **self.registry.to_facts()})

    @classmethod
    def from_bytes(cls, blob: bytes) -> Self:
        weights, values = unpack(cls.kind, blob)
        facts = Facts(cls.kind, values)
        return cls(facts.integer("round_index"), Registry.from_facts(facts), weights)


@dataclass(frozen=True)
class Broadcast(_ModelMessage):
    """From the global server to a present client that is not selected: the classes known in this round and, if the
    client is to observe, the global model; else no weights."""

    kind: ClassVar[str] = "broadcast"


@dataclass(frozen=True)
class TransitionNotice(_RoundMessage):
    """To a client whose detector is the oracle: new classes have come to it in this round."""

    kind: ClassVar[str] = "transition notice"


@dataclass(frozen=True)
class Job:
    """From the global server to a selected client: the model, and when this is."""

    kind: ClassVar[str] = "job"

    round_index: int
    progress: float  # how much of the task's rounds is over
    step: float  # how much of it this round is
    registry: Registry
    weights: Weights
    phase: Phase = "train"

    @property
    def size(self) -> int:
        return tensor_bytes(self.weights)

    def to_bytes(self) -> bytes:
        facts = {name: getattr(self, name) for name in ("round_index", "progress", "step", "phase")}
        return pack(self.kind, self.weights, {**facts, **self.registry.to_facts()})

    @staticmethod
    def from_bytes(blob: bytes) -> "Job":
        weights, values = unpack("job", blob)
        facts = Facts("job", values)
        return Job(
            facts.integer("round_index"),
            facts.number("progress"),
            facts.number("step"),
            Registry.from_facts(facts),
            weights,
            _phase(facts),
        )


@dataclass(frozen=True)
class TaskEnded(_ModelMessage):
    """From the global server to every present client after a task's last round: the model with which clients choose
    their exemplars of what they have just learned."""

    kind: ClassVar[str] = "task end"


@dataclass(frozen=True)
class RoundClosed(_RoundMessage):
    """From the global server to every present client: this round is over, and nobody else will be asked in it."""

    kind: ClassVar[str] = "round close"


@dataclass(frozen=True)
class Announcement:
    """From a client to the global server: classes it holds that the registry does not know."""

    kind: ClassVar[str] = "announcement"

    round_index: int
    names: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(len(name.encode("utf-8", "surrogateescape")) for name in self.names)

    def to_bytes(self) -> bytes:
        return pack(self.kind, {}, {"round_index": self.round_index, "names": self.names})

    @staticmethod
    def from_bytes(blob: bytes) -> "Announcement":
        facts = Facts("announcement", unpack("announcement", blob)[1])
        return Announcement(facts.integer("round_index"), facts.names("names"))


@dataclass(frozen=True)
class Extras:
    """What a client tells the global server beyond its model: of one kind, and never averaged by accident."""

    kind: str  # class sums, bias, importances, ...
    tensors: Weights


@dataclass(frozen=True)
class Reply:
    """From a client back to the global server: its model and its losses; no weights if it had nothing to train on."""

    kind: ClassVar[str] = "reply"

    weights: Weights = field(default_factory=dict)
    samples: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)  # mean of each term over the round's batches
    extras: Extras | None = None
    round_index: int = 0  # of the job that it answers
    phase: Phase = "train"

    @property
    def size(self) -> int:
        return tensor_bytes(self.weights)

    @property
    def extra_size(self) -> int:
        return tensor_bytes(self.extras.tensors) if self.extras else 0

    def to_bytes(self) -> bytes:
        extras = self.extras or Extras("", {})
        tensors = {**prefixed("weights.", self.weights), **prefixed("extras.", extras.tensors)}
        facts = {name: getattr(self, name) for name in ("samples", "round_index", "phase")}
        return pack(self.kind, tensors, {**facts, "losses": dict(self.losses), "extras": extras.kind})

    @staticmethod
    def from_bytes(blob: bytes) -> "Reply":
        tensors, values = unpack("reply", blob)
        facts = Facts("reply", values)
        losses = Facts("reply", facts.table("losses"))
        extras = Extras(facts.text("extras"), part("extras.", tensors))
        return Reply(
            part("weights.", tensors),
            facts.integer("samples"),
            {name: losses.number(name) for name in losses.values},
            extras if extras.kind else None,
            facts.integer("round_index"),
            _phase(facts),
        )


@dataclass(frozen=True)
class Failure:
    """From a client back to the global server in place of a reply: its work ended in an error."""

    kind: ClassVar[str] = "failure"
    size: ClassVar[int] = 0

    what: str  # diverged, crash, timeout
    reason: str
    round_index: int = 0
    phase: Phase = "train"

    def to_bytes(self) -> bytes:
        return pack(self.kind, {}, {name: getattr(self, name) for name in ("what", "reason", "round_index", "phase")})

    @staticmethod
    def from_bytes(blob: bytes) -> "Failure":
        facts = Facts("failure", unpack("failure", blob)[1])
        return Failure(facts.text("what"), facts.text("reason"), facts.integer("round_index"), _phase(facts))


def _phase(facts: Facts) -> Phase:
    phase = facts.text("phase")
    if phase not in get_args(Phase):
        raise facts.wrong("phase")
    return phase  # type: ignore[return-value]


@dataclass(frozen=True)
class Teachers:
    """From the proxy to a selected client: old global models to distil from, by the growth that each is the best of."""

    kind: ClassVar[str] = "teachers"

    models: Mapping[int, Weights] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(map(tensor_bytes, self.models.values()))

    def before(self, growth: int) -> int | None:
        """The growth whose model a client that has noticed this growth distils from: the growth before, or the nearest
        that was sent; None if no model was sent."""
        older = [known for known in self.models if known < growth]
        return max(older) if older else min(self.models, default=None)

    def to_bytes(self) -> bytes:
        tensors = {f"{growth}.{name}": t for growth, model in self.models.items() for name, t in model.items()}
        return pack(self.kind, tensors, {"growths": list(self.models)})

    @staticmethod
    def from_bytes(blob: bytes) -> "Teachers":
        tensors, values = unpack("teachers", blob)
        models: dict[int, dict[str, Tensor]] = {growth: {} for growth in Facts("teachers", values).integers("growths")}
        growths = {str(growth): growth for growth in models}
        for key, tensor in tensors.items():
            growth, _, name = key.partition(".")
            if growth not in growths:
                raise MalformedMessage(f"a teachers message has the tensor {key[:60]!r} of no growth that it names")
            models[growths[growth]][name] = tensor
        return Teachers(models)


@dataclass(frozen=True)
class PrototypeShare:
    """From a client to the proxy, and to nobody else: the gradient of one prototype image through the encoding network,
    and the variance of its class's features under the broadcast model (N12). It says neither who nor which class."""

    kind: ClassVar[str] = "share"

    gradient: Weights  # parameter of the encoding network -> gradient
    count: int  # images of the class at this client
    variance: Tensor  # (d,)

    @property
    def size(self) -> int:
        return tensor_bytes(self.gradient) + tensor_bytes({"variance": self.variance}) + COUNT_BYTES

    @property
    def fingerprint(self) -> bytes:
        """By which a client and the proxy can later tell, each for itself, which prototype this was."""
        digest = hashlib.sha256()
        for name in sorted(self.gradient):
            digest.update(self.gradient[name].cpu().contiguous().numpy().tobytes())
        return digest.digest()

    def to_bytes(self) -> bytes:
        return pack(self.kind, {**self.gradient, "variance": self.variance}, {"count": self.count})

    @staticmethod
    def from_bytes(blob: bytes) -> "PrototypeShare":
        tensors, values = unpack("share", blob)
        if "variance" not in tensors:
            raise MalformedMessage("a share has no variance")
        variance = tensors.pop("variance")
        return PrototypeShare(tensors, Facts("share", values).integer("count"), variance)


@dataclass(frozen=True)
class GlobalModel:
    """From the global server to the proxy: the model of a round."""

    kind: ClassVar[str] = "global model"

    round_index: int
    growths: tuple[int, ...]
    weights: Weights

    @property
    def size(self) -> int:
        return tensor_bytes(self.weights)

    def to_bytes(self) -> bytes:
        return pack(self.kind, self.weights, {"round_index": self.round_index, "growths": self.growths})

    @staticmethod
    def from_bytes(blob: bytes) -> "GlobalModel":
        weights, values = unpack("global model", blob)
        facts = Facts("global model", values)
        return GlobalModel(facts.integer("round_index"), facts.growths(), weights)


@dataclass(frozen=True)
class InferenceRequest:
    """What a simulation asks of a model about many images, chunk by chunk, by whichever process is free: the
    `entropies` (Eq. 8) or `features` of training images, or a method's `scores` or `answers` for test images."""

    kind: ClassVar[str] = "inference request"

    what: str
    growths: tuple[int, ...]
    weights: Weights
    stream: tuple[str | int, ...] = ()  # the random stream by which images are augmented, if they are

    def to_bytes(self) -> bytes:
        return pack(self.kind, self.weights, {key: getattr(self, key) for key in ("what", "growths", "stream")})

    @staticmethod
    def from_bytes(blob: bytes) -> "InferenceRequest":
        weights, values = unpack("inference request", blob)
        facts = Facts("inference request", values)
        stream = values.get("stream")
        if not isinstance(stream, list) or any(type(word) not in (str, int) for word in stream):
            raise facts.wrong("stream")
        return InferenceRequest(facts.text("what"), facts.growths(), weights, tuple(stream))


@dataclass(frozen=True)
class Inbox:
    """What a selected client receives for a job, each part from its own sender."""

    job: Job
    teachers: Teachers = field(default_factory=Teachers)


Message = Union[  # noqa: UP007
    Enrolment,
    Encoder,
    Broadcast,
    TransitionNotice,
    Job,
    TaskEnded,
    RoundClosed,
    Announcement,
    Reply,
    Failure,
    Teachers,
    PrototypeShare,
    GlobalModel,
    InferenceRequest,
]
MESSAGES: dict[str, type[Message]] = {message.kind: message for message in get_args(Message)}


def decode(blob: bytes) -> Message:
    """The message that these bytes are; raises `MalformedMessage` if they are none."""
    kind = kind_of(blob)
    if kind not in MESSAGES:
        raise MalformedMessage(f"a message of the unknown kind {kind[:40]!r}")
    message: Message = MESSAGES[kind].from_bytes(blob)
    return message
