"""What a new user meets: slips are answered with the way out, runs that are not finished can be read, and so on."""

import csv
import io
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from holdfast import experiment, locks
from holdfast.checkpoint import Checkpoints
from holdfast.config import CONFIGS, config_file, describe, load_config
from holdfast.errors import HoldfastError
from holdfast.experiment import resume, run_to_folder
from holdfast.methods import METHODS
from holdfast.predict import predict
from holdfast.results.record import read_record, read_result
from holdfast.results.tables import result_lines

Command = Callable[..., tuple[int, str, str]]
SITES = {"north": "ab", "south": "abc"}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites with up to three classes, each a shade."""
    top = tmp_path_factory.mktemp("sites")
    rng = np.random.Generator(np.random.PCG64(5))
    for site, classes in SITES.items():
        for name in classes:
            place = top / "clients" / site / name
            place.mkdir(parents=True)
            for i in range(10):
                pixels = rng.integers(0, 60, (16, 16, 3)) + 30 + 80 * "abc".index(name)
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{i}.png")
    return top


def settings_of(sites: Path) -> dict[str, Any]:
    return {
        "data": {"name": f"folder:{sites}", "size": 16},
        "plan": {"tasks": [2, 1], "rounds": 2, "memory": 9},
        "train": {"epochs": 1, "batch": 8},
        "method": {"name": "fedavg", "replay": True},
    }


@pytest.fixture(scope="module")
def finished(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_to_folder(load_config(settings_of(sites)), tmp_path_factory.mktemp("runs") / "finished").folder


@pytest.fixture(scope="module")
def stopped(sites: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its third round of four."""
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    save = Checkpoints.save

    def stop(self: Checkpoints, done: int, *rest: Any) -> None:
        save(self, done, *rest)
        if done == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            run_to_folder(load_config(settings_of(sites)), folder)
    return folder


# slips


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("lr=0.1", "unknown setting 'lr'; did you mean 'train.lr'?"),
        ("plan.lr=0.1", "unknown setting 'plan.lr'; did you mean 'train.lr'?"),
        ("replay=true", "unknown setting 'replay'; did you mean 'method.replay'?"),
        ("size=32", "unknown setting 'size'; did you mean 'data.size'?"),
    ],
)
def test_a_setting_without_its_section_is_recognised(holdfast: Command, setting: str, says: str) -> None:
    code, _, err = holdfast("run", "--set", setting)
    assert (code, says in err) == (2, True), err


def test_another_run_in_the_folder_is_told_apart(finished: Path, sites: Path) -> None:
    other = load_config({**settings_of(sites), "method": {"name": "fedavg"}, "seed": 5})
    with pytest.raises(HoldfastError, match=r"finished holds another run: seed is 2021 there and 5 here \(1 more sett"):
        run_to_folder(other, finished)
    other = load_config({**settings_of(sites), "method": {"name": "fedavg"}})
    with pytest.raises(HoldfastError, match=r": method.replay is True there and False here; choose another folder"):
        run_to_folder(other, finished)


def test_a_path_that_is_not_there(holdfast: Command, finished: Path) -> None:
    code, _, err = holdfast("run", "--dataset", "folder:/nope")
    assert (code, err.strip()) == (2, "holdfast: there is no folder or zip file /nope; check the path of folder:/nope")
    code, _, err = holdfast("predict", finished, "missing.png")
    assert (code, err.strip()) == (2, "holdfast: there is no image missing.png; check the path")


@pytest.mark.parametrize("name", ["demo", "demo.toml", "configs/demo.toml"])
def test_a_packaged_config_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(Path(name)) == load_config(CONFIGS / "demo.toml")
    (tmp_path / "demo").write_text("seed = 3")
    assert load_config(Path("demo")).seed == 3  # a file of the user's own comes first
    with pytest.raises(HoldfastError, match=r"there is no config 'dmeo'.*did you mean 'demo'\?"):
        config_file(Path("dmeo"))


def test_values_from_numpy_are_values() -> None:
    """Each is stored as the plain value that a TOML file has."""
    written = load_config({"plan": {"tasks": np.array([10, 15]), "clients": np.int64(7), "memory": (5,)[0]}})
    assert (written.plan.tasks, written.plan.clients) == ([10, 15], 7)
    flags = [("train.lr", np.float64(0.5)), ("plan.order", tuple(np.arange(25))), ("data.path", None)]
    config = load_config(None, flags)
    assert (config.train.lr, config.plan.order) == (0.5, list(range(25)))
    assert type(config.train.lr) is float
    assert load_config({"data": {"name": "tiny-imagenet", "path": Path("/x")}}).data.path == "/x"


