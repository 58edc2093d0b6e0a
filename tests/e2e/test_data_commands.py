"""`holdfast data` and a run of a federated folder with its own stream, from the command line."""

import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from holdfast.config import load_config
from holdfast.data import cache
from holdfast.data.images import DataSet
from holdfast.data.sources import SOURCES, Download, load_data
from holdfast.results.record import read_record, read_result

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data root, which the commands may change."""
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


@pytest.fixture
def command(root: Path, holdfast: Command) -> Command:
    """The command line, with a separate data root."""
    return holdfast


def facts(ended: tuple[int, str, str]) -> dict[str, Any]:
    """The JSON of a successful command."""
    code, out, err = ended
    assert code == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    return found


def sentence(ended: tuple[int, str, str]) -> str:
    """What a refused command prints."""
    code, _, err = ended
    assert code == 2
    assert err.count("\n") == 1
    return err


@pytest.fixture(scope="module")
def glyphs() -> DataSet:
    settings = {"classes": 4, "train_per_class": 20, "test_per_class": 3, "size": 16}
    return load_data(load_config({"data": {"name": "glyphs", **settings}}).data)


def draw(glyphs: DataSet, place: Path, c: int, start: int, count: int) -> None:
    """Some of the glyphs of a class, as image files."""
    place.mkdir(parents=True)
    for row in glyphs.train.by_class[c][start : start + count].tolist():
        Image.fromarray(glyphs.train.images[row].permute(1, 2, 0).numpy()).save(place / f"{row:03}.png")


def draw_classes(glyphs: DataSet, top: Path, count: int = 6) -> Path:
    for c in range(4):
        draw(glyphs, top / f"glyph {c}", c, 0, count)
    return top


HOLDERS = {"north": [0, 1, 3], "süd": [1, 2], "west": [2]}  # which classes each client holds


def draw_clients(glyphs: DataSet, top: Path) -> Path:
    for i, (client, classes) in enumerate(HOLDERS.items()):
        for c in classes:
            draw(glyphs, top / "clients" / client / f"glyph {c}", c, 6 * i, 6)
    return top


def test_list(command: Command, root: Path, cache: Path) -> None:
    found = facts(command("data", "list", "--json"))
    assert found["data_root"] == str(root)
    assert found["cache"] == str(cache / "holdfast")
    assert list(found["data_sets"]) == list(SOURCES)
    here = {name: row["here"] for name, row in found["data_sets"].items()}
    assert here["glyphs"] == here["digits"] == "always"
    assert here["imagenet"] is None
    assert all(row["licence"] and row["about"] for row in found["data_sets"].values())
    (root / "imagenet").mkdir(parents=True)
    assert facts(command("data", "list", "--json"))["data_sets"]["imagenet"]["here"] == str(root / "imagenet")
    code, out, err = command("data", "list")
    assert (code, err) == (0, "")
    assert all(name in out for name in SOURCES)
    assert f"data root: {root} (HOLDFAST_DATA or --data-root)" in " ".join(out.split())
    assert "research only" in out


def test_the_data_root(command: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option, else the variable, else a place beside the cache."""
    other = tmp_path / "other"
    assert facts(command("data", "list", "--data-root", other, "--json"))["data_root"] == str(other)
    monkeypatch.setenv("HOLDFAST_DATA", "~/data")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert facts(command("data", "list", "--json"))["data_root"] == str(tmp_path / "data")
    monkeypatch.delenv("HOLDFAST_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert facts(command("data", "list", "--json"))["data_root"] == str(tmp_path / "xdg" / "holdfast" / "data")


def test_info_of_a_folder(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    top = draw_classes(glyphs, tmp_path / "mine")
    name = f"folder:{top}"
    found = facts(command("data", "info", name, "--size", "16", "--json"))
    assert (found["name"], found["here"], found["size"]) == (name, str(top), 16)
    assert (found["train"], found["test"], found["unreadable"]) == (20, 4, [])
    assert found["classes"] == {f"glyph {c}": {"train": 5, "test": 1} for c in range(4)}
    assert {"about", "origin", "licence", "official", "obtain"} <= set(found)
    code, out, err = command("data", "info", name)
    assert (code, err) == (0, "")
    assert "4 classes, 20 training and 4 test images of 64 px; 5 and 1 per class" in out
    assert [line.split() for line in out.splitlines() if "glyph 2" in line] == [["glyph", "2", "5", "1"]]
    by_path = facts(command("data", "info", "folder", "--path", top, "--size", "16", "--json"))
    assert by_path["classes"] == found["classes"]


def test_info_of_clients(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    name = f"folder:{draw_clients(glyphs, tmp_path / 'mine')}"
    found = facts(command("data", "info", name, "--json"))
    assert found["clients"] == {"north": 15, "süd": 10, "west": 5}
    assert "clients: north 15, süd 10, west 5" in command("data", "info", name)[1]


def test_a_contact_sheet(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    top = draw_classes(glyphs, tmp_path / "mine")
    code, out, err = command("data", "info", f"folder:{top}", "--picture", tmp_path / "sheet.png")
    assert (code, err) == (0, "")
    assert f"picture: {tmp_path / 'sheet.png'}" in out
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 300
        colours = picture.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 20  # something is drawn


def test_info_of_what_is_not_here(command: Command, tmp_path: Path) -> None:
    found = facts(command("data", "info", "imagenet", "--json"))
    assert found["here"] is None
    assert "classes" not in found
    assert "sign up at https://www.image-net.org" in found["obtain"]
    code, out, _ = command("data", "info", "imagenet")
    assert code == 0
    assert "It is not here. Sign up at https://www.image-net.org/download" in out
    assert "'holdfast data prepare cifar100' to download it (169 MB)" in command("data", "info", "cifar100")[1]
    said = sentence(command("data", "info", "imagenet", "--picture", tmp_path / "sheet.png"))
    assert "ImageNet is not here, so there is nothing to draw; sign up" in said


def test_info_of_folders_says_what_they_may_hold(command: Command) -> None:
    code, out, _ = command("data", "info", "folder")
    assert code == 0
    assert "[[arrival]]" in out
    assert "clients/<client>/<class>/" in out


def test_info_of_folders_for_a_script(command: Command) -> None:
    assert facts(command("data", "info", "folder", "--json"))["name"] == "folder"


def test_check(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    top = draw_classes(glyphs, tmp_path / "mine")
    found = facts(command("data", "check", f"folder:{top}", "--json"))
    assert found["cache_is_whole"] is True
    assert found["unreadable"] == []
    code, out, err = command("data", "check", f"folder:{top}")
    assert (code, err) == (0, "")
    assert out == "4 classes, 20 training and 4 test images of 64 px; 5 and 1 per class\n"
    assert facts(command("data", "check", "digits", "--json"))["train"] > 1000


def test_check_names_every_broken_image(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    top = draw_classes(glyphs, tmp_path / "mine", 20)
    broken = sorted(top.rglob("*.png"))[::10]
    for file in broken:
        file.write_bytes(file.read_bytes()[:60])
    for words in (["--json"], []):
        code, out, err = command("data", "check", f"folder:{top}", *words)
        assert code == 2
        assert err.splitlines()[-1] == (
            f"holdfast: {len(broken)} images cannot be read; replace or remove them, or set data.corrupt=skip"
        )
        named = json.loads(out)["unreadable"] if words else out.splitlines()[:-1]
        assert len(named) == len(broken) == 8
        for file in broken:
            assert sum(f"{file.relative_to(top)} in {top} " in line for line in named) == 1
    found = facts(command("data", "info", f"folder:{top}", "--json"))  # only check fails on it
    assert len(found["unreadable"]) == 8
    assert found["train"] + found["test"] == 72


def test_check_compares_the_whole_cache(
    command: Command, glyphs: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "LARGE", 1000)  # larger files are compared by this command only
    name = f"folder:{draw_classes(glyphs, tmp_path / 'mine')}"
    facts(command("data", "check", name, "--json"))
    (file,) = (tmp_path / "cache").rglob("train_images.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    ended = command("data", "check", name, "--json")
    assert f"the cached data in {file.parent} is damaged; delete that folder and run again" in sentence(ended)
    assert json.loads(ended[1])["cache_is_whole"] is False
    shutil.rmtree(file.parent)
    facts(command("data", "check", name, "--json"))


def test_check_reads_an_archive_again_that_has_been_decoded(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    """The archive's directory is unchanged, so the cache looks current."""
    top = draw_classes(glyphs, tmp_path / "mine")
    file = Path(shutil.make_archive(str(tmp_path / "mine"), "zip", top))
    facts(command("data", "check", f"folder:{file}", "--json"))
    content = bytearray(file.read_bytes())
    content[content.index(b"PNG") + 60] ^= 255
    file.write_bytes(content)
    assert f"in {file} is damaged" in sentence(command("data", "check", f"folder:{file}"))


def test_names_with_brackets_are_shown_as_they_are(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    top = tmp_path / "my [holiday] pictures"
    draw(glyphs, top / "clients" / "[bold]er" / "[red] glyph", 0, 0, 6)
    draw(glyphs, top / "clients" / "[bold]er" / "other", 1, 0, 6)
    (top / "clients" / "[bold]er" / "other" / "photo[copy].png").write_bytes(b"not an image")
    _, out, _ = command("data", "info", f"folder:{top}")
    assert "[red] glyph" in out
    assert "clients: [bold]er " in out
    assert f"here: {top}\n" in out
    _, out, _ = command("data", "check", f"folder:{top}")
    assert "photo[copy].png" in out


def test_prepare_imports_a_folder(command: Command, root: Path, glyphs: DataSet, tmp_path: Path) -> None:
    top = draw_classes(glyphs, tmp_path / "mine", 12)
    found = facts(command("data", "prepare", "mini-imagenet", "--from", top, "--size", "16", "--json"))
    assert found["here"] == str(root / "mini-imagenet")
    assert (found["size"], found["train"], found["test"]) == (16, 40, 8)
    again = command("data", "prepare", "mini-imagenet", "--size", "16")
    assert again[0] == 0
    assert f"MiniImageNet is ready: {root / 'mini-imagenet'}" in again[1]
    assert "4 classes, 40 training and 8 test images of 16 px; 10 and 2 per class" in again[1]
    assert facts(command("data", "info", "mini-imagenet", "--size", "16", "--json"))["train"] == 40


def test_prepare_imports_an_archive_into_another_data_root(
    command: Command, root: Path, glyphs: DataSet, tmp_path: Path
) -> None:
    top = draw_classes(glyphs, tmp_path / "mine", 6)
    with zipfile.ZipFile(tmp_path / "download.zip", "w") as archive:
        for file in top.rglob("*.png"):
            archive.write(file, file.relative_to(top))
    other = tmp_path / "other"
    words = ["data", "prepare", "mini-imagenet", "--from", tmp_path / "download.zip", "--data-root", other, "--json"]
    assert facts(command(*words))["here"] == str(other / "mini-imagenet.zip")
    assert not root.exists()


def tiny_zip(path: Path) -> Path:
    """A data set of the true layout, with two classes."""
    image = path.with_suffix(".jpg")
    Image.new("RGB", (64, 64), (200, 30, 30)).save(image)
    with zipfile.ZipFile(path, "w") as archive:
        for i, wnid in enumerate(("n01", "n02")):
            for k in range(3):
                archive.write(image, f"tiny-imagenet-200/train/{wnid}/images/{wnid}_{k}.JPEG")
            archive.write(image, f"tiny-imagenet-200/val/images/val_{i}.JPEG")
        archive.writestr("tiny-imagenet-200/wnids.txt", "n01\nn02\n")
        archive.writestr("tiny-imagenet-200/val/val_annotations.txt", "val_0.JPEG\tn01\t0\nval_1.JPEG\tn02\t0\n")
    return path


def test_prepare_downloads(command: Command, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = tiny_zip(tmp_path / "published.zip")
    content = published.read_bytes()
    name = "tiny-imagenet-200.zip"
    download = Download(published.as_uri(), name, len(content), hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(SOURCES, "tiny-imagenet", replace(SOURCES["tiny-imagenet"], download=download))
    found = facts(command("data", "prepare", "tiny-imagenet", "--json"))
    assert found["here"] == str(root / name)
    assert (root / name).read_bytes() == content
    assert (found["train"], found["test"]) == (6, 2)
    published.unlink()
    facts(command("data", "prepare", "tiny-imagenet", "--json"))  # it is here
    (root / name).unlink()
    assert f"{download.url} cannot be downloaded (" in sentence(command("data", "prepare", "tiny-imagenet"))


def test_prepare_without_any_file(command: Command, root: Path) -> None:
    assert facts(command("data", "prepare", "digits", "--json"))["here"] == "always"
    assert not root.exists()


def test_stopping_it_says_how_to_continue(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.data.load_data", stop)
    code, out, err = command("data", "prepare", "glyphs")
    assert (code, out) == (130, "")
    assert "stopped; what is finished is kept, and the same command continues from there" in err


def test_prepare_says_how_to_get_what_may_not_be_downloaded(command: Command) -> None:
    said = sentence(command("data", "prepare", "imagenet"))
    assert "ImageNet may not be downloaded here; sign up at https://www.image-net.org/download" in said
    assert "'holdfast data prepare imagenet --from <its folder>'" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["info", "imagnet"], "unknown data set 'imagnet'; did you mean 'imagenet'?"),
        (["info", "folder:/nowhere"], "there is no folder or zip file /nowhere; check the path of folder:/nowhere"),
        (["check", "folder:/nowhere"], "there is no folder or zip file /nowhere"),
        (["check", "folder"], "the path of the images is missing; use --dataset folder:<path>"),
        (
            ["check", "mini-imagenet"],
            "holds no MiniImageNet; run 'holdfast data prepare mini-imagenet', or set data.path",
        ),
        (["check", "mini-imagenet", "--path", "/nowhere"], "there is no MiniImageNet at /nowhere"),
        (["info", "digits", "--path", "/nowhere"], "data.path='/nowhere' has no effect for digits; leave it out"),
        (["info", "digits", "--size", "7"], "data.size = 7 is not possible"),
        (["prepare", "glyphs", "--from", "/nowhere"], "glyphs needs no file; leave --from out"),
        (["prepare", "cifar100", "--from", "/nowhere"], "there is nothing at /nowhere; give the archive or folder of"),
        (["prepare", "folder"], "the path of the images is missing"),
        (["prepare"], "Missing argument"),
        (["lst"], "No such command 'lst'"),
    ],
)
def test_mistakes_are_one_sentence(command: Command, root: Path, words: list[str], says: str) -> None:
    assert says in sentence(command("data", *words))
    assert not root.exists()


def test_an_import_that_is_refused_leaves_nothing(
    command: Command, root: Path, glyphs: DataSet, tmp_path: Path
) -> None:
    """Folders of one's own images need no import; the command says so before it does anything."""
    top = draw_classes(glyphs, tmp_path / "mine")
    assert "your own images stay where they are" in sentence(command("data", "prepare", "folder", "--from", top))
    assert not root.exists()


ARRIVALS = """
rounds = 9
[[arrival]]
round = 1
client = "north"
classes = ["glyph 0", "glyph 1"]
[[arrival]]
round = 1
client = "süd"
classes = ["glyph 1"]
[[arrival]]
round = 4
client = "süd"
classes = ["glyph 2"]
[[arrival]]
round = 5
client = "west"
classes = ["glyph 2"]
[[arrival]]
round = 7
client = "north"
classes = ["glyph 3"]
"""

CONFIG = """
[data]
name = "folder:{place}"
size = 16
[plan]
rounds = 3
selected = 2
growth = "announce"
memory = 12
[train]
epochs = 1
batch = 8
lr = 0.5
[method]
name = "lga"
iterations = 4
perturb_steps = 3
"""


def measured(run: Path) -> tuple[str, list[dict[str, Any]]]:
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in read_record(run)]
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest(), lines


def test_a_federation_of_folders_with_its_own_stream(
    command: Command, glyphs: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    top = draw_clients(glyphs, tmp_path / "mine")
    (top / "arrivals.toml").write_text(ARRIVALS, encoding="utf-8")
    (tmp_path / "config.toml").write_text(CONFIG.format(place=top), encoding="utf-8")
    plan = facts(command("plan", "config.toml", "--json"))
    assert plan["tasks"] == [[0, 1], [2], [3]]
    assert plan["starts"] == [1, 4, 7]
    assert len(plan["selected"]) == 9
    result = facts(command("run", "config.toml", "--out", "serial", "--set", "run.engine=serial", "--json"))
    assert result["task_sizes"] == [2, 1, 1]
    assert result == {"folder": "serial", **read_result(tmp_path / "serial").to_json()}
    written = json.loads((tmp_path / "serial" / "plan.json").read_text())
    assert written == {**written, **{key: value for key, value in plan.items() if key not in ("bytes", "memory")}}

    model, lines = measured(tmp_path / "serial")
    assert [line["task"] for line in lines] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    # The server hears of a class in the round in which it reaches a client, and grows in the next; the first at once.
    grown = {line["round"]: line["grown"] for line in lines if line["grown"]}
    assert grown == {1: ["glyph 0", "glyph 1"], 5: ["glyph 2"], 8: ["glyph 3"]}
    noticed = [set(line["detector"]["hits"]) | {c for c, _ in line["detector"]["late"]} for line in lines]
    assert noticed[0] == {0, 1}  # a client's first images are always new to it
    assert 2 in noticed[4]
    assert all(2 not in line["selected"] for line in lines[:4])  # not there yet
    came = {0: [0, 1], 3: [1], 4: [2], 6: [0]}
    for number, line in enumerate(lines):
        assert sorted(line["detector"]["hits"] + line["detector"]["misses"]) == came.get(number, [])
    sent = [line["bytes"]["proxy"] for line in lines]
    assert sent[0]["shares"] > 0  # prototypes of the first classes, as soon as the head has them
    assert [bytes_["teachers"] > 0 for bytes_ in sent] == [False] * 4 + [True] * 5

    ended = command("run", "config.toml", "--out", "pool", "--set", "run.engine=pool", "--set", "run.workers=2")
    assert ended[0] == 0, ended[2]
    assert measured(tmp_path / "pool") == (model, lines)

    shown = facts(command("resume", "serial", "--json"))
    assert shown == result
    assert measured(tmp_path / "serial") == (model, lines)


def test_a_mistake_in_arrivals_is_said_before_the_run_begins(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    top = draw_clients(glyphs, tmp_path / "mine")
    (top / "arrivals.toml").write_text(ARRIVALS.replace('"west"', '"wets"'), encoding="utf-8")
    words = ["run", "--dataset", f"folder:{top}", "--out", tmp_path / "run"]
    said = sentence(command(*words))
    assert f"{top / 'arrivals.toml'}: arrival 4: there is no client 'wets' in clients/; did you mean 'west'?" in said
    assert not (tmp_path / "run").exists()


def test_a_class_whose_name_is_no_text(command: Command, glyphs: DataSet, tmp_path: Path) -> None:
    """As archives from other systems leave it: it runs, or it is one sentence."""
    top = tmp_path / "mine"
    draw(glyphs, top / "thé", 0, 0, 6)
    try:
        draw(glyphs, top / os.fsdecode("café".encode("latin-1")), 1, 0, 6)
    except OSError:
        pytest.skip("this file system has no such names")
    sets = [
        "data.size=16",
        "plan.clients=2",
        "plan.selected=1",
        "plan.rounds=1",
        "plan.tasks=1",
        "plan.class_share=1.0",
    ]
    words = ["run", "--dataset", f"folder:{top}", "--out", tmp_path / "run", *(w for s in sets for w in ("--set", s))]
    assert "caf\\udce9' is not UTF-8 text; rename it" in sentence(command(*words))
