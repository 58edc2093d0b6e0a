"""What a simulation asks of an engine: the clients' work, and passes over many images."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from holdfast.client.training import ClientWork, Outcome
from holdfast.models.passes import CHUNK
from holdfast.protocol.messages import Failure, Inbox, InferenceRequest
from holdfast.protocol.state import ClientState


@dataclass(frozen=True)
class ImageGroup:
    """Images of one class in one client's order (or a test set): they are passed in chunks of their own, so that no
    answer depends on what else is asked."""

    name: str  # of the class
    ids: Tensor

    @property
    def chunks(self) -> tuple[Tensor, ...]:
        return tuple(self.ids.split(CHUNK))


class Engine(Protocol):
    """Who does the arithmetic of a round. Every engine gives the same bits."""

    def map(
        self, work: ClientWork, states: Sequence[ClientState], inboxes: Iterable[Inbox]
    ) -> Iterator[Outcome | Failure]:
        """Runs `work` on pairs of states and inboxes and yields the outcomes in their order; a failure of one client's
        work is no error."""
        ...

    def infer(self, work: ClientWork, request: InferenceRequest, groups: Sequence[ImageGroup]) -> list[Tensor]:
        """The answers about these groups of images."""
        ...

    def __enter__(self) -> "Engine": ...

    def __exit__(self, *_: object) -> None: ...
