"""Small files that unpack to gigabytes are refused before they are in memory, each with a sentence."""

import io
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holdfast.data import decode, tree, zips
from holdfast.data.decode import BadImage, decode_image
from holdfast.data.decoding import decode_files, make_room
from holdfast.data.mini_imagenet import load as load_mini
from holdfast.data.prepare import torn_member
from holdfast.data.tiny_imagenet import load as load_tiny
from holdfast.data.tree import open_tree
from holdfast.errors import HoldfastError

# Runs a script under a limit of 2 GB of memory and prints its error and the peak in MB.
LIMITED = """
import resource, sys
from pathlib import Path
from holdfast.errors import HoldfastError
resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
place = Path(sys.argv[1])
try:
    {work}
except HoldfastError as error:
    status = Path("/proc/self/status").read_text()  # ru_maxrss would also count the process that has started this one
    print(error, "peak", int(status.partition("VmHWM:")[2].split()[0]) // 1024)
"""


def limited(work: str, place: Path) -> tuple[str, int]:
    line = [sys.executable, "-c", LIMITED.format(work=work), str(place)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""
    sentence, _, peak = done.stdout.partition(" peak ")
    return sentence, int(peak)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def palette_png(side: int) -> bytes:
    """An image of one colour, which takes a thousandth of its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 3, 0, 0, 0))
    rows = zlib.compress(bytes((side + 7) // 8 + 1) * side, 9)
    parts = [head, chunk(b"PLTE", bytes(6)), chunk(b"tRNS", b"\x80"), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("what", ["words.txt", "train/n01/images/n01_0.JPEG"])
def test_a_small_zip_of_a_huge_file_is_refused(tmp_path: Path, what: str) -> None:
    place = tmp_path / "tiny.zip"
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    files = {"wnids.txt": b"n01\n", "val/val_annotations.txt": b"v.JPEG\tn01\n", "words.txt": b""}
    files |= {"train/n01/images/n01_0.JPEG": picture.getvalue(), "val/images/v.JPEG": picture.getvalue()}
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            with archive.open(name, "w", force_zip64=True) as file:
                file.write(content)
                for _ in range(2500 if name == what else 0):
                    file.write(bytes(1 << 20))
    assert place.stat().st_size < 2_600_000
    load = "from holdfast.data.sources import load_data; from holdfast.data.settings import DataSettings; "
    load += "load_data(DataSettings('tiny-imagenet', path=str(place), size=16))"
    sentence, peak = limited(load, place)
    assert what in sentence
    assert "it unpacks to 2,621," in sentence
    assert peak < 700  # megabytes, most of them torch


def test_what_a_zip_says_of_a_size_is_not_believed(tmp_path: Path) -> None:
    place = tmp_path / "a.zip"
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.txt", bytes(50_000_000))
    content = place.read_bytes()
    place.write_bytes(content.replace(struct.pack("<I", 50_000_000), struct.pack("<I", 1_000)))
    with zips.open_zip(place) as archive, pytest.raises(zipfile.BadZipFile, match="CRC"):
        zips.read_member(archive, "a.txt", 10_000)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_ways_to_pack_that_cannot_be_bounded_are_refused(tmp_path: Path, method: int) -> None:
    place = tmp_path / "a.zip"
    with zipfile.ZipFile(place, "w", method) as archive:
        archive.writestr("wnids.txt", bytes(1000))
    with open_tree(place) as files, pytest.raises(HoldfastError, match=r"wnids\.txt in .* packed in another way"):
        files.read("wnids.txt")
    assert torn_member(place) == "wnids.txt"


@pytest.mark.parametrize("name", ["", "/", "//", "train/a/" + "1" * 5000])
def test_a_member_without_a_usable_name_is_one_sentence(tmp_path: Path, name: str) -> None:
    place = tmp_path / "a.zip"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("train/a/1.png", b"")
        archive.writestr("train/b/1.png", b"")
        archive.writestr(zipfile.ZipInfo(name or "~"), b"")
    if not name:
        content = place.read_bytes()
        at = content.rindex(b"~") - 46 + 28  # the length of the name in the directory; the rest is the extra field
        place.write_bytes(content[:at] + b"\0\0" + struct.pack("<H", 1) + content[at + 4 :])
    with pytest.raises(HoldfastError, match="has a member without a name"), open_tree(place):
        pass
    with pytest.raises(HoldfastError, match="has a member without a name"):
        torn_member(place)


def test_long_lists_in_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LARGEST_TEXT", 1000)
    (tmp_path / "wnids.txt").write_text("n01\n" * 300)
    with pytest.raises(HoldfastError, match=r"wnids\.txt has more than 1,000 bytes"):
        load_tiny(tmp_path, 16, tmp_path / "cache")


def test_a_field_longer_than_csv_allows_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").touch()
    (tmp_path / "train.csv").write_text("filename,label\n" + "x" * 200_000 + ",a\n")
    with pytest.raises(HoldfastError, match=r"train\.csv in .* is not CSV \(field larger"):
        load_mini(tmp_path, 16, tmp_path / "cache")


# images


def test_a_small_file_of_many_pixels_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "bomb.png"
    place.write_bytes(palette_png(13_000))
    assert place.stat().st_size < 50_000
    sentence, peak = limited(f"from {decode.__name__} import decode_image; decode_image(place, 64, 'x')", place)
    assert "it has 13000 x 13000 pixels, and at most 89,478,485 are read" in sentence
    assert peak < 300  # megabytes


def test_the_largest_image_takes_less_than_a_gigabyte(tmp_path: Path) -> None:
    place = tmp_path / "large.png"
    place.write_bytes(palette_png(9_400))
    work = f"from {decode.__name__} import decode_image; from holdfast.errors import HoldfastError; "
    work += "raise HoldfastError(decode_image(place, 64, 'x').shape)"
    sentence, peak = limited(work, place)
    assert sentence == "(3, 64, 64)"
    assert peak < 700  # megabytes, most of them torch


@pytest.mark.parametrize("mode", ["P", "RGBA", "LA", "I;16", "CMYK", "L"])
def test_strips_give_the_bits_of_the_whole(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (37, 23, 4), np.uint8)
    image = Image.fromarray(pixels, "RGBA")
    if mode == "I;16":
        image = Image.fromarray(pixels[..., :2].copy().view(np.uint16)[..., 0])
    elif mode == "P":
        image = image.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE)
        image.info["transparency"] = 7
    else:
        image = image.convert(mode)
    file = io.BytesIO()
    image.save(file, "TIFF" if mode == "CMYK" else "PNG", **({"transparency": 7} if mode == "P" else {}))
    whole = decode_image(file, 16, "x")
    monkeypatch.setattr(decode, "STRIP", 23 * 5)
    np.testing.assert_array_equal(decode_image(file, 16, "x"), whole)


@pytest.mark.parametrize("kind", ["EPS", "ICO", "TGA", "PCX"])
def test_formats_that_are_not_named_are_refused(kind: str) -> None:
    """Pillow would start Ghostscript for EPS, whatever the file is called."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, kind)
    with pytest.raises(BadImage, match="no known image format"):
        decode_image(file, 16, "x.png")


def test_a_file_that_is_too_large_is_an_unreadable_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.data.decoding.LARGEST", 100)
    monkeypatch.setattr("holdfast.data.decode.LARGEST", 100)
    (tmp_path / "a.png").write_bytes(bytes(101))
    make_room(tmp_path / "x.npy", 1, 16)
    [block] = decode_files(tmp_path / "x.npy", tmp_path, ["a.png"], 16)
    assert "a.png has more than 100 bytes" in block.bad[0][1]
    with pytest.raises(BadImage, match="has more than 100 bytes"):
        decode_image(tmp_path / "a.png", 16, "a.png")
