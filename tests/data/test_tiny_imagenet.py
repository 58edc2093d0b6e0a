import io
import os
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holdfast.data import decoding, tiny_imagenet
from holdfast.data.cache import Arrays
from holdfast.data.decode import decode_image
from holdfast.data.decoded import Split, decoded
from holdfast.data.tiny_imagenet import PATTERNS
from holdfast.data.tree import find, open_tree
from holdfast.errors import HoldfastError

TOP = "tiny-imagenet-200/"
WNIDS = ["n03", "n01", "n02"]  # not sorted, as in the true one
NUMBERS = [0, 1, 2, 10, 11]  # sorted as text, 10 would come before 2
VALIDATION = [("val_3.JPEG", "n01"), ("val_0.JPEG", "n03"), ("val_7.JPEG", "n99"), ("val_1.JPEG", "n02")]

Files = dict[str, bytes]


def shade(wnid: str, number: int) -> int:
    """The grey that tells which image this is."""
    return 10 + 60 * WNIDS.index(wnid) + 5 * NUMBERS.index(number)


def jpeg(value: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (64, 64), value if mode == "L" else (value, value, value)).save(file, "JPEG", quality=95)
    return file.getvalue()


def archive_files() -> Files:
    """A small archive in the official layout, with the official one's other files and one greyscale image."""
    files = {
        "wnids.txt": "\n".join(WNIDS).encode(),
        "words.txt": b"n00\tnothing\nn01\tcrane, bird\nn02\tcrane\nn03\tsnail, slow one\n",
        "val/val_annotations.txt": "".join(f"{f}\t{w}\t0\t0\t62\t62\n" for f, w in VALIDATION).encode(),
        "test/images/test_0.JPEG": b"the official test images have no labels and are not read",
    }
    for wnid in WNIDS:
        files[f"train/{wnid}/{wnid}_boxes.txt"] = b"boxes"
        for number in reversed(NUMBERS):
            mode = "L" if (wnid, number) == ("n01", 2) else "RGB"
            files[f"train/{wnid}/images/{wnid}_{number}.JPEG"] = jpeg(shade(wnid, number), mode)
    for i, (file, _) in enumerate(VALIDATION):
        files[f"val/images/{file}"] = jpeg(200 + 10 * i)
    return files


def write_zip(path: Path, files: Files, top: str = TOP) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(top + name, content)
    return path


def write_folder(path: Path, files: Files) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def write_source(tmp_path: Path, form: str, files: Files) -> Path:
    if form == "zip":
        return write_zip(tmp_path / "any name.zip", files)
    folder = tmp_path / "unpacked"
    write_folder(folder if form == "folder" else folder / "tiny-imagenet-200", files)
    return folder


def load(source: Path, size: int, cache: Path) -> tuple[tuple[str, ...], Arrays]:
    names, entry = tiny_imagenet.load(source, size, cache)
    assert entry.facts == {"unreadable": []}
    return names, entry.arrays


FORMS = ["zip", "folder", "folder around the folder"]


