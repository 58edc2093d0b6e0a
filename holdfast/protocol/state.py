"""What a client keeps between rounds. It crosses a boundary only where worker processes compute a simulation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from holdfast.protocol.codec import Facts, Weights, pack, part, unpack

Holdings = Mapping[str, Tensor]  # class name -> ids of the client's own images, in its own order


@dataclass(frozen=True)
class ClientState:
    """A client's images by class name and own ids, how far it has come with its arrivals, and a method's notes."""

    client: int
    arrivals: tuple[tuple[str, ...], ...] = ()  # the classes that each arrival brought, in time order
    data: Holdings = field(default_factory=dict)  # of the last arrival
    memory: Holdings = field(default_factory=dict)  # best exemplar first
    stored: int = 0  # how many of the arrivals are in the memory
    noticed: int = 0  # how many of them the detector has noticed
    shared: int = 0  # the prototypes of how many of them the proxy has, or will not get
    notes: Weights = field(default_factory=dict)

    @property
    def images(self) -> int:
        """How many images the client has, which is how long its work takes."""
        return sum(map(len, (*self.data.values(), *self.memory.values())))

    def to_bytes(self) -> bytes:
        tensors = {f"{name}.{i}": ids for name in ("data", "memory") for i, ids in enumerate(self._ids(name))}
        tensors |= {f"notes.{name}": tensor for name, tensor in self.notes.items()}
        facts = {name: getattr(self, name) for name in ("client", "arrivals", "stored", "noticed", "shared")}
        return pack("state", tensors, {**facts, "data": list(self.data), "memory": list(self.memory)})

    def _ids(self, name: str) -> Sequence[Tensor]:
        held: Holdings = getattr(self, name)
        return list(held.values())

    @staticmethod
    def from_bytes(blob: bytes) -> "ClientState":
        tensors, values = unpack("state", blob)
        facts = Facts("state", values)
        arrivals = values.get("arrivals")
        if not isinstance(arrivals, list):
            raise facts.wrong("arrivals")
        counts = {name: facts.integer(name) for name in ("stored", "noticed", "shared")}
        try:
            data, memory = (
                {c: tensors[f"{name}.{i}"] for i, c in enumerate(facts.names(name))} for name in ("data", "memory")
            )
        except KeyError as error:
            raise facts.wrong(str(error)) from error
        brought = tuple(Facts("state", {"arrivals": names}).names("arrivals") for names in arrivals)
        return ClientState(facts.integer("client"), brought, data, memory, notes=part("notes.", tensors), **counts)


def new_classes(arrivals: Sequence[Sequence[str]], start: int, end: int) -> list[str]:
    """The classes that the arrivals from `start` to `end` brought a client for the first time."""
    before = {name for arrival in arrivals[:start] for name in arrival}
    brought = dict.fromkeys(name for arrival in arrivals[start:end] for name in arrival)
    return [name for name in brought if name not in before]