def test_without_file_locks_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with (
        open(tmp_path / "lock", "w") as file,
        pytest.raises(HoldfastError, match=r"no file locks .* on Windows, use Holdfast inside WSL"),
    ):
        locks.lock_file(file)


def test_settings_of_one_method(holdfast: Command) -> None:
    rows = {row["setting"]: row for row in json.loads(holdfast("settings", "--method", "icarl", "--json")[1])}
    assert rows["train.lr"]["default"] == str(METHODS["icarl"]().preset.lr)
    assert "method.inference" in rows
    assert "method.replay" not in rows
    assert not any(row[1] == "(preset)" for row in describe("lga"))
    code, _, err = holdfast("settings", "--method", "icral")
    assert (code, "did you mean 'icarl'?" in err) == (2, True)


def test_compare_writes_where_out_says_and_compares_with_the_first(holdfast: Command, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        '[data]\nname = "glyphs"\nclasses = 4\ntrain_per_class = 6\ntest_per_class = 4\nsize = 16\n'
        "[plan]\ntasks = 2\nclients = 2\nmove_on = 1.0\njoin_per_task = 0\nselected = 2\n"
        "class_share = 1.0\nrounds = 1\n[train]\nepochs = 1\n"
    )
    words = ["compare", config, "--methods", "fedavg[replay=true],fedavg", "--seeds", "1"]
    code, out, _ = holdfast(*words, "--out", tmp_path / "runs", "--json")
    assert (code, json.loads(out)["reference"]) == (0, "fedavg replay")
    assert len(list((tmp_path / "runs").iterdir())) == 2
    code, out, _ = holdfast(*words, "--runs", tmp_path / "runs", "--reference", "fedavg", "--json")
    assert (code, json.loads(out)["reference"]) == (0, "fedavg")


# what is shown of a run


