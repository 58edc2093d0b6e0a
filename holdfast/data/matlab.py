"""The few kinds of values that MATLAB files of published data sets hold: text, numbers, and tables of them.

Nothing is allocated for what a file says that it has but does not have. (SciPy's reader crashes on damaged files.)"""

import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

MOST = 2**24  # bytes, unpacked; ImageNet's table of classes has 1 MB
MATRIX, PACKED = 14, 15  # kinds of elements
NUMBERS = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
TEXTS = {1: "utf-8", 2: "utf-8", 4: "utf-16-le", 16: "utf-8", 17: "utf-16-le", 18: "utf-32-le"}
CELL, STRUCT, TEXT, NUMERIC = 1, 2, 4, range(6, 16)  # kinds of matrices
DEEPEST = 8  # matrices inside each other


def read_mat(blob: bytes) -> dict[str, Any]:
    """The variables of a file of version 5: text as str, numbers as a list, cells as a list, and a table as a list with
    a dictionary per row. Raises ValueError for anything else."""
    if len(blob) < 128 or blob[124:128] != b"\0\1IM":
        raise ValueError("it is not a MATLAB file of version 5")
    try:
        return dict(_matrix(content, DEEPEST) for content in _matrices(blob[128:]))
    except (struct.error, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def _matrices(content: bytes) -> Iterator[bytes]:
    """The variables, unpacked."""
    left = MOST
    for kind, part in _elements(content):
        inner = [(kind, part)]
        if kind == PACKED:
            part = zlib.decompressobj().decompress(part, left + 1)
            inner = list(_elements(part)) if len(part) <= left else []
        left -= len(part)
        if left < 0:
            raise ValueError(f"it unpacks to more than {MOST:,} bytes")
        yield from (one for what, one in inner if what == MATRIX)


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and content of each element, one after the other."""
    place = 0
    while place < len(content):
        kind, count = struct.unpack_from("<II", content, place)
        if kind >> 16:  # a small element: both numbers in four bytes, and its content in the next four
            kind, count, start, end = kind & 0xFFFF, kind >> 16, place + 4, place + 8
        else:
            start, end = place + 8, place + 8 + count + (-count % 8 if kind != PACKED else 0)
        if start + count > min(len(content), end):
            raise ValueError("an element is cut short")
        yield kind, content[start : start + count]
        place = end


def _matrix(content: bytes, depth: int) -> tuple[str, Any]:
    """The name and the value of a matrix."""
    if not depth:
        raise ValueError("its matrices are nested too deeply")
    if not content:
        return "", []
    (_, flags), (_, sides), (_, name), *parts = _parts(content, 3)
    entries = math.prod(struct.unpack(f"<{len(sides) // 4}I", sides[: len(sides) // 4 * 4]))
    return name.decode("latin1"), _value(flags[0] if flags else 0, entries, parts, depth)


def _parts(content: bytes, least: int) -> list[tuple[int, bytes]]:
    parts = list(_elements(content))
    if len(parts) < least:
        raise ValueError("a matrix is cut short")
    return parts


def _value(kind: int, entries: int, parts: list[tuple[int, bytes]], depth: int) -> Any:
    if kind == TEXT and parts and parts[0][0] in TEXTS:
        return parts[0][1].decode(TEXTS[parts[0][0]])
    if kind in NUMERIC and parts and parts[0][0] in NUMBERS:
        numbers = np.frombuffer(parts[0][1], NUMBERS[parts[0][0]]).tolist()
        if len(numbers) == entries:
            return numbers
    if kind == CELL and len(parts) == entries:
        return [_matrix(part, depth - 1)[1] for _, part in parts]
    if kind == STRUCT and len(parts) >= 2:
        (_, width), (_, text), *cells = parts
        wide = int.from_bytes(width, "little")
        fields = [text[i : i + wide].rstrip(b"\0").decode("latin1") for i in range(0, len(text), max(1, wide))]
        if len(cells) == entries * len(fields):
            values = [_matrix(cell, depth - 1)[1] for _, cell in cells]
            rows = [values[i : i + len(fields)] for i in range(0, len(values), max(1, len(fields)))]
            return [dict(zip(fields, row, strict=True)) for row in rows]
    raise ValueError("it holds something else than text, numbers and tables of them, or less than it says")
