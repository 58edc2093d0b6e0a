"""Tables that compare experiments, as in the paper: methods in rows, classes seen in columns; which differences are
real."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean, stdev
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from holdfast.errors import HoldfastError
from holdfast.results import tables
from holdfast.results.record import Result
from holdfast.results.tables import markdown_cell, names_of, percent
from holdfast.terminal import on_one_line

REAL = 0.05  # a difference is called real if its p-value is below this
ROUNDING = 1e-9  # differences that vary by no more are equal
MEASURES = {
    "accuracy": "accuracy",
    "f1": "macro_f1",
    "recall": "macro_recall",
    "f1-batchwise128": "macro_f1_batchwise128",
    "recall-batchwise128": "macro_recall_batchwise128",
}


@dataclass(frozen=True)
class Row:
    """One experiment: figures are fractions, by seed where they are lists."""

    method: str
    seeds: tuple[int, ...]
    curve: Mapping[int, float]  # classes seen -> the mean over seeds
    averages: tuple[float, ...]  # over tasks, one per seed
    improvement: float | None = None  # of the reference over this one, on the seeds they share
    chance: float | None = None  # p-value of the difference, corrected for multiple comparisons

    @property
    def real(self) -> bool:
        return self.chance is not None and self.chance < REAL


@dataclass(frozen=True)
class Comparison:
    """All experiments on one protocol."""

    dataset: str
    measure: str
    seen: tuple[int, ...]
    rows: tuple[Row, ...]
    reference: str

    @property
    def tested(self) -> bool:
        return any(row.chance is not None for row in self.rows)

    def best(self, seen: int | None) -> float:
        """The best figure after `seen` classes; the best average if `seen` is None."""
        if seen is None:
            return max(mean(row.averages) for row in self.rows)
        return max(row.curve[seen] for row in self.rows if seen in row.curve)


def compared(
    results: Sequence[Result],
    reference: str | None = None,
    measure: str = "accuracy",
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Groups the results by experiment, in the given order. All experiments are tested against the reference, which is
    the last one if none is named. `names` maps experiments to their names in the table."""
    experiments: dict[str, dict[int, Result]] = {}
    for result in results:
        experiments.setdefault(result.experiment, {})[result.seed] = result
    names = names or names_of(results)
    rows = []
    for experiment, seeds in experiments.items():
        curves = [curve_of(seeds[seed], measure) for seed in sorted(seeds)]
        averages = tuple(mean(curve) for curve in curves)
        seen = accumulate(next(iter(seeds.values())).task_sizes)
        curve = dict(zip(seen, map(mean, zip(*curves, strict=True)), strict=True))
        rows.append(Row(names[experiment], tuple(sorted(seeds)), curve, averages))
    chosen = next((row for row in rows if row.method == reference), rows[-1])
    columns = tuple(sorted({seen for row in rows for seen in row.curve}))
    return Comparison(results[0].dataset, measure, columns, tuple(_tested(rows, chosen)), chosen.method)


def curve_of(result: Result, measure: str) -> list[float]:
    """A measure after each task."""
    if measure == "accuracy":
        return result.accuracy_after_task
    curves = result.curves or {}
    if MEASURES[measure] not in curves:
        raise HoldfastError(
            f"the run of {result.method}, seed {result.seed}, has no {measure}; delete its folder and run it again"
        )
    return curves[MEASURES[measure]]


def _tested(rows: Sequence[Row], reference: Row) -> list[Row]:
    """Adds to each row the reference's improvement over it, and the p-value of a paired t-test, corrected by Holm."""
    of_reference = dict(zip(reference.seeds, reference.averages, strict=True))
    tested: list[Row] = []
    for row in rows:
        own = dict(zip(row.seeds, row.averages, strict=True))
        both = sorted(own.keys() & of_reference.keys())
        differences = [of_reference[seed] - own[seed] for seed in both]
        if row is reference or not both:
            tested.append(row)
            continue
        tested.append(Row(row.method, row.seeds, row.curve, row.averages, mean(differences), paired(differences)))
    order = sorted((i for i, row in enumerate(tested) if row.chance is not None), key=lambda i: tested[i].chance or 0.0)
    largest = 0.0
    for place, i in enumerate(order):
        row = tested[i]
        largest = max(largest, min(1.0, (row.chance or 0.0) * (len(order) - place)))
        tested[i] = Row(row.method, row.seeds, row.curve, row.averages, row.improvement, largest)
    return tested


def paired(differences: Sequence[float]) -> float | None:
    """The two-sided p-value of a paired t-test; None for a single seed, or if all differences are equal, which says
    nothing about their spread."""
    from scipy.stats import t  # here, because the import takes a second that most commands do not need

    if len(differences) < 2 or stdev(differences) <= ROUNDING:
        return None
    error = stdev(differences) / len(differences) ** 0.5
    return float(2 * t.sf(abs(mean(differences)) / error, len(differences) - 1))


