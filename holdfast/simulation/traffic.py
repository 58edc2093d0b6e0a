"""What a plan will cost in bytes, by arithmetic and without training: the same account as the record's, where the head
grows by schedule, clients notice new classes at once and share them only then."""

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.client.detector import detector_of
from holdfast.methods.base import Method, fixed_names
from holdfast.protocol.codec import tensor_bytes
from holdfast.protocol.messages import COUNT_BYTES
from holdfast.proxy.prototype_server import SelectorSetup, build_selector
from holdfast.proxy.selectors import encoder_bytes
from holdfast.seeding import torch_generator
from holdfast.simulation.plan import Plan

Bytes = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Sizes:
    """What messages of a method weigh, and which of them there are."""

    models: Sequence[int]  # the global model after each growth
    sent: Sequence[int]  # what a client sends back after each growth
    teachers: int = 0  # how many old models a selected client gets in the first round of a growth; then at most one
    encoder: int = 0  # the encoding network
    share: int = 0  # one prototype
    observes: bool = False  # do all present clients get the model of every round?
    remembers: bool = False  # do all present clients get the model at a task's end?
    to_proxy: bool = False  # does the proxy get every global model?
    begin: bool = False  # are extras collected when the head has grown?
    finish: bool = False  # are extras collected after a task's last round?


def traffic_of(method: Method, setup: SelectorSetup, plan: Plan, observe: str = "present") -> list[Bytes]:
    """The bytes of every round of this method under this plan, but for its extras, whose size the clients decide."""
    return expected_traffic(plan, sizes_of(method, setup, plan, observe))


def sizes_of(method: Method, setup: SelectorSetup, plan: Plan, observe: str) -> Sizes:
    model = method.build_model(setup.spec, torch_generator(0, "buffer"))
    models, sent = [], []
    for _, classes in plan.growths:
        model.grow(len(classes), torch_generator(0, "buffer"))
        weights, fixed = model.state_dict(), fixed_names(method, model)
        models.append(tensor_bytes(weights))
        sent.append(tensor_bytes({name: tensor for name, tensor in weights.items() if name not in fixed}))
    selector = build_selector(method, setup)
    encoder = encoder_bytes(selector)
    return Sizes(
        models,
        sent,
        teachers=selector.sent,
        encoder=encoder,
        share=encoder + 4 * model.features + COUNT_BYTES if encoder else 0,
        observes=detector_of(method.detector_kind()).observes and observe == "present",
        remembers=method.keeps_memory,
        to_proxy=selector.is_party,
        begin=method.collects_extras("begin"),
        finish=method.collects_extras("finish"),
    )


def expected_traffic(plan: Plan, sizes: Sizes) -> list[Bytes]:
    """The bytes of every round when all transitions are noticed at once and every selected client trains."""
    grown = {when for when, _ in plan.growths}
    account = []
    for round_index, selected in enumerate(plan.selected):
        growth = sum(when <= round_index for when, _ in plan.growths) - 1
        model, present = sizes.models[growth], int((plan.joined <= round_index).sum())
        ends = plan.ends_task(round_index)
        jobs = 1 + (round_index in grown and sizes.begin) + (ends and sizes.finish)
        told = present - (len(selected) if sizes.finish else 0)
        teachers = sizes.teachers if round_index in grown else min(sizes.teachers, 1)
        server = {
            "down": model * len(selected) * jobs,
            "up": sizes.sent[growth] * len(selected),
            "observed": model * (present - len(selected)) if sizes.observes else 0,
            "task_end": model * told if ends and sizes.remembers else 0,
        }
        proxy = {
            "encoder": sizes.encoder * int((plan.joined == round_index).sum()),
            "teachers": sum(sizes.models[max(0, growth - teachers) : growth]) * len(selected),
            "shares": sizes.share * sum(_prototypes(plan, client, round_index) for client in selected),
            "models": model if sizes.to_proxy else 0,
        }
        account.append({"server": server, "proxy": proxy})
    return account


def by_task(plan: Plan, account: Sequence[Bytes]) -> list[dict[str, int]]:
    """The same, added up over each task's rounds."""
    totals: list[dict[str, int]] = [{} for _ in plan.tasks]
    for round_index, channels in enumerate(account):
        total = totals[plan.task_of_round(round_index)]
        for ways in channels.values():
            for way, count in ways.items():
                total[way] = total.get(way, 0) + count
    return totals


def _prototypes(plan: Plan, client: int, round_index: int) -> int:
    """How many classes a client that is selected now has just met for the first time."""
    arrivals, current = plan.arrivals[client], plan.current(client, round_index)
    if arrivals[current].round_index != round_index:
        return 0
    before = {c for arrival in arrivals[:current] for c in arrival.classes}
    return sum(c not in before for c in arrivals[current].classes)
