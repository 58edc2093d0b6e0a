"""Runs for the paper's tables and figures: the config of every experiment, at the published scale or at one that two
cores can manage, and the pages made from the runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from holdfast.compare import Spec
from holdfast.config import Config, load_config
from holdfast.data.images import DataSet, Images, ImageSet
from holdfast.experiment import bytes_of, plan_of
from holdfast.paper import pages
from holdfast.paper.items import REPLAY, Experiment, Item, Scale, Setup, stand_in
from holdfast.paper.tables import Runs
from holdfast.simulation.plan import Plan
from holdfast.simulation.traffic import by_task

CONFIGS = Path(__file__).parent / "configs"
CLASSES = {"cifar100": 100, "mini-imagenet": 100, "tiny-imagenet": 200, "imagenet": 1000}
IMAGES = {"cifar100": 500, "mini-imagenet": 500, "tiny-imagenet": 500, "imagenet": 1281}


def spec_of(method: str) -> Spec:
    """The method and settings that a name in the tables stands for."""
    if method == REPLAY:
        return Spec("fedavg", (("method.replay", True),))
    name, _, part = method.partition(" w/o ")
    return Spec(name, ((f"method.{part}", False),) if part else ())


def config_of(experiment: Experiment, scale: Scale, seed: int) -> Config:
    """The config of an experiment's run with this seed."""
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
    if experiment.schedule is not None:
        settings["train.schedule"] = experiment.schedule
    if experiment.order > 1:
        settings["plan.order"] = f"random:{experiment.order}"
    return load_config(file, list(settings.items()))


def plan_without_images(config: Config) -> tuple[DataSet, Plan]:
    """The plan of a run on the published number of classes, for arithmetic that needs no data."""
    count, size = config.data.classes or CLASSES[config.data.name], config.data.size or 32
    pixel = torch.zeros(1, 3, size, size, dtype=torch.uint8)
    empty = ImageSet(Images(pixel, torch.zeros(count, dtype=torch.int64)), torch.arange(count))
    names = tuple(str(c) for c in range(count))
    data = DataSet(config.data.name, names, empty, empty, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), flip=True)
    return data, plan_of(config, data)


def passes(config: Config) -> int:
    """Roughly how many images a run trains on, by arithmetic."""
    classes = config.data.classes or CLASSES[config.data.name]
    images = config.data.train_per_class or IMAGES[config.data.name]
    tasks = config.plan.tasks if isinstance(config.plan.tasks, int) else len(config.plan.tasks)
    held = int(config.plan.class_share * classes / tasks) * images + (tasks > 1) * config.plan.memory
    return tasks * config.plan.rounds * config.plan.selected * config.train.epochs * held


def setup_of(experiment: Experiment, scale: Scale) -> Setup:
    """What the page of an experiment states about its runs."""
    config, spec = config_of(experiment, scale, 0), spec_of(experiment.method)
    bare = load_config(None, [("method.name", spec.name), *spec.settings])
    own = [f"lr={config.train.lr:g}"]
    for section, here, usual in (("method", config.method, bare.method), ("train", config.train, bare.train)):
        for key, value in asdict(here).items():
            if value != asdict(usual)[key] and f"{section}.{key}" not in ("train.lr", "train.epochs", "train.batch"):
                own.append(f"{key}={value}")
    return Setup(
        images=config.data.train_per_class,
        clients=config.plan.clients,
        join_per_task=config.plan.join_per_task,
        selected=config.plan.selected,
        rounds=config.plan.rounds,
        epochs=config.train.epochs,
        batch=config.train.batch,
        class_share=config.plan.class_share,
        memory=config.plan.memory,
        backbone=config.model.name,
        schedule=config.train.schedule or "",
        own=tuple(own),
    )


def traffic(scale: Scale, seeds: Sequence[int]) -> dict[str, float]:
    """MB per task and channel for table 10, computed from the plans of these seeds without any image."""
    totals: list[Mapping[str, int]] = []
    for seed in seeds:
        config = config_of(Experiment("cifar100", 10, "lga"), scale, seed)
        data, plan = plan_without_images(config)
        totals += by_task(plan, bytes_of(config, data, plan))
    return {channel: mean(total[channel] for total in totals) / 1e6 for channel in totals[0]}


def page_of(
    item: Item, scale: Scale, runs: Runs, seeds: Sequence[int], command: str, whole: str
) -> tuple[str, Callable[[Path], None] | None, str | None]:
    """A Markdown page, what draws its picture, and its numbers as CSV; `command` made it, `whole` runs the rest."""
    setups = {one: setup_of(one, scale) for one in item.experiments}
    sent = traffic(scale, seeds) if item.name == "table10" else None
    return pages.page_of(item, scale, runs, setups, seeds, sent, command, whole)
