"""Joint training: the ceiling. Nothing comes late and nothing is taken away."""

from typing import ClassVar

from pydantic.dataclasses import dataclass

from holdfast.methods.base import Method
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class Joint(Method):
    """Federated averaging in which every client holds, from the moment it joins to the end, all the classes that the
    schedule would have brought it one after another, and the head has all classes from the start. It is asked the same
    question as the others: which of the classes seen by now is this?"""

    name: ClassVar[str] = "joint"
    about: ClassVar[str] = "federated averaging with all classes from the start, kept for ever: the ceiling"
    all_at_once: ClassVar[bool] = True
