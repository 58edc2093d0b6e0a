"""Where the commands print: tables and text to standard output, a mistake to standard error."""

import sys
from typing import NoReturn

from rich.console import Console
from rich.markup import escape

STOPPED = 130  # the exit code of a process that the user or the system stopped, as shells have it
out = Console(emoji=False, width=None if sys.stdout.isatty() else 160)  # a file has no width; tables need one


def stop(sentence: str, code: int) -> NoReturn:
    """Ends the process with a sentence on standard error."""
    Console(stderr=True, emoji=False).print(f"[red]holdfast:[/red] {escape(sentence)}", soft_wrap=True, highlight=False)
    sys.exit(code)
