"""Readable tables of results."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import mean, stdev
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from holdfast.results.record import Result
from holdfast.results.stored import Tree
from holdfast.server.metrics import forgotten
from holdfast.simulation.plan import Plan
from holdfast.terminal import on_one_line, printable

GROUPS = {"Zo": "stayed", "Zn": "moved on", "Za": "joined"}
PART = "part"  # the prototypes as a fraction of the models sent back
TRAFFIC = {
    "down": "models to clients",
    "up": "and back",
    "observed": "to observers",
    "task_end": "at a task's end",
    "teachers": "teachers",
    "shares": "prototypes",
    PART: "of the models back",
    "encoder": "encoders",
    "models": "models to the proxy",
}
NUMBER = re.compile(r"|-|[\d.+-]+(e[+-]?\d+)?( ± [\d.]+)?%?")
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # how a cell begins that a spreadsheet computes


def result_table(result: Result) -> Table:
    """Per task: accuracy on all classes seen so far, on the task itself then and at the end, and the forgetting."""
    title = f"{result.method} on {result.dataset}, seed {result.seed}: accuracy in %"
    table = Table(title=escape(printable(title)), title_justify="left")
    for column in ("task", "classes seen", "on all seen", "on the task itself", "at the end", "forgotten"):
        table.add_column(column, justify="right", style="bold" if column == "on all seen" else None)
    final = result.accuracy_matrix[-1]
    lost = [*forgotten(result.accuracy_matrix), None]
    for t, seen in enumerate(accumulate(result.task_sizes)):
        row = (result.accuracy_after_task[t], result.accuracy_matrix[t][t], final[t], lost[t])
        table.add_row(str(t + 1), str(seen), *map(percent, row))
    table.add_section()
    # The accuracy at the end is that on all seen classes, in the last row; tasks of other sizes have another mean.
    table.add_row("mean", "", percent(result.average_accuracy), "", "", percent(result.forgetting))
    return table


def result_lines(result: Result, clients: Sequence[str] = (), metrics: str = "whole") -> list[str]:
    """The headline numbers in words; `clients` are the clients' names, if they have any."""
    worst = result.worst_client["client"]
    name = result.worst_client.get("name") or (clients[worst] if clients else f"client {worst}")
    groups = ", ".join(f"{GROUPS[g]} ({g}) {percent(v)}" for g, v in result.group_accuracy.items() if v is not None)
    sent = {way: count / 1e6 for channel in result.bytes.values() for way, count in channel.items()}
    lines = [
        f"average {percent(result.average_accuracy)}, last {percent(result.last_accuracy)}, "
        f"macro F1 {percent(result.macro_f1)}, macro recall {percent(result.macro_recall)}",
        f"on the classes they have held: {groups}; worst: {name} with {percent(result.worst_client['accuracy'])}",
        f"{sent.get('down', 0):.1f} MB sent to clients, {sent.get('up', 0):.1f} MB back"
        + (f" and {sent['extras']:.2f} MB of extras" if sent.get("extras") else "")
        + f", {sum(result.seconds.values()):.1f} s",
        *_further_models(sent),
    ]
    if metrics == "batchwise128":
        lines.insert(1, _batchwise_line(result))
    if any(result.bytes.get("proxy", {}).values()):
        teachers, shares, encoder = (sent.get(way, 0) for way in ("teachers", "shares", "encoder"))
        part = f" ({shares / sent['up']:.2%} of the models sent back)" if sent.get("up") else ""
        models = f", {sent['models']:.1f} MB of models from the server to the proxy" if "models" in sent else ""
        lines.append(
            f"on the proxy's channel: {teachers:.1f} MB of teachers, {shares:.2f} MB of prototypes"
            f"{part}, {encoder:.1f} MB of encoders{models}"
        )
    if at_chance(result):
        lines.append(
            f"this is no better than chance ({percent(1 / len(result.classes))} %): try more rounds (plan.rounds), a "
            "lower train.lr, smaller batches (train.batch), or a method with a memory (docs/choosing.md)"
        )
    if found := detected(result):
        lines.append(
            f"new classes noticed at once {found['hits']:.0f} of {found['transitions']:.0f} times, late "
            f"{found['late']:.0f}; false alarms in {found['false_alarms']:.0f} of "
            f"{found['client_rounds']:.0f} client-rounds"
        )
    return lines


def at_chance(result: Result) -> bool:
    """Is the accuracy at the end within two standard errors of guessing?"""
    chance, images = 1 / len(result.classes), sum(map(sum, result.confusion))
    if len(result.classes) < 2:
        return False
    return bool(result.last_accuracy <= chance + 2 * math.sqrt(chance * (1 - chance) / images))


def detected(result: Result) -> dict[str, Any] | None:
    """How well detectors worked; None if clients were told of new classes. Nobody else is asked then, and nothing is
    missed."""
    found = result.detection
    if not found or not found["transitions"]:
        return None
    told = found["client_rounds"] == found["transitions"] == found["hits"]
    return None if told else found


