"""ImageNet in the forms in which people have it: validation in class folders, or flat with a file that maps it."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from holdfast.data import imagenet
from holdfast.data.cache import Arrays
from holdfast.errors import HoldfastError

WNIDS = ["n01440764", "n01443537", "n02123045"]
NUMBERS = {"n01440764": 3, "n01443537": 1, "n02123045": 2}  # the contest's own, in another order
TRAIN = 3  # images of a class
VAL = ["n02123045", "n01440764", "n01443537", "n01440764"]  # of validation images 1, 2, 3, 4
KAGGLE = "ILSVRC/Data/CLS-LOC/"
WORDS = "n01440764 tench, Tinca tinca\nn01443537 goldfish, Carassius auratus\nn02123045 tabby, tabby cat\n"

Files = dict[str, bytes]


def image(value: int) -> bytes:
    """Lossless, so that the shade tells which image it is; the decoder goes by content, not by name."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(file, "PNG")
    return file.getvalue()


def val_name(i: int) -> str:
    return f"ILSVRC2012_val_{i + 1:08}"


def train_files(top: str = "") -> Files:
    return {
        f"{top}train/{wnid}/{wnid}_{i}.JPEG": image(10 + 30 * c + 5 * i)
        for c, wnid in enumerate(WNIDS)
        for i in range(TRAIN)
    }


def flat(top: str = "") -> Files:
    return train_files(top) | {f"{top}val/{val_name(i)}.JPEG": image(200 + 10 * i) for i in range(len(VAL))}


def in_class_folders() -> Files:
    return train_files() | {f"val/{w}/{val_name(i)}.JPEG": image(200 + 10 * i) for i, w in enumerate(VAL)}


def meta_mat(wnids: dict[str, int]) -> bytes:
    """The development kit's table of classes; the true one has more of them than the contest, and more columns."""
    synsets = np.zeros((len(wnids), 1), [("ILSVRC2012_ID", object), ("WNID", object), ("words", object)])
    for row, (wnid, number) in enumerate(wnids.items()):
        synsets[row, 0] = (float(number), wnid, "a word, another")
    file = io.BytesIO()
    scipy.io.savemat(file, {"synsets": synsets})
    return file.getvalue()


GROUND_TRUTH = "ILSVRC2012_devkit_t12/data/ILSVRC2012_validation_ground_truth.txt"
META = "ILSVRC2012_devkit_t12/data/meta.mat"
SOLUTION = "".join(f"{val_name(i)},{wnid} 1 2 3 4 {wnid} 5 6 7 8 \n" for i, wnid in reversed(list(enumerate(VAL))))
LABELS = "\n".join(VAL).encode()
NUMBERED = "".join(f"{NUMBERS[wnid]}\n" for wnid in VAL).encode()
BOXES = "".join(f"{val_name(i)}.JPEG\t{wnid}\t0\t0\t62\t62\n" for i, wnid in enumerate(VAL)).encode()
FLAT: dict[str, Files] = {
    "Kaggle's": {"LOC_val_solution.csv": f"ImageId,PredictionString\n{SOLUTION}".encode()},
    "TensorFlow's": {"imagenet_2012_validation_synset_labels.txt": LABELS},
    "TensorFlow's, beside the images": {"val/imagenet_2012_validation_synset_labels.txt": LABELS},
    "TinyImageNet's": {"val/val_annotations.txt": BOXES},
    "pairs": {"val_map.txt": "".join(f"{val_name(i)}.JPEG {w}\n" for i, w in enumerate(VAL)).encode()},
    "the contest's": {GROUND_TRUTH: NUMBERED, META: meta_mat(NUMBERS | {"n00000001": 4})},
}


def write_folder(path: Path, files: Files) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def write_zip(path: Path, files: Files) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def load(source: Path, cache: Path, size: int = 8) -> tuple[tuple[str, ...], Arrays]:
    names, entry = imagenet.load(source, size, cache)
    assert entry.facts == {"unreadable": []}
    return names, entry.arrays