def spread(values: Sequence[float]) -> str:
    """Mean and, for several values, standard deviation, in per cent."""
    return percent(mean(values)) if len(values) < 2 else f"{percent(mean(values))} ± {percent(stdev(values))}"


def _cells(table: Comparison, bold: tuple[str, str]) -> list[list[str]]:
    """The cells of all rows as text, the best of each column between the `bold` marks."""

    def mark(value: float, best: float, text: str) -> str:
        return f"{bold[0]}{text}{bold[1]}" if round(100 * value, 1) >= round(100 * best, 1) else text

    lines = []
    for row in table.rows:
        cells = [mark(row.curve[s], table.best(s), percent(row.curve[s])) if s in row.curve else "" for s in table.seen]
        average = mark(mean(row.averages), table.best(None), spread(row.averages))
        better = "-" if row.improvement is None else f"{100 * row.improvement:+.1f}{' *' if row.real else ''}"
        lines.append([row.method, str(len(row.seeds)), *cells, average, better])
    return lines


def _head(table: Comparison) -> list[str]:
    return ["method", "seeds", *map(str, table.seen), "average", "improvement"]


def note(table: Comparison) -> str:
    """What the marks mean."""
    tests = f"; *: real (paired t-test over seeds, Holm's correction, p < {REAL})" if table.tested else ""
    return f"improvement: of {table.reference} over the method, in points{tests}"


def as_text(table: Comparison) -> Group:
    """Title and note are outside the table, which may be narrower than they are."""
    title = f"{table.dataset}: {table.measure} in %"
    if any(len(row.seeds) > 1 for row in table.rows):
        title += ", mean over seeds (± standard deviation)"
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, column in enumerate(_head(table)):
        view.add_column(column, justify="right" if i else "left", no_wrap=True)
    for line in _cells(table, ("[bold]", "[/bold]")):
        view.add_row(escape(line[0]), *line[1:])
    return Group(Text(title, style="table.title"), view, Text(note(table), style="table.caption"))


def as_markdown(table: Comparison) -> str:
    head = _head(table)
    rule = ["---", *["---:"] * (len(head) - 1)]
    lines = [head, rule, *_cells(table, ("**", "**"))]
    body = "\n".join("| " + " | ".join(map(markdown_cell, line)) + " |" for line in lines)
    return f"{body}\n\n{markdown_cell(note(table))}\n"


def as_latex(table: Comparison) -> str:
    """A booktabs table."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join([_latex(cells[0]), *(cell.replace("±", r"$\pm$") for cell in cells[1:])]) + r" \\"

    columns = "lr" + "r" * (len(table.seen) + 2)
    body = [line(cells) for cells in _cells(table, (r"\textbf{", "}"))]
    parts = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(_head(table)), r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*parts, r"\end{tabular}", f"% {on_one_line(note(table))}"]) + "\n"


LATEX: dict[str, str | int | None] = {sign: f"\\{sign}" for sign in "%#_&{}$"}
LATEX |= {"\\": r"\textbackslash{}", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}", '"': r"\textquotedbl{}"}
LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$"}


def _latex(name: str) -> str:
    return on_one_line(name).translate(str.maketrans(LATEX))


def as_csv(table: Comparison) -> str:
    """All figures with full precision, in per cent."""
    rows: list[list[object]] = [[*_head(table)[:-1], "standard deviation", "improvement", "p"]]
    for row in table.rows:
        curve = [100 * row.curve[seen] if seen in row.curve else "" for seen in table.seen]
        deviation = 100 * stdev(row.averages) if len(row.averages) > 1 else ""
        better = "" if row.improvement is None else 100 * row.improvement
        chance = "" if row.chance is None else row.chance
        rows.append([row.method, len(row.seeds), *curve, 100 * mean(row.averages), deviation, better, chance])
    return tables.as_csv(rows)


def as_json(table: Comparison) -> dict[str, Any]:
    rows = [
        {
            "method": row.method,
            "seeds": list(row.seeds),
            "curve": [row.curve.get(seen) for seen in table.seen],
            "averages": list(row.averages),
            "average": mean(row.averages),
            "standard_deviation": stdev(row.averages) if len(row.averages) > 1 else None,
            "improvement": row.improvement,
            "p": row.chance,
            "real": row.real,
        }
        for row in table.rows
    ]
    facts = {"dataset": table.dataset, "measure": table.measure, "classes_seen": list(table.seen)}
    return {**facts, "reference": table.reference, "rows": rows}