def test_clients_have_names_and_unused_settings_are_left_out(holdfast: Command, finished: Path, tmp_path: Path) -> None:
    result = read_result(finished)
    assert result.worst_client["name"] == list(SITES)[result.worst_client["client"]]
    assert f"worst: {result.worst_client['name']} with" in holdfast("show", finished)[1]
    assert holdfast("report", finished, "--out", tmp_path / "page.html")[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "plan.memory" in page
    assert "plan.join_per_task" not in page
    assert "plan.class_share" not in page


def test_a_detector_is_mentioned_only_where_there_is_one(
    holdfast: Command, small: dict[str, Any], tmp_path: Path
) -> None:
    quick = {"name": "lga", "iterations": 2, "perturb_steps": 1}
    for detector, there in (("oracle", False), ("auto", True)):
        config = load_config({**small, "method": {**quick, "detector": detector}})
        run_to_folder(config, tmp_path / detector)
        assert ("new classes noticed at once" in holdfast("show", tmp_path / detector)[1]) == there
        holdfast("report", tmp_path / detector, "--out", tmp_path / "page.html")
        assert ("<h3>Detector</h3>" in (tmp_path / "page.html").read_text()) == there


def test_the_line_before_training_and_the_hint_at_chance(holdfast: Command, sites: Path, tmp_path: Path) -> None:
    words = ["--dataset", f"folder:{sites}", "--tasks", "2,1", "--set", "data.size=16", "--set", "plan.rounds=1"]
    code, out, err = holdfast("run", *words, "--set", "train.lr=1e-9", "--out", tmp_path / "run")
    assert code == 0
    # North has 8 + 8 training images in the first task and none in the second, South 8 + 8 and then 8; two epochs.
    assert "chance is 50.0%, at the end 33.3%; 2-4 steps per round and client in batches of 8; 8 images per" in err
    assert "images are not mirrored: if left and right do not matter, set data.flip=true" in err
    assert "this is no better than chance (33.3 %)" in out
    learned = replace(read_result(tmp_path / "run"), last_accuracy=0.9)
    assert not any("no better than chance" in line for line in result_lines(learned))
    _, _, err = holdfast("run", *words, "--set", "data.flip=false", "--out", tmp_path / "said")
    assert "chance is" in err
    assert "mirrored" not in err


# runs that are not finished


def test_a_stopped_run_is_shown_as_far_as_it_came(holdfast: Command, stopped: Path, finished: Path) -> None:
    before = {file: file.read_bytes() for file in stopped.rglob("*") if file.is_file()}
    code, out, err = holdfast("show", stopped, "--json")
    assert code == 0
    said = f"{stopped} is not finished: this is round 3 of 4; go on with: holdfast resume {stopped}"
    assert err.strip() == said
    shown, lines = json.loads(out), read_record(finished)
    assert shown["accuracy_after_task"] == [lines[1]["accuracy"], lines[2]["accuracy"]]
    assert shown["last_accuracy"] == lines[2]["accuracy"]
    counts = np.array(shown["confusion"])
    assert np.trace(counts) / counts.sum() == pytest.approx(lines[2]["accuracy"])
    assert shown["experiment"] == read_result(finished).experiment
    assert {file: file.read_bytes() for file in stopped.rglob("*") if file.is_file()} == before


def test_a_stopped_run_is_reported_exported_and_asked(
    holdfast: Command, stopped: Path, sites: Path, tmp_path: Path
) -> None:
    said = f"go on with: holdfast resume {stopped}"
    code, _, err = holdfast("report", stopped, "--out", tmp_path / "page.html")
    assert (code, said in err) == (0, True)
    assert said in (tmp_path / "page.html").read_text()
    code, out, err = holdfast("export", stopped, "--out", tmp_path / "csv")
    assert (code, said in err) == (0, True)
    assert [row["round"] for row in csv.DictReader(io.StringIO(Path(out.strip()).read_text()))] == ["1", "2", "3"]
    code, _, err = holdfast("export", stopped, "--format", "card", "--out", tmp_path)
    assert (code, said in (tmp_path / "stopped.md").read_text()) == (0, True)
    code, out, err = holdfast("predict", stopped, sites / "clients" / "south" / "c" / "0.png", "--json")
    assert (code, said in err) == (0, True)
    assert set(json.loads(out)[0]["classes"]) == set("abc")


def test_the_model_so_far_is_that_of_a_run_that_ends_there(stopped: Path, sites: Path, tmp_path: Path) -> None:
    """A copy is resumed; its model after the last round differs from the one so far, and the stopped run's does not."""
    images = [sites / "clients" / "south"]
    again = tmp_path / "again"
    shutil.copytree(stopped, again)
    so_far = predict(stopped, images)
    assert predict(again, images) == so_far
    resume(again)
    assert predict(again, images) != so_far
    assert predict(again / "model.safetensors", images) == predict(again, images)


def test_a_run_without_a_round_says_so(holdfast: Command, sites: Path, tmp_path: Path) -> None:
    config = load_config(settings_of(sites))
    experiment._prepare(tmp_path / "new", config)
    for words in (["show"], ["predict"]):
        code, _, err = holdfast(*words, tmp_path / "new", *(["x.png"] if words == ["predict"] else []))
        assert code == 2
        assert f"has no finished round yet; go on with: holdfast resume {tmp_path / 'new'}" in err


# predict and export


def test_predict_on_folders_with_a_table(holdfast: Command, finished: Path, sites: Path, tmp_path: Path) -> None:
    folder, table = sites / "clients" / "north", tmp_path / "tables" / "answers.csv"
    code, out, _ = holdfast("predict", finished, folder, "--top-k", "2", "--csv", table, "--json")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(table.read_text())))
    assert [row["image"] for row in rows] == sorted(str(file) for file in folder.rglob("*.png"))
    assert list(rows[0]) == ["image", "class_1", "probability_1", "class_2", "probability_2"]
    for row, guess in zip(rows, json.loads(out), strict=True):
        assert [row["class_1"], row["class_2"]] == guess["classes"]
        assert float(row["probability_1"]) == pytest.approx(guess["probabilities"][0])
    (tmp_path / "empty").mkdir()
    code, _, err = holdfast("predict", finished, tmp_path / "empty")
    assert (code, "holds no images; check the path" in err) == (2, True)


def test_a_model_card(holdfast: Command, finished: Path, tmp_path: Path) -> None:
    code, out, _ = holdfast("export", finished, "--format", "card", "--out", tmp_path)
    assert (code, out.strip()) == (0, str(tmp_path / "finished.md"))
    card, result = (tmp_path / "finished.md").read_text(), read_result(finished)
    assert f"- method: {result.method}\n" in card
    assert f"| all classes at the end | {100 * result.last_accuracy:.1f} |" in card
    assert f"worst client ({result.worst_client['name']})" in card
    for i, name in enumerate(result.classes):
        right, images = result.confusion[i][i], sum(result.confusion[i])
        assert re.search(rf"^\| {name} \| {images} \| {100 * right / images:.1f} \|", card, re.M)


def test_export_needs_a_place(holdfast: Command, finished: Path) -> None:
    code, _, err = holdfast("export", finished)
    assert (code, "name the folder to write to with --out" in err) == (2, True)
