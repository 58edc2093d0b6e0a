"""Decoding into the cache: what a killed process leaves, broken images, a full disk, two at once, little memory."""

import hashlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from holdfast.cli import main
from holdfast.config import load_config
from holdfast.data import decoding
from holdfast.data.cache import Entry
from holdfast.data.decode import decode_image
from holdfast.data.decoded import Split, decoded
from holdfast.data.images import DataSet
from holdfast.data.sources import load_data
from holdfast.errors import HoldfastError

BLOCK = 20
TRAIN, TEST = 200, 50  # images, so 10 blocks and 3
BROKEN = 25  # number of a training image that cannot be read, in the second block


def write_images(place: Path) -> None:
    """Images that are all different, but for one that is none."""
    rng = np.random.Generator(np.random.PCG64(0))
    place.mkdir()
    for i in range(TRAIN + TEST):
        Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).save(place / f"{i:03}.png")
    (place / f"{BROKEN:03}.png").write_bytes(b"not an image")


def decode(place: Path, cache: Path, size: int = 8) -> Entry:
    names = [f"{i:03}.png" for i in range(TRAIN + TEST)]
    splits = {
        "train": Split(names[:TRAIN], np.arange(TRAIN) % 7),
        "test": Split(names[TRAIN:], np.arange(TEST) % 7),
    }
    return decoded(cache, {"name": "toy"}, place, splits, size, "Toy")


CHILD = f"""
import os, signal, sys, time
from pathlib import Path
import numpy as np
from holdfast.data import decoding
from holdfast.data.decoded import Split, decoded

place, cache = Path(sys.argv[1]), Path(sys.argv[2])
names = [f"{{i:03}}.png" for i in range({TRAIN + TEST})]
splits = {{
    "train": Split(names[:{TRAIN}], np.arange({TRAIN}) % 7),
    "test": Split(names[{TRAIN}:], np.arange({TEST}) % 7),
}}

def go():
    return decoded(cache, {{"name": "toy"}}, place, splits, 8, "Toy")
"""

KILLED = (
    CHILD
    + f"""
decoding.BLOCK, decoding.FEW = {BLOCK}, int(sys.argv[4])
real, left = decoding.decode_files, int(sys.argv[3])

def until_killed(*words):
    global left
    for block in real(*words):
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        yield block

decoding.decode_files = until_killed
go()
"""
)


