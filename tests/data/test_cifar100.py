"""CIFAR-100 from files of its true formats, whole and broken; and pickles that want to do harm."""

import gzip
import io
import lzma
import os
import pickle
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.data.cifar100 import PATTERNS, load
from holdfast.data.tree import find
from holdfast.data.unpickled import read_pickle
from holdfast.errors import HoldfastError

RNG = np.random.Generator(np.random.PCG64(1))
NAMES = ["apple", "aquarium_fish", "baby"]
PARTS = {
    part: (RNG.integers(0, 256, (count, 3072), dtype=np.uint8), [i % 3 for i in range(count)])
    for part, count in (("train", 9), ("test", 6))
}


def table(part: str, **changed: Any) -> bytes:
    """As the authors' Python 2 wrote it: keys and file names are bytes to us."""
    images, labels = PARTS[part]
    content = {"filenames": [b"a.png"] * len(labels), "batch_label": b"part 1 of 1", "coarse_labels": [0] * len(labels)}
    content |= {"fine_labels": labels, "data": images, **changed}
    return pickle.dumps({key.encode(): value for key, value in content.items()}, 2)


def python_files(**changed: Any) -> dict[str, bytes]:
    meta = {b"fine_label_names": [n.encode() for n in NAMES], b"coarse_label_names": [b"x"]}
    return {"train": table("train", **changed), "test": table("test"), "meta": pickle.dumps(meta, 2)}


def binary_files() -> dict[str, bytes]:
    files = {"fine_label_names.txt": "\n".join(NAMES).encode() + b"\n", "coarse_label_names.txt": b"x\n"}
    for part, (images, labels) in PARTS.items():
        records = zip(images, labels, strict=True)
        files[f"{part}.bin"] = b"".join(bytes([7, c]) + image.tobytes() for image, c in records)
    return files


