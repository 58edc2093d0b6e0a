"""The settings of local training."""

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.protocol.enrolment import AUTO
from holdfast.settings import STRICT, setting


@dataclass(frozen=True, config=STRICT)
class TrainSettings:
    """Local training; settings that are not given come from the method's preset."""

    epochs: Annotated[int, Field(ge=1, le=10_000)] = setting(2, "local epochs per round")
    batch: Annotated[int, Field(ge=1, le=65_536)] | Literal["auto"] = setting(
        "auto",
        "batch size; auto: per client the largest of 128, 64, 32, 16 and 8 that gives it at least 8 steps per epoch",
    )
    lr: Annotated[float, Field(gt=0, le=100)] | None = setting(None, "learning rate")
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = setting(None, "momentum of SGD")
    weight_decay: Annotated[float, Field(ge=0, le=1)] | None = setting(None, "weight decay of SGD")
    schedule: Literal["cosine", "steps"] | None = setting(
        None, "how the learning rate falls during a task: cosine or steps"
    )
    milestones: list[Annotated[float, Field(ge=0, le=1)]] | None = setting(
        None, "steps: the fractions of a task after which the learning rate drops"
    )
    gamma: Annotated[float, Field(gt=0, le=1)] | None = setting(None, "steps: the factor of each drop")
    weighting: Literal["uniform", "samples"] = setting(
        "uniform", "weights of the clients in the average: uniform or samples"
    )

    @property
    def batch_size(self) -> int:
        """The batch size as clients are told."""
        return AUTO if self.batch == "auto" else self.batch
