"""The server's optimiser: it takes the aggregate as a direction in which to move the global model (Reddi et al., 2021).

It moves trainable parameters only. Everything else, such as batch statistics, is taken from the aggregate as it is: a
variance that momentum carries on could become negative."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from holdfast.protocol.codec import Snapshot, Weights
from holdfast.server.aggregation import Aggregation

TAU = 1e-3  # adam: the least divisor
RATES = {"momentum": 1.0, "adam": 0.01}


class ServerOptimiser:
    """Where d leads from the model x to the aggregate: without an optimiser x + d; momentum: v = beta v + d and
    x + rate v; adam: m = beta1 m + (1 - beta1) d, v = beta2 v + (1 - beta2) d^2 and x + rate m / (sqrt(v) + tau)."""

    def __init__(self, settings: Aggregation) -> None:
        self.kind, self.momentum, self.beta = settings.optimiser, settings.momentum, settings.beta
        self.rate = settings.rate or RATES.get(settings.optimiser, 1.0)
        self.first: dict[str, Tensor] = {}  # v of momentum, m of adam
        self.second: dict[str, Tensor] = {}  # v of adam

    def step(self, before: Weights, merged: Weights, trainable: Collection[str]) -> dict[str, Tensor]:
        """The new values of all merged tensors."""
        if self.kind == "none":
            return dict(merged)
        return {
            name: self._moved(name, before[name], tensor) if name in trainable else tensor
            for name, tensor in merged.items()
        }

    def _moved(self, name: str, before: Tensor, merged: Tensor) -> Tensor:
        start = before.double()
        step = merged.double() - start
        first = self.first.get(name, torch.zeros_like(step))
        if self.kind == "momentum":
            first = self.momentum * first + step
            moved = first
        else:
            first = self.momentum * first + (1 - self.momentum) * step
            second = self.beta * self.second.get(name, torch.zeros_like(step)) + (1 - self.beta) * step.square()
            self.second[name] = second
            moved = first / (second.sqrt() + TAU)
        self.first[name] = first
        return (start + self.rate * moved).to(merged.dtype)

    # to a checkpoint and back

    def snapshot(self) -> dict[str, Snapshot]:
        parts = {"first": self.first, "second": self.second}
        return {f"optimiser.{name}": (dict(state), {}) for name, state in parts.items() if state}

    def restore(self, parts: Mapping[str, Snapshot], device: torch.device) -> None:
        for name in ("first", "second"):
            state = parts.get(f"optimiser.{name}", ({}, {}))[0]
            setattr(self, name, {key: tensor.to(device) for key, tensor in state.items()})