def is_whole(arrays: Arrays) -> None:
    """Every image is there once, with its own class."""
    assert arrays["train_images"].shape == (9, 3, 8, 8)
    assert arrays["train_images"].dtype == np.uint8
    assert arrays["train_labels"].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert arrays["train_images"][:, 0, 0, 0].tolist() == [10, 15, 20, 40, 45, 50, 70, 75, 80]
    shades = zip(arrays["test_images"][:, 0, 0, 0].tolist(), arrays["test_labels"].tolist(), strict=True)
    assert sorted(shades) == [(200, 2), (210, 0), (220, 1), (230, 0)]


def refused(tmp_path: Path, files: Files) -> str:
    source = write_folder(tmp_path / "imagenet", files)
    with pytest.raises(HoldfastError) as caught:
        load(source, tmp_path / "cache")
    said = str(caught.value)
    assert "\n" not in said
    assert str(source) in said
    return said


def test_validation_in_class_folders(tmp_path: Path) -> None:
    names, arrays = load(write_folder(tmp_path / "imagenet", in_class_folders()), tmp_path / "cache")
    assert names == tuple(WNIDS)
    is_whole(arrays)


@pytest.mark.parametrize("mapping", FLAT)
@pytest.mark.parametrize("form", ["folder", "zip"])
def test_flat_validation_with_a_mapping(tmp_path: Path, mapping: str, form: str) -> None:
    files = flat() | FLAT[mapping]
    write = write_folder if form == "folder" else write_zip
    names, arrays = load(write(tmp_path / "imagenet.zip", files), tmp_path / "cache")
    assert names == tuple(WNIDS)
    is_whole(arrays)


def test_a_table_of_one_class(tmp_path: Path) -> None:
    """Read back, it is a single entry and no array of them."""
    files = {name: content for name, content in flat().items() if "n0144" not in name}
    files |= {GROUND_TRUTH: b"2\n2\n2\n2\n", META: meta_mat({"n02123045": 2})}
    _, arrays = load(write_folder(tmp_path / "imagenet", files), tmp_path / "cache")
    assert arrays["test_labels"].tolist() == [0] * 4


def kaggle() -> Files:
    return flat(KAGGLE) | FLAT["Kaggle's"] | {"LOC_synset_mapping.txt": WORDS.encode()}


def test_kaggles_layout_and_names(tmp_path: Path) -> None:
    names, arrays = load(write_folder(tmp_path / "imagenet", kaggle()), tmp_path / "cache")
    assert names == ("tench", "goldfish", "tabby")
    is_whole(arrays)


def test_kaggles_archive_has_boxes_lists_and_test_images_too(tmp_path: Path) -> None:
    """Boxes lie in folders that are called like those of the images, and come before them."""
    files = kaggle() | {
        f"ILSVRC/Annotations/CLS-LOC/train/{WNIDS[0]}/{WNIDS[0]}_0.xml": b"<annotation/>",
        f"ILSVRC/Annotations/CLS-LOC/val/{val_name(0)}.xml": b"<annotation/>",
        "ILSVRC/ImageSets/CLS-LOC/val.txt": b"ILSVRC2012_val_00000001 1\n",
        f"{KAGGLE}test/ILSVRC2012_test_00000001.JPEG": image(3),
        "LOC_train_solution.csv": b"ImageId,PredictionString\n",
    }
    names, arrays = load(write_folder(tmp_path / "imagenet", files), tmp_path / "cache")
    assert names == ("tench", "goldfish", "tabby")
    is_whole(arrays)


@pytest.mark.parametrize("words", ["LOC_synset_mapping.txt", "synset_words.txt", "words.txt"])
def test_names_come_from_whichever_list_is_there(tmp_path: Path, words: str) -> None:
    files = in_class_folders() | {words: b"n01440764\ttench, Tinca tinca\nn02123045\ttench\n"}
    names, _ = load(write_folder(tmp_path / "imagenet", files), tmp_path / "cache")
    assert names == ("tench (n01440764)", "n01443537", "tench (n02123045)")


def test_folders_that_are_no_class_are_left_alone(tmp_path: Path) -> None:
    files = in_class_folders() | {"train/thumbnails/a.JPEG": image(1), "train/list.txt": b"x"}
    names, arrays = load(write_folder(tmp_path / "imagenet", files), tmp_path / "cache")
    assert names == tuple(WNIDS)
    is_whole(arrays)


