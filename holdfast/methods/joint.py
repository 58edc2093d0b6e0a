"""Joint training: the ceiling. Nothing comes late and nothing is taken away."""

from dataclasses import replace
from typing import ClassVar

from pydantic.dataclasses import dataclass

from holdfast.methods.base import STRICT, Method
from holdfast.simulation.plan import Plan
from holdfast.simulation.timeline import Arrival


@dataclass(frozen=True, config=STRICT)
class Joint(Method):
    """Federated averaging in which every client holds, from the moment it joins to the end, all the classes that the
    schedule would have brought it one after another, and the head has all classes from the start. It is asked the same
    question as the others: which of the classes seen by now is this?"""

    name: ClassVar[str] = "joint"
    about: ClassVar[str] = "federated averaging with all classes from the start, kept for ever: the ceiling"

    def arrange(self, plan: Plan) -> Plan:
        everything = tuple(c for task in plan.tasks for c in task)
        return replace(
            plan, arrivals=tuple(_at_once(arrivals) for arrivals in plan.arrivals), growths=((0, everything),)
        )


def _at_once(arrivals: tuple[Arrival, ...]) -> tuple[Arrival, ...]:
    """All that a client would get over time, on the day it joins."""
    classes = tuple(sorted({c for arrival in arrivals for c in arrival.classes}))
    shared = all(arrival.images is None for arrival in arrivals if arrival.classes)
    images = None if shared else tuple(sorted({i for arrival in arrivals for i in arrival.images or ()}))
    return (Arrival(arrivals[0].round, classes, images),)
