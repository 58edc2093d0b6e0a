"""The paper's tables and figures by their numbers: the experiments that each is made of, and what stands in for their
data at mini scale."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.paper import published as paper

Scale = Literal["mini", "paper"]
REPLAY = "replay"
SHORT = (REPLAY, "icarl", "glfc", "lga")  # where all methods would take more than an hour on two cores
PROXY = ("lga w/o sbm", "lga w/o ssa", "lga w/o npb")


@dataclass(frozen=True)
class Experiment:
    """What produced one line of a table."""

    dataset: str
    tasks: int
    method: str  # a method, "replay", or an ablation such as "lga w/o cbl"
    share: int | None = None  # of a task's classes per client, in per cent
    memory: int | None = None
    order: int = 1
    schedule: str | None = None  # of the learning rate; None: the method's

    @property
    def tasks_title(self) -> str:
        return f"T = {self.tasks}" + (f", {self.schedule}" if self.schedule else "")


@dataclass(frozen=True)
class Setup:
    """What an experiment is run with at one scale, as far as its page states it."""

    images: int | None  # for training, per class; None: all
    clients: int
    join_per_task: int
    selected: int
    rounds: int
    epochs: int
    batch: int | str  # or auto
    class_share: float
    memory: int
    backbone: str
    schedule: str
    own: tuple[str, ...]  # settings of the method and its training that are not its defaults, as key=value


Setups = Mapping[Experiment, Setup]


@dataclass(frozen=True)
class Item:
    """A table or figure: its question, and the experiments that answer it."""

    name: str
    title: str
    experiments: tuple[Experiment, ...]
    short: tuple[str, ...] | None = SHORT  # the methods of the mini scale; None: all
    mini_tasks: tuple[int, ...] = (5, 10, 20)  # the numbers of tasks of the mini scale

    def stem(self, scale: Scale) -> str:
        """The name of its files, which differs between the two scales."""
        return self.name if scale == "mini" else f"{self.name}-{scale}"

    def wanted(self, scale: Scale, methods: Sequence[str] | None = None) -> list[Experiment]:
        """The experiments to run: at mini scale those that fit into an hour, unless methods are named."""
        mini = scale == "mini"
        chosen = methods or (self.short if mini else None)
        known = [one for one in self.experiments if not mini or one.tasks in self.mini_tasks]
        return [one for one in known if chosen is None or one.method in chosen]


@dataclass(frozen=True)
class StandIn:
    """What stands in for a data set and a number of tasks at mini scale."""

    protocol: str  # a config
    about: str
    settings: Mapping[str, Any]


def stand_in(experiment: Experiment) -> StandIn:
    """Glyphs for CIFAR-100, a part of TinyImageNet at 32 px for the others.

    A task has five classes, as in the paper's tables of twenty tasks. There are two exceptions. Where the share of
    classes varies it has ten, because 40 and 50 per cent of five are the same number. Where a hundred classes would
    include some that settings were tuned on it has two, and each client holds both: 60 per cent of two is one, and a
    client with a single class has nothing to tell it apart from."""
    if experiment.dataset == "cifar100":
        size = 10 if experiment.share is not None else 5
        count = size * experiment.tasks
        about = f"glyphs, {experiment.tasks} tasks of {size} classes"
        return StandIn("glyphs-mini", about, {} if count == 25 else _sized(count, experiment.tasks))
    if experiment.dataset == "imagenet":
        about = "TinyImageNet at 32 px, 5 tasks of 10 classes, 70 % of them per client"
        return StandIn("tiny-mini", about, {**_sized(50, 5), "plan.class_share": 0.7})
    if experiment.tasks == 20:
        about = "TinyImageNet at 32 px, 20 tasks of 2 classes, both at each client"
        return StandIn("tiny-mini", about, {**_sized(40, 20), "plan.class_share": 1.0})
    about = f"TinyImageNet at 32 px, {experiment.tasks} tasks of 5 classes"
    return StandIn("tiny-mini" if experiment.tasks == 5 else "tiny-mini-10", about, {})


def _sized(classes: int, tasks: int) -> dict[str, Any]:
    return {"data.classes": classes, "plan.tasks": tasks}


def _table(dataset: str, tasks: int) -> tuple[Experiment, ...]:
    return tuple(Experiment(dataset, tasks, method) for method in (REPLAY, *paper.ACCURACY[dataset, tasks]))


def _all(*parts: Iterable[Experiment]) -> tuple[Experiment, ...]:
    return tuple(one for part in parts for one in part)


def _curves(
    dataset: str, methods: Sequence[str], tasks: Sequence[int], schedule: str | None = None
) -> tuple[Experiment, ...]:
    return tuple(Experiment(dataset, count, method, schedule=schedule) for count in tasks for method in methods)


def _proxy_parts(dataset: str) -> tuple[Experiment, ...]:
    """LGA without each part of its proxy. Under a learning rate that falls to zero a growth's last model is always
    best, and the proxy's choice cannot show: so there are runs whose rate falls in steps, too."""
    methods = ("lga", *PROXY)
    return _all(_curves(dataset, methods, (5, 10, 20)), _curves(dataset, methods, (5,), "steps"))


