"""MATLAB files: what SciPy writes is read, and what would fill the memory is not."""

import io
import struct
import zlib

import numpy as np
import pytest
import scipy.io

from holdfast.data import matlab
from holdfast.data.matlab import read_mat


def written(packed: bool = False, **values: object) -> bytes:
    file = io.BytesIO()
    scipy.io.savemat(file, values, do_compression=packed)
    return file.getvalue()


def table(rows: int) -> np.ndarray:
    synsets = np.zeros(
        (rows, 1), [("ILSVRC2012_ID", object), ("WNID", object), ("words", object), ("children", object)]
    )
    for row in range(rows):
        synsets[row, 0] = (float(row), f"n{row:08}", "a word", np.arange(row % 3))
    return synsets


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 700])
def test_what_scipy_writes_is_read(packed: bool, rows: int) -> None:
    mine = read_mat(written(packed, synsets=table(rows), x=np.eye(3), cells=np.array([1, "añ", [2.0, 3.0]], object)))
    assert mine["synsets"] == [
        {"ILSVRC2012_ID": [row], "WNID": f"n{row:08}", "words": "a word", "children": list(range(row % 3))}
        for row in range(rows)
    ]
    assert mine["x"] == [1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert mine["cells"] == [[1], "añ", [2, 3]]


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(of: int, sides: tuple[int, ...], *parts: bytes) -> bytes:
    flags, shape = element(6, bytes([of, 0, 0, 0, 0, 0, 0, 0])), element(5, struct.pack(f"<{len(sides)}I", *sides))
    return element(14, flags + shape + element(1, b"x") + b"".join(parts))


HEAD = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
FIELDS = element(5, struct.pack("<I", 1)) + element(1, b"a" * 1_000)
NESTED = matrix(6, (1, 1), element(9, bytes(8)))
for _ in range(20):
    NESTED = matrix(1, (1, 1), NESTED)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (matrix(1, (10**6, 10**6)), "less than it says"),
        (matrix(2, (10**3, 1), FIELDS), "less than it says"),
        (matrix(6, (10**5, 10**5), element(9, bytes(8))), "less than it says"),
        (matrix(5, (10**5, 10**5)), "something else"),
        (NESTED, "nested too deeply"),
        (struct.pack("<II", 14, 10**9), "cut short"),
        (
            struct.pack("<II", 15, 20_000) + zlib.compress(bytes(50_000_000), 9)[:20_000].ljust(20_000),
            "unpacks to more",
        ),
    ],
)
def test_what_says_that_it_is_huge_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_mat(HEAD + content)


def test_other_versions_are_refused() -> None:
    file = io.BytesIO()
    scipy.io.savemat(file, {"x": np.eye(2)}, format="4")
    with pytest.raises(ValueError, match="version 5"):
        read_mat(file.getvalue())


def test_the_limit_counts_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matlab, "MOST", 3_000)
    blob = written(True, a=np.zeros((16, 16)), b=np.zeros((16, 16)))
    with pytest.raises(ValueError, match="unpacks to more"):
        read_mat(blob)
