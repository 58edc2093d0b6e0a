"""Several experiments: which are wanted, which are run, which are not repeated, and what the command prints."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from holdfast.compare import Spec, grid, known_runs, names_of_specs, parse_seeds, parse_specs, run_all
from holdfast.config import Config, load_config, to_toml
from holdfast.errors import HoldfastError
from holdfast.experiment import run_name, run_to_folder
from holdfast.results.record import Result, read_record, read_result

Settings = dict[str, Any]


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("fedavg", [Spec("fedavg")]),
        ("fedavg, lga", [Spec("fedavg"), Spec("lga")]),
        ("lga[cbl=false],lga", [Spec("lga", (("method.cbl", False),)), Spec("lga")]),
        ("fedavg[replay=true, train.lr=0.05]", [Spec("fedavg", (("method.replay", True), ("train.lr", 0.05)))]),
        ("lga[form=sigmoid]", [Spec("lga", (("method.form", "sigmoid"),))]),
        ("lga[]", [Spec("lga")]),
    ],
)
def test_methods_with_settings(text: str, specs: list[Spec]) -> None:
    assert parse_specs(text) == specs


@pytest.mark.parametrize("text", ["", ",", " ", "lga[cbl=false", "lga[cbl]", "[cbl=false]", "a=b", "lga]", "lga[]]"])
def test_malformed_lists_of_methods(text: str) -> None:
    with pytest.raises(HoldfastError):
        parse_specs(text)


def test_seeds() -> None:
    assert parse_seeds("3, 1,2,1") == [3, 1, 2]


@pytest.mark.parametrize("text", ["", "1,", "one", "1.5", "1;2"])
def test_malformed_lists_of_seeds(text: str) -> None:
    with pytest.raises(HoldfastError, match="is not a list such as 2021,2022,2023"):
        parse_seeds(text)


def named(small: Settings, text: str) -> list[str]:
    specs = parse_specs(text)
    return names_of_specs(specs, grid(lambda settings: load_config(small, settings), specs, [1]))


def test_names_of_rows_are_unambiguous(small: Settings) -> None:
    assert named(small, "fedavg[replay=true],lga[cbl=false],lga") == ["fedavg replay", "lga w/o cbl", "lga"]
    three = named(small, "fedavg[train.lr=0.1], fedavg[train.lr=0.05],fedavg")
    assert three == ["fedavg[train.lr=0.1] = fedavg", "fedavg[train.lr=0.05]", "fedavg[train.lr=0.1] = fedavg"]
    assert named(small, "fedavg[replay=true,train.lr=0.3],lga") == ["fedavg[replay=true,train.lr=0.3]", "lga"]
    two = named(small, "lga[form=sigmoid,train.lr=0.5],lga[form=sigmoid]")
    assert two == ["lga[form=sigmoid,train.lr=0.5]", "lga[form=sigmoid]"]


def test_names_include_settings_that_a_config_has_for_one_method_only(small: Settings) -> None:
    own = {**small, "for": {"lga": {"plan": {"memory": 5}, "train": {"lr": 0.3}}}}
    assert named(own, "fedavg,lga") == [f"fedavg (plan.memory={load_config(small).plan.memory})", "lga (plan.memory=5)"]
    assert named(small, "fedavg,lga[plan.memory=5]")[1] == "lga[plan.memory=5]"


def test_the_grid_has_every_method_with_every_seed(small: Settings) -> None:
    specs = parse_specs("fedavg[train.lr=0.5],lga")
    configs = grid(lambda settings: load_config(small, settings), specs, iter([1, 2]))
    found = [(config.method.name, config.seed, config.train.lr == 0.5) for config in configs]
    assert found == [("fedavg", 1, True), ("fedavg", 2, True), ("lga", 1, False), ("lga", 2, False)]


def test_a_setting_of_one_is_not_taken_for_a_switch(small: Settings) -> None:
    """The names that tell experiments apart in every table."""
    specs = parse_specs("lga[perturb_steps=1],lga[cbl=false],fedavg[replay=true]")
    configs = grid(lambda settings: load_config(small, settings), specs, [1])
    assert [config.method.label for config in configs] == ["lga perturb_steps=1", "lga w/o cbl", "fedavg replay"]


def config_of(small: Settings, seed: int, **method: Any) -> Config:
    return load_config({**small, "seed": seed, "method": method or {"name": "fedavg"}})


def same(a: Result, b: Result) -> bool:
    """Everything that does not depend on the clock."""
    return {**a.to_json(), "seconds": None} == {**b.to_json(), "seconds": None}


def times(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


def test_missing_runs_are_made_and_complete_ones_are_found_in_any_subfolder(small: Settings, tmp_path: Path) -> None:
    first, second = config_of(small, 1), config_of(small, 2)
    alone = run_to_folder(first, tmp_path / "alone").result
    runs = tmp_path / "runs"
    shutil.copytree(tmp_path / "alone", runs / "of last year" / "a")
    before = times(runs)
    one, two, again = run_all([first, second, first], runs)
    assert (one.fresh, one.folder) == (False, runs / "of last year" / "a")
    assert (two.fresh, two.folder) == (True, runs / run_name(second))
    assert again == one
    assert {file: when for file, when in times(runs).items() if file in before} == before
    assert same(one.result, alone)
    assert same(two.result, run_to_folder(second, tmp_path / "second").result)
    assert not any(run.fresh for run in run_all([second, first], runs))
    assert known_runs(runs) == {run_name(first): one.folder, run_name(second): two.folder}


def test_a_run_that_is_not_complete_or_not_ours_is_not_known(small: Settings, tmp_path: Path) -> None:
    assert known_runs(tmp_path / "nowhere") == {}
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / "config.toml").write_text(to_toml(config_of(small, 1)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "result.json").write_text("{}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "result.json").write_text("{}")
    (tmp_path / "old" / "config.toml").write_text("[data]\nno_longer_there = 1\n")
    assert known_runs(tmp_path) == {}


def test_a_damaged_result_is_one_sentence(small: Settings, tmp_path: Path) -> None:
    config = config_of(small, 1)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.toml").write_text(to_toml(config))
    (tmp_path / "a" / "result.json").write_text("{")
    with pytest.raises(HoldfastError, match=r"a/result.json is damaged .*; delete the folder and run it again"):
        run_all([config], tmp_path)


COMPARE = ["compare", "config.toml", "--methods", "fedavg,fedavg[replay=true]", "--seeds", "1,2", "--runs", "runs"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a comparison that was killed in its third run and then repeated."""
    where = tmp_path_factory.mktemp("compared")
    tree = {
        "data": {"name": "glyphs", "classes": 6, "train_per_class": 12, "test_per_class": 6, "size": 16},
        "plan": {"tasks": 3, "clients": 5, "join_per_task": 2, "selected": 3, "rounds": 2, "memory": 12},
        "train": {"epochs": 1, "batch": 16},
    }
    (where / "config.toml").write_text(to_toml(load_config(tree)))
    (where / "folder.png").mkdir()
    line = [sys.executable, "-m", "holdfast", *COMPARE]
    environment = {**os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(line, cwd=where, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    [third] = grid(lambda settings: load_config(tree, settings), parse_specs("fedavg[replay=true]"), [1])
    record = where / "runs" / run_name(third) / "record.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (record.exists() and record.read_bytes().count(b"\n") > 1):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert len(known_runs(where / "runs")) == 2
    (where / "before.json").write_text(json.dumps({str(file): when for file, when in times(where / "runs").items()}))
    again = subprocess.run(line, cwd=where, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stderr
    (where / "stdout").write_text(again.stdout)
    (where / "stderr").write_text(again.stderr)
    return where


def test_a_killed_comparison_continues_where_it_stopped(compared: Path) -> None:
    said = (compared / "stderr").read_text()
    assert "fedavg: continuing after round " in said
    assert [line.split(":")[0] for line in said.splitlines() if " runs: " in line] == ["1 of 2 runs", "2 of 2 runs"]
    done = known_runs(compared / "runs")
    assert len(done) == 4
    before = json.loads((compared / "before.json").read_text())
    finished = {file: when for file, when in before.items() if (Path(file).parent / "result.json") in map(Path, before)}
    assert len({Path(file).parent for file in finished}) == 2
    assert {file: Path(file).stat().st_mtime_ns for file in finished} == finished


def test_a_killed_comparison_has_the_results_of_separate_runs(compared: Path, tmp_path: Path) -> None:
    for name, folder in known_runs(compared / "runs").items():
        alone = run_to_folder(load_config(folder / "config.toml"), tmp_path / name)
        assert same(read_result(folder), alone.result)
        assert [line["round"] for line in read_record(folder)] == [1, 2, 3, 4, 5, 6]


def test_the_table_has_the_results(compared: Path) -> None:
    text = (compared / "stdout").read_text()
    assert "glyphs: accuracy in %" in text
    results = [read_result(folder) for folder in known_runs(compared / "runs").values()]
    for method in ("fedavg", "fedavg replay"):
        averages = [result.average_accuracy for result in results if result.method == method]
        [line] = [line for line in text.splitlines() if line.strip().startswith(f"{method}  ")]
        assert f"{50 * sum(averages):.1f} ±" in line


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(compared: Path, monkeypatch: pytest.MonkeyPatch, holdfast: Command) -> Command:
    """The comparison again, with more words."""
    monkeypatch.chdir(compared)
    return lambda *words: holdfast(*COMPARE, *words)


def test_every_form_of_the_command(command: Command, tmp_path: Path) -> None:
    _, out, _ = command("--format", "csv", "--save", str(tmp_path / "all"), "--picture", str(tmp_path / "curves.png"))
    assert [row["method"] for row in csv.DictReader(out.splitlines())] == ["fedavg", "fedavg replay"]
    saved = {file.name: file.read_text() for file in (tmp_path / "all").iterdir()}
    assert set(saved) == {f"comparison.{suffix}" for suffix in ("md", "tex", "csv", "json")}
    assert saved["comparison.csv"] == out
    for form, suffix in (("markdown", "md"), ("latex", "tex"), ("json", "json")):
        assert command("--format", form) == (0, saved[f"comparison.{suffix}"], "")
    code, out, err = command("--json", "--reference", "fedavg", "--measure", "f1-batchwise128")
    assert (code, err, json.loads(out)["reference"]) == (0, "", "fedavg")
    assert json.loads(out)["measure"] == "f1-batchwise128"
    with Image.open(tmp_path / "curves.png") as picture:
        assert picture.width > 600


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--measure", "f2"], "unknown --measure f2; use accuracy, f1, recall,"),
        (["--reference", "lga"], "--reference 'lga' is not one of the compared methods: fedavg, fedavg replay"),
        (["--methods", "fedagv"], "unknown method 'fedagv'; did you mean 'fedavg'?"),
        (["--methods", "fedavg[replai=true]"], "unknown setting 'method.replai'; did you mean 'replay'?"),
        (["--methods", "lga[cbl]"], "'cbl' is not of the form"),
        (["--seeds", "x"], "--seeds 'x' is not a list such as"),
        (["--seeds", "-1"], "seed = -1 is not possible"),
        (["--format", "html"], "Invalid value for '--format'"),
        (["--set", "seed=4"], "which --seeds lists; use --seeds"),
        (["--set", "method.name=lga"], "which --methods lists; use --methods"),
        (["--methods", "fedavg[method.name=lga]"], "'fedavg[method.name=lga]' names two methods"),
        (["--methods", "fedavg[name=lga]"], "'fedavg[name=lga]' names two methods"),
        (["--seeds", "9", "--save", "config.toml"], "config.toml is a file; choose another"),
        (["--seeds", "9", "--picture", "config.toml/a.png"], "config.toml is a file; choose another"),
        (["--seeds", "9", "--picture", "folder.png"], "cannot write folder.png, which is a folder"),
        (
            ["--seeds", "9", "--picture", "a.jpg"],
            "--picture a.jpg would be a PNG file; give it a name that ends in .png",
        ),
        (["--methods", "fedavg,lga[plan.tasks=2]"], "lga[plan.tasks=2] has plan.tasks=2 and fedavg has 3"),
        (
            ["--methods", "fedavg,lga[data.seed=2]"],
            "has 0, so they cannot be compared; set data.seed",
        ),
        (["--methods", "fedavg,lga[plan.order=random:3]"], "plan.order=random:3 and fedavg has natural"),
        (["--methods", "lga[plan.order=[1,2]]"], "is not a list such as"),
        (
            ["--methods", 'lga[plan.order="1,2"]'],
            "--methods 'lga[plan.order=\"1,2\"]': '2\"' is not of the form key=value",
        ),
        (["--set", "plan.tasks=4"], "plan.tasks=4 does not divide 6 classes"),
    ],
)
def test_bad_input_is_one_sentence(command: Command, compared: Path, words: list[str], says: str) -> None:
    before = times(compared)
    code, out, err = command(*words)
    assert (code, out, err.strip().count("\n")) == (2, "", 0)
    assert says in err
    assert times(compared) == before


def test_sizes_of_tasks_with_and_without_brackets(command: Command) -> None:
    for sizes in ("3,4", "[3,4]"):
        code, _, err = command("--tasks", sizes)
        assert (code, err.strip().count("\n")) == (2, 0)
        assert "plan.tasks=[3, 4]" in err


def test_specs_of_one_method_are_rows_with_their_own_names(command: Command) -> None:
    """Nothing is run: the runs of the first two exist already."""
    specs = "fedavg[train.lr=0.1],fedavg,fedavg[replay=true]"
    code, out, _ = command("--methods", specs, "--reference", "fedavg", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["reference"] == "fedavg[train.lr=0.1] = fedavg"
    assert [row["method"] for row in facts["rows"]] == ["fedavg[train.lr=0.1] = fedavg", "fedavg replay"]
    assert json.loads(command("--methods", specs, "--reference", "fedavg[train.lr = 0.1]", "--json")[1]) == facts


def test_stopping_it_says_how_to_continue(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.results.run_all", stop)
    code, out, err = command()
    assert (code, out) == (130, "")
    assert "stopped; what is finished is kept, and the same command continues from there" in err
