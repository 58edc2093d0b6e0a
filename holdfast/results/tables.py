"""Tables that a person can read, from results."""

from collections.abc import Sequence
from itertools import accumulate

from rich.table import Table

from holdfast.results.record import Result


def result_table(result: Result) -> Table:
    """Accuracy on all seen classes after each task, accuracy on each task, and what was forgotten, in per cent."""
    tasks = range(len(result.task_sizes))
    table = Table(title=f"{result.method} on {result.dataset}, seed {result.seed}: accuracy in %", title_justify="left")
    table.add_column("after task")
    table.add_column("classes", justify="right")
    table.add_column("all seen", justify="right", style="bold")
    for t in tasks:
        table.add_column(f"task {t + 1}", justify="right")
    for t, seen in zip(tasks, accumulate(result.task_sizes), strict=True):
        row = result.accuracy_matrix[t]
        cells = [percent(value) for value in row] + [""] * (len(result.task_sizes) - len(row))
        table.add_row(str(t + 1), str(seen), percent(result.accuracy_after_task[t]), *cells)
    lost = [_best_before(result, k) - result.accuracy_matrix[-1][k] for k in tasks[:-1]]
    table.add_section()
    table.add_row(
        "forgotten", "", percent(result.forgetting), *map(percent, lost), *([""] if result.task_sizes else [])
    )
    return table


def _best_before(result: Result, task: int) -> float:
    return max(row[task] for row in result.accuracy_matrix[task:-1])


def result_lines(result: Result) -> list[str]:
    """The headline numbers in words."""
    groups = ", ".join(
        f"{group} {percent(value)}" for group, value in result.group_accuracy.items() if value is not None
    )
    sent = {way: sum(channel[way] for channel in result.bytes.values()) / 1e6 for way in ("down", "up")}
    return [
        f"average {percent(result.average_accuracy)}, last {percent(result.last_accuracy)}, "
        f"macro F1 {percent(result.macro_f1)}, macro recall {percent(result.macro_recall)}",
        f"on the classes they have held: {groups}; worst client {result.worst_client['client']:.0f} "
        f"with {percent(result.worst_client['accuracy'])}",
        f"{sent['down']:.1f} MB sent to clients, {sent['up']:.1f} MB back, {sum(result.seconds.values()):.1f} s",
    ]


def rows_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table of words."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
