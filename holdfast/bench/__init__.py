"""`holdfast bench`: how fast Holdfast is, as ratios that are measured in one run on this machine."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """A measured ratio and its bound."""

    name: str
    value: float
    bound: float
    at_most: bool = False  # the bound is an upper one

    @property
    def holds(self) -> bool:
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def to_json(self) -> dict[str, Any]:
        wanted = {"at_most" if self.at_most else "at_least": self.bound}
        return {"name": self.name, "value": self.value, **wanted, "holds": self.holds}


@dataclass(frozen=True)
class Report:
    """What a benchmark found: its ratios, and a table of the measurements behind them."""

    ratios: list[Ratio]
    head: list[str]
    rows: list[list[str]]
    facts: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {"ratios": [ratio.to_json() for ratio in self.ratios], **self.facts}
