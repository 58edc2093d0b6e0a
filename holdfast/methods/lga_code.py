"""LGA as in its authors' code, with the quirks that docs/departures.md lists as D1-D5 and D18."""

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from holdfast.methods.base import BCE
from holdfast.methods.context import ClientContext, Stage
from holdfast.methods.lga import CLAMP, DETECTOR, EXPONENT, GROUPS, LGA
from holdfast.protocol.enrolment import Preset
from holdfast.settings import STRICT


@dataclass(frozen=True, config=STRICT)
class LGACode(LGA):
    """Sigmoid outputs and |s_y - 1| (D1, D2), an exponent that counts the federation's tasks instead of the client's
    classes (D3), old groups that contain all older ones and whose weights add up (D4), weights between 0.5 and 5 once
    there is a memory (D5), and a learning rate that falls only in the rounds of its milestones (D18)."""

    name: ClassVar[str] = "lga_code"
    about: ClassVar[str] = "LGA with the quirks of its authors' code: cumulative groups, clamped weights, jumping rate"

    form: Literal["sigmoid"] = Field(default="sigmoid", description="the outputs that both losses use")
    groups: Literal["own", "cumulative"] = Field(default="cumulative", description=GROUPS)
    exponent: Literal["client", "federation"] = Field(default="federation", description=EXPONENT)
    clamp: bool = Field(default=True, description=CLAMP)
    detector: Literal["auto", "fixed", "oracle"] = Field(default="fixed", description=DETECTOR)

    @property
    def preset(self) -> Preset:
        return BCE

    def stages(self, context: ClientContext) -> list[Stage]:
        stage = context.stage(context.everything)
        training, job = context.training, context.job
        if training.optimiser.schedule != "steps":
            return [stage]
        lr, gamma, milestones = training.optimiser.lr, training.optimiser.gamma, training.optimiser.milestones

        def rate(epoch: int) -> float:
            now = job.progress + job.step * epoch / training.epochs
            return lr * gamma ** drops_in_round(milestones, job.progress, now)

        return [replace(stage, rate=rate)]


def drops_in_round(milestones: tuple[float, ...], start: float, now: float) -> int:
    """How often the rate has fallen by now: the optimiser is new in every round, so only this round's milestones count,
    but the k-th of them applies the k-th power at once (D18)."""
    passed = [k + 1 for k, milestone in enumerate(milestones) if start - 1e-9 <= milestone <= now + 1e-9]
    return max(passed, default=0)
