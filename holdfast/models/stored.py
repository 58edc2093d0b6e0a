"""A model on disk: weights and facts in one safetensors file, never pickle."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.files import parse_json, write_atomic


def write_model(file: Path, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes the weights together with all facts needed to use them, such as the class names; refuses weights that are
    not finite."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise HoldfastError(f"{file} is not written: {name!r} has values that are not finite")
    plain = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    write_atomic(file, save(plain, metadata={"holdfast": json.dumps(facts)}))


def read_model(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads weights and facts that `write_model` wrote. Weights that are no numbers are refused."""
    if not file.is_file():
        raise HoldfastError(f"{file.parent} holds no {file.name}; give the folder of a finished run")
    try:
        with safe_open(file, framework="pt") as stored:
            facts = dict(parse_json(stored.metadata()["holdfast"]))
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise damaged(file, error) from error
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise HoldfastError(f"{file} is damaged: its weight {name!r} is not finite; run it again")
    return weights, facts


def damaged(file: Path, error: Exception) -> HoldfastError:
    return HoldfastError(f"{file} is damaged or not a Holdfast model ({type(error).__name__})")
