"""Many files on several processes: the same pixels, and the same sentence when one is broken."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holdfast.data.decoding import decode_files
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


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_several_processes_give_the_pixels_of_one(tmp_path: Path, form: str) -> None:
    names = make_folder(tmp_path / "images", 601)  # two full blocks and one file more than half
    place = zipped(tmp_path / "images", names) if form == "zip" else tmp_path / "images"
    alone = decode_files(place, names, 8, "", processes=1)
    assert alone.shape == (601, 3, 8, 8)
    assert alone[0].any()
    np.testing.assert_array_equal(decode_files(place, names, 8, "", processes=2), alone)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_broken_or_missing_file_is_named(tmp_path: Path, processes: int) -> None:
    names = make_folder(tmp_path / "images", 300)
    (tmp_path / "images" / names[270]).write_bytes(b"no image")
    with pytest.raises(HoldfastError, match=r"ünïcode 270.png in .* cannot be read as an image") as caught:
        decode_files(tmp_path / "images", names, 8, "", processes)
    assert "\n" not in str(caught.value)
    (tmp_path / "images" / names[270]).unlink()
    with pytest.raises(HoldfastError, match=r"ünïcode 270.png cannot be read \(No such file"):
        decode_files(tmp_path / "images", names, 8, "", processes)
