"""Tables that a person can read, from results."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from statistics import mean, stdev

from rich.markup import escape
from rich.table import Table

from holdfast.results.record import Result


def result_table(result: Result) -> Table:
    """Task by task: accuracy on all classes seen by then, on the task itself then and at the end, and what was lost."""
    title = f"{result.method} on {result.dataset}, seed {result.seed}: accuracy in %"
    table = Table(title=title, title_justify="left")
    for column in ("task", "classes seen", "on all seen", "on the task itself", "at the end", "forgotten"):
        table.add_column(column, justify="right", style="bold" if column == "on all seen" else None)
    final = result.accuracy_matrix[-1]
    for t, seen in enumerate(accumulate(result.task_sizes)):
        lost = None if t == len(final) - 1 else max(row[t] for row in result.accuracy_matrix[t:-1]) - final[t]
        row = (result.accuracy_after_task[t], result.accuracy_matrix[t][t], final[t], lost)
        table.add_row(str(t + 1), str(seen), *map(percent, row))
    table.add_section()
    table.add_row("mean", "", percent(result.average_accuracy), "", percent(mean(final)), percent(result.forgetting))
    return table


def result_lines(result: Result) -> list[str]:
    """The headline numbers in words."""
    groups = ", ".join(
        f"{group} {percent(value)}" for group, value in result.group_accuracy.items() if value is not None
    )
    sent = {way: sum(channel[way] for channel in result.bytes.values()) / 1e6 for way in ("down", "up")}
    return [
        f"average {percent(result.average_accuracy)}, last {percent(result.last_accuracy)}, "
        f"macro F1 {percent(result.macro_f1)}, macro recall {percent(result.macro_recall)}",
        f"on the classes they have held: {groups}; "
        f"worst client {result.worst_client['client']:.0f} {percent(result.worst_client['accuracy'])}",
        f"{sent['down']:.1f} MB sent to clients, {sent['up']:.1f} MB back, {sum(result.seconds.values()):.1f} s",
    ]


def comparison(results: Iterable[Result]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows that set methods side by side: means over seeds, with ± standard deviation where it matters."""

    def what(result: Result) -> tuple[str, list[int], str]:
        return result.dataset, result.task_sizes, result.method

    groups = [list(group) for _, group in groupby(sorted(results, key=what), key=what)]
    sizes = max((group[0].task_sizes for group in groups), key=len)
    columns = ["data", "method", "seeds", *map(str, accumulate(sizes)), "average", "last", "forgotten"]
    rows = []
    for group in sorted(groups, key=lambda group: (group[0].dataset, mean(r.average_accuracy for r in group))):
        after = [percent(mean(values)) for values in zip(*(r.accuracy_after_task for r in group), strict=True)]
        after += [""] * (len(sizes) - len(after))
        spread = [
            _with_deviation([r.average_accuracy for r in group]),
            _with_deviation([r.last_accuracy for r in group]),
            _with_deviation([r.forgetting for r in group if r.forgetting is not None]),
        ]
        rows.append([group[0].dataset, group[0].method, str(len(group)), *after, *spread])
    return columns, rows


def _with_deviation(values: Sequence[float]) -> str:
    if len(values) < 2:
        return percent(values[0] if values else None)
    return f"{percent(mean(values))} ± {percent(stdev(values))}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table for a Markdown page."""
    rule = ["---" if column in ("data", "method") else "---:" for column in columns]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, rule, *rows])


def rows_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table of words."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
