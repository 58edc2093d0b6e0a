"""A method of your own, without touching Holdfast's files. Run this file, or name its class in a command in this
folder; in a config it is `name = "own_method:Calm"` in [method].

    python examples/own_method.py
    holdfast run --dataset digits --tasks 5 --method own_method:Calm
"""

from typing import ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

import holdfast
from holdfast.losses import cross_entropy
from holdfast.methods.base import Losses, Method
from holdfast.methods.context import Batch, ClientContext
from holdfast.settings import STRICT


@holdfast.register_method
@dataclass(frozen=True, config=STRICT)
class Calm(Method):
    """Cross-entropy and a penalty on the size of the logits, with the exemplar memory."""

    name: ClassVar[str] = "calm"
    about: ClassVar[str] = "an example: averaging with replay and small logits"

    weight: float = Field(default=0.01, ge=0, description="weight of the penalty")

    @property
    def keeps_memory(self) -> bool:
        return True

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        logits = context.model(batch.images).logits
        return {"classification": cross_entropy(logits, batch.labels), "penalty": self.weight * logits.square().mean()}


SMALL = {
    "data": {"name": "digits", "train_per_class": 60, "test_per_class": 30, "size": 16},
    "plan": {"tasks": 2, "rounds": 2, "clients": 4, "join_per_task": 1, "selected": 3, "memory": 100},
    "train": {"epochs": 2, "batch": 16},
}

if __name__ == "__main__":
    for method in ({"name": "fedavg"}, {"name": "calm", "weight": 0.02}):
        result = holdfast.run({**SMALL, "method": method})
        print(f"{result.method}: {result.last_accuracy:.1%} on all ten digits, {result.forgetting:.1%} forgotten")
