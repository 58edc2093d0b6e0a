"""MATLAB files from anywhere: their sizes are checked before SciPy reads them, because it believes what they say."""

import io
import math
import struct
import zlib
from collections.abc import Iterator
from typing import Any

MOST = 2**24  # bytes, unpacked; ImageNet's list of classes has 1 MB
MATRIX, PACKED = 14, 15  # kinds of elements
CELL, STRUCT, TEXT, NUMBERS = 1, 2, 4, range(6, 16)  # kinds of matrices
DEEPEST = 8  # matrices inside each other


def read_mat(blob: bytes) -> dict[str, Any]:
    """The variables of a file of version 5; raises ValueError, zlib.error or what SciPy's reader raises."""
    from scipy.io import loadmat  # here, because only one form of one data set needs it

    if len(blob) < 128 or blob[124:128] != b"\0\1IM":
        raise ValueError("it is not a MATLAB file of version 5")
    left = MOST
    for kind, content in _elements(blob[128:]):
        if kind == PACKED:
            content = zlib.decompressobj().decompress(content, left + 1)
        left -= len(content)
        if left < 0:
            raise ValueError(f"it unpacks to more than {MOST:,} bytes")
        if kind == PACKED:
            for inner, matrix in _elements(content):
                _check(inner, matrix, DEEPEST)
        else:
            _check(kind, content, DEEPEST)
    found: dict[str, Any] = loadmat(io.BytesIO(blob), squeeze_me=True)
    return found


def _elements(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and content of each element, one after the other."""
    place = 0
    while place < len(content):
        kind, count = struct.unpack_from("<II", content, place)
        if kind >> 16:  # a small element: both numbers in four bytes, and its content in the next four
            kind, count, start, end = kind & 0xFFFF, kind >> 16, place + 4, place + 8
        else:
            start, end = place + 8, place + 8 + count + (-count % 8 if kind != PACKED else 0)
        if start + count > len(content):
            raise ValueError("an element is cut short")
        yield kind, content[start : start + count]
        place = end


def _check(kind: int, content: bytes, depth: int) -> None:
    """Raises ValueError for a matrix that says that it has more entries than there are bytes or elements for."""
    if kind != MATRIX or not content:
        return
    if not depth:
        raise ValueError("its matrices are nested too deeply")
    (_, flags), (_, sides), _, *parts = _elements(content)
    entries = math.prod(struct.unpack(f"<{len(sides) // 4}I", sides))
    if flags[0] == STRUCT:
        (_, width), (_, names), *parts = parts
        entries *= len(names) // max(1, int.from_bytes(width, "little"))
    elif flags[0] not in (CELL, TEXT, *NUMBERS):
        raise ValueError("it has something else than cells, structures, text and numbers")
    if entries > (len(parts) if flags[0] in (CELL, STRUCT) else len(content)):
        raise ValueError(f"it says that it has {entries:,} entries, and has fewer")
    for inner, part in parts:
        _check(inner, part, depth - 1)
