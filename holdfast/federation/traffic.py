"""What a plan will cost in bytes, by arithmetic and without training: the same account as the record's."""

from collections.abc import Sequence

from holdfast.data.schedule import Plan, new_classes
from holdfast.federation.proxy import TEACHERS

Bytes = dict[str, dict[str, int]]


def expected_traffic(plan: Plan, models: Sequence[int], teachers: bool, encoder: int, share: int) -> list[Bytes]:
    """The bytes of every round when all transitions are noticed at once and every selected client trains.

    `models` are the sizes of the global model after each growth, `encoder` and `share` those of the encoding network
    and of one prototype; `teachers` says whether clients distil."""
    account = []
    for number, selected in enumerate(plan.selected):
        growth = plan.task_of_round(number)
        old = sum(models[max(0, growth - TEACHERS) : growth]) if teachers else 0
        prototypes = sum(_prototypes(plan, client, number) for client in selected)
        account.append(
            {
                "server": {"down": models[growth] * len(selected), "up": models[growth] * len(selected)},
                "proxy": {
                    "encoder": encoder * int((plan.joined == number).sum()),
                    "teachers": old * len(selected),
                    "shares": share * prototypes,
                },
            }
        )
    return account


def _prototypes(plan: Plan, client: int, number: int) -> int:
    """How many classes a client that is selected now has just met for the first time."""
    current = plan.current(client, number)
    if plan.arrivals[client][current].round != number:
        return 0
    return len(new_classes(plan.arrivals[client], current, current + 1))
