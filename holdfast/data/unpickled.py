"""Reads the few pickles that data sets are published as, without ever loading one.

A pickle is a program. `pickletools` parses it without running it, and this module only builds numbers, strings, bytes,
lists, tuples, dictionaries and NumPy arrays from it. Anything else is refused."""

import pickletools
from typing import Any

import numpy as np

from holdfast.errors import HoldfastError

ARRAYS = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
TYPES = {("numpy", "ndarray"), ("numpy", "dtype")}
TEXTS = {("_codecs", "encode")}  # how Python 3 writes bytes in old protocols
MOST_VALUES = 1_000_000  # CIFAR-100 has 200,000
MOST_STEPS = 1_000_000  # CIFAR-100 has 400,000 instructions
SHOWN = 40  # characters of a name in an error


class _Name(tuple[str, ...]):
    """One of the names that may be called."""


class _Mark:
    """Where on the stack a list, tuple or dictionary begins."""


class _Array:
    """An array that has been created but has no content yet."""

    value: np.ndarray | None = None


class _Type:
    """A NumPy type: only integers and floats of one to eight bytes."""

    def __init__(self, name: Any) -> None:
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else name
        if not isinstance(text, str) or text not in {f"{kind}{size}" for kind in "iuf" for size in (1, 2, 4, 8)}:
            raise ValueError(f"an array of type {_shown(text)}")
        self.name, self.order = text, "<"


def read_pickle(blob: bytes, name: str) -> Any:
    """What a pickle of plain values and arrays holds; error messages call it `name`."""
    try:
        return _run(blob)
    except Exception as error:  # pickletools and the stack raise nearly any type on a broken file
        reason = str(error)[:200]
        raise HoldfastError(
            f"{name} is not a file of plain values ({reason}); nothing in it was executed; download the archive again"
        ) from error


class _Stack(list[Any]):
    """The values that a pickle is building, and how many more bytes it may write as text."""

    left = 0

    def encoded(self, text: str) -> bytes:
        """Text as the bytes that it stands for. A short pickle may name one long text many times."""
        self.left -= len(text)
        if self.left < 0:
            raise ValueError("more bytes than the file has")
        return text.encode("latin1")


def _shown(value: Any) -> str:
    """A value in an error. Only text: tuples that hold one another may be endless when written out."""
    return str(value[:SHOWN]) if isinstance(value, str | bytes) else f"a {type(value).__name__}"


def _run(blob: bytes) -> Any:
    stack = _Stack()
    stack.left = len(blob)
    memo: dict[Any, Any] = {}
    for step, (opcode, argument, _) in enumerate(pickletools.genops(blob)):
        name = opcode.name
        if step >= MOST_STEPS:
            raise ValueError("more instructions than any of these files has")
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            return _finished(stack.pop())
        if name in VALUES:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            words = tuple(str(argument).split(" ")) if name == "GLOBAL" else (stack.pop(-2), stack.pop())
            # Only text is compared: to compare tuples that hold one another may take for ever.
            if not all(isinstance(word, str) for word in words) or words not in ARRAYS | TYPES | TEXTS:
                raise ValueError(f"it wants to call {'.'.join(map(_shown, words))}")
            stack.append(_Name(words))
        elif name in BUILDERS:
            BUILDERS[name](stack)
        else:
            raise ValueError(f"it has the instruction {name}")
    raise ValueError("it ends too soon")


def _since_mark(stack: list[Any]) -> list[Any]:
    items = []
    while not isinstance(stack[-1], _Mark):
        items.append(stack.pop())
    stack.pop()
    return items[::-1]


def _tuple(stack: list[Any], count: int) -> None:
    items = tuple(stack[len(stack) - count :])
    del stack[len(stack) - count :]
    stack.append(items)


def _append(stack: list[Any], items: list[Any]) -> None:
    if not isinstance(stack[-1], list):
        raise ValueError("it appends to something that is not a list")
    stack[-1].extend(items)


def _set(stack: list[Any], items: list[Any]) -> None:
    if not isinstance(stack[-1], dict):
        raise ValueError("it fills something that is not a dictionary")
    if not all(isinstance(key, str | bytes | int) for key in items[::2]):
        raise ValueError("it has a key that is neither text nor a number")
    stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _call(stack: _Stack) -> None:
    given, what = stack.pop(), stack.pop()
    if not isinstance(what, _Name):
        raise ValueError("it calls something that cannot be called")
    if what in ARRAYS:
        stack.append(_Array())
    elif what == ("numpy", "dtype"):
        stack.append(_Type(given[0]))
    elif what in TEXTS:
        text, encoding = given
        if encoding != "latin1":
            raise ValueError("it encodes text in an unknown way")
        stack.append(stack.encoded(text))
    else:
        raise ValueError("it calls something that cannot be called")


def _build(stack: _Stack) -> None:
    """Gives an array its shape, type and bytes, or a type its byte order."""
    state, what = stack.pop(), stack[-1]
    if isinstance(what, _Type):
        order = state[1].decode() if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise ValueError("a type without a byte order")
        what.order = order
    elif isinstance(what, _Array):
        _, shape, kind, fortran, content = state
        if isinstance(content, str):
            content = stack.encoded(content)
        values = np.frombuffer(content, np.dtype(kind.name).newbyteorder(kind.order))
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise ValueError("an array of an impossible shape")
        what.value = values.reshape(shape, order="F" if fortran else "C")
    else:
        raise ValueError("it describes something that is not an array")


def _finished(value: Any, budget: list[int] | None = None) -> Any:
    """The same value with real arrays in place of `_Array`. `budget` limits the number of values, because a short
    pickle of nested references can expand endlessly."""
    budget = [MOST_VALUES] if budget is None else budget
    budget[0] -= 1
    if budget[0] < 0:
        raise ValueError("more values than any of these files has")
    if isinstance(value, _Array):
        if value.value is None:
            raise ValueError("an array without content")
        return value.value
    if isinstance(value, list):
        return [_finished(item, budget) for item in value]
    if isinstance(value, dict):
        return {_finished(key, budget): _finished(item, budget) for key, item in value.items()}
    if isinstance(value, str | bytes | int | float | bool | None):
        return value
    if isinstance(value, tuple) and not isinstance(value, _Name):
        return tuple(_finished(item, budget) for item in value)
    raise ValueError("something that is not a plain value")


CONSTANTS: dict[str, Any] = {
    "MARK": _Mark,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
}
VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
BUILDERS: dict[str, Any] = {
    "TUPLE": lambda stack: stack.append(tuple(_since_mark(stack))),
    "TUPLE1": lambda stack: _tuple(stack, 1),
    "TUPLE2": lambda stack: _tuple(stack, 2),
    "TUPLE3": lambda stack: _tuple(stack, 3),
    "LIST": lambda stack: stack.append(_since_mark(stack)),
    "APPEND": lambda stack: _append(stack, [stack.pop()]),
    "APPENDS": lambda stack: _append(stack, _since_mark(stack)),
    "SETITEM": lambda stack: _set(stack, [stack.pop(-2), stack.pop()]),
    "SETITEMS": lambda stack: _set(stack, _since_mark(stack)),
    "REDUCE": _call,
    "BUILD": _build,
}
