"""One codec for everything that crosses a boundary: a safetensors blob whose metadata holds plain values as JSON.

No pickle is ever loaded. Bytes from outside are checked before anything is allocated for them, and whatever is wrong
with them becomes one `MalformedMessage` with a sentence."""

import json
import math
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as _load_tensors
from safetensors.torch import save as _save_tensors
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.files import parse_json

Weights = Mapping[str, Tensor]
Snapshot = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and plain values, as `pack` takes them

MAX_BYTES = 2**32  # of one message
MAX_HEADER = 2**24  # of its names, shapes and plain values
MAX_TENSORS = 100_000
MAX_SIDE = 2**31  # of one axis of a tensor
MAX_AXES = 8
MAX_CLASSES = 1_000_000
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8,
    "U64": 8, "F64": 8,
}  # fmt: skip


class MalformedMessage(HoldfastError):
    """Bytes that are not a message of the kind that was expected."""


def pack(kind: str, tensors: Weights, facts: Mapping[str, Any]) -> bytes:
    """One safetensors blob; the facts travel as JSON in its metadata."""
    plain: dict[str, Tensor] = {}
    stored = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        # Two names of one tensor are two tensors on the wire.
        plain[name] = copy.clone() if copy.untyped_storage().data_ptr() in stored else copy
        stored.add(copy.untyped_storage().data_ptr())
    # One entry of metadata, because the order of several is not the same from call to call.
    return _save_tensors(plain, metadata={"holdfast": json.dumps({"kind": kind, **facts})})


def unpack(kind: str, blob: bytes) -> Snapshot:
    """The tensors and facts of a blob that `pack` made; raises `MalformedMessage` for anything else."""
    facts = _checked_facts(kind, blob)
    if facts.get("kind") != kind:
        raise MalformedMessage(f"expected a {kind}, got a {str(facts.get('kind'))[:40]}")
    try:
        return _load_tensors(blob), facts
    except (SafetensorError, ValueError, RuntimeError, TypeError, KeyError, OverflowError) as error:
        raise MalformedMessage(f"a {kind} has tensors that cannot be read: {error}") from error


def kind_of(blob: bytes) -> str:
    """What kind of message these bytes say they are."""
    return str(_checked_facts("message", blob).get("kind"))


def _checked_facts(kind: str, blob: bytes) -> dict[str, Any]:
    """The plain values of a blob whose sizes are all within bounds and fit the bytes that are there."""
    if not 8 < len(blob) <= MAX_BYTES:
        raise MalformedMessage(f"a {kind} of {len(blob)} bytes is too short or too long")
    length = int.from_bytes(blob[:8], "little")
    if length > min(len(blob) - 8, MAX_HEADER):
        raise MalformedMessage(f"a {kind} says that its header has {length} bytes, which is more than it can have")
    header = _json_object(kind, blob[8 : 8 + length])
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("holdfast"), str):
        raise MalformedMessage(f"a {kind} has no facts in its header")
    if len(header) > MAX_TENSORS:
        raise MalformedMessage(f"a {kind} has {len(header)} tensors; at most {MAX_TENSORS} are allowed")
    for name, entry in header.items():
        _check_tensor(kind, name, entry, len(blob) - 8 - length)
    return _json_object(kind, metadata["holdfast"])


def _json_object(kind: str, text: bytes | str) -> dict[str, Any]:
    try:
        value = parse_json(text, _no_constant)
    except ValueError as error:
        raise MalformedMessage(f"a {kind} has a header that is not JSON: {str(error)[:80]}") from error
    if not isinstance(value, dict):
        raise MalformedMessage(f"a {kind} has a header that is not a JSON object")
    return value


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number")


def _is_finite(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _is_text(value: Any) -> bool:
    """Text that has bytes: file names may have bytes that are no UTF-8, but half a character is none."""
    try:
        return type(value) is str and value.encode("utf-8", "surrogateescape") is not None
    except UnicodeEncodeError:
        return False


def _check_tensor(kind: str, name: str, entry: Any, available: int) -> None:
    """Does this entry describe a tensor of a known type that lies within the bytes that are there?"""
    wrong = MalformedMessage(f"a {kind} describes its tensor {name[:60]!r} wrongly")
    if not isinstance(entry, dict):
        raise wrong
    shape, offsets, item = entry.get("shape"), entry.get("data_offsets"), ITEM_BYTES.get(str(entry.get("dtype")))
    if item is None or not _sizes(shape, MAX_AXES, MAX_SIDE) or not _sizes(offsets, 2, available):
        raise wrong
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * item:
        raise wrong


def _sizes(value: Any, most: int, largest: int) -> bool:
    """Is this a list of at most `most` whole numbers between 0 and `largest`?"""
    return (
        isinstance(value, list)
        and len(value) <= most
        and all(type(number) is int and 0 <= number <= largest for number in value)
    )


class Facts:
    """The plain values of a message, read with their types; a wrong one is a `MalformedMessage`."""

    def __init__(self, kind: str, values: Mapping[str, Any]) -> None:
        self.kind, self.values = kind, values

    def integer(self, name: str, least: int = 0, most: int = 2**62) -> int:
        value = self.values.get(name)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(name)
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not _is_finite(value):
            raise self.wrong(name)
        return float(value)  # type: ignore[arg-type]

    def flag(self, name: str) -> bool:
        value = self.values.get(name)
        if type(value) is not bool:
            raise self.wrong(name)
        return value

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not _is_text(value):
            raise self.wrong(name)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.values.get(name)
        if not isinstance(value, list) or not all(map(_is_text, value)):
            raise self.wrong(name)
        return tuple(value)

    def names(self, name: str) -> tuple[str, ...]:
        """Different texts."""
        value = self.texts(name)
        if len(set(value)) != len(value):
            raise self.wrong(name)
        return value

    def growths(self, name: str = "growths") -> tuple[int, ...]:
        """How many classes each growth of a head brought."""
        value = self.integers(name, least=1)
        if sum(value) > MAX_CLASSES:
            raise self.wrong(name)
        return value

    def integers(self, name: str, least: int = 0) -> tuple[int, ...]:
        value = self.values.get(name)
        if not isinstance(value, list) or any(type(one) is not int or not least <= one <= 2**62 for one in value):
            raise self.wrong(name)
        return tuple(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.values.get(name)
        if not isinstance(value, list) or not all(map(_is_finite, value)):
            raise self.wrong(name)
        return tuple(map(float, value))

    def table(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self.wrong(name)
        return value

    def wrong(self, name: str) -> MalformedMessage:
        return MalformedMessage(f"a {self.kind} has no usable {name!r}: {str(self.values.get(name))[:60]}")


def part(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def prefixed(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """The tensors with a prefix before their names."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def tensor_bytes(tensors: Weights) -> int:
    """How many bytes these tensors have, without names and shapes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