def killed(place: Path, cache: Path, after: int, few: int = 2000) -> Path:
    """The folder that a process leaves which is killed after it has finished so many blocks."""
    line = [sys.executable, "-c", KILLED, str(place), str(cache), str(after), str(few)]
    assert subprocess.run(line, timeout=120, check=False).returncode == -9
    (growing,) = cache.glob(".*.growing")
    return growing


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_images(tmp_path / "images")
    return tmp_path / "images"


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that this process decodes."""
    found: list[str] = []

    def counting(file: io.BytesIO, size: int, name: str) -> np.ndarray:
        found.append(name.split(" in ")[0])
        return decode_image(file, size, name)

    monkeypatch.setattr(decoding, "decode_image", counting)
    monkeypatch.setattr(decoding, "BLOCK", BLOCK)
    return found


def check_whole(entry: Entry, place: Path, cache: Path) -> None:
    """It is what a process makes that is left alone, and nothing else is left."""
    expected = decode(place, cache.with_name("fresh cache"))
    assert sorted(entry.arrays) == sorted(expected.arrays)
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(entry.arrays[name], array)
        assert (entry.place / f"{name}.npy").read_bytes() == (expected.place / f"{name}.npy").read_bytes()
    assert entry.facts == expected.facts
    assert len(entry.facts["unreadable"]) == 1
    assert entry.facts["unreadable"][0].startswith(f"{BROKEN:03}.png in {place}")
    assert entry.arrays["train_labels"][BROKEN] == -1
    assert list(cache.iterdir()) == [entry.place]
    assert sorted(file.name for file in entry.place.iterdir()) == [
        "meta.json",
        "test_images.npy",
        "test_labels.npy",
        "train_images.npy",
        "train_labels.npy",
    ]


@pytest.mark.parametrize("few", [2000, 10], ids=["one process", "several processes"])
@pytest.mark.parametrize("after", [0, 4, 12])
def test_after_a_kill_only_the_rest_is_decoded(
    tmp_path: Path, place: Path, done: list[str], after: int, few: int
) -> None:
    growing = killed(place, tmp_path / "cache", after, few)
    lines = [line for file in growing.glob("*.jsonl") for line in file.read_text().splitlines()]
    assert len(lines) == after
    finished = {json.loads(line)[0] for line in (growing / "train.jsonl").read_text().splitlines()}
    assert finished <= set(range(0, TRAIN, BLOCK))
    entry = decode(place, tmp_path / "cache")
    assert len(done) == TRAIN + TEST - sum(json.loads(line)[1] for line in lines)
    rows = [row for start in range(0, TRAIN, BLOCK) if start not in finished for row in range(start, start + BLOCK)]
    assert done[: len(rows)] == [f"{row:03}.png" for row in rows]
    check_whole(entry, place, tmp_path / "cache")


def pixels_of(growing: Path, number: int) -> int:
    """Where a block begins in the file of the training images."""
    array = np.load(growing / "train_images.npy", mmap_mode="r")
    return int(array.offset) + number * BLOCK * 3 * 8 * 8


def test_a_block_that_is_not_as_it_was_written_is_decoded_again(tmp_path: Path, place: Path, done: list[str]) -> None:
    growing = killed(place, tmp_path / "cache", 4)
    with open(growing / "train_images.npy", "r+b") as file:
        file.seek(pixels_of(growing, 2) + 100)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    entry = decode(place, tmp_path / "cache")
    assert len(done) == TRAIN + TEST - 3 * BLOCK
    assert done[0] == f"{2 * BLOCK:03}.png"
    check_whole(entry, place, tmp_path / "cache")


@pytest.mark.parametrize("cut", [1, 10])
def test_a_journal_with_half_a_line(tmp_path: Path, place: Path, done: list[str], cut: int) -> None:
    journal = killed(place, tmp_path / "cache", 4) / "train.jsonl"
    content = journal.read_bytes()
    assert content.endswith(b"\n")
    os.truncate(journal, len(content) - cut)
    entry = decode(place, tmp_path / "cache")
    lost = 0 if cut == 1 else 1  # without its end the line is still whole
    assert len(done) == TRAIN + TEST - (4 - lost) * BLOCK
    check_whole(entry, place, tmp_path / "cache")


@pytest.mark.parametrize("junk", [b"\x00" * 9, b"\xff\xfe\n", b'[0, 20, "no such sum", []]\n'])
def test_a_journal_with_junk_in_it(tmp_path: Path, place: Path, done: list[str], junk: bytes) -> None:
    """As a power cut may leave it."""
    journal = killed(place, tmp_path / "cache", 4) / "train.jsonl"
    journal.write_bytes(journal.read_bytes() + junk)
    entry = decode(place, tmp_path / "cache")
    assert len(done) == TRAIN + TEST - 4 * BLOCK
    check_whole(entry, place, tmp_path / "cache")


@pytest.mark.parametrize("left", [0, 5000])
def test_a_growing_file_that_was_cut_short(tmp_path: Path, place: Path, done: list[str], left: int) -> None:
    """As a power cut may leave it."""
    os.truncate(killed(place, tmp_path / "cache", 4) / "train_images.npy", left)
    check_whole(decode(place, tmp_path / "cache"), place, tmp_path / "cache")


def test_killed_again_and_again(tmp_path: Path, place: Path, done: list[str]) -> None:
    for _ in range(3):
        killed(place, tmp_path / "cache", 3)
    entry = decode(place, tmp_path / "cache")
    assert len(done) == TRAIN + TEST - 9 * BLOCK
    check_whole(entry, place, tmp_path / "cache")


FEW_FILES = {"train/cat": 5, "train/dog": 4, "test/cat": 2, "test/dog": 2}


def write_folder(top: Path, broken: list[str]) -> Path:
    for name, count in FEW_FILES.items():
        (top / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (9, 9), (20 * i + 20, 0, 0)).save(top / name / f"{i}.png")
    for name in broken:
        (top / name).write_bytes(b"not an image")
    return top


def load(top: Path, **data: Any) -> DataSet:
    return load_data(load_config({"data": {"name": f"folder:{top}", "size": 16, **data}}).data)


def test_broken_images_are_named_and_counted_and_fatal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    top = write_folder(tmp_path / "mine", ["train/cat/3.png", "test/dog/0.png"])
    words = ["holdfast", "run", "--dataset", f"folder:{top}", "--out", str(tmp_path / "run")]
    for more in ([], ["--set", "data.corrupt=fail"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "2 of 13 images cannot be used: train/cat/3.png in " in said
        assert "test/dog/0.png in " in said
        assert said.endswith("; replace or remove them, or set data.corrupt=skip\n")
    assert not (tmp_path / "run").exists()


def test_broken_images_are_left_out_if_one_wants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top = write_folder(tmp_path / "mine", ["train/cat/3.png", "test/dog/0.png"])
    data = load(top, corrupt="skip")
    said = capsys.readouterr().err
    assert said.startswith("2 of 13 images are skipped: train/cat/3.png in ")
    assert "test/dog/0.png in " in said
    assert said.count("\n") == 1
    assert data.train.labels.tolist() == [0] * 4 + [1] * 4
    assert data.train.images[:][:, 0, 0, 0].tolist() == [20, 40, 60, 100, 20, 40, 60, 80]
    assert data.test.labels.tolist() == [0, 0, 1]
    assert data.test.images[:][:, 0, 0, 0].tolist() == [20, 40, 40]
    assert [sentence.split(" in ")[0] for sentence in data.unreadable] == ["train/cat/3.png", "test/dog/0.png"]


def test_of_many_broken_images_some_are_named(tmp_path: Path) -> None:
    broken = [f"train/cat/{i}.png" for i in range(4)] + [f"train/dog/{i}.png" for i in range(3)]
    with pytest.raises(HoldfastError, match=r"^7 of 13 images cannot be used: .*; and 2 more") as caught:
        load(write_folder(tmp_path / "mine", broken))
    assert str(caught.value).count("cannot be read as an image") == 5


@pytest.mark.parametrize(("part", "kind"), [("train", "training"), ("test", "test")])
def test_a_class_without_any_image_that_can_be_read(tmp_path: Path, part: str, kind: str) -> None:
    broken = [f"{part}/dog/{i}.png" for i in range(FEW_FILES[f"{part}/dog"])]
    with pytest.raises(HoldfastError, match=f"^no {kind} image of the class 'dog' can be read; replace them or drop"):
        load(write_folder(tmp_path / "mine", broken), corrupt="skip")


def test_a_broken_image_is_named_as_it_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets and colons are no instructions for the terminal."""
    names = ["train/cat/photo[copy].png", "train/cat/my :cat: [bold].png"]
    load(write_folder(tmp_path / "mine", names), corrupt="skip")
    said = capsys.readouterr().err
    for name in names:
        assert name in said


