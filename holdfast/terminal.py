"""What is shown to people: a control character in a name is written out, and never reaches a terminal."""

import re
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# All control characters but tab and line break, the marks that turn the direction of text, and halves of characters.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters as escapes, such as \\x1b."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def on_one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", " ")


def write(text: str) -> None:
    """Writes a text to standard output as it is, but for control characters."""
    sys.stdout.write(printable(text))


class Terminal(Console):
    """A console that passes on its own control sequences only, not those of the texts that it is given."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
