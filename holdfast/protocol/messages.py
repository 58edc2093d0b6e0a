"""What passes between clients, global server and proxy server: values that serialise to safetensors with a JSON header,
never pickle. A job and a reply travel on the global server's channel, teachers and shares on the proxy's."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from safetensors.torch import load as _load_tensors
from safetensors.torch import save as _save_tensors
from torch import Tensor

from holdfast.protocol.registry import Registry

Weights = Mapping[str, Tensor]
Snapshot = tuple[dict[str, Tensor], dict[str, Any]]  # a part of some role's memory, as `pack` takes it
# What a selected client is asked for: before a task's training, to train, or after a task's last round.
Moment = Literal["begin", "train", "finish"]
COUNT_BYTES = 8  # of an integer on the wire


def pack(kind: str, tensors: Weights, facts: Mapping[str, Any]) -> bytes:
    """One safetensors blob; the facts travel as JSON in its metadata."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One entry of metadata, because the order of several is not the same from call to call.
    return _save_tensors(plain, metadata={"holdfast": json.dumps({"kind": kind, **facts})})


def unpack(kind: str, blob: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a blob that `pack` made."""
    length = int.from_bytes(blob[:8], "little")
    facts = json.loads(json.loads(blob[8 : 8 + length])["__metadata__"]["holdfast"])
    if facts["kind"] != kind:
        raise ValueError(f"expected a {kind}, got a {facts['kind']}")
    return _load_tensors(blob), facts


def _part(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """The tensors whose names begin so, without the beginning."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def tensor_bytes(tensors: Weights) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True)
class Job:
    """From the global server to a selected client: the model, and when this is."""

    round: int
    progress: float  # how much of the task's rounds is over
    step: float  # how much of it this round is
    registry: Registry
    weights: Weights
    moment: Moment = "train"

    @property
    def size(self) -> int:
        return tensor_bytes(self.weights)

    def to_bytes(self) -> bytes:
        facts = {
            "round": self.round,
            "progress": self.progress,
            "step": self.step,
            "names": self.registry.names,
            "growths": self.registry.growths,
            "moment": self.moment,
        }
        return pack("job", self.weights, facts)

    @staticmethod
    def from_bytes(blob: bytes) -> "Job":
        weights, facts = unpack("job", blob)
        registry = Registry(tuple(facts["names"]), tuple(facts["growths"]))
        return Job(facts["round"], facts["progress"], facts["step"], registry, weights, facts["moment"])


@dataclass(frozen=True)
class Extras:
    """What a client tells the global server beyond its model: of one kind, and never averaged by accident."""

    kind: str  # class sums, bias, importances, ...
    tensors: Weights


@dataclass(frozen=True)
class Reply:
    """From a client back to the global server: its model and how it went; no weights if it had nothing to train on."""

    weights: Weights = field(default_factory=dict)
    samples: int = 0
    losses: Mapping[str, float] = field(default_factory=dict)  # mean of each term over the round's batches
    extras: Extras | None = None

    @property
    def size(self) -> int:
        return tensor_bytes(self.weights)

    @property
    def extra_size(self) -> int:
        return tensor_bytes(self.extras.tensors) if self.extras else 0

    def to_bytes(self) -> bytes:
        extras = self.extras or Extras("", {})
        tensors = {f"weights.{name}": tensor for name, tensor in self.weights.items()}
        tensors |= {f"extras.{name}": tensor for name, tensor in extras.tensors.items()}
        return pack("reply", tensors, {"samples": self.samples, "losses": dict(self.losses), "extras": extras.kind})

    @staticmethod
    def from_bytes(blob: bytes) -> "Reply":
        tensors, facts = unpack("reply", blob)
        weights, extras = _part("weights.", tensors), Extras(facts["extras"], _part("extras.", tensors))
        return Reply(weights, facts["samples"], facts["losses"], extras if extras.kind else None)


@dataclass(frozen=True)
class Teachers:
    """From the proxy to a selected client: old global models to distil from, by the growth that each is the best of."""

    models: Mapping[int, Weights] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(map(tensor_bytes, self.models.values()))

    def before(self, growth: int) -> int | None:
        """Whose model a client that has noticed this growth distils from: that of the growth before, or the nearest
        that was sent. With the first growth there is nothing to keep yet."""
        older = [known for known in self.models if known < growth]
        return max(older) if older else min(self.models, default=None) if growth > 0 else None

    def to_bytes(self) -> bytes:
        tensors = {f"{growth}.{name}": t for growth, model in self.models.items() for name, t in model.items()}
        return pack("teachers", tensors, {"growths": list(self.models)})

    @staticmethod
    def from_bytes(blob: bytes) -> "Teachers":
        tensors, facts = unpack("teachers", blob)
        models: dict[int, dict[str, Tensor]] = {growth: {} for growth in facts["growths"]}
        for key, tensor in tensors.items():
            growth, _, name = key.partition(".")
            models[int(growth)][name] = tensor
        return Teachers(models)


@dataclass(frozen=True)
class PrototypeShare:
    """From a client to the proxy, and to nobody else: the gradient of one prototype image through the encoding network,
    and the variance of its class's features under the broadcast model (N12). It says neither who nor which class."""

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
        return pack("share", {**self.gradient, "variance": self.variance}, {"count": self.count})

    @staticmethod
    def from_bytes(blob: bytes) -> "PrototypeShare":
        tensors, facts = unpack("share", blob)
        variance = tensors.pop("variance")
        return PrototypeShare(tensors, facts["count"], variance)


@dataclass(frozen=True)
class Inbox:
    """What a selected client receives in a round, each from its own sender."""

    job: Job
    teachers: Teachers = field(default_factory=Teachers)


@dataclass(frozen=True)
class State:
    """What a client keeps between rounds: exemplars as image indices, and a method's own notes."""

    client: int
    memory: Mapping[int, Tensor] = field(default_factory=dict)  # class -> indices of its images, best exemplar first
    stored: int = 0  # how many of the client's arrivals are in its memory
    noticed: int = 0  # how many of them its detector has noticed
    shared: int = 0  # the prototypes of how many of them the proxy has
    notes: Weights = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        tensors = {f"memory.{c}": rows for c, rows in self.memory.items()}
        tensors |= {f"notes.{name}": tensor for name, tensor in self.notes.items()}
        facts = {"client": self.client, "stored": self.stored, "noticed": self.noticed, "shared": self.shared}
        return pack("state", tensors, {**facts, "memory": list(self.memory)})

    @staticmethod
    def from_bytes(blob: bytes) -> "State":
        tensors, facts = unpack("state", blob)
        memory = {c: tensors[f"memory.{c}"] for c in facts["memory"]}
        notes = _part("notes.", tensors)
        return State(facts["client"], memory, facts["stored"], facts["noticed"], facts["shared"], notes)
