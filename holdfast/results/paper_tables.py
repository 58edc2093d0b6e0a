"""The paper's tables and figures with our figures in them, the published ones in brackets beside ours."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from holdfast.config import Config
from holdfast.experiment import bytes_of
from holdfast.federation.traffic import by_task
from holdfast.files import write_atomic
from holdfast.reproduce import Experiment, Item, Scale, config_of, plan_without_images, stand_in
from holdfast.results import paper, plots
from holdfast.results.comparison import MEASURES, spread
from holdfast.results.record import Result, read_record
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
SHOWN = ("accuracy", "f1", "recall")
BATCHES = (
    "The published F1 and recall fit averages over batches of 128, in which most classes are absent and count as 0 "
    "(see docs/report.md): ours, computed so, stand beside them; those over the whole test set stand alone."
)


@dataclass(frozen=True)
class Found:
    """The finished runs of an experiment."""

    folders: tuple[Path, ...]
    results: tuple[Result, ...]

    def curves(self, measure: str) -> list[list[float]]:
        """After each task, one curve a seed."""
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
    """A part of a table: lines of our curves, each with the published one."""

    title: str
    measure: str
    lines: tuple[tuple[str, Found | None, paper.Line | None], ...]
    reference: str | None = None  # the line whose advantage over the others is shown


def blocks_of(item: Item, scale: Scale, runs: Runs) -> list[Block]:
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
                (_memory(one, scale) if memory else one.method, runs.get(one), _published(one, measure)) for one in some
            )
            blocks.append(Block(title, measure, lines, _memory(some[-1], scale) if memory else "lga"))
    return blocks


def _memory(one: Experiment, scale: Scale) -> str:
    """Exemplars a client, as published and as run."""
    here = config_of(one, scale, 0).plan.memory
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
    """Ours, and in brackets the published figure."""
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
    """Over the seeds that both have."""
    if reference is None or found is None:
        return "-"
    ours, theirs = (
        {r.seed: mean(c) for r, c in zip(one.results, one.curves(measure), strict=True) if c}
        for one in (reference, found)
    )
    both = ours.keys() & theirs.keys()
    return f"{100 * mean(ours[s] - theirs[s] for s in both):.1f}" if both else "-"


def orders_markdown(scale: Scale, runs: Runs) -> str:
    """Orders are compared over the seeds that all of a column's runs have."""
    shared = {
        tasks: _common_seeds([found for one, found in runs.items() if one.tasks == tasks]) for tasks in (5, 10, 20)
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
        ["", "", *(f"T = {t}{_of_seeds(seeds)}" for t, seeds in shared.items())],
        ["---"] * 2 + ["---:"] * 3,
        *rows,
    ]
    body = "\n".join("| " + " | ".join(row) + " |" for row in table)
    return f"**{where}; average accuracy in %**\n\n{body}\n"


def _common_seeds(found: Sequence[Found]) -> list[int]:
    every = [{result.seed for result in one.results} for one in found]
    return sorted(set.intersection(*every)) if every else []


def _of_seeds(seeds: Sequence[int]) -> str:
    return f" (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})" if seeds else ""


def traffic_lines(scale: Scale, seeds: Sequence[int]) -> list[tuple[str, float, float | None]]:
    """Table 10, by arithmetic from the plans of these seeds; at the published scale too, because no image is needed."""
    totals: list[Mapping[str, int]] = []
    for seed in seeds:
        config = config_of(Experiment("cifar100", 10, "lga"), scale, seed)
        data, plan = plan_without_images(config)
        totals += by_task(plan, bytes_of(config, data, plan))
    words = {
        "up": ("models sent back", paper.COST["models"]),
        "shares": ("prototypes' gradients to the proxy", paper.COST["proxy"]),
        "teachers": ("teachers from the proxy", None),
        "encoder": ("encoding network to newcomers", None),
    }
    return [(text, mean(t[way] for t in totals) / 1e6, published) for way, (text, published) in words.items()]


def traffic_markdown(scale: Scale, lines: Sequence[tuple[str, float, float | None]]) -> str:
    models = lines[0][1]
    rows = ["| a task, mean | MB | of the models |", "| --- | ---: | ---: |"]
    for text, megabytes, published in lines:
        theirs = "" if published is None else f" ({published})"
        share = "" if megabytes == models else f"{100 * megabytes / models:.3g} %"
        ratio = f" ({paper.COST['ratio']} %)" if published == paper.COST["proxy"] else ""
        rows.append(f"| {text} | {megabytes:.1f}{theirs} | {share}{ratio} |")
    where = "ResNet-18, CIFAR-100, T = 10" if scale == "paper" else "The small network, 10 tasks of 5 classes"
    note = (
        f"{where}. The paper's figure has the gradients alone; the teachers that the proxy sends to every selected "
        "client are by far the larger part of its traffic, and are not in it."
    )
    return "\n".join(rows) + f"\n\n{note}\n"


