"""Where the commands print: tables and text to standard output, a mistake to standard error."""

import sys
from typing import NoReturn

from rich.markup import escape

from holdfast.terminal import Terminal, on_one_line

STOPPED = 130  # the exit code of a process that the user or the system stopped, as shells have it
out = Terminal(emoji=False, width=None if sys.stdout.isatty() else 160)  # a file has no width; tables need one


def stop(sentence: str, code: int) -> NoReturn:
    """Ends the process with a sentence on standard error."""
    text = f"[red]holdfast:[/red] {escape(on_one_line(sentence))}"
    Terminal(stderr=True, emoji=False).print(text, soft_wrap=True, highlight=False)
    sys.exit(code)
