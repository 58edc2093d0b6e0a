"""Where the commands print: tables and text to standard output, a mistake to standard error."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

from rich.markup import escape

from holdfast.terminal import Terminal, on_one_line
from holdfast.unfinished import finished_part

STOPPED = 130  # the exit code of a process that the user or the system stopped, as shells have it
out = Terminal(emoji=False, width=None if sys.stdout.isatty() else 160)  # a file has no width; tables need one


@contextmanager
def finished_parts(runs: Sequence[Path], with_model: bool = False) -> Iterator[list[Path]]:
    """The folders to read these runs from. Of runs that are not finished it says so, on standard error."""
    with ExitStack() as stack:
        found = [stack.enter_context(finished_part(run, with_model)) for run in runs]
        for _, note in found:
            if note:
                say(note)
        yield [folder for folder, _ in found]


def say(sentence: str) -> None:
    """Prints a sentence on standard error, unchanged: paths may contain brackets."""
    Terminal(stderr=True, emoji=False).print(sentence, style="yellow", soft_wrap=True, highlight=False, markup=False)


def stop(sentence: str, code: int) -> NoReturn:
    """Ends the process with a sentence on standard error."""
    text = f"[red]holdfast:[/red] {escape(on_one_line(sentence))}"
    Terminal(stderr=True, emoji=False).print(text, soft_wrap=True, highlight=False)
    sys.exit(code)
