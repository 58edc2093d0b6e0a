"""Joint training, the upper bound: no class comes late and no data is taken away."""

from typing import ClassVar

from pydantic.dataclasses import dataclass

from holdfast.methods.base import Method
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class Joint(Method):
    """Federated averaging in which every client holds, from the round it joins to the end, all the classes that the
    schedule would have brought it over time, and the head has all classes from the start. It is evaluated like the
    other methods, on the classes seen so far."""

    name: ClassVar[str] = "joint"
    about: ClassVar[str] = "federated averaging with all classes from the start to the end: the upper bound"
    all_at_once: ClassVar[bool] = True
