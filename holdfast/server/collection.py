"""The answers to one job: each client counts once, in client order, whenever and in whatever order they arrive."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.errors import HoldfastError
from holdfast.protocol.checks import Misfit, Refusal
from holdfast.protocol.messages import Failure, Reply

Answer = tuple[int, Reply | Failure]  # the client that sent it, as its channel knows it
Check = Callable[[Reply | Failure], Misfit | None]
AGAIN = ("crash", "timeout")  # failures after which a client is asked again; any other answer would be the same
BOOKKEEPING = ("late", "duplicate", "not asked")  # refusals that say nothing about what a client has computed


@dataclass(frozen=True)
class Quorum:
    """When a round counts: with at least `least` usable replies, after at most `retries` further attempts."""

    least: int = 1
    retries: int = 2


@dataclass
class Collection:
    """The answers to the job of one round and phase. `check` says why an answer cannot be used."""

    asked: Sequence[int]
    check: Check
    replies: dict[int, Reply] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    attempts: int = 0

    def take(self, client: int, answer: Reply | Failure) -> None:
        """Takes in one answer, or notes why it is not used."""
        problem = self._problem(client, answer)
        if problem is None and isinstance(answer, Reply):
            self.replies[client] = answer
        elif problem is not None:
            self.refused.append(Refusal(client, problem.kind, problem.reason))

    def _problem(self, client: int, answer: Reply | Failure) -> Misfit | None:
        if client not in self.asked:
            return self._late(answer) or Misfit("not asked", "an answer of a client that was not asked")
        if client in self.replies:
            return self._late(answer) or Misfit("duplicate", "a second answer to the same job")
        return self.check(answer)

    def _late(self, answer: Reply | Failure) -> Misfit | None:
        problem = self.check(answer)
        return problem if problem is not None and problem.kind == "late" else None

    @property
    def usable(self) -> list[tuple[int, Reply]]:
        """The replies that count, in the order of client numbers."""
        return sorted(self.replies.items())

    @property
    def missing(self) -> list[int]:
        """Clients that were asked and have not given a usable answer."""
        return [client for client in self.asked if client not in self.replies]

    @property
    def to_ask(self) -> list[int]:
        """Clients that may still answer: those that were not heard, and those whose work broke down."""
        final = {one.client for one in self.refused if one.kind not in (*AGAIN, *BOOKKEEPING)}
        return [client for client in self.missing if client not in final]

    @property
    def unusable(self) -> list[Refusal]:
        """What clients have computed and could not be used, or could not compute."""
        return [one for one in self.refused if one.kind not in BOOKKEEPING]


def collect(
    ask: Callable[[Sequence[int]], Iterable[Answer]], asked: Sequence[int], check: Check, quorum: Quorum
) -> Collection:
    """Asks these clients, and those that have not answered again, until there are enough usable answers.

    Every usable answer counts, more than the quorum too. `ask` gives the answers that arrive within the deadline, in
    any order; a client may be missing or answer twice."""
    found = Collection(asked, check)
    while found.attempts <= quorum.retries:
        waiting = found.to_ask
        if not waiting or (found.attempts and len(found.replies) >= quorum.least):
            break
        found.attempts += 1
        for client, answer in ask(waiting):
            found.take(client, answer)
    return found


def require_update(found: Collection, useful: bool, what: str, round_index: int) -> None:
    """Ends the run if nobody's update can be used and somebody's was refused; it says whose first, and why."""
    if useful or not found.unusable:
        return
    first, others = found.unusable[0], len({one.client for one in found.unusable}) - 1
    more = f" (and {others} more)" if others else ""
    hint = "; lower train.lr or the method's own rates; the rounds before it are in the record"
    if first.kind in ("diverged", *AGAIN):
        hint = ""  # the reason says what to do
    who = f"client {first.client}{more}"
    raise HoldfastError(f"no client's {what} could be used in round {round_index + 1}: {who}: {first.reason}{hint}")
