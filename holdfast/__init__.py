"""Holdfast: federated class-incremental learning in which nobody's classes are forgotten."""

from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from holdfast.experiment import run
    from holdfast.results.record import Result

__all__ = ["HoldfastError", "Result", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """On first use only, because PyTorch takes seconds to import and processes that decode images do without."""
    if name == "run":
        from holdfast.experiment import run

        return run
    if name == "Result":
        from holdfast.results.record import Result

        return Result
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
