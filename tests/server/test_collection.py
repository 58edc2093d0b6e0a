"""Who counts in a round: at most once, in client order, whenever and in whatever order answers arrive."""

from collections.abc import Sequence

import pytest

from holdfast.errors import HoldfastError
from holdfast.protocol.checks import Misfit
from holdfast.protocol.messages import Failure, Reply
from holdfast.server.collection import Answer, Collection, Quorum, collect, require_update


def check(answer: Reply | Failure) -> Misfit | None:
    if answer.round_index != 5:
        return Misfit("late", f"an answer of round {answer.round_index + 1}")
    if isinstance(answer, Failure):
        return Misfit(answer.what, answer.reason)
    return Misfit("samples", "too many") if answer.samples > 100 else None


def reply(samples: int = 1, round_index: int = 5) -> Reply:
    return Reply(samples=samples, round_index=round_index)


def test_each_client_counts_once_in_client_order() -> None:
    found = Collection((1, 2, 4), check)
    for client, answer in [(4, reply(4)), (1, reply(1)), (4, reply(40)), (2, reply(2)), (1, reply(10))]:
        found.take(client, answer)
    assert [(client, one.samples) for client, one in found.usable] == [(1, 1), (2, 2), (4, 4)]
    assert [(one.client, one.kind) for one in found.refused] == [(4, "duplicate"), (1, "duplicate")]
    assert found.missing == []


def test_answers_of_earlier_rounds_and_of_strangers_are_refused() -> None:
    found = Collection((1, 2), check)
    for client, answer in [(1, reply(round_index=4)), (3, reply()), (3, reply(round_index=2)), (1, reply())]:
        found.take(client, answer)
    found.take(1, reply(round_index=4))  # late once more, now that the client has answered
    assert [client for client, _ in found.usable] == [1]
    assert [one.kind for one in found.refused] == ["late", "not asked", "late", "late"]
    assert found.missing == [2]


class Script:
    """Answers attempt by attempt, and who was asked."""

    def __init__(self, *attempts: list[Answer]) -> None:
        self.attempts, self.asked = list(attempts), []  # type: ignore[var-annotated]

    def __call__(self, clients: Sequence[int]) -> list[Answer]:
        self.asked.append(list(clients))
        return self.attempts.pop(0) if self.attempts else []


def test_every_usable_answer_counts_and_not_the_first_k() -> None:
    script = Script([(3, reply()), (1, reply()), (2, reply())])
    found = collect(script, (1, 2, 3), check, Quorum(2, 2))
    assert len(found.usable) == 3
    assert script.asked == [[1, 2, 3]]
    assert found.attempts == 1


def test_without_a_quorum_the_others_are_asked_again_with_the_same_job() -> None:
    script = Script([(2, reply())], [(1, reply())], [(3, reply())])
    found = collect(script, (1, 2, 3), check, Quorum(2, 5))
    assert script.asked == [[1, 2, 3], [1, 3]]
    assert [client for client, _ in found.usable] == [1, 2]
    assert (found.attempts, found.missing) == (2, [3])


def test_attempts_end_after_a_set_number() -> None:
    script = Script()
    found = collect(script, (1, 2), check, Quorum(1, 3))
    assert script.asked == [[1, 2]] * 4
    assert (found.usable, found.missing) == ([], [1, 2])
    require_update(found, False, "update", 5)  # nobody's was refused: the model stays, and the run goes on


def test_who_would_give_the_same_bad_answer_is_not_asked_again() -> None:
    crash, diverged = Failure("crash", "why", 5), Failure("diverged", "too fast", 5)
    script = Script([(1, reply(999)), (2, crash), (3, diverged)], [(2, reply())])
    found = collect(script, (1, 2, 3), check, Quorum(1, 5))
    assert script.asked == [[1, 2, 3], [2]]
    assert [client for client, _ in found.usable] == [2]


def test_the_run_ends_when_nobodys_update_is_usable_and_says_why() -> None:
    found = collect(Script([(1, reply(999)), (2, Failure("diverged", "too fast", 5))]), (1, 2), check, Quorum())
    with pytest.raises(
        HoldfastError, match=r"^no client's update .* in round 6: client 1 \(and 1 more\): too many; lower"
    ):
        require_update(found, False, "update", 5)
    require_update(found, True, "update", 5)