def as_csv(rows: Sequence[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def curve_rows(item: Item, scale: Scale, runs: Runs) -> list[list[object]]:
    """The numbers of the curves: a line for each experiment, seed and measure."""
    head = ["data set", "run on", "tasks", "method", "classes a client in %", "memory", "order", "seed", "measure"]
    most = max((len(r.task_sizes) for found in runs.values() for r in found.results), default=0)
    rows: list[list[object]] = [[*head, *(f"after task {t + 1} in %" for t in range(most))]]
    for one in item.experiments:
        found = runs.get(one)
        if found is None:
            continue
        config = config_of(one, scale, 0)
        where = one.dataset if scale == "paper" else stand_in(one).about
        share, memory = round(100 * config.plan.class_share), config.plan.memory
        facts = [one.dataset, where, one.tasks, one.method, share, memory, ORDER_NAMES[one.order]]
        for measure in WORDS:
            for result, curve in zip(found.results, found.curves(measure), strict=True):
                if curve:
                    rest = [""] * (most - len(curve))
                    rows.append([*facts, result.seed, measure, *[round(100 * value, 2) for value in curve], *rest])
    return rows


def draw(item: Item, runs: Runs, file: Path) -> None:
    """A figure's picture."""
    if item.name in ("fig3", "fig4"):
        panels: dict[tuple[str, str], dict[str, list[list[float]]]] = {}
        for measure in ("f1", "recall"):
            for one in item.experiments:
                if found := runs.get(one):
                    curves = [[100 * value for value in curve] for curve in found.curves(measure) if curve]
                    panels.setdefault((WORDS[measure], f"T = {one.tasks}"), {})[one.method] = curves
        plots.panels_of_curves(panels, "after task", file)
    elif item.name in ("fig6", "fig7"):
        bars: dict[str, dict[str, dict[str, float]]] = {}
        for tasks in sorted({one.tasks for one in runs}):
            there = {one.method: found for one, found in runs.items() if one.tasks == tasks}
            seeds = _common_seeds(list(there.values()))
            if seeds:  # small differences are to be seen, which no other seed may cover
                panel = bars[f"T = {tasks}{_of_seeds(seeds)}"] = {}
                for method, found in there.items():
                    of = {m: found.only(seeds).curves(m) for m in SHOWN}
                    panel[method] = {WORDS[m]: 100 * mean(map(mean, curves)) for m, curves in of.items()}
        plots.panels_of_bars(bars, file)
    elif item.name == "fig8":
        panels = {}
        for one in item.experiments:
            if found := runs.get(one):
                lines = [read_record(folder) for folder in found.folders]
                for key, word in (("accuracy", "accuracy"), ("macro_f1", "macro F1")):
                    curves = [[100 * line[key] for line in record] for record in lines]
                    panels.setdefault((word, f"T = {one.tasks}"), {})[one.method] = curves
        plots.panels_of_curves(panels, "round", file, marks=False)


NOTES = {
    "fig3": "The paper's curves have no numbers in its text: these are ours alone.",
    "fig4": "The paper's curves have no numbers in its text: these are ours alone.",
    "fig5": "Rows: original, perturbed by its client, reconstructed by the proxy.",
    "fig6": "The paper's bars have no numbers in its text: these are ours alone.",
    "fig7": "The paper's bars have no numbers in its text: these are ours alone.",
    "fig8": "The paper's curves have no numbers in its text: these are ours alone.",
}


def page_of(
    item: Item, scale: Scale, runs: Runs, seeds: Sequence[int], command: str, whole: str
) -> tuple[str, Callable[[Path], None] | None, str | None]:
    """A Markdown page, what draws its picture, and its numbers as CSV; `command` made it, `whole` runs the rest."""
    table, draws, numbers = item.name.startswith("table"), None, as_csv(curve_rows(item, scale, runs))
    notes = ["In brackets: as published."] if table else [NOTES[item.name]]
    if item.name == "table10":
        lines = traffic_lines(scale, seeds)
        body, numbers = traffic_markdown(scale, lines), as_csv([["what", "MB a task", "published"], *lines])
        options = f"scale {scale}; plans of seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    else:
        options = f"scale {scale}; {_seeds(runs)}"
    if item.name == "table12":
        body = orders_markdown(scale, runs)
    elif table and item.experiments:
        blocks = [
            block for block in blocks_of(item, scale, runs) if any(ours or theirs for _, ours, theirs in block.lines)
        ]
        body = "\n".join(map(block_markdown, blocks))
        notes += [BATCHES] * (item.name in ("table9", "table11")) + _shared(item, scale)
    elif not table:
        draws = _drawing(item, runs)
        notes += [] if scale == "paper" else [_stand_ins(item)]
        body = f"![{item.title}]({item.stem(scale)}.png)\n" if draws else "Nothing has been run for it yet.\n"
    where = "" if scale == "mini" else " at the published scale"
    heading = f"## {item.name}{where}: {item.title}\n\n{options}. Made by `{command}`. {' '.join(notes)}"
    missing = _missing(item, scale, runs)
    rest = f"\nNot run here: {', '.join(missing)}; `{whole}`.\n" if missing else ""
    page = f"{heading}\n\n{body}{_options(item, scale, runs)}{rest}"
    return page, draws, None if item.name == "fig5" else numbers


def _seeds(runs: Runs) -> str:
    """Of the runs of each number of tasks, where these differ; a table has their number in each line."""
    groups: dict[int, set[int]] = {}
    for one, found in runs.items():
        groups.setdefault(one.tasks, set()).update(result.seed for result in found.results)
    words = {tasks: ", ".join(map(str, sorted(seeds))) for tasks, seeds in sorted(groups.items())}
    if len(set(words.values())) > 1:
        return "seeds " + "; ".join(f"{text} (T = {tasks})" for tasks, text in words.items())
    return f"seeds {next(iter(words.values()), 'none')}"


def _options(item: Item, scale: Scale, runs: Runs) -> str:
    """What the runs were made with, as far as the page does not say it elsewhere: the federation, and each method's own
    settings; once for all parts of the page that have the same."""
    parts: dict[str, tuple[str, dict[str, None]]] = {}
    for one in item.experiments:
        if one in runs:
            config = config_of(one, scale, 0)
            spec = config.method.label.split(" ", 1)[1:] if one.method == config.method.name else []
            _, methods = parts.setdefault(f"{TITLES[one.dataset]}, T = {one.tasks}", (_federation(one, config), {}))
            methods[f"{one.method}: {', '.join([*spec, f'lr {config.train.lr:g}'])}"] = None
    alike: dict[str, list[str]] = {}
    for where, (federation, methods) in parts.items():
        alike.setdefault(f"{federation}. {'; '.join(methods)}.", []).append(where)
    lines = [f"- {'; '.join(places)}: {text}\n" for text, places in alike.items()]
    return "\nOptions (all others are as `holdfast settings` lists them):\n\n" + "".join(lines) if lines else ""


def _federation(one: Experiment, config: Config) -> str:
    plan, train = config.plan, config.train
    words = [
        f"{plan.clients} clients and {plan.join_per_task} more in each task",
        f"{plan.selected} selected a round",
        f"{plan.rounds} rounds of {train.epochs} epochs a task in batches of {train.batch}",
        *([f"{100 * plan.class_share:.0f} % of a task's classes a client"] if one.share is None else []),
        *([f"{plan.memory} exemplars a client"] if one.memory is None else []),
        config.model.name,
    ]
    return ", ".join(words)


def _missing(item: Item, scale: Scale, runs: Runs) -> list[str]:
    """The methods that have not been run; with what they lack, if that is not everything."""
    everything = item.wanted(scale, [one.method for one in item.experiments])
    lacking: dict[str, list[Experiment]] = {}
    for one in everything:
        if one not in runs:
            lacking.setdefault(one.method, []).append(one)
    words = []
    for method, some in sorted(lacking.items()):
        whole = len(some) == sum(one.method == method for one in everything)
        words.append(method if whole else f"{method} ({'; '.join(_within(one, everything) for one in some)})")
    return words


def _within(one: Experiment, others: Sequence[Experiment]) -> str:
    """That by which an experiment differs from others of its method."""
    facts = {
        "dataset": TITLES[one.dataset],
        "tasks": f"T = {one.tasks}",
        "share": f"{one.share} % of classes",
        "memory": f"memory {one.memory}",
        "order": f"order {one.order}",
    }
    return ", ".join(text for key, text in facts.items() if len({getattr(other, key) for other in others}) > 1)


def _shared(item: Item, scale: Scale) -> list[str]:
    """Two data sets that the same images stand in for."""
    twins = {"table1": "table2", "table2": "table1", "table4": "table5", "table5": "table4"}
    twins |= {"table7": "table8", "table8": "table7"}
    if scale == "paper" or item.name not in twins:
        return []
    return [f"The same images stand in for MiniImageNet and TinyImageNet: {twins[item.name]} has the same runs."]


def _stand_ins(item: Item) -> str:
    wanted = [one for one in item.experiments if one.tasks in item.mini_tasks]
    pairs = dict.fromkeys(f"{TITLES[one.dataset]}, T = {one.tasks}: {stand_in(one).about}" for one in wanted)
    return f"Stand-in data: {'; '.join(pairs)}."


def _drawing(item: Item, runs: Runs) -> Callable[[Path], None] | None:
    """What draws the figure, if there is anything to draw."""
    if item.name == "fig5":
        sheets = [folder / "prototypes.png" for found in runs.values() for folder in found.folders]
        sheet = next((file for file in sheets if file.exists()), None)
        return None if sheet is None else lambda file: write_atomic(file, sheet.read_bytes())
    return (lambda file: draw(item, runs, file)) if runs else None
