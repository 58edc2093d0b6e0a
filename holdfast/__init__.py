"""Holdfast: federated class-incremental learning in which nobody's classes are forgotten."""

from holdfast.errors import HoldfastError
from holdfast.experiment import run
from holdfast.results.record import Result

__all__ = ["HoldfastError", "Result", "run"]
__version__ = "0.1.0"