def test_a_broken_image_whose_name_is_no_text(tmp_path: Path) -> None:
    """As archives from other systems leave it."""
    top = write_folder(tmp_path / "mine", [])
    try:
        (top / "train/cat" / os.fsdecode(b"caf\xe9.png")).write_bytes(b"not an image")
    except OSError:
        pytest.skip("this file system has no such names")
    data = load(top, corrupt="skip")
    assert len(data.unreadable) == 1
    assert len(data.train) == 9


def test_an_image_that_is_replaced_is_read(tmp_path: Path) -> None:
    top = write_folder(tmp_path / "mine", ["train/cat/3.png"])
    with pytest.raises(HoldfastError, match="1 of 13 images cannot be used"):
        load(top)
    shutil.copy(top / "train/cat/2.png", top / "train/cat/3.png")
    assert len(load(top).train) == 9


def test_an_image_that_one_is_allowed_to_read_later_is_read_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the operating system says to an ordinary user, also when the tests run as root."""
    top = write_folder(tmp_path / "mine", [])
    read = decoding.read_limited

    def denied(path: Path, most: int) -> bytes:
        if path == top / "train/cat/3.png":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, most)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "read_limited", denied)
        with pytest.raises(HoldfastError, match=r"3.png cannot be read \(Permission denied\)"):
            load(top)
    assert len(load(top).train) == 9


Usage = namedtuple("Usage", "total used free")


def test_no_room_on_the_disk_is_one_sentence_before_any_work(
    tmp_path: Path, place: Path, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 10**12 - 48_000_000, 48_000_000))
        with pytest.raises(HoldfastError) as caught:
            decode(place, cache, 256)
    assert str(caught.value) == (
        f"the decoded images take 0.0 GB, but {cache} has only 0.0 GB free; "
        "choose a smaller data.size, or set XDG_CACHE_HOME to a larger disk"
    )
    assert done == []
    assert decode(place, cache, 256).arrays["train_images"].shape == (TRAIN, 3, 256, 256)
    assert len(done) == TRAIN + TEST


def test_a_disk_that_is_full_after_all_is_one_sentence(tmp_path: Path, place: Path, done: list[str]) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        with pytest.raises(HoldfastError, match=r"cannot be written \(File too large\); set XDG_CACHE_HOME"):
            decode(place, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    check_whole(decode(place, tmp_path / "cache"), place, tmp_path / "cache")


WAITING = (
    CHILD
    + """
