"""One client after another, in this process."""

from collections.abc import Iterable, Iterator, Sequence

from holdfast.federation.client import ClientWork
from holdfast.federation.messages import Job, Reply, State


class Serial:
    """The plainest engine, and the one that the others must equal."""

    def map(self, work: ClientWork, states: Sequence[State], jobs: Iterable[Job]) -> Iterator[tuple[State, Reply]]:
        return map(work, states, jobs)
