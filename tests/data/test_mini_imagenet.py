"""MiniImageNet from class folders, from the three folders of few-shot learning, and from zip files of either."""

import io
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holdfast.data import mini_imagenet
from holdfast.data.cache import Arrays
from holdfast.errors import HoldfastError

CLASSES = ["n03", "n01", "n02"]  # not sorted, as a file system may have them
PARTS = {"n03": "train", "n01": "val", "n02": "test"}
COUNT = 12  # images of a class

Files = dict[str, bytes]


def shade(name: str, number: int) -> int:
    """The grey that tells which image this is."""
    return 10 + 70 * sorted(CLASSES).index(name) + 5 * number


def png(value: int, size: tuple[int, int] = (4, 4)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (value, value, value)).save(file, "PNG")
    return file.getvalue()


def content(layout: str, count: int = COUNT) -> Files:
    """Three classes; numbers with leading zeros, so that names sort as numbers do."""
    before = {name: f"{PARTS[name]}/" if layout == "three parts" else "" for name in CLASSES}
    return {f"{before[n]}{n}/{n}_{i:04}.png": png(shade(n, i)) for n in CLASSES for i in reversed(range(count))}


def write_folder(path: Path, files: Files, order: Iterable[str] | None = None) -> Path:
    for name in order or files:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(files[name])
    return path


def write_zip(path: Path, files: Files, top: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(top + name, data)
    return path


def write(tmp_path: Path, form: str, files: Files) -> Path:
    if form == "folder":
        return write_folder(tmp_path / "mini", files)
    return write_zip(tmp_path / "mini.zip", files, top="" if form == "zip" else "mini/")


def load(source: Path, size: int, cache: Path) -> tuple[tuple[str, ...], Arrays]:
    names, entry = mini_imagenet.load(source, size, cache)
    assert entry.facts == {"unreadable": []}
    return names, entry.arrays


def refused(source: Path, tmp_path: Path) -> str:
    with pytest.raises(HoldfastError) as caught:
        load(source, 4, tmp_path / "cache")
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["class folders", "three parts"])
@pytest.mark.parametrize("form", ["folder", "zip", "zip with a top folder"])
def test_the_first_five_sixths_of_each_class_are_to_train_on(tmp_path: Path, layout: str, form: str) -> None:
    names, arrays = load(write(tmp_path, form, content(layout)), 4, tmp_path / "cache")
    assert names == ("n01", "n02", "n03")
    for split, numbers in (("train", range(10)), ("test", range(10, 12))):
        expected = [shade(name, i) for name in names for i in numbers]
        assert arrays[f"{split}_images"].dtype == np.uint8
        assert arrays[f"{split}_images"].shape == (len(expected), 3, 4, 4)
        np.testing.assert_array_equal(arrays[f"{split}_images"][:, 0, 0, 0], expected)
        assert arrays[f"{split}_labels"].tolist() == [c for c in range(3) for _ in numbers]


@pytest.mark.parametrize("layout", ["class folders", "three parts"])
def test_an_archive_may_be_renamed(tmp_path: Path, layout: str) -> None:
    source = write_zip(tmp_path / "download (1).zip", content(layout), top="mini-imagenet/")
    names, arrays = load(source, 4, tmp_path / "cache")
    assert names == ("n01", "n02", "n03")
    assert len(arrays["train_labels"]) == 30


def test_of_600_images_500_are_to_train_on(tmp_path: Path) -> None:
    files = {f"{name}/{i:03}.png": png(i % 200) for name in ("a", "b") for i in range(600)}
    _, arrays = load(write_zip(tmp_path / "mini.zip", files), 4, tmp_path / "cache")
    assert np.bincount(arrays["train_labels"]).tolist() == [500, 500]
    assert np.bincount(arrays["test_labels"]).tolist() == [100, 100]
    np.testing.assert_array_equal(arrays["test_images"][:100, 0, 0, 0], np.arange(500, 600) % 200)


@pytest.mark.parametrize(("count", "train"), [(2, 1), (3, 2), (5, 4), (7, 5)])
def test_a_class_of_few_images_has_some_in_each_part(tmp_path: Path, count: int, train: int) -> None:
    _, arrays = load(write(tmp_path, "folder", content("class folders", count)), 4, tmp_path / "cache")
    assert np.bincount(arrays["train_labels"]).tolist() == [train] * 3
    assert np.bincount(arrays["test_labels"]).tolist() == [count - train] * 3


def test_the_order_in_which_files_were_made_does_not_matter(tmp_path: Path) -> None:
    files = content("class folders")
    first = write_folder(tmp_path / "first", files)
    again = write_folder(tmp_path / "again", files, sorted(files, key=lambda name: (name[-5], name)))
    one, other = load(first, 4, tmp_path / "cache"), load(again, 4, tmp_path / "other cache")
    assert one[0] == other[0]
    for name, array in one[1].items():
        np.testing.assert_array_equal(array, other[1][name])


