"""Every table and figure of the paper's experiments by its number: which runs it wants, at the published scale or at
one that two cores can do."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast.compare import Spec
from holdfast.config import Config, load_config
from holdfast.data.images import DataSet, Images, ImageSet
from holdfast.experiment import plan_of
from holdfast.paper import published as paper
from holdfast.simulation.plan import Plan

Scale = Literal["mini", "paper"]
CONFIGS = Path(__file__).parent / "configs"
REPLAY = "replay"
SHORT = (REPLAY, "icarl", "glfc", "lga")  # where all methods would take more than an hour on two cores
PROXY = ("lga w/o sbm", "lga w/o ssa", "lga w/o npb")
CLASSES = {"cifar100": 100, "mini-imagenet": 100, "tiny-imagenet": 200, "imagenet": 1000}
IMAGES = {"cifar100": 500, "mini-imagenet": 500, "tiny-imagenet": 500, "imagenet": 1281}


@dataclass(frozen=True)
class Experiment:
    """What one line of a table was made with."""

    dataset: str
    tasks: int
    method: str  # a method, "replay", or an ablation such as "lga w/o cbl"
    share: int | None = None  # of a task's classes that a client holds, in per cent
    memory: int | None = None
    order: int = 1


@dataclass(frozen=True)
class Item:
    """A table or figure: what it asks, and the experiments it is made of."""

    name: str
    title: str
    experiments: tuple[Experiment, ...]
    short: tuple[str, ...] | None = SHORT  # the methods of the mini scale; None: all
    mini_tasks: tuple[int, ...] = (5, 10, 20)  # the numbers of tasks of the mini scale

    def stem(self, scale: Scale) -> str:
        """The name of its files, by which the pages of the two scales are told apart."""
        return self.name if scale == "mini" else f"{self.name}-{scale}"

    def wanted(self, scale: Scale, methods: Sequence[str] | None = None) -> list[Experiment]:
        """The experiments to run: at mini scale those that fit into an hour, unless methods are named."""
        mini = scale == "mini"
        chosen = methods or (self.short if mini else None)
        known = [one for one in self.experiments if not mini or one.tasks in self.mini_tasks]
        return [one for one in known if chosen is None or one.method in chosen]


def spec_of(method: str) -> Spec:
    """The method and settings behind a name of the tables."""
    if method == REPLAY:
        return Spec("fedavg", (("method.replay", True),))
    name, _, part = method.partition(" w/o ")
    return Spec(name, ((f"method.{part}", False),) if part else ())


@dataclass(frozen=True)
class StandIn:
    """What stands in for a data set and a number of tasks at mini scale."""

    protocol: str  # a config
    about: str
    settings: Mapping[str, Any]


def stand_in(experiment: Experiment) -> StandIn:
    """Glyphs for CIFAR-100, a part of TinyImageNet at 32 px for the others. Five classes a task, as in the paper's
    tables of twenty tasks; where the share of classes is the question ten, for 40 and 50 per cent of five are the same;
    two where a hundred classes would reach into those that settings were found on, and then both at each client: 60 per
    cent of two is one, and a client with one class has nothing to tell it from."""
    if experiment.dataset == "cifar100":
        size = 10 if experiment.share is not None else 5
        count = size * experiment.tasks
        about = f"glyphs, {experiment.tasks} tasks of {size} classes"
        return StandIn("glyphs-mini", about, {} if count == 25 else _sized(count, experiment.tasks))
    if experiment.dataset == "imagenet":
        about = "TinyImageNet at 32 px, 5 tasks of 10 classes, 70 % of them a client"
        return StandIn("tiny-mini", about, {**_sized(50, 5), "plan.class_share": 0.7})
    if experiment.tasks == 20:
        about = "TinyImageNet at 32 px, 20 tasks of 2 classes, both at each client"
        return StandIn("tiny-mini", about, {**_sized(40, 20), "plan.class_share": 1.0})
    about = f"TinyImageNet at 32 px, {experiment.tasks} tasks of 5 classes"
    return StandIn("tiny-mini" if experiment.tasks == 5 else "tiny-mini-10", about, {})


def _sized(classes: int, tasks: int) -> dict[str, Any]:
    return {"data.classes": classes, "plan.tasks": tasks}


def config_of(experiment: Experiment, scale: Scale, seed: int) -> Config:
    """The run of an experiment."""
    spec = spec_of(experiment.method)
    settings: dict[str, Any] = {"method.name": spec.name, **dict(spec.settings), "seed": seed}
    if scale == "paper":
        file = CONFIGS / f"{experiment.dataset}.toml"
        settings["plan.tasks"] = experiment.tasks
        memory = experiment.memory
    else:
        stand = stand_in(experiment)
        file = CONFIGS / f"{stand.protocol}.toml"
        settings |= stand.settings
        whole = 100 if stand.protocol == "glyphs-mini" else 200
        memory = None if experiment.memory is None else experiment.memory * whole // 2000
        if experiment.method == REPLAY:  # the best of its trials; see BENCHMARKS.md
            settings["train.lr"] = 0.1 if stand.protocol == "glyphs-mini" else 0.05
    if experiment.share is not None:
        settings["plan.class_share"] = experiment.share / 100
    if memory is not None:
        settings["plan.memory"] = memory
    if experiment.order > 1:
        settings["plan.order"] = f"random:{experiment.order}"
    return load_config(file, list(settings.items()))


def plan_without_images(config: Config) -> tuple[DataSet, Plan]:
    """The plan of a run on the published number of classes, for arithmetic where the data are not there."""
    count, size = config.data.classes or CLASSES[config.data.name], config.data.size or 32
    pixel = torch.zeros(1, 3, size, size, dtype=torch.uint8)
    empty = ImageSet(Images(pixel, torch.zeros(count, dtype=torch.int64)), torch.arange(count))
    names = tuple(str(c) for c in range(count))
    data = DataSet(config.data.name, names, empty, empty, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), flip=True)
    return data, plan_of(config, data)


def passes(config: Config) -> int:
    """About how many images a run trains on, by arithmetic."""
    classes = config.data.classes or CLASSES[config.data.name]
    images = config.data.train_per_class or IMAGES[config.data.name]
    tasks = config.plan.tasks if isinstance(config.plan.tasks, int) else len(config.plan.tasks)
    held = int(config.plan.class_share * classes / tasks) * images + (tasks > 1) * config.plan.memory
    return tasks * config.plan.rounds * config.plan.selected * config.train.epochs * held


def _table(dataset: str, tasks: int) -> tuple[Experiment, ...]:
    return tuple(Experiment(dataset, tasks, method) for method in (REPLAY, *paper.ACCURACY[dataset, tasks]))


def _all(*parts: Iterable[Experiment]) -> tuple[Experiment, ...]:
    return tuple(one for part in parts for one in part)


def _curves(dataset: str, methods: Sequence[str], tasks: Sequence[int]) -> tuple[Experiment, ...]:
    return tuple(Experiment(dataset, count, method) for count in tasks for method in methods)


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
            "heterogeneity: 40, 50 and 60 % of a task's classes a client, T = 10, CIFAR-100",
            tuple(Experiment("cifar100", 10, m, share=share) for share in (40, 50, 60) for m in ("glfc", "lga")),
        ),
        Item("table10", "communication: what the proxy adds to the models", ()),
        Item(
            "table11",
            "memory: 500 to 2,000 exemplars a client, T = 5 and 10, CIFAR-100",
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
        Item("fig6", "the proxy's parts, CIFAR-100", _curves("cifar100", ("lga", *PROXY), (5, 10, 20)), None),
        Item(
            "fig7",
            "the proxy's parts, MiniImageNet",
            _curves("mini-imagenet", ("lga", *PROXY), (5, 10, 20)),
            None,
            (5, 20),
        ),
        Item(
            "fig8", "convergence: accuracy and F1 after each round, CIFAR-100", _curves("cifar100", ("lga",), (5, 10))
        ),
    )
}
