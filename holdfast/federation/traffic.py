"""What a plan will cost in bytes, by arithmetic and without training: the same account as the record's."""

from collections.abc import Sequence

from holdfast.data.schedule import Plan, new_classes
from holdfast.federation.messages import COUNT_BYTES, tensor_bytes
from holdfast.federation.proxy import TEACHERS, NoTeacher, ProxyHome
from holdfast.methods.base import Method
from holdfast.seeding import torch_generator

Bytes = dict[str, dict[str, int]]


def traffic_of(method: Method, home: ProxyHome, plan: Plan) -> list[Bytes]:
    """The bytes of every round of this method under this plan."""
    model = method.build_model(home.spec, torch_generator(0, "buffer"))
    sizes = []
    for _, classes in plan.growths:
        model.grow(len(classes), torch_generator(0, "buffer"))
        sizes.append(tensor_bytes(model.state_dict()))
    proxy = method.build_proxy(home)
    encoder = tensor_bytes(proxy.encoder.state_dict()) if proxy.encoder else 0
    share = encoder + 4 * model.features + COUNT_BYTES if encoder else 0
    return expected_traffic(plan, sizes, not isinstance(proxy, NoTeacher), encoder, share)


def expected_traffic(plan: Plan, models: Sequence[int], teachers: bool, encoder: int, share: int) -> list[Bytes]:
    """The bytes of every round when all transitions are noticed at once and every selected client trains.

    `models` are the sizes of the global model after each growth, `encoder` and `share` those of the encoding network
    and of one prototype; `teachers` says whether clients distil."""
    account = []
    for number, selected in enumerate(plan.selected):
        growth = sum(when <= number for when, _ in plan.growths) - 1
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


def by_task(plan: Plan, account: Sequence[Bytes]) -> list[dict[str, int]]:
    """The same, added up over each task's rounds."""
    totals: list[dict[str, int]] = [{} for _ in plan.tasks]
    for number, channels in enumerate(account):
        total = totals[plan.task_of_round(number)]
        for ways in channels.values():
            for way, count in ways.items():
                total[way] = total.get(way, 0) + count
    return totals


def _prototypes(plan: Plan, client: int, number: int) -> int:
    """How many classes a client that is selected now has just met for the first time."""
    current = plan.current(client, number)
    if plan.arrivals[client][current].round != number:
        return 0
    return len(new_classes(plan.arrivals[client], current, current + 1))