@pytest.mark.parametrize("size", [16, 84])
def test_any_size_will_do_whatever_the_size_of_the_images(tmp_path: Path, size: int) -> None:
    files = {f"{name}/{i}.png": png(50 * i, (20 + 7 * i, 31)) for name in "ab" for i in range(3)}
    _, arrays = load(write_folder(tmp_path / "mini", files), size, tmp_path / "cache")
    assert arrays["train_images"].shape == (4, 3, size, size)
    assert np.unique(arrays["train_images"][1]).tolist() == [50]


def test_files_that_are_no_images_are_left_alone(tmp_path: Path) -> None:
    files = content("three parts") | {"train.csv": b"filename,label\n", "train/n03/notes.txt": b"x", "README": b"x"}
    names, arrays = load(write(tmp_path, "folder", files), 4, tmp_path / "cache")
    assert names == ("n01", "n02", "n03")
    assert len(arrays["train_labels"]) == 30


def test_a_class_in_two_parts_is_refused(tmp_path: Path) -> None:
    files = content("three parts") | {"test/n01/another.png": png(3)}
    source = write(tmp_path, "folder", files)
    said = refused(source, tmp_path)
    assert "the class 'n01'" in said
    assert str(source) in said
    assert "is in two of test, train, val" in said


@pytest.mark.parametrize("layout", ["class folders", "three parts"])
def test_an_empty_class_folder_is_named(tmp_path: Path, layout: str) -> None:
    source = write(tmp_path, "folder", content(layout))
    empty = source / ("val/n00" if layout == "three parts" else "n00")
    empty.mkdir()
    assert refused(source, tmp_path) == f"the class 'n00' has no images in {empty}; add some or remove the folder"


def test_a_class_with_one_image_is_named(tmp_path: Path) -> None:
    source = write(tmp_path, "folder", content("class folders") | {"n09/only.png": png(1)})
    assert f"the class 'n09' of {source} has one image" in refused(source, tmp_path)


def test_a_folder_without_class_folders_is_refused(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "mini", {"a.png": png(1), "b.png": png(2)})
    assert refused(source, tmp_path) == f"{source} has no class folders; set data.path to the folder that holds them"


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "mini.zip"
    source.write_bytes(b"half a download")
    assert refused(source, tmp_path).startswith(f"{source} cannot be opened (damaged, or neither")


def test_a_broken_image_is_named_and_has_no_label(tmp_path: Path) -> None:
    source = write(tmp_path, "zip", content("class folders") | {"n02/n02_0003.png": b"not an image"})
    _, entry = mini_imagenet.load(source, 4, tmp_path / "cache")
    (sentence,) = entry.facts["unreadable"]
    assert sentence.startswith(f"n02/n02_0003.png in {source} cannot be read as an image")
    assert np.flatnonzero(entry.arrays["train_labels"] < 0).tolist() == [13]


def test_images_in_one_folder_with_lists_of_their_classes(tmp_path: Path) -> None:
    top = tmp_path / "mini"
    (top / "images").mkdir(parents=True)
    for c, name in enumerate(("n02", "n01")):
        lines = ["filename,label"]
        for i in range(6):
            Image.new("RGB", (8, 8), (100 * c + i, 0, 0)).save(top / "images" / f"{name}_{i}.png")
            lines.append(f"{name}_{i}.png,{name}")
        (top / f"{('train', 'val')[c]}.csv").write_text("\n".join(lines))
    names, entry = mini_imagenet.load(top, 8, tmp_path / "cache")
    assert names == ("n01", "n02")
    assert entry.arrays["train_labels"].tolist() == [0] * 5 + [1] * 5
    assert entry.arrays["test_images"][:, 0, 0, 0].tolist() == [105, 5]
    whole = (top / "val.csv").read_text()
    for text, says in (
        (f"{whole}\nn02_0.png,n01", "names 'images/n02_0.png' a second time"),
        ("n01_0.png,n01", "does not begin with the line filename,label"),
    ):
        (top / "val.csv").write_text(text)
        with pytest.raises(HoldfastError, match=f"val.csv in .* {says}"):
            mini_imagenet.load(top, 8, tmp_path / "cache")
    (top / "val.csv").write_text(whole)
    (top / "images" / "n01_3.png").unlink()
    with pytest.raises(HoldfastError, match=r"val.csv in .* names 'images/n01_3.png', which is not there"):
        mini_imagenet.load(top, 8, tmp_path / "cache")
    for part in ("train", "val"):
        (top / f"{part}.csv").write_text("filename,label\n")
    with pytest.raises(HoldfastError, match=r"train.csv, val.csv in .* name no images"):
        mini_imagenet.load(top, 8, tmp_path / "cache")
