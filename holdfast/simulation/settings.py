"""The settings of a simulated federation: tasks, clients, rounds, and what each client holds."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
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
    max_samples: Annotated[int, Field(ge=1, le=10**9)] = setting(
        1_000_000, "images that a client may say it has trained on; a reply that claims more is refused"
    )
    quorum: Count = setting(1, "usable replies that a round needs; with fewer it is tried again")
    retries: Annotated[int, Field(ge=0, le=100)] = setting(
        2, "how often a round without a quorum is tried again; then the model stays as it was"
    )
    deadline: Annotated[float, Field(gt=0)] | None = setting(
        None, "seconds after which a reply is too late; in a simulation only injected delays count, never the clock"
    )
    over_select: Annotated[int, Field(ge=0, le=1_000_000)] = setting(
        0, "clients that are selected in addition, so that a quorum is likely; all usable replies count"
    )


def _rule(value: Any) -> Any:
    """A number stands for a rule with this probability."""
    return {"probability": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


@dataclass(frozen=True, config=STRICT)
class FaultRule:
    """Whom a fault hits: clients by their numbers and rounds counted from 1, or else all that are selected, each with a
    probability; or `count` of them, drawn anew in each round."""

    clients: list[Annotated[int, Field(ge=0)]] | None = None
    rounds: list[Annotated[int, Field(ge=1)]] | None = None
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    count: Count | None = None


@dataclass(frozen=True, config=STRICT)
class DropRule(FaultRule):
    """`channel`: whether the reply is lost on its way to the server, the shares on their way to the proxy, or both."""

    channel: Literal["both", "server", "proxy"] = "both"


@dataclass(frozen=True, config=STRICT)
class DelayRule(FaultRule):
    """By how many seconds an answer is late."""

    seconds: Annotated[float, Field(gt=0)] = 60.0


@dataclass(frozen=True, config=STRICT)
class ScaleRule(FaultRule):
    """By how much an update is multiplied."""

    factor: float = 10.0


Rule = Annotated[FaultRule, BeforeValidator(_rule)]


@dataclass(frozen=True, config=STRICT)
class FaultSettings:
    """What is made to go wrong, to test a federation: each a probability, or a table with clients, rounds, probability
    or count."""

    drop: Annotated[DropRule, BeforeValidator(_rule)] | None = setting(
        None, "answers are lost; also channel = both, server or proxy"
    )
    delay: Annotated[DelayRule, BeforeValidator(_rule)] | None = setting(
        None, "answers come late, by `seconds` (60); see plan.deadline"
    )
    duplicate: Rule | None = setting(None, "answers come twice")
    crash: Rule | None = setting(None, "a client's work ends in an error")
    label_flip: Rule | None = setting(None, "clients train with each label replaced by another of their own")
    nan: Rule | None = setting(None, "one value of a reply is NaN")
    inf: Rule | None = setting(None, "one value of a reply is infinite")
    scale: Annotated[ScaleRule, BeforeValidator(_rule)] | None = setting(
        None, "updates are multiplied by `factor` (10)"
    )
    sign_flip: Rule | None = setting(None, "updates point the other way")
    wrong_shape: Rule | None = setting(None, "a tensor of a reply has another shape")
    wrong_key: Rule | None = setting(None, "a tensor of a reply has another name")
    wrong_dtype: Rule | None = setting(None, "tensors of a reply are whole numbers")
    bad_samples: Rule | None = setting(None, "a reply claims a million million samples")
    bad_share: Rule | None = setting(None, "a share's variance is NaN")
    poison_share: Rule | None = setting(None, "shares are of noise, with other labels and a hundredfold variance")