calls, real, here = 0, decoding.decode_image, cache.parent

def slow(*words):
    global calls
    calls += 1
    (here / "begun").touch()
    while not (here / "go").exists():
        time.sleep(0.01)
    return real(*words)

decoding.decode_image = slow
import hashlib
images = go().arrays["train_images"]
print(calls, hashlib.sha256(images.tobytes()).hexdigest())
"""
)


def test_of_two_processes_one_decodes_and_the_other_waits(tmp_path: Path, place: Path) -> None:
    line = [sys.executable, "-c", WAITING, str(place), str(tmp_path / "cache")]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert first.poll() is None, first.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = start()
    assert second.stderr is not None
    assert "Another process is preparing toy; waiting for it." in second.stderr.readline()
    (tmp_path / "go").touch()
    one, other = (process.communicate(timeout=60)[0].split() for process in (first, second))
    assert (int(one[0]), int(other[0])) == (TRAIN + TEST, 0)
    assert one[1] == other[1]
    entry = decode(place, tmp_path / "cache")
    assert hashlib.sha256(entry.arrays["train_images"].tobytes()).hexdigest() == one[1]


MANY, SIZE = 2_500, 112

MEMORY = f"""
import re, resource, sys
from pathlib import Path
import numpy as np
from holdfast.data.decoded import Split, decoded

place, cache = Path(sys.argv[1]), Path(sys.argv[2])
files = sorted(file.name for file in place.iterdir())
entry = decoded(cache, {{"name": "toy"}}, place, {{"train": Split(files, np.zeros(len(files), int))}}, {SIZE}, "Toy")
assert entry.arrays["train_images"].shape == ({MANY}, 3, {SIZE}, {SIZE})
assert entry.facts == {{"unreadable": []}}
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(1024 * peak, 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("this system does not say how much memory a process has used")
    limit = MANY * 3 * SIZE * SIZE  # all of them together
    assert MANY > decoding.FEW  # so that several processes work
    (tmp_path / "images").mkdir()
    Image.radial_gradient("L").resize((40, 30)).save(tmp_path / "image.png")
    for i in range(MANY):
        os.link(tmp_path / "image.png", tmp_path / "images" / f"{i}.png")
    line = [sys.executable, "-c", MEMORY, str(tmp_path / "images"), str(tmp_path / "cache")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    own, children = map(int, ended.stdout.split())
    shutil.rmtree(tmp_path / "cache")
    assert 1_000_000 < own < limit
    assert 1_000_000 < children < limit
