"""The pages of the paper's tables and figures: the numbers, the settings behind them, and what is missing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean

from holdfast.files import write_atomic
from holdfast.paper.items import Experiment, Item, Scale, Setup, Setups, stand_in
from holdfast.paper.tables import (
    TITLES,
    WORDS,
    Runs,
    block_markdown,
    blocks_of,
    common_seeds,
    curve_rows,
    of_seeds,
    orders_markdown,
    traffic_lines,
    traffic_markdown,
)
from holdfast.results import plots
from holdfast.results.record import read_record
from holdfast.results.stored import stored
from holdfast.results.tables import as_csv

SHOWN = ("accuracy", "f1", "recall")
BATCHES = (
    "The published F1 and recall fit averages over batches of 128, in which most classes are absent and count as 0 "
    "(see docs/report.md). Ours, averaged in the same way, stand beside them; ours over the whole test set stand alone."
)


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
        for title in dict.fromkeys(one.tasks_title for one in item.experiments if one in runs):
            there = {one.method: found for one, found in runs.items() if one.tasks_title == title}
            seeds = common_seeds(list(there.values()))
            if seeds:  # the differences are small, so all bars have the same seeds
                panel = bars[f"{title}{of_seeds(seeds)}"] = {}
                for method, found in there.items():
                    of = {m: found.only(seeds).curves(m) for m in SHOWN}
                    if all(curve for curves in of.values() for curve in curves):
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
    "fig3": "The paper prints no numbers for its curves: these are ours alone.",
    "fig4": "The paper prints no numbers for its curves: these are ours alone.",
    "fig5": "Rows: original, perturbed by its client, reconstructed by the proxy.",
    "fig6": "The paper prints no numbers for its bars: these are ours alone.",
    "fig7": "The paper prints no numbers for its bars: these are ours alone.",
    "fig8": "The paper prints no numbers for its curves: these are ours alone.",
}


def page_of(
    item: Item,
    scale: Scale,
    runs: Runs,
    setups: Setups,
    seeds: Sequence[int],
    sent: Mapping[str, float] | None,
    command: str,
    whole: str,
) -> tuple[str, Callable[[Path], None] | None, str | None]:
    """A Markdown page, what draws its picture, and its numbers as CSV.

    `setups` has every experiment of the item; `sent` the MB per task and channel, which table 10 needs; `command` made
    the page, `whole` runs what is missing."""
    table, draws, numbers = item.name.startswith("table"), None, as_csv(curve_rows(item, scale, runs, setups))
    notes = ["In brackets: as published."] if table else [NOTES[item.name]]
    if sent is not None:
        lines = traffic_lines(sent)
        body, numbers = traffic_markdown(scale, lines), as_csv([["what", "MB per task", "published"], *lines])
        options = f"scale {scale}; plans of seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    else:
        options = f"scale {scale}; {_seeds(runs)}"
    if item.name == "table12":
        body = orders_markdown(scale, runs)
    elif table and item.experiments:
        blocks = [
            block
            for block in blocks_of(item, scale, runs, setups)
            if any(ours or theirs for _, ours, theirs in block.lines)
        ]
        body = "\n".join(map(block_markdown, blocks))
        notes += [BATCHES] * (item.name in ("table9", "table11")) + _shared(item, scale)
    elif not table:
        draws = _drawing(item, runs)
        notes += [] if scale == "paper" else [_stand_ins(item)]
        body = f"![{item.title}]({item.stem(scale)}.png)\n" if draws else "Nothing has been run for it yet.\n"
    where = "" if scale == "mini" else " at the published scale"
    heading = f"# {item.name}{where}: {item.title}\n\n{options}. Made by `{command}`. {' '.join(notes)}"
    missing = _missing(item, scale, runs)
    rest = f"\nNot run here: {', '.join(missing)}; `{whole}`.\n" if missing else ""
    page = f"{heading}\n\n{body}{_options(item, runs, setups)}{rest}"
    return page, draws, None if item.name == "fig5" else numbers


def _seeds(runs: Runs) -> str:
    """The seeds, by number of tasks where these differ; a table has their number in each line."""
    groups: dict[str, set[int]] = {}
    for one in sorted(runs, key=lambda one: (one.tasks, one.schedule or "")):
        groups.setdefault(one.tasks_title, set()).update(result.seed for result in runs[one].results)
    words = {title: ", ".join(map(str, sorted(seeds))) for title, seeds in groups.items()}
    if len(set(words.values())) > 1:
        return "seeds " + "; ".join(f"{text} ({title})" for title, text in words.items())
    return f"seeds {next(iter(words.values()), 'none')}"


def _options(item: Item, runs: Runs, setups: Setups) -> str:
    """What the runs were made with, as far as the page does not say it elsewhere: the federation, and the settings of
    each method; once for all parts of the page that agree."""
    parts: dict[str, tuple[str, dict[str, None]]] = {}
    for one in item.experiments:
        if one in runs:
            where, setup = f"{TITLES[one.dataset]}, {one.tasks_title}", setups[one]
            _, methods = parts.setdefault(where, (_federation(one, setup), {}))
            methods[f"{one.method}: {', '.join(setup.own)}"] = None
    alike: dict[str, list[str]] = {}
    for where, (federation, methods) in parts.items():
        alike.setdefault(f"{federation}. {'; '.join(methods)}.", []).append(where)
    lines = [f"- {'; '.join(places)}: {text}\n" for text, places in alike.items()]
    return "\nOptions (all others are as `holdfast settings` lists them):\n\n" + "".join(lines) if lines else ""


def _federation(one: Experiment, setup: Setup) -> str:
    words = [
        *([f"{setup.images} training images per class"] if setup.images else []),
        f"{setup.clients} clients and {setup.join_per_task} more in each task",
        f"{setup.selected} selected per round",
        f"{setup.rounds} rounds of {setup.epochs} epochs per task in batches of {setup.batch}",
        *([f"{100 * setup.class_share:.0f} % of a task's classes per client"] if one.share is None else []),
        *([f"{setup.memory} exemplars per client"] if one.memory is None else []),
        setup.backbone,
    ]
    return ", ".join(words)


def _missing(item: Item, scale: Scale, runs: Runs) -> list[str]:
    """The methods that have not been run; for those with some runs, which are missing."""
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
    """What tells an experiment apart from the others."""
    facts = {
        "dataset": TITLES[one.dataset],
        "tasks": f"T = {one.tasks}",
        "share": f"{one.share} % of classes",
        "memory": f"memory {one.memory}",
        "order": f"order {one.order}",
        "schedule": f"{one.schedule or 'cosine'} schedule",
    }
    return ", ".join(text for key, text in facts.items() if len({getattr(other, key) for other in others}) > 1)


def _shared(item: Item, scale: Scale) -> list[str]:
    """A note where the same images stand in for two data sets."""
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
        sheets = (stored(run).picture("prototypes.png") for found in runs.values() for run in found.folders)
        sheet = next((file for file in sheets if file), None)
        return None if sheet is None else lambda file: write_atomic(file, sheet.read_bytes())
    return (lambda file: draw(item, runs, file)) if runs else None
