"""One client after another, in this process."""

from collections.abc import Iterable, Iterator, Sequence

from holdfast.federation.client import ClientWork, Outcome
from holdfast.federation.messages import Inbox, State


class Serial:
    """The plainest engine, and the one that the others must equal."""

    def map(self, work: ClientWork, states: Sequence[State], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        return map(work, states, inboxes)

    def __enter__(self) -> "Serial":
        return self

    def __exit__(self, *_: object) -> None:
        pass
