"""Anyone's images: layouts, the drawn test images, strange files and names, links, and arrivals.toml."""

import os
import re
import unicodedata
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holdfast.data import folder
from holdfast.data.folder import Folder
from holdfast.data.images import Stream
from holdfast.errors import HoldfastError

Shades = Mapping[str, Iterable[int]]  # the images of each folder, each of one grey


def paint(file: Path, shade: int, size: tuple[int, int] = (6, 6)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(file, "PNG")


def write(top: Path, shades: Shades) -> Path:
    for name, values in shades.items():
        (top / name).mkdir(parents=True, exist_ok=True)
        for value in values:
            paint(top / name / f"{value:03}.png", value)
    return top


def zipped(top: Path, inside: str = "") -> Path:
    with zipfile.ZipFile(top.with_suffix(".zip"), "w") as archive:
        for file in sorted(top.rglob("*")):
            archive.write(file, inside + str(file.relative_to(top)))
    return top.with_suffix(".zip")


def load(source: Path, share: float = 0.2, seed: int = 0, size: int = 4) -> Folder:
    return folder.load(source, size, source.parent / "cache", share, seed)


def refused(source: Path) -> str:
    with pytest.raises(HoldfastError) as caught:
        load(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def shades_of(found: Folder, split: str) -> dict[str, list[int]]:
    """The greys of each class's images."""
    images, labels = (found.entry.arrays[f"{split}_{part}"] for part in ("images", "labels"))
    shades: dict[str, list[int]] = {name: [] for name in found.names}
    for image, label in zip(images, labels, strict=True):
        shades[found.names[label]].append(int(image[0, 0, 0]))
    return shades


TWO_PARTS = {"train/cat": [10, 20, 30], "train/dog": [40, 50], "test/dog": [60], "test/cat": [70, 80]}
CLIENTS = {
    "clients/north/cat": range(10, 15),
    "clients/north/dog": [20],
    "clients/south/dog": range(30, 40),
    "clients/south/emu": [50, 51],
}


@pytest.mark.parametrize("form", ["folder", "zip"])
@pytest.mark.parametrize("aside", ["test", "val"])
def test_training_and_test_folders(tmp_path: Path, form: str, aside: str) -> None:
    top = write(tmp_path / "mine", {name.replace("test/", f"{aside}/"): s for name, s in TWO_PARTS.items()})
    found = load(zipped(top) if form == "zip" else top)
    assert found.names == ("cat", "dog")
    assert shades_of(found, "train") == {"cat": [10, 20, 30], "dog": [40, 50]}
    assert shades_of(found, "test") == {"cat": [70, 80], "dog": [60]}
    assert (found.clients, found.owners, found.stream) == ((), None, None)


@pytest.mark.parametrize("below", ["", "train/"])
@pytest.mark.parametrize("form", ["folder", "zip"])
def test_a_single_folder_is_split(tmp_path: Path, form: str, below: str) -> None:
    classes = {"cat": list(range(100, 120)), "dog": list(range(10))}
    top = write(tmp_path / "mine", {f"{below}{name}": shades for name, shades in classes.items()})
    found = load(zipped(top) if form == "zip" else top, share=0.3)
    train, test = shades_of(found, "train"), shades_of(found, "test")
    assert {name: len(shades) for name, shades in test.items()} == {"cat": 6, "dog": 3}
    for name, shades in classes.items():
        assert sorted(train[name] + test[name]) == shades


def test_folders_deeper_down_belong_to_their_class(tmp_path: Path) -> None:
    found = load(write(tmp_path / "mine", {**TWO_PARTS, "train/cat/old/2019": [90]}))
    assert sorted(shades_of(found, "train")["cat"]) == [10, 20, 30, 90]


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_clients_folders_say_whose_images_they_are(tmp_path: Path, form: str) -> None:
    top = write(tmp_path / "mine", {**CLIENTS, "test/cat": [200], "test/dog": [201], "test/emu": [202]})
    found = load(zipped(top) if form == "zip" else top)
    assert found.clients == ("north", "south")
    assert found.names == ("cat", "dog", "emu")
    assert found.owners is not None
    images = found.entry.arrays["train_images"][:, 0, 0, 0]
    assert images[found.owners == 0].tolist() == [*range(10, 15), 20]
    assert images[found.owners == 1].tolist() == [*range(30, 40), 50, 51]
    assert shades_of(found, "test") == {"cat": [200], "dog": [201], "emu": [202]}


def test_test_images_are_drawn_from_each_client_but_never_its_last(tmp_path: Path) -> None:
    found = load(write(tmp_path / "mine", CLIENTS), share=0.4)
    train, test = shades_of(found, "train"), shades_of(found, "test")
    assert 20 in train["dog"]  # all that the north has of dogs
    assert [len(test[name]) for name in found.names] == [2, 4, 1]
    assert all(30 <= shade < 40 for shade in test["dog"])
    assert found.owners is not None
    assert np.bincount(found.owners).tolist() == [3 + 1, 6 + 1]
    for owner, row in zip(found.owners, found.entry.arrays["train_images"][:, 0, 0, 0], strict=True):
        assert (row >= 30) == owner


def test_however_large_the_share_a_client_keeps_an_image_of_each_class(tmp_path: Path) -> None:
    found = load(write(tmp_path / "mine", {"clients/a/x": [1, 2, 3], "clients/b/x": [4, 5]}), share=0.99)
    assert found.owners is not None
    assert np.bincount(found.owners).tolist() == [1, 1]


def test_the_seed_decides_which_images_are_for_testing(tmp_path: Path) -> None:
    shades = {"cat": range(40), "dog": range(50, 90)}
    first = write(tmp_path / "first" / "mine", shades)
    again = write(tmp_path / "again" / "mine", {name: reversed(list(values)) for name, values in shades.items()})
    drawn = shades_of(load(first, seed=1), "test")
    assert shades_of(load(again, seed=1), "test") == drawn
    assert [len(values) for values in drawn.values()] == [8, 8]
    other = shades_of(load(first, seed=2), "test")
    assert all(other[name] != drawn[name] for name in drawn)
    assert [shade - 50 for shade in drawn["dog"]] != drawn["cat"]  # not the same places in every class


def colour(mode: str) -> Image.Image:
    """A pure red, or what a mode has of it."""
    if mode == "I;16":
        return Image.fromarray(np.full((9, 5), 257 * 77, np.uint16))
    if mode in ("L", "LA", "1"):
        return Image.new("L", (7, 4), 255).convert(mode)
    red = Image.new("RGB", (5 + len(mode), 6), (255, 0, 0))
    return red.convert("P", palette=Image.Palette.ADAPTIVE) if mode == "P" else red.convert(mode)


MODES = {
    "grey.png": ("L", (255, 255, 255)),
    "bits.png": ("1", (255, 255, 255)),
    "grey and alpha.png": ("LA", (255, 255, 255)),
    "palette.gif": ("P", (255, 0, 0)),
    "palette.png": ("P", (255, 0, 0)),
    "print.tiff": ("CMYK", (255, 0, 0)),
    "print.jpg": ("CMYK", (255, 0, 0)),
    "deep.png": ("I;16", (77, 77, 77)),
    "alpha.webp": ("RGBA", (255, 0, 0)),
    "alpha.PNG": ("RGBA", (255, 0, 0)),
    "plain.bmp": ("RGB", (255, 0, 0)),
    "plain.ppm": ("RGB", (255, 0, 0)),
    "plain.JPEG": ("RGB", (255, 0, 0)),
}


def test_images_of_any_kind_and_size_in_one_class(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", {"test/any": [1], "train/any": []})
    for name, (mode, _) in MODES.items():
        colour(mode).save(top / "train" / "any" / name)
    found = load(top)
    assert found.entry.facts == {"unreadable": []}
    images = found.entry.arrays["train_images"]
    assert len(images) == len(MODES)
    for name, image in zip(sorted(MODES), images, strict=True):
        expected = np.array(MODES[name][1])[:, None, None]
        assert np.abs(image.astype(int) - expected).max() <= 3, name  # JPEG and WebP lose a little


def test_transparent_parts_are_white(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", {"test/any": [1], "train/any": []})
    Image.new("RGBA", (5, 5), (9, 9, 9, 0)).save(top / "train" / "any" / "clear.png")
    assert load(top).entry.arrays["train_images"].min() == 255


def test_an_image_without_a_known_range_is_named(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", TWO_PARTS)
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(top / "train" / "cat" / "depth.tiff")
    (sentence,) = load(top).entry.facts["unreadable"]
    assert "train/cat/depth.tiff" in sentence
    assert "floating-point" in sentence


NAMES = ["ein Hund", "größe", "猫", "C:\\x", "ñandú & co", "émeu #1", "a'b\"c", "[red]"]


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_names_with_spaces_and_any_letters(tmp_path: Path, form: str) -> None:
    names = [name for name in NAMES if form == "folder" or "\\" not in name]  # a zip file has it for a slash
    top = write(tmp_path / "die Fotos", {f"{name}/im Grünen": range(5) for name in names})
    found = load(zipped(top) if form == "zip" else top)
    assert found.names == tuple(sorted(names))
    assert all(len(shades) == 4 for shades in shades_of(found, "train").values())


def nfd(name: str) -> str:
    return unicodedata.normalize("NFD", name)


def test_a_name_spelt_in_two_ways_is_one_class(tmp_path: Path) -> None:
    """As when the training images come from a Mac."""
    found = load(write(tmp_path / "mine", {nfd("train/émeu"): [1, 2], "test/émeu": [3]}))
    assert found.names == ("émeu",)
    assert shades_of(found, "test") == {"émeu": [3]}


@pytest.mark.parametrize("second", [nfd("émeu"), "émeu "])
def test_two_folders_of_one_name_are_refused(tmp_path: Path, second: str) -> None:
    top = write(tmp_path / "mine", {"train/émeu": [1], f"train/{second}": [2], "test/émeu": [3]})
    if len(os.listdir(top / "train")) < 2:
        pytest.skip("this file system takes the two for one name")
    said = refused(top)
    assert "is a second folder of the class 'émeu'; merge them or rename one" in said
    assert str(top) in said


HIDDEN = [".hidden.png", ".DS_Store", "Thumbs.db", "notes.txt", "no suffix", "half.png.part"]


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_hidden_files_and_files_that_are_no_images_are_left_alone(tmp_path: Path, form: str) -> None:
    top = write(tmp_path / "mine", TWO_PARTS)
    for name in HIDDEN:
        (top / "train" / "cat" / name).write_bytes(b"not an image")
    (top / "README.txt").write_text("these are mine")
    write(top, {".git/objects": [1], "train/.thumbnails": [2]})
    found = load(zipped(top) if form == "zip" else top)
    assert found.entry.facts == {"unreadable": []}
    assert found.names == ("cat", "dog")
    assert shades_of(found, "train") == {"cat": [10, 20, 30], "dog": [40, 50]}


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_images_of_a_kind_that_cannot_be_read_are_not_passed_over(tmp_path: Path, form: str) -> None:
    top = write(tmp_path / "mine", TWO_PARTS)
    names = ["IMG_0001.HEIC", "scan.nii.gz"]
    for name in names:
        (top / "train" / "cat" / name).write_bytes(b"a photograph")
    found = load(zipped(top) if form == "zip" else top)
    said = found.entry.facts["unreadable"]
    assert [f"train/cat/{name}" in sentence for name, sentence in zip(names, said, strict=True)] == [True, True]


def test_what_a_mac_adds_to_a_zip_is_left_alone(tmp_path: Path) -> None:
    archive = zipped(write(tmp_path / "mine", {"cat": range(5), "dog": range(5)}))
    with zipfile.ZipFile(archive, "a") as more:
        more.writestr("__MACOSX/cat/._000.png", b"\x00\x05\x16\x07")
        more.writestr("cat/.DS_Store", b"\x00")
    found = load(archive)
    assert found.names == ("cat", "dog")
    assert found.entry.facts == {"unreadable": []}


@pytest.mark.parametrize("shades", [TWO_PARTS, {"cat": range(5), "dog": range(5)}, CLIENTS])
def test_a_zip_with_its_folder_in_it_is_the_same(tmp_path: Path, shades: Shades) -> None:
    """`zip -r mine.zip mine` makes such a file, and so does every file manager."""
    top = write(tmp_path / "mine", shades)
    found, inside = load(top), load(zipped(top, "mine/"))
    assert inside.names == found.names
    assert inside.clients == found.clients
    np.testing.assert_array_equal(inside.entry.arrays["train_images"], found.entry.arrays["train_images"])


@pytest.mark.parametrize("empty", ["train/owl", "test/owl", "owl", "clients/north/owl"])
def test_an_empty_class_is_named(tmp_path: Path, empty: str) -> None:
    layouts: dict[str, Shades] = {"train": TWO_PARTS, "test": TWO_PARTS, "owl": {"cat": range(5)}, "clients": CLIENTS}
    top = write(tmp_path / "mine", {**layouts[empty.split("/")[0]], empty: []})
    (top / empty / "notes.txt").write_text("no image")
    assert refused(top) == f"the class 'owl' has no images in {top / empty}; add some or remove the folder"


@pytest.mark.parametrize(
    ("name", "says"),
    [("train/owl", "has training images but no test images"), ("test/owl", "has test images but no training images")],
)
def test_a_class_in_one_part_only_is_named(tmp_path: Path, name: str, says: str) -> None:
    top = write(tmp_path / "mine", {**TWO_PARTS, name: [1]})
    assert refused(top) == f"the class 'owl' of {top} {says}; add some"


def test_a_class_of_one_image_cannot_be_split(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", {"cat": range(5), "dog": [7]})
    assert f"the class 'dog' of {top} has too few images to draw some for testing; add" in refused(top)


@pytest.mark.parametrize(
    ("shades", "idle"),
    [
        ({"car": [1, 2], "plane": [3, 4], "train/steam": [5, 6], "train/diesel": [7, 8]}, "car, plane"),
        ({"car": [1, 2], "plane": [3, 4], "train": [5, 6]}, "car, plane"),
        ({"train/a": [1, 2], "Test/a": [3], "valid/a": [4]}, "Test, valid"),
        ({"clients/north/a": [1, 2], "train/a": [3, 4]}, "train"),
    ],
)
def test_images_that_would_not_be_used_are_named(tmp_path: Path, shades: Shades, idle: str) -> None:
    with pytest.raises(HoldfastError, match=f"beside it {idle}, which would not be used; move them into"):
        load(write(tmp_path / "top", shades))


@pytest.mark.parametrize("shades", [{}, {"train": [1, 2]}, {"clients": []}])
def test_no_classes_at_all(tmp_path: Path, shades: Shades) -> None:
    top = write(tmp_path / "mine", {"": [], **shades})
    assert f"{top} has no class folders with images" in refused(top)


def test_a_loose_file_among_the_clients_is_named(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", CLIENTS)
    (top / "clients" / "list.txt").write_text("north, south")
    assert refused(top) == f"clients/list.txt in {top} is a file; clients/ holds a folder for each client"


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", {"dog": [1, 2, 3]})
    top = write(tmp_path / "mine", {"train/cat": [4], "test/cat": [5], "test/dog": [6]})
    (top / "train" / "dog").symlink_to(tmp_path / "elsewhere" / "dog")
    (tmp_path / "by another name").symlink_to(top)
    found = load(tmp_path / "by another name")
    assert shades_of(found, "train") == {"cat": [4], "dog": [1, 2, 3]}


@pytest.mark.parametrize(
    ("where", "to"),
    [
        ("train/cat/again", "train/cat"),
        ("train/cat/again", "train"),
        ("train/cat/again", "."),
        ("train/again", "train"),
        ("train/again", "."),
        ("again", "."),
    ],
)
def test_a_link_in_a_circle_is_one_sentence(tmp_path: Path, where: str, to: str) -> None:
    top = write(tmp_path / "mine", TWO_PARTS)
    (top / where).symlink_to(top / to)
    assert refused(top) == f"{top / where} is a link to one of its own parent folders; remove it"


@pytest.mark.parametrize("to", ["nowhere.png", "itself.png"])
def test_a_link_that_leads_nowhere_is_one_sentence(tmp_path: Path, to: str) -> None:
    top = write(tmp_path / "mine", TWO_PARTS)
    (top / "train" / "cat" / "itself.png").symlink_to(to)
    said = refused(top)
    assert said.startswith(f"{top / 'train' / 'cat' / 'itself.png'} is a broken or circular link (")
    assert said.endswith("; remove it")


GOOD = """
rounds = 24
[[arrival]]
round = 5
client = "south"
classes = ["emu"]
[[arrival]]
round = 1
client = "north"
classes = ["cat", "dog", "cat"]
[[arrival]]
round = 1
client = "south"
classes = ["dog"]
[[arrival]]
round = 9
client = "north"
leaves = ["cat"]
[[arrival]]
round = 5
client = "south"
classes = ["dog"]
"""


@pytest.mark.parametrize("form", ["folder", "zip"])
def test_arrivals(tmp_path: Path, form: str) -> None:
    top = write(tmp_path / "mine", CLIENTS)
    (top / "arrivals.toml").write_text("# ünser Plan\n" + GOOD, encoding="utf-8-sig")
    found = load(zipped(top) if form == "zip" else top)
    arrivals = ((0, 0, ("cat", "dog"), ()), (0, 1, ("dog",), ()), (4, 1, ("emu", "dog"), ()), (8, 0, (), ("cat",)))
    assert found.stream == Stream(arrivals, 24)
    (top / "arrivals.toml").write_text(GOOD.replace("rounds = 24", ""))
    assert load(top).stream == Stream(arrivals, None)


def test_names_in_arrivals_may_be_spelt_in_another_way(tmp_path: Path) -> None:
    """The folders come from a Mac, the text was written elsewhere, or the other way round."""
    lines = '[[arrival]]\nround = 1\nclient = "Zoë"\nclasses = ["émeu"]\n'
    for folders, told in ((nfd("clients/Zoë/émeu"), lines), ("clients/Zoë/émeu", nfd(lines))):
        top = write(tmp_path / str(len(folders)), {folders: range(5)})
        (top / "arrivals.toml").write_text(told)
        assert load(top).stream == Stream(((0, 0, ("émeu",), ()),), None)


def changed(old: str, new: str) -> str:
    assert GOOD.count(old) >= 1
    return GOOD.replace(old, new, 1)


WRONG = {
    "not TOML": ("[[arrival]\n", r"this is not TOML \(.*\); see 'holdfast data info folder'"),
    "nested too deep": ("x = " + "[" * 3000, r"this is not TOML \(.*\); see 'holdfast data info folder'"),
    "unknown key": (changed("rounds", "round"), "unknown key 'round'; it may hold rounds and"),
    "no tables": ("rounds = 3\n", r"it has no \[\[arrival\]\] tables; see 'holdfast data info folder'"),
    "empty": ("", r"it has no \[\[arrival\]\] tables"),
    "one table": ("[arrival]\nround = 1\n", r"it has no \[\[arrival\]\] tables"),
    "a list of words": ('arrival = ["north"]\n', r"it has no \[\[arrival\]\] tables"),
    "unknown key of an arrival": (changed("round = 5", "round = 5\nwho = 1"), "arrival 1: unknown key 'who'; it has"),
    "lacks a key": (
        changed("round = 5\n", ""),
        "arrival 1: it lacks 'round'; it has round, client, and classes or leaves",
    ),
    "round 0": (changed("round = 5", "round = 0"), "arrival 1: round = 0 should be a whole number from 1 to 1,000,000"),
    "round is a fraction": (changed("round = 5", "round = 1.5"), "arrival 1: round = 1.5 should be a whole number"),
    "round is a word": (changed("round = 5", 'round = "5"'), "arrival 1: round = '5' should be a whole number"),
    "round is true": (changed("round = 5", "round = true"), "arrival 1: round = True should be a whole number"),
    "round without end": (changed("rounds = 24", "").replace("= 9", f"= {10**12}"), f"arrival 4: round = {10**12}"),
    "unknown client": (changed('"south"', '"suoth"'), "arrival 1: there is no client 'suoth' .*mean 'south'"),
    "client is a number": (changed('"south"', "3"), "arrival 1: there is no client 3 in clients/; choose one of"),
    "client is a list": (changed('"south"', '["south"]'), r"arrival 1: .*\['south'\]"),
    "classes are a word": (changed('["emu"]', '"emu"'), "arrival 1: classes = 'emu' should be a list of names"),
    "classes are numbers": (changed('["emu"]', "[3]"), r"arrival 1: classes = \[3\] should be a list of names"),
    "unknown class": (changed('["emu"]', '["enu"]'), "arrival 1: client 'south' has no class 'enu'; did you mean"),
    "somebody else's class": (changed('["emu"]', '["cat"]'), "arrival 1: client 'south' has no class 'cat'; choose"),
    "never arrives": (
        changed('["emu"]', '["dog"]'),
        "the class 'emu' of client 'south' never arrives; add it or remove",
    ),
    "nothing comes or leaves": (changed('["emu"]', "[]"), "arrival 1: nothing comes and nothing leaves; it has"),
    "leaves are a word": (
        changed('leaves = ["cat"]', 'leaves = "cat"'),
        "arrival 4: leaves = 'cat' should be a list of names",
    ),
    "somebody else's class leaves": (
        changed('leaves = ["cat"]', 'leaves = ["emu"]'),
        "arrival 4: client 'north' has no class 'emu'",
    ),
    "what is not there leaves": (
        changed("round = 9", "round = 1").replace(
            'client = "north"\nleaves = ["cat"]', 'client = "south"\nleaves = ["emu"]'
        ),
        "the class 'emu' leaves client 'south' in round 1, but it is not among its data then; correct the round",
    ),
    "comes and leaves": (
        changed("round = 9", "round = 1"),
        "the class 'cat' comes to client 'north' and leaves it in round 1; name it in classes or in leaves",
    ),
    "too few rounds": (
        changed("24", "8"),
        "rounds = 8, but the last arrival is in round 9; use 9 to 1,000,000",
    ),
    "rounds are a word": (changed("24", '"many"'), "rounds = 'many', but the last arrival is in round 9"),
    "rounds without end": (changed("24", str(10**12)), f"rounds = {10**12}"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arrivals_are_one_sentence(tmp_path: Path, case: str) -> None:
    text, says = WRONG[case]
    top = write(tmp_path / "mine", CLIENTS)
    (top / "arrivals.toml").write_text(text)
    assert re.match(f"{re.escape(str(top / 'arrivals.toml'))}: {says}", refused(top))


def test_arrivals_without_clients(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", TWO_PARTS)
    (top / "arrivals.toml").write_text(GOOD)
    assert refused(top).startswith(f"{top / 'arrivals.toml'}: there is no folder clients/ beside it; ")


def test_arrivals_that_are_no_text(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", CLIENTS)
    (top / "arrivals.toml").write_bytes(b"\xff\xfe")
    assert f"arrivals.toml in {top} is not UTF-8 text" in refused(top)


def test_a_client_whose_name_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", CLIENTS)
    os.rename(top / "clients" / "south", os.fsencode(top / "clients") + b"/s\xffd")
    assert "clients/'s\\udcffd'" in refused(top)
    assert "is not UTF-8 text; rename it" in refused(top)


def test_long_or_nested_arrivals_are_one_sentence(tmp_path: Path) -> None:
    top = write(tmp_path / "mine", CLIENTS)
    for text in ("x = " + "[" * 100_000, "x" + ".a" * 100_000 + " = 1", "x = 1\n" * 600_000):
        (top / "arrivals.toml").write_text(text)
        assert re.search(r"arrivals\.toml: this is not TOML \(it.* (nested too deeply|has more than)", refused(top))


def test_two_folders_of_one_client_are_refused(tmp_path: Path) -> None:
    for client in ("north", "north "):
        for name in ("cat", "dog"):
            (tmp_path / "mine" / "clients" / client / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "mine" / "clients" / client / name / f"{i}.png")
    with pytest.raises(HoldfastError, match="two folders of the client 'north'"):
        folder.load(tmp_path / "mine", 8, tmp_path / "cache", 0.2, 0)