def load_error(source: Path, tmp_path: Path) -> str:
    with pytest.raises(HoldfastError) as caught:
        load(source, 64, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_order_labels_and_pixels(tmp_path: Path, form: str) -> None:
    _, arrays = load(write_source(tmp_path, form, archive_files()), 64, tmp_path / "cache")
    assert arrays["train_images"].shape == (15, 3, 64, 64)
    assert arrays["test_images"].shape == (3, 3, 64, 64)
    assert arrays["train_images"].dtype == arrays["test_images"].dtype == np.uint8
    assert arrays["train_labels"].dtype == arrays["test_labels"].dtype == np.int64
    assert arrays["train_labels"].tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert arrays["test_labels"].tolist() == [1, 0, 2]
    shades = [shade(wnid, number) for wnid in WNIDS for number in NUMBERS]  # of the greyscale image too
    for images, expected in ((arrays["train_images"], shades), (arrays["test_images"], [200, 210, 230])):
        distance = np.abs(images.astype(int) - np.array(expected)[:, None, None, None])
        assert distance.max() <= 1


def test_class_names_are_first_phrases_made_unique(tmp_path: Path) -> None:
    files = archive_files()
    names, _ = load(write_zip(tmp_path / "a.zip", files), 8, tmp_path / "cache")
    assert names == ("snail", "crane (n01)", "crane (n02)")
    files["words.txt"] = b"n01\tcrane, bird\n"
    names, _ = load(write_zip(tmp_path / "b.zip", files), 8, tmp_path / "cache")
    assert names == ("n03", "crane", "n02")
    del files["words.txt"]
    names, _ = load(write_zip(tmp_path / "c.zip", files), 8, tmp_path / "cache")
    assert names == ("n03", "n01", "n02")


def test_a_zip_without_the_top_folder_reads_the_same(tmp_path: Path) -> None:
    names, arrays = load(write_zip(tmp_path / "a.zip", archive_files(), top=""), 8, tmp_path / "cache")
    assert names[0] == "snail"
    assert len(arrays["train_labels"]) == 15


@pytest.mark.parametrize("size", [16, 100])
def test_other_sizes_are_resized_with_boxes(tmp_path: Path, size: int) -> None:
    files = archive_files()
    picture = Image.radial_gradient("L").resize((64, 64)).convert("RGB")
    file = io.BytesIO()
    picture.save(file, "PNG")  # lossless, so that the expected pixels are known; the decoder goes by content
    files["train/n03/images/n03_0.JPEG"] = file.getvalue()
    _, arrays = load(write_zip(tmp_path / "a.zip", files), size, tmp_path / "cache")
    assert arrays["train_images"].shape == (15, 3, size, size)
    expected = np.asarray(picture.resize((size, size), Image.Resampling.BOX)).transpose(2, 0, 1)
    np.testing.assert_array_equal(arrays["train_images"][0], expected)


@pytest.mark.parametrize("form", FORMS)
def test_decoded_once_per_size_and_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    decoded: list[str] = []

    def counting(file: io.BytesIO, size: int, name: str) -> np.ndarray:
        decoded.append(name)
        return decode_image(file, size, name)

    monkeypatch.setattr(decoding, "decode_image", counting)
    cache = tmp_path / "cache"
    source = write_source(tmp_path, form, archive_files())
    first, again = load(source, 8, cache), load(source, 8, cache)
    assert len(decoded) == 18
    assert first[0] == again[0]
    np.testing.assert_array_equal(first[1]["train_images"], again[1]["train_images"])
    load(source, 16, cache)
    assert len(decoded) == 36
    assert len(list(cache.iterdir())) == 2
    changed = archive_files() | {"train/n03/images/n03_0.JPEG": jpeg(255)}
    _, arrays = load(write_source(tmp_path, form, changed), 8, cache)
    assert len(decoded) == 54
    assert arrays["train_images"][0].min() == 255


def test_tampered_cache_is_rebuilt_with_a_notice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "cache"
    source = write_zip(tmp_path / "a.zip", archive_files())
    _, arrays = load(source, 8, cache)
    before = arrays["train_images"].copy()
    (file,) = cache.glob("*/train_images.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 0xFF
    file.write_bytes(content)
    capsys.readouterr()
    _, arrays = load(source, 8, cache)
    np.testing.assert_array_equal(arrays["train_images"], before)
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS)
def test_truncated_jpeg_is_named_and_has_no_label(tmp_path: Path, form: str) -> None:
    name = "train/n01/images/n01_10.JPEG"
    files = archive_files()
    files[name] = files[name][:-60]
    source = write_source(tmp_path, form, files)
    _, entry = tiny_imagenet.load(source, 64, tmp_path / "cache")
    (sentence,) = entry.facts["unreadable"]
    assert name in sentence
    assert "cannot be read as an image (" in sentence
    assert "truncated" in sentence
    assert entry.arrays["train_labels"].tolist() == [0] * 5 + [1, 1, 1, -1, 1] + [2] * 5
    assert not entry.arrays["train_images"][8].any()


def test_damaged_bytes_within_a_zip_are_named(tmp_path: Path) -> None:
    files = archive_files()
    source = write_zip(tmp_path / "a.zip", files)
    content = source.read_bytes()
    image = files["val/images/val_0.JPEG"]
    assert content.count(image) == 1
    source.write_bytes(content.replace(image, image[:-20] + b"x" + image[-19:]))
    _, entry = tiny_imagenet.load(source, 64, tmp_path / "cache")
    (sentence,) = entry.facts["unreadable"]
    assert sentence.startswith(f"tiny-imagenet-200/val/images/val_0.JPEG in {source} cannot be read (Bad CRC-32")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"half"])