@pytest.mark.parametrize("size", [16, 32])
def test_any_size(tmp_path: Path, size: int) -> None:
    _, arrays = load(write_folder(tmp_path / "imagenet", in_class_folders()), tmp_path / "cache", size)
    assert arrays["test_images"].shape == (4, 3, size, size)


def test_no_training_folders(tmp_path: Path) -> None:
    files = {"val/a.JPEG": image(1), "train/cats/a.JPEG": image(1)}
    assert "is not a complete ImageNet: it has no train/<class>/ folders" in refused(tmp_path, files)


def test_no_validation_images(tmp_path: Path) -> None:
    assert "it has no validation images in val/; correct data.path or add" in refused(tmp_path, train_files())


def test_flat_validation_without_a_mapping(tmp_path: Path) -> None:
    said = refused(tmp_path, flat())
    assert "lie flat and no file gives their classes (one of LOC_val_solution.csv, " in said


@pytest.mark.parametrize("mapping", ["Kaggle's", "TensorFlow's", "TinyImageNet's", "the contest's"])
def test_an_image_that_the_mapping_lacks(tmp_path: Path, mapping: str) -> None:
    files = flat() | FLAT[mapping] | {f"val/{val_name(4)}.JPEG": image(1)}
    name = next(iter(FLAT[mapping]))
    assert f"{name} does not give the class of val/ILSVRC2012_val_0000000" in refused(tmp_path, files)


def test_a_number_that_means_nothing(tmp_path: Path) -> None:
    files = flat() | FLAT["the contest's"] | {GROUND_TRUTH: NUMBERED.replace(b"1", b"77")}
    assert f"{GROUND_TRUTH} does not give the class of val/ILSVRC2012_val_0000000" in refused(tmp_path, files)


@pytest.mark.parametrize("form", ["class folders", "flat"])
def test_a_validation_class_without_training_images(tmp_path: Path, form: str) -> None:
    if form == "flat":
        said = refused(tmp_path, flat() | {"val.txt": BOXES.replace(b"n02123045", b"n09999999")})
    else:
        said = refused(tmp_path, in_class_folders() | {"val/n09999999/a.JPEG": image(1)})
    assert "is of class n09999999, which has no training images" in said


def test_a_training_class_without_validation_images(tmp_path: Path) -> None:
    files = in_class_folders() | {"train/n09999999/a.JPEG": image(1)}
    assert "class n09999999 has no validation images" in refused(tmp_path, files)


def test_an_empty_training_class(tmp_path: Path) -> None:
    (tmp_path / "imagenet/train/n01440000").mkdir(parents=True)
    assert "the class 'n01440000' has no images in" in refused(tmp_path, in_class_folders())


def test_numbers_without_the_table_of_classes(tmp_path: Path) -> None:
    said = refused(tmp_path, flat() | {GROUND_TRUTH: NUMBERED})
    assert "has numbers, but meta.mat, which explains them, is missing" in said


BROKEN = {
    "another format": b"nothing of use",
    "empty": b"",
    "half": FLAT["the contest's"][META][:200],
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_table_of_classes(tmp_path: Path, content: bytes) -> None:
    said = refused(tmp_path, flat() | {GROUND_TRUTH: NUMBERED, META: content})
    assert said.startswith(f"{META} in {tmp_path / 'imagenet'} cannot be read (")
    assert said.endswith("; download the development kit again")


def test_a_table_of_something_else(tmp_path: Path) -> None:
    file = io.BytesIO()
    scipy.io.savemat(file, {"other": np.zeros(3)})
    said = refused(tmp_path, flat() | {GROUND_TRUTH: NUMBERED, META: file.getvalue()})
    assert said.startswith(f"{META} in {tmp_path / 'imagenet'} cannot be read (")


def test_a_mapping_that_is_no_text(tmp_path: Path) -> None:
    said = refused(tmp_path, flat() | {"val_map.txt": b"\xff\xfe\x00"})
    assert "val_map.txt in" in said
    assert "is not UTF-8 text" in said
