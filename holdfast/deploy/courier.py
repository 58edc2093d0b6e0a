"""How the global server reaches its sites: a courier carries opaque bytes. Flower is one; the rest of the package knows
only this protocol."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Failure:
    """Why no answer came, in a few words."""

    reason: str


class Courier(Protocol):
    """Carries one request to each of some sites and brings their answers, in the order in which they come."""

    def present(self) -> Sequence[str]:
        """The names of the sites that are connected now."""
        ...

    def exchange(self, blobs: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes | Failure]]:
        """Sends every site its request; yields each site once. After `deadline` seconds the rest have failed. A site
        that comes back in the meantime gets its request again."""
        ...
