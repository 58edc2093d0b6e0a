"""The one exception that a user is meant to see: what is wrong, where, and what to do, in one sentence."""

from collections.abc import Iterable
from difflib import get_close_matches


class HoldfastError(Exception):
    """Bad input or an impossible request; the command line prints it and exits with code 2."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: the nearest valid one, or the list of all."""
    names = sorted(known)
    close = get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(names)}"


def complain(sentence: str) -> None:
    """Prints a warning on standard error."""
    from holdfast.terminal import Terminal  # here, so that processes that decode images start sooner

    Terminal(stderr=True).print(sentence, style="yellow", highlight=False, soft_wrap=True, markup=False, emoji=False)