DRAWN = (REPLAY, "icarl", "bic", "podnet", "dytox", "afc", "glfc", "lga")  # the paper's curves, and replay
ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        Item(
            "table1",
            "accuracy, T = 5, CIFAR-100 and MiniImageNet",
            _all(_table("cifar100", 5), _table("mini-imagenet", 5)),
            None,
        ),
        Item(
            "table2",
            "accuracy, T = 5, TinyImageNet and ImageNet",
            _all(_table("tiny-imagenet", 5), _table("imagenet", 5)),
        ),
        Item("table3", "accuracy, T = 10, CIFAR-100", _table("cifar100", 10)),
        Item("table4", "accuracy, T = 10, MiniImageNet", _table("mini-imagenet", 10)),
        Item("table5", "accuracy, T = 10, TinyImageNet", _table("tiny-imagenet", 10)),
        Item("table6", "accuracy, T = 20, CIFAR-100", _table("cifar100", 20)),
        Item("table7", "accuracy, T = 20, MiniImageNet", _table("mini-imagenet", 20)),
        Item("table8", "accuracy, T = 20, TinyImageNet", _table("tiny-imagenet", 20)),
        Item(
            "table9",
            "heterogeneity: 40, 50 and 60 % of a task's classes per client, T = 10, CIFAR-100",
            tuple(Experiment("cifar100", 10, m, share=share) for share in (40, 50, 60) for m in ("glfc", "lga")),
        ),
        Item("table10", "communication: what the proxy adds to the models", ()),
        Item(
            "table11",
            "memory: 500 to 2,000 exemplars per client, T = 5 and 10, CIFAR-100",
            tuple(Experiment("cifar100", t, "lga", memory=m) for t in (5, 10) for m in (500, 1000, 1500, 2000)),
        ),
        Item(
            "table12",
            "three class orders, T = 5, 10 and 20, CIFAR-100",
            tuple(
                Experiment("cifar100", t, m, order=o) for o in (1, 2, 3) for m in ("glfc", "lga") for t in (5, 10, 20)
            ),
        ),
        Item("fig3", "F1 and recall after each task, CIFAR-100", _curves("cifar100", DRAWN, (5, 10, 20))),
        Item("fig4", "F1 and recall after each task, MiniImageNet", _curves("mini-imagenet", DRAWN, (5, 10, 20))),
        Item("fig5", "prototypes: original, perturbed, reconstructed", (Experiment("cifar100", 5, "lga"),)),
        Item("fig6", "the proxy's parts, CIFAR-100", _proxy_parts("cifar100"), None),
        Item("fig7", "the proxy's parts, MiniImageNet", _proxy_parts("mini-imagenet"), None, (5, 20)),
        Item(
            "fig8", "convergence: accuracy and F1 after each round, CIFAR-100", _curves("cifar100", ("lga",), (5, 10))
        ),
    )
}
