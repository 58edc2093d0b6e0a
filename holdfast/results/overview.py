"""The first sentence of the report: what happened, in words."""

from collections.abc import Mapping, Sequence
from statistics import mean

from holdfast.results.details import View
from holdfast.results.record import Result

BEHIND = 0.10  # a client this far below the accuracy on all classes is left behind
KEPT = 0.90  # a method that has at least this share of its first accuracy at the end has kept it
PLAIN = "fedavg"
Experiment = Sequence[View]  # its seeds


def in_a_sentence(experiments: Mapping[str, Experiment], data: str) -> str:
    """The best experiment, plain averaging (or the worst one) beside it, and who is left behind. `experiments` are
    those on one data set, by name."""
    ranked = sorted(experiments, key=lambda name: -_last(experiments[name]))
    fair = [name for name in ranked if experiments[name][0].result.method != "joint"] or ranked
    best, *others = fair
    sizes = experiments[best][0].result.task_sizes
    after = f"After {len(sizes)} task{'s' * (len(sizes) > 1)} on {data}, " if len(sizes) > 1 else f"On {data}, "
    parts = [after + _fate(best, experiments[best])]
    plain = next((name for name in others if experiments[name][0].result.method == PLAIN), None)
    if plain:
        parts.append("plain averaging " + _fate("", experiments[plain]).strip())
    elif others:
        parts.append(_fate(others[-1], experiments[others[-1]]))
    behind = left_behind(experiments[best])
    if behind and others:
        behind = f"with {best}, {behind}"
    return "; ".join([*parts, *([behind] if behind else [])]) + "."


def _whole(value: float) -> str:
    return f"{100 * value:.0f}\u00a0%"  # never broken across lines


def _last(some: Experiment) -> float:
    return mean(view.result.last_accuracy for view in some)


def _fate(name: str, some: Experiment) -> str:
    first, last = mean(view.result.accuracy_after_task[0] for view in some), _last(some)
    if len(some[0].result.task_sizes) == 1:
        return f"{name} reached {_whole(last)}"
    if last >= KEPT * first:
        return f"{name} kept {_whole(last)} (of {_whole(first)} after the first task)"
    return f"{name} fell from {_whole(first)} to {_whole(last)}"


def left_behind(some: Experiment) -> str:
    """The client that does worst, if it is well below the whole in every seed."""
    results: list[Result] = [view.result for view in some]
    if not all(r.last_accuracy - r.worst_client["accuracy"] >= BEHIND for r in results):
        return ""
    value = _whole(mean(r.worst_client["accuracy"] for r in results))
    numbers = {int(r.worst_client["client"]) for r in results}
    if len(numbers) > 1:
        return f"the worst client of each seed is left behind with {value} on average"
    number, clients = numbers.pop(), some[0].clients
    name = clients.names[number] if clients and clients.names else f"{number}"
    return f"client {name} is left behind with {value} on the classes it has held"
