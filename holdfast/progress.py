"""Progress bars on standard error, so that standard output stays clean for tables and JSON."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from rich import box
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from holdfast.terminal import Terminal

T = TypeVar("T")
LATEST = 8  # rounds in the table above the bar
ROOM = (72, 18)  # columns and lines that a terminal needs for the table


class RoundsProgress(Progress):
    """A bar and above it, where there is room, a table of the latest rounds. `note` tells it of each round."""

    def __init__(self, *columns: ProgressColumn, console: Console) -> None:
        self.latest: list[list[str]] = []
        self._before: float | None = None
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=True)

    def note(self, line: Mapping[str, Any]) -> None:
        """A line of the record."""
        accuracy, before = line["accuracy"], self._before
        self._before = accuracy
        row = [
            f"{line['round']}",
            f"{line['task']}",
            f"{line['classes_seen']}",
            f"{accuracy:.1%}",
            "" if before is None else f"{100 * (accuracy - before):+.1f}",
            f"{sum(line['losses'].values()):.3g}" if line["losses"] else "-",
            f"{len(line['trained'])}/{len(line['selected'])}",
            f"{len(line.get('refused', ()))}",
            f"{sum(line['seconds'].values()):.1f}",
        ]
        self.latest = [*self.latest, row][-LATEST:]  # a new list: another thread may be showing the old one

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.latest and self.console.width >= ROOM[0] and self.console.height >= ROOM[1]:
            table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for head in ("round", "task", "classes", "accuracy", "change", "loss", "trained", "refused", "seconds"):
                table.add_column(head, justify="right", no_wrap=True, style="bold" if head == "accuracy" else None)
            for row in self.latest:
                table.add_row(*row)
            yield table
        yield self.make_tasks_table(self.tasks)


def progress_bar(*extra: TextColumn) -> RoundsProgress:
    """A bar with count, elapsed and remaining time; `extra` columns come before these. Silent without a terminal."""
    console = Terminal(stderr=True, markup=False)
    return RoundsProgress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        *extra,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def track(items: Iterable[T], text: str, total: int) -> Iterator[T]:
    """Yields `items` while a bar named `text` advances."""
    with progress_bar() as bar:
        task = bar.add_task(text, total=total)
        for item in items:
            yield item
            bar.advance(task)
