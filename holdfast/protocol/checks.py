"""What tensors from outside must look like: names, shapes, types and ranges, compared with what the receiver expects.

The server checks replies with it and the proxy checks shares, each for itself. A message that fails is left out with a
`Refusal`; nobody else's is touched."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from holdfast.protocol.codec import Weights

LARGEST = 1e12  # no weight, statistic or sum of a sane model is beyond it, and its square is finite


class Like(NamedTuple):
    """What one tensor must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    least: float = -LARGEST
    most: float = LARGEST


Form = Mapping[str, Like]  # name -> what it must be


class Misfit(NamedTuple):
    """Why something cannot be used."""

    kind: str  # names, type, shape, not finite, range, ...
    reason: str


@dataclass(frozen=True)
class Refusal:
    """What was not used of whom, and why."""

    client: int
    kind: str
    reason: str

    def to_json(self) -> dict[str, int | str]:
        return {"client": self.client, "kind": self.kind, "reason": self.reason}


def misfit(what: str, tensors: Weights, required: Form, optional: Form | None = None) -> Misfit | None:
    """The first thing in which `what` differs from its form; None if it fits. Optional tensors come all or not at all.

    Each value is looked at once: the least and the largest of a tensor tell whether it is finite, too."""
    form = dict(required)
    if optional and not tensors.keys().isdisjoint(optional):
        form |= optional
    if tensors.keys() != form.keys():
        wrong = sorted(tensors.keys() ^ form.keys())
        lack = "lacks" if wrong[0] in form else "has the unknown tensor"
        return Misfit("names", f"{what} {lack} {_short(wrong[0])}")
    for name, like in form.items():
        tensor = tensors[name]
        if tensor.dtype != like.dtype or tensor.layout != torch.strided:
            return Misfit("type", f"{_short(name)} of {what} has the type {tensor.dtype}, not {like.dtype}")
        if tuple(tensor.shape) != like.shape:
            return Misfit("shape", f"{_short(name)} of {what} has the shape {tuple(tensor.shape)}, not {like.shape}")
    for name, like in form.items():
        problem = _out_of_range(what, name, tensors[name], like)
        if problem is not None:
            return problem
    return None


def _out_of_range(what: str, name: str, tensor: torch.Tensor, like: Like) -> Misfit | None:
    if not tensor.numel():
        return None
    low, high = (value.item() for value in torch.aminmax(_in_order(tensor.detach())))  # both are NaN if any value is
    if like.least <= low and high <= like.most:
        return None
    if low != low or {low, high} & {float("inf"), -float("inf")}:
        return Misfit("not finite", f"{_short(name)} of {what} has values that are not finite")
    worst = low if low < like.least else high
    return Misfit(
        "range", f"{_short(name)} of {what} has the value {worst:.3g}, outside {like.least:g} to {like.most:g}"
    )


def _in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The values in the order in which they are in memory, which makes one pass over them twenty times as fast."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.reshape(-1)


def _short(name: str) -> str:
    return repr(name[:60])
