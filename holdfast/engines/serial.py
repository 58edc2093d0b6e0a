"""One client after another, in this process."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from holdfast.client.training import ClientWork, Outcome, attempt
from holdfast.protocol.messages import Failure, Inbox, InferenceRequest
from holdfast.protocol.state import ClientState
from holdfast.simulation.engine import ImageGroup


class Serial:
    """The simplest engine and the reference: all others must give the same bits."""

    def map(
        self, work: ClientWork, states: Sequence[ClientState], inboxes: Iterable[Inbox]
    ) -> Iterator[Outcome | Failure]:
        return map(partial(attempt, work), states, inboxes)

    def infer(self, work: ClientWork, request: InferenceRequest, groups: Sequence[ImageGroup]) -> list[Tensor]:
        return [
            torch.cat([work.infer(request, chunk, group.name, i) for i, chunk in enumerate(group.chunks)])
            for group in groups
        ]

    def __enter__(self) -> "Serial":
        return self

    def __exit__(self, *_: object) -> None:
        pass
