"""The settings of local training."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.errors import HoldfastError
from holdfast.protocol.enrolment import AUTO
from holdfast.settings import STRICT, setting

Aggregator = Literal["mean", "samples", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"]


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
    aggregator: Aggregator = setting(
        "mean",
        "how the server puts the clients' models together: mean, samples (a mean weighted by images), median, "
        "trimmed_mean, krum, multi_krum or geometric_median",
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = setting(
        0.2, "trimmed_mean: the fraction of values that is left out at each end"
    )
    hostile: Annotated[int, Field(ge=0, le=1_000_000)] = setting(
        1, "krum and multi_krum: how many clients of a round may be hostile"
    )
    outlier: Annotated[float, Field(gt=0)] | None = setting(
        None, "updates longer than so many times the median of their round are refused; off if not given"
    )
    clip: bool = setting(False, "updates longer than that are shortened to it, not refused")
    server_optimiser: Literal["none", "momentum", "adam"] = setting(
        "none", "what the server makes of the aggregate: the new model (none), or a direction for momentum or adam"
    )
    server_rate: Annotated[float, Field(gt=0, le=100)] | None = setting(
        None, "its learning rate; 1 for momentum and 0.01 for adam if not given"
    )
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = setting(0.9, "its momentum, or the first beta of adam")
    server_beta: Annotated[float, Field(ge=0, lt=1)] = setting(0.99, "the second beta of adam")

    @property
    def batch_size(self) -> int:
        """The batch size as clients are told."""
        return AUTO if self.batch == "auto" else self.batch


WEIGHTINGS = {"uniform": "mean", "samples": "samples"}  # of older configs, and the aggregators that they are now


def with_aggregator(train: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of an older config: `weighting` is the aggregator of the same meaning."""
    rest = {key: value for key, value in train.items() if key != "weighting"}
    old = train.get("weighting")
    if old is None:
        return rest
    if old not in WEIGHTINGS:
        raise HoldfastError(f"train.weighting = {old!r} is not possible: use train.aggregator = mean or samples")
    return {"aggregator": WEIGHTINGS[old], **rest}


def with_weighting(train: Mapping[str, Any]) -> dict[str, Any]:
    """The other way round, so that runs keep their names."""
    rest = {key: value for key, value in train.items() if key != "aggregator"}
    old = {aggregator: weighting for weighting, aggregator in WEIGHTINGS.items()}.get(train["aggregator"])
    return {**rest, "weighting": old} if old else {**rest, "weighting": "uniform", "aggregator": train["aggregator"]}
