"""Holdfast: federated class-incremental learning in which nobody's classes are forgotten."""

from importlib import import_module
from typing import Any

from holdfast.errors import HoldfastError

__all__ = [
    "HoldfastError",
    "Result",
    "register_backbone",
    "register_dataset",
    "register_method",
    "run",
]  # their types are in __init__.pyi
__version__ = "0.2.0.dev0"

_HOMES = {
    "Result": "holdfast.results.record",
    "register_backbone": "holdfast.models",
    "register_dataset": "holdfast.data.sources",
    "register_method": "holdfast.methods",
    "run": "holdfast.experiment",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: PyTorch takes seconds to import, and processes that only decode images do not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
