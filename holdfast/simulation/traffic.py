"""What a plan will cost in bytes, by arithmetic and without training: the same account as the record's, where the head
grows by schedule, clients notice new classes at once and share them only then."""

from collections.abc import Sequence

from holdfast.methods.base import Method
from holdfast.protocol.messages import COUNT_BYTES, tensor_bytes
from holdfast.proxy.selectors import ProxyHome, encoder_bytes
from holdfast.seeding import torch_generator
from holdfast.simulation.plan import Plan, new_classes

Bytes = dict[str, dict[str, int]]


def traffic_of(method: Method, home: ProxyHome, plan: Plan) -> list[Bytes]:
    """The bytes of every round of this method under this plan, but for its extras, whose size the clients decide."""
    model = method.build_model(home.spec, torch_generator(0, "buffer"))
    down, up = [], []
    for _, classes in plan.growths:
        model.grow(len(classes), torch_generator(0, "buffer"))
        weights, fixed = model.state_dict(), method.fixed(model)
        down.append(tensor_bytes(weights))
        up.append(tensor_bytes({name: tensor for name, tensor in weights.items() if name not in fixed}))
    proxy = method.build_proxy(home)
    encoder = encoder_bytes(proxy)
    share = encoder + 4 * model.features + COUNT_BYTES if encoder else 0
    account = expected_traffic(plan, down, up, proxy.sent, encoder, share)
    grown = {when for when, _ in plan.growths}
    for number, channels in enumerate(account):
        visits = (number in grown and method.visits("begin")) + (plan.ends_task(number) and method.visits("finish"))
        channels["server"]["down"] *= 1 + visits
    return account


def expected_traffic(
    plan: Plan, models: Sequence[int], sent: Sequence[int], teachers: int, encoder: int, share: int
) -> list[Bytes]:
    """The bytes of every round when all transitions are noticed at once and every selected client trains.

    `models` are the sizes of the global model after each growth, `sent` of what a client sends back, `encoder` and
    `share` those of the encoding network and of one prototype; `teachers` is how many old models they get."""
    account = []
    for number, selected in enumerate(plan.selected):
        growth = sum(when <= number for when, _ in plan.growths) - 1
        old = sum(models[max(0, growth - teachers) : growth])
        prototypes = sum(_prototypes(plan, client, number) for client in selected)
        account.append(
            {
                "server": {"down": models[growth] * len(selected), "up": sent[growth] * len(selected)},
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
