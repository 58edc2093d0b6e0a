"""Progress bars on standard error, so that standard output stays clean for tables and JSON."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from holdfast.terminal import Terminal

T = TypeVar("T")


def progress_bar(*extra: TextColumn) -> Progress:
    """A bar with count, elapsed and remaining time; `extra` columns come before these. Silent without a terminal."""
    console = Terminal(stderr=True, markup=False)
    return Progress(
        TextColumn("{task.description}", style="bold", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        *extra,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def track(items: Iterable[T], text: str, total: int) -> Iterator[T]:
    """Yields `items` while a bar named `text` advances."""
    with progress_bar() as bar:
        task = bar.add_task(text, total=total)
        for item in items:
            yield item
            bar.advance(task)