def written(folder: Path, form: str, files: dict[str, bytes], name: str) -> Path:
    if form == "archive":
        path = folder / f"{name}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for file, content in files.items():
                entry = tarfile.TarInfo(f"{name}/{file}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        return path
    inside = folder / "unpacked" / (name if form == "outer folder" else "")
    inside.mkdir(parents=True)
    for file, content in files.items():
        (inside / file).write_bytes(content)
    return folder / "unpacked"


@pytest.mark.parametrize("form", ["archive", "folder", "outer folder"])
@pytest.mark.parametrize("kind", ["python", "binary"])
def test_all_published_forms_give_the_same(tmp_path: Path, kind: str, form: str) -> None:
    files = python_files() if kind == "python" else binary_files()
    names, arrays = load(written(tmp_path, form, files, f"cifar-100-{kind}"), 32, tmp_path / "cache")
    assert names == tuple(NAMES)
    for part, (images, labels) in PARTS.items():
        np.testing.assert_array_equal(arrays[f"{part}_images"], images.reshape(-1, 3, 32, 32))
        assert arrays[f"{part}_labels"].tolist() == labels


def test_it_is_found_by_its_usual_names(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="holds no CIFAR-100"):
        find("CIFAR-100", None, tmp_path, PATTERNS, "cifar100")
    path = written(tmp_path, "archive", binary_files(), "cifar-100-binary")
    assert find("CIFAR-100", None, tmp_path, PATTERNS, "cifar100") == path


def broken(what: str) -> dict[str, bytes]:
    if what == "cut binary":
        files = binary_files()
        return {**files, "train.bin": files["train.bin"][:-5]}
    if what == "missing test":
        return {name: content for name, content in python_files().items() if name != "test"}
    if what == "label out of range":
        files = binary_files()
        return {**files, "train.bin": bytes([0, 99]) + files["train.bin"][2:]}
    if what == "too few labels":
        return python_files(fine_labels=[0])
    if what == "float images":
        return python_files(data=PARTS["train"][0].astype(float))
    return {**python_files(), "train": python_files()["train"][:-100]}


@pytest.mark.parametrize(
    "what", ["cut binary", "missing test", "label out of range", "too few labels", "float images", "cut pickle"]
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, what: str) -> None:
    source = written(tmp_path, "folder", broken(what), "any")
    with pytest.raises(HoldfastError) as caught:
        load(source, 32, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert str(source) in str(caught.value)


def test_half_an_archive_and_another_size_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "archive", python_files(), "cifar-100-python")
    with pytest.raises(HoldfastError, match=r"data\.size=64, but CIFAR-100"):
        load(path, 64, tmp_path / "cache")
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(HoldfastError, match="cannot be read"):
        load(path, 32, tmp_path / "cache")


class Harm:
    """When it is unpickled, a file appears."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path, protocol: int) -> None:
    harm = pickle.dumps({b"data": Harm(tmp_path / "harmed"), b"fine_labels": [0]}, protocol)
    source = written(tmp_path, "folder", {**python_files(), "train": harm}, "any")
    with pytest.raises(HoldfastError, match="not a file of plain values"):
        load(source, 32, tmp_path / "cache")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize("protocol", range(1, 5))
def test_plain_values_and_arrays_are_read(protocol: int) -> None:
    value = {"a": [1, -2, 1 << 40, 1.5, None, True], "é": ("x", b"\xff\x00"), "n": np.arange(6.0).reshape(2, 3)}
    found = read_pickle(pickle.dumps(value, protocol), "it")
    assert found["a"] == value["a"]
    assert found["é"] == value["é"]
    np.testing.assert_array_equal(found["n"], value["n"])


@pytest.mark.parametrize("value", [{1, 2}, range(3), np.array([object()]), np.dtype("O"), print, Path("x")])
def test_everything_else_is_refused(value: Any) -> None:
    with pytest.raises(HoldfastError, match="not a file of plain values"):
        read_pickle(pickle.dumps(value, 2), "it")


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path: Path) -> None:
    """Whether it hits a header or the pixels of the last image: the archive's own checksum knows."""
    path = written(tmp_path, "archive", binary_files(), "cifar-100-binary")
    whole = path.read_bytes()
    for place in (len(whole) // 3, len(whole) // 2, len(whole) - 6):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(HoldfastError) as caught:
            load(path, 32, tmp_path / f"cache {place}")
        assert str(path) in str(caught.value)


def test_other_damaged_archives_are_one_sentence(tmp_path: Path) -> None:
    path = written(tmp_path, "archive", binary_files(), "cifar-100-binary")
    packed = lzma.compress(gzip.decompress(path.read_bytes()))
    for content in (packed[: len(packed) // 2], packed[:99] + bytes(50) + packed[149:], b""):
        other = tmp_path / "cifar.tar.xz"
        other.write_bytes(content)
        with pytest.raises(HoldfastError, match="cannot be read") as caught:
            load(other, 32, tmp_path / "cache")
        assert "\n" not in str(caught.value)


def test_a_class_without_test_images_is_refused(tmp_path: Path) -> None:
    files = binary_files()
    size = 3074
    one = b"".join(files["test.bin"][i : i + size] for i in range(0, len(files["test.bin"]), size) if i // size % 3)
    source = written(tmp_path, "folder", {**files, "test.bin": one}, "any")
    with pytest.raises(HoldfastError, match="a class of test has no images"):
        load(source, 32, tmp_path / "cache")


def test_lists_that_hold_one_another_many_times_are_refused_in_time() -> None:
    bomb: list[Any] = [0]
    for _ in range(40):
        bomb = [bomb, bomb]
    with pytest.raises(HoldfastError, match="more values"):
        read_pickle(pickle.dumps(bomb, 2), "it")


def test_tuples_that_hold_one_another_many_times_are_refused_in_time() -> None:
    """As a key, as a name to call, as a type: each of them would be compared, hashed or written out."""
    bomb = b"K\x01" + b"".join(b"q%ch%c\x86" % (step, step) for step in range(60))  # each a pair of the last
    for harm in (
        b"}" + bomb + b"K\x00s.",
        b"\x8c\x01a" + bomb + b"\x93.",
        b"cnumpy\ndtype\n" + bomb + b"\x85R.",
        bomb + b")R.",
        b"cnumpy.core.multiarray\n_reconstruct\n)R" + bomb + b"b.",
        bomb + b".",
    ):
        start = time.perf_counter()
        with pytest.raises(HoldfastError, match="not a file of plain values"):
            read_pickle(b"\x80\x04" + harm, "it")
        assert time.perf_counter() - start < 5


def test_a_short_pickle_cannot_fill_the_memory() -> None:
    text = b"X" + (100_000).to_bytes(4, "little") + b"x" * 100_000 + b"q\x00"
    encode = b"c_codecs\nencode\nq\x01X\x06\x00\x00\x00latin1q\x02"
    copies = b"](" + b"h\x01h\x00h\x02\x86R" * 20_000 + b"e."  # 2 GB of a file of 300 kB
    with pytest.raises(HoldfastError, match="more bytes than the file has"):
        read_pickle(b"\x80\x04" + text + encode + copies, "it")
    with pytest.raises(HoldfastError, match="more instructions"):
        read_pickle(b"\x80\x04(" + b"]" * 2_000_000 + b"l.", "it")


LIMITED = """
import resource, sys
from pathlib import Path
from holdfast.data.cifar100 import load
from holdfast.errors import HoldfastError

resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
try:
    load(Path(sys.argv[1]), 32, Path(sys.argv[1]).parent / "cache")
except HoldfastError as error:
    status = Path("/proc/self/status").read_text()  # ru_maxrss would also count the process that has started this one
    print(error, "peak", int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""


@pytest.mark.parametrize("kind", ["member", "header", "members", "end"])
def test_a_small_archive_of_huge_files_is_refused(tmp_path: Path, kind: str) -> None:
    """Each archive has less than 4 MB and unpacks to one or several gigabytes."""
    content = io.BytesIO()
    with gzip.open(content, "wb", compresslevel=1) as file:
        entry = tarfile.TarInfo("train.bin")
        entry.size = 3 << 30
        if kind == "header":
            entry.type = tarfile.XHDTYPE
        if kind == "members":
            entry.size = 0
            file.write(entry.tobuf() * 100_000)
        if kind == "end":
            file.write(tarfile.TarInfo("x").tobuf() + bytes(2 * 512))
        else:
            file.write(entry.tobuf())
        for _ in range(700 if kind != "members" else 0):
            file.write(bytes(1 << 20))
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(content.getvalue())
    assert path.stat().st_size < 4 << 20
    line = [sys.executable, "-c", LIMITED, str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    sentence, _, peak = done.stdout.partition(" peak ")
    assert "cannot be read" in sentence or "is missing" in sentence
    assert int(peak) < 600  # megabytes, most of them torch