def test_corrupt_zip_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    source = write_zip(tmp_path / "a.zip", archive_files())
    whole = source.read_bytes()
    source.write_bytes(whole[: len(whole) // 2] if content == b"half" else content)
    message = load_error(source, tmp_path)
    assert message.startswith(f"{source} cannot be opened (damaged, or neither a folder nor a zip file); ")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["wnids.txt", "val/val_annotations.txt", "val/images/val_1.JPEG"])
def test_missing_piece_is_named(tmp_path: Path, form: str, name: str) -> None:
    files = archive_files()
    del files[name]
    source = write_source(tmp_path, form, files)
    assert f"{source} is not a complete TinyImageNet: {name} is missing; " in load_error(source, tmp_path)


CONTENT = {
    "wnids.txt lists no class": {"wnids.txt": b"\n"},
    "is not UTF-8 text": {"wnids.txt": b"\xff\xfe"},
    "class n77 of wnids.txt has no training images": {"wnids.txt": b"n01\nn77\n"},
    "class n02 of wnids.txt has no validation images": {
        "val/val_annotations.txt": b"val_3.JPEG\tn01\nval_0.JPEG\tn03\n"
    },
    "val/val_annotations.txt has a line without a tab": {"val/val_annotations.txt": b"val_3.JPEG n01\n"},
}


@pytest.mark.parametrize("message", CONTENT)
def test_wrong_content_is_named(tmp_path: Path, message: str) -> None:
    source = write_zip(tmp_path / "a.zip", archive_files() | CONTENT[message])
    assert message in load_error(source, tmp_path)


def test_some_other_folder_is_refused_without_walking_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walk(*_: object, **__: object) -> None:
        raise AssertionError("walked")

    monkeypatch.setattr(os, "scandir", walk)
    assert "wnids.txt is missing" in load_error(tmp_path, tmp_path)


@pytest.mark.parametrize("part", ["", "train/n01", "val/val_annotations.txt"])
def test_unreadable_part_of_a_folder_is_named(tmp_path: Path, part: str) -> None:
    source = write_folder(tmp_path / "unpacked", archive_files())
    locked = source / part
    locked.chmod(0)
    try:
        if os.access(locked, os.R_OK):
            pytest.skip("this user may read everything, so an unreadable folder cannot be made")
        assert load_error(source, tmp_path).startswith(f"{locked} cannot be read (Permission denied); ")
    finally:
        locked.chmod(0o755)


def test_denied_reading_is_one_sentence_for_every_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operating system says to an ordinary user, also when the tests run as root."""

    def denied(path: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", denied)
    assert load_error(tmp_path, tmp_path).startswith(f"{tmp_path} cannot be read (Permission denied); ")


def find_tiny(path: Path | None, root: Path) -> Path:
    return find("TinyImageNet", path and str(path), root, PATTERNS, "tiny-imagenet")


def test_find_takes_an_explicit_path_or_says_it_is_missing(tmp_path: Path) -> None:
    assert find_tiny(tmp_path, tmp_path / "elsewhere") == tmp_path
    with pytest.raises(HoldfastError, match=re.escape(f"no TinyImageNet at {tmp_path / 'none.zip'}; set data.path")):
        find_tiny(tmp_path / "none.zip", tmp_path)


def test_find_looks_through_the_data_folder(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match=rf"^{re.escape(str(tmp_path))} holds no .* set data\.path .*HOLDFAST_DATA"):
        find_tiny(None, tmp_path)
    for name in ("tiny-imagenet-b.zip", "tiny-imagenet-a.zip"):
        (tmp_path / name).touch()
    assert find_tiny(None, tmp_path).name == "tiny-imagenet-a.zip"
    (tmp_path / "tiny-imagenet-200").mkdir()
    assert find_tiny(None, tmp_path).name == "tiny-imagenet-200"
    (tmp_path / "tiny-imagenet-200.zip").touch()
    assert find_tiny(None, tmp_path).name == "tiny-imagenet-200.zip"


def real_archive() -> Path:
    root = os.environ.get("HOLDFAST_DATA")
    if not root:
        pytest.skip("HOLDFAST_DATA is not set, so there is no real TinyImageNet to read")
    try:
        return find_tiny(None, Path(root))
    except HoldfastError as error:
        pytest.skip(str(error))


def test_real_archive_whole_at_a_small_size(tmp_path: Path) -> None:
    names, arrays = load(real_archive(), 8, tmp_path)
    classes = len(names)
    assert len(set(names)) == classes
    assert names[:3] == ("Egyptian cat", "reel", "volleyball")
    assert arrays["train_images"].shape == (500 * classes, 3, 8, 8)
    assert np.bincount(arrays["train_labels"]).tolist() == [500] * classes
    assert np.bincount(arrays["test_labels"]).tolist() == [50] * classes
    mean = arrays["train_images"].mean((0, 2, 3)) / 255
    np.testing.assert_allclose(mean, tiny_imagenet.MEAN, atol=0.02)


def test_real_images_are_those_that_pillow_reads(tmp_path: Path) -> None:
    with open_tree(real_archive(), tiny_imagenet.TOP) as tree:
        wnids = tiny_imagenet.read_wnids(tree)
        split = tiny_imagenet.train_split(tree, wnids)
        rows = list(range(0, len(split.files), 499))  # another number in every class
        files = [split.files[row] for row in rows]
        assert files[1] == f"{tree.prefix}train/{wnids[0]}/images/{wnids[0]}_499.JPEG"
        part = {"train": Split(files, split.labels[rows])}
        images = decoded(tmp_path, {"name": "part"}, tree.place, part, 64, "a part").arrays["train_images"]
        for file, row, image in zip(files, rows, images, strict=True):
            assert file.removeprefix(tree.prefix).split("/")[1] == wnids[split.labels[row]]
            with Image.open(io.BytesIO(tree.read(file.removeprefix(tree.prefix)))) as expected:
                np.testing.assert_array_equal(image, np.asarray(expected.convert("RGB")).transpose(2, 0, 1))
