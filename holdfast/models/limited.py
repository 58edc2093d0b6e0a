"""A limit on how much memory a network takes that is built as a file or a message says."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

FACTOR = 8  # DyTox builds a head of as many classes anew with every growth
SPARE = 2**22  # bytes


class AtMost(TorchDispatchMode):
    """Inside, new tensors may have so many bytes in all; beyond, ValueError is raised before they are allocated.
    Tensors that are computed from others do not count."""

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = limit

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        first = args[0] if args else given.get("size")
        if torch.device(given.get("device") or "cpu").type != "meta":
            if isinstance(first, list | tuple) and all(isinstance(side, int) for side in first):  # empty, zeros, full
                self._take(math.prod(first), given.get("dtype"))
            elif isinstance(first, Tensor) and "device" in given:  # empty_like
                self._take(first.numel(), given.get("dtype") or first.dtype)
        return func(*args, **given)

    def _take(self, count: int, dtype: torch.dtype | None) -> None:
        self.left -= count * (dtype or torch.get_default_dtype()).itemsize
        if self.left < 0:
            raise ValueError("the network would be much larger than its weights are")


def as_large_as(weights: Mapping[str, Tensor]) -> AtMost:
    """The limit for a network that these weights will be loaded into."""
    return AtMost(FACTOR * sum(tensor.nbytes for tensor in weights.values()) + SPARE)
