"""Many files on several processes: the same pixels, and the same sentence about one that is broken."""

import hashlib
import resource
import signal
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holdfast.data.decoding import Block, block_digest, decode_files, make_room
from holdfast.errors import HoldfastError


def make_folder(folder: Path, count: int) -> list[str]:
    rng = np.random.Generator(np.random.PCG64(0))
    folder.mkdir()
    names = [f"class {i % 3}/ünïcode {i}.png" for i in range(count)]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)).save(folder / name)
    return names


def zipped(folder: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(folder.with_suffix(".zip"), "w") as archive:
        for name in names:
            archive.write(folder / name, name)
    return folder.with_suffix(".zip")


def decode(target: Path, place: Path, names: list[str], processes: int) -> tuple[np.ndarray, list[Block]]:
    make_room(target, len(names), 8)
    blocks = sorted(decode_files(target, place, names, 8, processes=processes), key=lambda block: block.start)
    return np.load(target), blocks


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_several_processes_give_the_pixels_of_one(tmp_path: Path, form: str) -> None:
    names = make_folder(tmp_path / "images", 601)  # two full blocks and one file more than half
    place = zipped(tmp_path / "images", names) if form == "zip" else tmp_path / "images"
    alone, blocks = decode(tmp_path / "alone.npy", place, names, 1)
    assert alone.shape == (601, 3, 8, 8)
    assert alone[0].any()
    shared, same = decode(tmp_path / "shared.npy", place, names, 2)
    np.testing.assert_array_equal(shared, alone)
    assert same == blocks
    assert [(block.start, block.count) for block in blocks] == [(0, 250), (250, 250), (500, 101)]
    assert blocks[1].digest == hashlib.sha256(alone[250:500].tobytes()).hexdigest()
    assert block_digest(tmp_path / "alone.npy", 250, 250, 8) == blocks[1].digest


@pytest.mark.parametrize("processes", [1, 2])
def test_a_broken_file_is_named_and_black_and_a_missing_one_ends_it(tmp_path: Path, processes: int) -> None:
    names = make_folder(tmp_path / "images", 300)
    (tmp_path / "images" / names[270]).write_bytes(b"no image")
    pixels, blocks = decode(tmp_path / "pixels.npy", tmp_path / "images", names, processes)
    (broken,) = blocks[1].bad
    assert blocks[0].bad == ()
    assert broken[0] == 270
    assert "ünïcode 270.png in" in broken[1]
    assert "cannot be read as an image" in broken[1]
    assert [row for row in range(300) if not pixels[row].any()] == [270]
    (tmp_path / "images" / names[3]).unlink()  # this is not the file's fault, and is not remembered
    with pytest.raises(HoldfastError, match=r"ünïcode 3.png cannot be read \(No such file"):
        decode(tmp_path / "pixels.npy", tmp_path / "images", names, processes)


def test_blocks_that_are_done_are_not_done_again(tmp_path: Path) -> None:
    names = make_folder(tmp_path / "images", 600)
    make_room(tmp_path / "pixels.npy", 600, 8)
    blocks = list(decode_files(tmp_path / "pixels.npy", tmp_path / "images", names, 8, done=[0, 500]))
    assert [block.start for block in blocks] == [250]
    assert not np.load(tmp_path / "pixels.npy")[:250].any()


def test_a_full_disk_is_not_taken_for_a_broken_image(tmp_path: Path) -> None:
    names = make_folder(tmp_path / "images", 3)
    make_room(tmp_path / "pixels.npy", 3, 8)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        with pytest.raises(OSError, match="File too large"):
            list(decode_files(tmp_path / "pixels.npy", tmp_path / "images", names, 8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
