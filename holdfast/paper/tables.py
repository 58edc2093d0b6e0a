"""The paper's tables with our numbers in them, and the published ones in brackets beside ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from holdfast.paper import published as paper
from holdfast.paper.items import Experiment, Item, Scale, Setups, stand_in
from holdfast.results.comparison import MEASURES, spread
from holdfast.results.record import Result
from holdfast.results.tables import percent

TITLES = {
    "cifar100": "CIFAR-100",
    "mini-imagenet": "MiniImageNet",
    "tiny-imagenet": "TinyImageNet",
    "imagenet": "ImageNet-1000",
}
WORDS = {
    "accuracy": "accuracy",
    "f1": "macro F1",
    "recall": "macro recall",
    "f1-batchwise128": "F1 averaged over batches of 128",
    "recall-batchwise128": "recall averaged over batches of 128",
}


@dataclass(frozen=True)
class Found:
    """The finished runs of an experiment."""

    folders: tuple[Path, ...]
    results: tuple[Result, ...]

    def curves(self, measure: str) -> list[list[float]]:
        """The measure after each task: one curve per seed."""
        if measure == "accuracy":
            return [result.accuracy_after_task for result in self.results]
        return [(result.curves or {}).get(MEASURES[measure], []) for result in self.results]

    def only(self, seeds: Sequence[int]) -> "Found":
        """The runs of these seeds."""
        chosen = [pair for pair in zip(self.folders, self.results, strict=True) if pair[1].seed in seeds]
        return Found(tuple(folder for folder, _ in chosen), tuple(result for _, result in chosen))


Runs = Mapping[Experiment, Found]


@dataclass(frozen=True)
class Block:
    """A part of a table: lines of our numbers, each with the published one."""

    title: str
    measure: str
    lines: tuple[tuple[str, Found | None, paper.Line | None], ...]
    reference: str | None = None  # the line whose advantage over the others is shown


def blocks_of(item: Item, scale: Scale, runs: Runs, setups: Setups) -> list[Block]:
    """The parts of an accuracy, heterogeneity or memory table."""
    groups: dict[tuple[object, ...], list[Experiment]] = {}
    memory = item.name == "table11"
    for one in item.experiments:
        groups.setdefault((one.dataset, one.tasks, one.share, one.order), []).append(one)
    measures = {
        "table9": ("accuracy", "f1-batchwise128", "f1"),
        "table11": ("accuracy", "f1-batchwise128", "recall-batchwise128", "f1", "recall"),
    }.get(item.name, ("accuracy",))
    blocks = []
    for some in groups.values():
        first = some[0]
        if scale == "mini" and first.tasks not in item.mini_tasks:
            continue
        where = TITLES[first.dataset] if scale == "paper" else f"{TITLES[first.dataset]}: {stand_in(first).about}"
        title = f"{where}; T = {first.tasks}" + (f"; {first.share} % of classes" if first.share else "")
        for measure in measures:
            lines = tuple(
                (_memory(one, setups) if memory else one.method, runs.get(one), _published(one, measure))
                for one in some
            )
            blocks.append(Block(title, measure, lines, _memory(some[-1], setups) if memory else "lga"))
    return blocks


def _memory(one: Experiment, setups: Setups) -> str:
    """Exemplars per client, as published and as run."""
    here = setups[one].memory
    return f"{one.memory}" if here == one.memory else f"{one.memory} (here {here})"


def _published(one: Experiment, measure: str) -> paper.Line | None:
    if measure in ("f1", "recall"):
        return None  # the published ones are batchwise
    measure = measure.removesuffix("-batchwise128")
    if one.memory is not None:
        return paper.MEMORY.get((measure, one.memory, one.tasks))
    if one.share is not None:
        return paper.HETEROGENEITY[measure, one.share].get(one.method)
    return paper.ACCURACY[one.dataset, one.tasks].get(one.method)


ORDER_NAMES = {1: "the data set's", 2: "random:2", 3: "random:3"}


def _beside(ours: str, theirs: float | None) -> str:
    return ours if theirs is None else f"{ours} ({theirs:.1f})"


def block_markdown(block: Block) -> str:
    """Our numbers, with the published ones in brackets."""
    ran = [curve for _, found, _ in block.lines if found for curve in found.curves(block.measure)]
    tasks = max([len(line.values) for _, _, line in block.lines if line] + [len(curve) for curve in ran], default=0)
    reference = next((found for name, found, _ in block.lines if name == block.reference), None)
    head = ["", "seeds", *(f"task {t + 1}" for t in range(tasks)), "average", f"{block.reference} over it"]
    rows = []
    for name, found, line in block.lines:
        curves = [curve for curve in (found.curves(block.measure) if found else []) if curve]
        if found is None and line is None:
            continue  # neither run nor published
        means = [percent(mean(values)) for values in zip(*curves, strict=True)] if curves else ["-"] * tasks
        cells = [_beside(text, line.values[t] if line else None) for t, text in enumerate(means)]
        average = spread([mean(curve) for curve in curves]) if curves else "-"
        better = _advantage(reference, found, block.measure)
        rows.append(
            [
                name,
                str(len(curves)),
                *cells,
                _beside(average, line.average if line else None),
                "" if name == block.reference else _beside(better, line.improvement if line else None),
            ]
        )
    table = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    body = "\n".join("| " + " | ".join(row) + " |" for row in table)
    return f"**{block.title}; {WORDS[block.measure]} in %**\n\n{body}\n"


def _advantage(reference: Found | None, found: Found | None, measure: str) -> str:
    """The mean difference, over the seeds that both have."""
    if reference is None or found is None:
        return "-"
    ours, theirs = (
        {r.seed: mean(c) for r, c in zip(one.results, one.curves(measure), strict=True) if c}
        for one in (reference, found)
    )
    both = ours.keys() & theirs.keys()
    return f"{100 * mean(ours[s] - theirs[s] for s in both):.1f}" if both else "-"


def orders_markdown(scale: Scale, runs: Runs) -> str:
    """Orders are compared over the seeds that all runs of a column have in common."""
    shared = {
        tasks: common_seeds([found for one, found in runs.items() if one.tasks == tasks]) for tasks in (5, 10, 20)
    }
    rows = []
    for order, method in paper.ORDERS:
        cells = []
        for tasks, theirs in paper.ORDERS[order, method].items():
            found = runs.get(Experiment("cifar100", tasks, method, order=order))
            ours = [mean(curve) for curve in found.only(shared[tasks]).curves("accuracy")] if found else []
            cells.append(_beside(spread(ours) if ours else "-", theirs))
        rows.append([f"order {order} ({ORDER_NAMES[order]})", method, *cells])
    where = TITLES["cifar100"] if scale == "paper" else "CIFAR-100: glyphs, tasks of 5 classes"
    table = [
        ["", "", *(f"T = {t}{of_seeds(seeds)}" for t, seeds in shared.items())],
        ["---"] * 2 + ["---:"] * 3,
        *rows,
    ]
    body = "\n".join("| " + " | ".join(row) + " |" for row in table)
    return f"**{where}; average accuracy in %**\n\n{body}\n"


def common_seeds(found: Sequence[Found]) -> list[int]:
    every = [{result.seed for result in one.results} for one in found]
    return sorted(set.intersection(*every)) if every else []


def of_seeds(seeds: Sequence[int]) -> str:
    return f" (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})" if seeds else ""


def traffic_lines(sent: Mapping[str, float]) -> list[tuple[str, float, float | None]]:
    """Table 10: each channel with its MB per task, and what the paper prints for it."""
    words = {
        "up": ("models sent back", paper.COST["models"]),
        "shares": ("prototypes' gradients to the proxy", paper.COST["proxy"]),
        "teachers": ("teachers from the proxy", None),
        "encoder": ("encoding network to newcomers", None),
    }
    return [(text, sent[channel], published) for channel, (text, published) in words.items()]


def traffic_markdown(scale: Scale, lines: Sequence[tuple[str, float, float | None]]) -> str:
    models = lines[0][1]
    rows = ["| mean per task | MB | of the models |", "| --- | ---: | ---: |"]
    for text, megabytes, published in lines:
        theirs = "" if published is None else f" ({published})"
        share = "" if megabytes == models else f"{100 * megabytes / models:.3g} %"
        ratio = f" ({paper.COST['ratio']} %)" if published == paper.COST["proxy"] else ""
        rows.append(f"| {text} | {megabytes:.1f}{theirs} | {share}{ratio} |")
    where = "ResNet-18, CIFAR-100, T = 10" if scale == "paper" else "The small network, 10 tasks of 5 classes"
    note = (
        f"{where}. The paper's number counts the gradients alone. The teachers that the proxy sends to every selected "
        "client are by far the larger part of its traffic, and it does not count them."
    )
    return "\n".join(rows) + f"\n\n{note}\n"


def curve_rows(item: Item, scale: Scale, runs: Runs, setups: Setups) -> list[list[object]]:
    """The numbers of the curves: one line per experiment, seed and measure."""
    head = ["data set", "run on", "tasks", "method", "classes per client in %", "memory", "order", "schedule"]
    most = max((len(r.task_sizes) for found in runs.values() for r in found.results), default=0)
    rows: list[list[object]] = [[*head, "seed", "measure", *(f"after task {t + 1} in %" for t in range(most))]]
    for one in item.experiments:
        found = runs.get(one)
        if found is None:
            continue
        where = one.dataset if scale == "paper" else stand_in(one).about
        share, memory = round(100 * setups[one].class_share), setups[one].memory
        order, schedule = ORDER_NAMES[one.order], setups[one].schedule
        facts = [one.dataset, where, one.tasks, one.method, share, memory, order, schedule]
        for measure in WORDS:
            for result, curve in zip(found.results, found.curves(measure), strict=True):
                if curve:
                    rest = [""] * (most - len(curve))
                    rows.append([*facts, result.seed, measure, *[round(100 * value, 2) for value in curve], *rest])
    return rows
