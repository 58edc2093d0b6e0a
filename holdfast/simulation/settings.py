"""The settings of a simulated federation: tasks, clients, rounds, and what each client holds."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.settings import STRICT, Count, Fraction, setting


@dataclass(frozen=True, config=STRICT)
class PlanSettings:
    """The protocol: tasks, clients, rounds, and what each client holds."""

    tasks: Count | list[Count] = setting(5, "number of equal tasks, or a list of task sizes in classes")
    order: str | list[int] | list[str] = setting(
        "natural", "class order: natural, icarl (100 classes), seed1993, random:<seed>, or a list of indices or names"
    )
    rounds: Count = setting(10, "global rounds per task")
    clients: Count = setting(30, "clients in the first task")
    join_per_task: Annotated[int, Field(ge=0, le=1_000_000)] = setting(10, "clients that join in each later task")
    join: Literal["task", "irregular"] = setting(
        "task", "newcomers join in a task's first round (task), or spread over its rounds (irregular)"
    )
    selected: Count = setting(10, "clients selected in each round")
    select_from: Literal["present", "first_task"] = setting(
        "present", "who can be selected: all present clients, or only those of the first task, as in the authors' code"
    )
    move_on: Annotated[float, Field(ge=0, le=1)] = setting(
        0.9, "fraction of the present clients that meet a new task's classes"
    )
    class_share: Fraction = setting(0.6, "fraction of a task's classes that a client holds")
    partition: str = setting("shared", "images of a class: shared by its holders, disjoint, or dirichlet:<alpha>")
    zo_data: Literal["memory", "last_task"] = setting(
        "memory", "what a client that does not move on trains on: memory or last_task"
    )
    growth: Literal["schedule", "announce"] = setting(
        "schedule", "who tells the server of new classes: the schedule, or clients that announce them"
    )
    observe: Literal["present", "selected"] = setting(
        "present",
        "which clients get the global model to detect new classes, if the method detects: all that are present, as in "
        "the paper's Algorithm 1, or only the selected ones, which costs no extra model",
    )
    memory: Annotated[int, Field(ge=0, le=10_000_000)] = setting(2000, "exemplars that a client may keep")
