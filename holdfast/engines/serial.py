"""One client after another, in this process."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from holdfast.client.training import ClientWork, Outcome
from holdfast.models.passes import CHUNK, Question
from holdfast.protocol.messages import Inbox, State


class Serial:
    """The plainest engine, and the one that the others must equal."""

    def map(self, work: ClientWork, states: Sequence[State], inboxes: Iterable[Inbox]) -> Iterator[Outcome]:
        return map(work, states, inboxes)

    def ask(self, work: ClientWork, question: Question, rows: Tensor) -> Tensor:
        return torch.cat([work.answer(question, some, i) for i, some in enumerate(rows.split(CHUNK))])

    def __enter__(self) -> "Serial":
        return self

    def __exit__(self, *_: object) -> None:
        pass