def _further_models(sent: Mapping[str, float]) -> list[str]:
    """Models to clients that do not train on them; older runs did not count them."""
    words = {"observed": "broadcasts to clients that only observe", "task_end": "models at a task's end"}
    parts = [f"{sent[way]:.1f} MB of {text}" for way, text in words.items() if way in sent]
    return [f"beside them {', '.join(parts)}"] if parts else []


def _batchwise_line(result: Result) -> str:
    curves = result.curves or {}
    if "macro_f1_batchwise128" not in curves:
        return "averaged over batches of 128: not recorded by the version that made this run"
    f1, recall = (percent(curves[f"{name}_batchwise128"][-1]) for name in ("macro_f1", "macro_recall"))
    return f"averaged over batches of 128, the only way the paper's can have been computed: F1 {f1}, recall {recall}"


def by_protocol(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results per data set. If a data set was divided into tasks in several ways, per way: named by the number of
    tasks, or by their sizes if the numbers are equal."""
    groups: dict[tuple[str, tuple[int, ...]], list[Result]] = {}
    for result in results:
        groups.setdefault((result.dataset, tuple(result.task_sizes)), []).append(result)
    several = Counter(dataset for dataset, _ in groups)
    alike = Counter((dataset, shape(sizes)) for dataset, sizes in groups)
    named = {}
    for (dataset, sizes), some in groups.items():
        ways = shape(sizes) if alike[dataset, shape(sizes)] == 1 else f"tasks of {', '.join(map(str, sizes))} classes"
        named[dataset if several[dataset] == 1 else f"{dataset}, {ways}"] = some
    return named


def shape(sizes: Sequence[int]) -> str:
    """A short description of how classes are divided into tasks."""
    return f"{len(sizes)} task{'s' * (len(sizes) > 1)}, {sum(sizes)} classes"


def names_of(results: Iterable[Result], configs: Mapping[str, Tree] | None = None) -> dict[str, str]:
    """A name for each experiment of a table: its method, and the settings of data, plan or network in which it differs
    from the others; within one method also those of training, or else its key. `configs` holds the settings of the
    experiments, as far as they are known."""
    methods = {result.experiment: result.method for result in results}
    known = {key: settings_of(configs[key]) for key in methods if configs and key in configs}
    words = differences(known, ("data", "plan", "model"))
    for method in dict.fromkeys(methods.values()):
        alike = {key: settings for key, settings in known.items() if methods[key] == method}
        for key, more in differences(alike, ("train",)).items():
            words[key] += more
    names = {key: f"{one} ({', '.join(words[key])})" if words.get(key) else one for key, one in methods.items()}
    several = Counter(names.values())
    return {key: name if several[name] == 1 else f"{name} #{key}" for key, name in names.items()}


Settings = Mapping[tuple[str, str], object]


def differences(settings: Mapping[str, Settings], sections: Sequence[str]) -> dict[str, list[str]]:
    """Per experiment, the settings of these sections that are not the same for all; a missing setting is shown as
    unset."""
    words: dict[str, list[str]] = {one: [] for one in settings}
    for key in {key: None for values in settings.values() for key in values if key[0] in sections}:
        if len({repr(values.get(key)) for values in settings.values()}) > 1:
            for one, values in settings.items():
                text = "unset" if values.get(key) is None else str(values[key])
                words[one].append(f"{'.'.join(key)}={text if len(text) <= 24 else f'{text[:23]}…'}")
    return words


def settings_of(config: Mapping[str, Any]) -> Settings:
    """All settings of a config except those that a table shows already: the data set, its tasks and the method."""
    sections = {name: config.get(name, {}) for name in ("data", "plan", "model", "train")}
    said = {("data", "name"), ("data", "path"), ("data", "classes"), ("plan", "tasks")}
    return {
        (name, key): value
        for name, values in sections.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
        if (name, key) not in said
    }


def reference_of(results: Sequence[Result], method: str | None) -> str | None:
    """The experiment whose advantage over the others is shown: the first of the method with default settings, or else
    with other settings, but never an ablation; None if no method is named."""
    whole = [result for result in results if result.method.split()[0] == method and "w/o" not in result.method]
    plain = [result for result in whole if result.method == method]
    return next((result.experiment for result in [*plain, *whole]), None)


def comparison(
    results: Sequence[Result], names: Mapping[str, str] | None = None, reference: str | None = None
) -> tuple[list[str], list[list[str]]]:
    """Columns and rows that compare experiments: means over seeds, ± standard deviation where it matters; and, if the
    method `reference` is among them, its advantage over each in points of average accuracy, paired by seed, ± standard
    error."""
    experiments: dict[str, dict[int, Result]] = {}
    for result in results:
        experiments.setdefault(result.experiment, {})[result.seed] = result
    groups = [list(seeds.values()) for seeds in experiments.values()]
    groups.sort(key=lambda group: mean(r.average_accuracy for r in group))
    seen = sorted({classes for group in groups for classes in accumulate(group[0].task_sizes)})
    names = names or names_of(results)
    chosen = reference_of(results, reference)
    best = {r.seed: r.average_accuracy for r in results if r.experiment == chosen}
    rows = []
    for group in groups:
        after = zip(*(r.accuracy_after_task for r in group), strict=True)
        at = dict(zip(accumulate(group[0].task_sizes), map(mean, after), strict=True))
        spread = [
            _with_deviation([r.average_accuracy for r in group]),
            _with_deviation([r.last_accuracy for r in group]),
            _with_deviation([r.forgetting for r in group if r.forgetting is not None]),
        ]
        cells = [percent(at[classes]) if classes in at else "" for classes in seen]
        own = group[0].experiment
        over = [best[r.seed] - r.average_accuracy for r in group if r.seed in best and own != chosen]
        rows.append([names[own], str(len(group)), *cells, *spread, *([_with_error(over)] if best else [])])
    head = ["method", "seeds", *map(str, seen), "average", "last", "forgotten"]
    return [*head, f"{names[chosen]} over it"] if chosen else head, rows


def _with_error(differences: Sequence[float]) -> str:
    """The mean of paired differences, ± its standard error."""
    if not differences:
        return ""
    mean_of = f"{100 * mean(differences):+.1f}"
    return mean_of if len(differences) < 2 else f"{mean_of} ± {percent(stdev(differences) / len(differences) ** 0.5)}"


def _with_deviation(values: Sequence[float]) -> str:
    if len(values) < 2:
        return percent(values[0] if values else None)
    return f"{percent(mean(values))} ± {percent(stdev(values))}"


def plan_tables(plan: Plan, names: Sequence[str], clients: Sequence[str] = ()) -> list[Table]:
    """A readable plan: the federation per task, and what each client gets when; rounds are counted from 1. `clients`
    are the clients' names, if they have any."""
    tasks = []
    for t, classes in enumerate(plan.tasks):
        groups = plan.groups[t]
        rounds = plan.rounds_of(t)
        picked = {client for round_index in rounds for client in plan.selected[round_index]}
        new = sum(groups[client] == "Za" for client in picked)
        sizes = [str(groups.count(group)) for group in ("Zo", "Zn", "Za")]
        held = " ".join(names[c] for c in classes)
        tasks.append([str(t + 1), f"{rounds.start + 1}-{rounds.stop}", held, *sizes, f"{len(picked)} ({new} new)"])
    lines = [
        [
            clients[client] if clients else str(client),
            str(arrivals[0].round_index + 1),
            " | ".join(f"{a.round_index + 1}: {' '.join(names[c] for c in a.classes) or '(memory)'}" for a in arrivals),
            " ".join(str(index + 1) for index, chosen in enumerate(plan.selected) if client in chosen),
        ]
        for client, arrivals in enumerate(plan.arrivals)
    ]
    columns = ["task", "rounds", "classes", "Zo stay", "Zn move on", "Za join", "selected"]
    return [
        rows_table("The federation by task", columns, tasks),
        rows_table("The clients", ["client", "joins", "round: classes", "selected in rounds"], lines),
    ]


def traffic_table(totals: Sequence[Mapping[str, int]]) -> Table:
    """The bytes that a plan will send per task, if every transition is noticed at once."""
    known = {way for sent in totals for way in sent}
    ways = [way for way in TRAFFIC if way in known or (way == PART and "shares" in known)]
    rows = []
    for t, sent in enumerate(totals):
        cells = {way: f"{sent.get(way, 0) / 1e6:.2f}" for way in ways}
        if PART in cells:
            cells[PART] = f"{sent.get('shares', 0) / sent['up']:.3%}" if sent.get("up") else "-"
        rows.append([str(t + 1), *cells.values()])
    title = "Bytes in MB; models by the global server, the rest by the proxy"
    return rows_table(title, ["task", *(TRAFFIC[way] for way in ways)], rows)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a Markdown page."""
    rule = ["---" if column == "method" else "---:" for column in columns]
    return "\n".join("| " + " | ".join(map(markdown_cell, row)) + " |" for row in [columns, rule, *rows])


def markdown_cell(text: str) -> str:
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", on_one_line(text).replace("|", "\\|"))


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([_csv_cell(cell) for cell in row] for row in rows)
    return file.getvalue()


def _csv_cell(cell: object) -> object:
    """A text that a spreadsheet would compute as a formula gets a quotation mark before it."""
    if not isinstance(cell, str):
        return cell
    return f"'{printable(cell)}" if cell[:1] in FORMULA and not NUMBER.fullmatch(cell) else printable(cell)


def rows_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table of words."""
    table = Table(title=escape(printable(title)), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        cells = [column, *(row[i] for row in rows)]
        numbers = all(NUMBER.fullmatch(cell) for cell in cells[1:])
        longest = max(len(word) for cell in cells for word in [*cell.split(), ""])
        table.add_column(
            escape(column), overflow="fold", min_width=min(longest, 14), justify="right" if numbers and rows else "left"
        )
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    return table


def percent(value: float | None) -> str:
    if value is None:
        return "-"
    text = f"{100 * value:.1f}"
    return "0.0" if text == "-0.0" else text
