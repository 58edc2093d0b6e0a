"""A run from the command line to its folder, and everything that is read from it."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import holdfast
from holdfast.config import load_config
from holdfast.data.sources import load_data
from holdfast.results.record import read_record, read_result

CONFIG = """
[data]
name = "glyphs"
classes = 6
train_per_class = 12
test_per_class = 6
size = 16
[plan]
tasks = 3
clients = 5
join_per_task = 2
selected = 3
rounds = 2
move_on = 0.7
memory = 12
[train]
epochs = 1
batch = 16
[method]
name = "fedavg"
replay = true
"""


def command(*words: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The real command in a fresh process."""
    environment = {**os.environ, "COLUMNS": "200", **variables}
    line = [sys.executable, "-m", "holdfast", *map(str, words)]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a finished run."""
    where = tmp_path_factory.mktemp("e2e")
    (where / "config.toml").write_text(CONFIG)
    done = command("run", "config.toml", "--seed", "3", "--out", "run", cwd=where)
    assert done.returncode == 0, done.stderr
    assert "forgotten" in done.stdout
    assert "run/accuracy.png" in done.stdout
    return where


def test_the_run_folder_is_complete(folder: Path) -> None:
    names = {file.name for file in (folder / "run").iterdir()}
    pictures = {"accuracy.png", "exemplars.png"}
    files = {"config.toml", "plan.json", "record.jsonl", "result.json", "model.safetensors"}
    assert names == {*files, "SHA256SUMS", *pictures}
    sums = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder / "run", capture_output=True, text=True)
    assert {line.partition(":")[0] for line in sums.stdout.splitlines() if line.endswith(": OK")} == files
    assert sums.returncode == 0
    assert load_config(folder / "run" / "config.toml").seed == 3
    with Image.open(folder / "run" / "accuracy.png") as picture:
        assert picture.width > 600


@pytest.mark.parametrize("command", ["show", "report", "predict", "resume"])
@pytest.mark.parametrize("file", ["result.json", "record.jsonl", "model.safetensors"])
def test_a_flipped_byte_is_refused(
    folder: Path, tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]], file: str, command: str
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    more = {"report": ["--out", tmp_path / "page.html"], "predict": [tmp_path / "run" / "exemplars.png"]}
    words = [command, tmp_path / "run", *more.get(command, [])]
    assert holdfast(*words)[0] == 0
    content = bytearray((tmp_path / "run" / file).read_bytes())
    place = content.index(b"0.") + 2 if file != "model.safetensors" else len(content) - 1  # a digit, or a weight
    content[place] ^= 1
    (tmp_path / "run" / file).write_bytes(content)
    code, _, err = holdfast(*words)
    assert (code, err.strip().count("\n")) == (2, 0)
    assert f"{file} is damaged (it does not match its hash in SHA256SUMS)" in err
    if (file, command) == ("model.safetensors", "predict"):  # the same by the name of the file
        code, _, err = holdfast("predict", tmp_path / "run" / file, words[2])
        assert (code, "does not match its hash" in err) == (2, True)
    (tmp_path / "run" / "SHA256SUMS").unlink()  # as in the folder of an older version
    assert holdfast(*words)[0] == 0 or (command, file) == ("report", "record.jsonl")


def test_the_record_has_one_line_per_round_with_all_measurements(folder: Path) -> None:
    lines = read_record(folder / "run")
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["task"] for line in lines] == [1, 1, 2, 2, 3, 3]
    with safe_open(folder / "run" / "model.safetensors", framework="pt") as model:
        weights = {name: model.get_tensor(name) for name in model.keys()}  # noqa: SIM118
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    for line in lines:
        assert {"accuracy", "macro_f1", "macro_recall", "losses", "detector", "seconds"} <= set(line)
        assert len(line["task_accuracy"]) == line["task"]
        assert line["accuracy"] == pytest.approx(np.mean(line["task_accuracy"]))
        assert line["accuracy"] == pytest.approx(line["macro_recall"])  # the test set is balanced
        assert set(line["losses"]) == {"classification"}
        assert set(line["seconds"]) == {
            "grow",
            "observe",
            "train",
            "check",
            "aggregate",
            "proxy",
            "remember",
            "begin",
            "finish",
            "evaluate",
        }
    sent = {"down": 3 * size, "up": 3 * size, "task_end": 9 * size}  # to three selected of nine clients
    assert lines[-1]["bytes"]["server"] == {**sent, "extras": 0, "observed": 0, "announced": 0}


def test_the_result_follows_from_the_record(folder: Path) -> None:
    lines, result = read_record(folder / "run"), read_result(folder / "run")
    ends = [lines[1], lines[3], lines[5]]
    assert result.accuracy_matrix == [line["task_accuracy"] for line in ends]
    assert result.accuracy_after_task == [line["accuracy"] for line in ends]
    assert result.average_accuracy == pytest.approx(np.mean(result.accuracy_after_task))
    assert result.last_accuracy == lines[-1]["accuracy"]
    best = [max(m[k] for m in result.accuracy_matrix[k:2]) for k in range(2)]
    assert result.forgetting == pytest.approx(np.mean([best[k] - result.accuracy_matrix[2][k] for k in range(2)]))
    counts = np.array(result.confusion)
    assert counts.sum() == 36
    assert np.trace(counts) / 36 == pytest.approx(result.last_accuracy)
    assert result.bytes["server"]["up"] == sum(line["bytes"]["server"]["up"] for line in lines)


def test_fairness_follows_from_plan_and_confusion(folder: Path) -> None:
    result = read_result(folder / "run")
    plan = json.loads((folder / "run" / "plan.json").read_text())
    order = [c for task in plan["tasks"] for c in task]
    recall = {c: result.confusion[i][i] / 6 for i, c in enumerate(order)}
    scores, groups = [], {"Zo": [], "Zn": [], "Za": []}  # type: ignore[var-annotated]
    for arrivals in plan["arrivals"]:
        held = {c for arrival in arrivals for c in arrival["classes"]}
        scores.append(np.mean([recall[c] for c in held]))
        last = arrivals[-1]  # the last task begins in round 5
        kind = "Za" if arrivals[0]["round"] == 5 else "Zn" if last["round"] == 5 and last["classes"] else "Zo"
        groups[kind].append(scores[-1])
    assert result.worst_client["accuracy"] == pytest.approx(min(scores))
    assert scores[int(result.worst_client["client"])] == pytest.approx(min(scores))
    for kind, values in groups.items():
        assert result.group_accuracy[kind] == pytest.approx(np.mean(values))


def digest(run: Path) -> tuple[str, list[dict[str, Any]], str]:
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in read_record(run)]
    model = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    return model, lines, (run / "plan.json").read_text()


def test_same_seed_same_bits_in_two_fresh_processes(folder: Path) -> None:
    again = command(
        "run", "config.toml", "--seed", "3", "--out", "again", cwd=folder, PYTHONHASHSEED="77", OMP_NUM_THREADS="2"
    )
    assert again.returncode == 0, again.stderr
    assert digest(folder / "again") == digest(folder / "run")


def test_python_gives_the_same_result_and_leaves_global_generators_alone(folder: Path, tmp_path: Path) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index,union-attr]
    threads = torch.get_num_threads()
    result = holdfast.run(folder / "config.toml", out=tmp_path / "run", seed=3)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index,union-attr]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.get_num_threads() == threads
    there = {**read_result(folder / "run").to_json(), "seconds": None}
    assert {**result.to_json(), "seconds": None} == there
    other = holdfast.run(
        str(folder / "config.toml"), out=tmp_path / "other", method="joint", tasks=2, train={"epochs": 2}
    )
    assert (other.method, other.task_sizes) == ("joint", [3, 3])


def test_a_finished_run_is_not_computed_again(folder: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in (folder / "run").iterdir()}
    again = command("run", "config.toml", "--seed", "3", "--out", "run", "--json", cwd=folder)
    assert json.loads(again.stdout)["last_accuracy"] == read_result(folder / "run").last_accuracy
    assert {file: file.stat().st_mtime_ns for file in (folder / "run").iterdir()} == before


@pytest.mark.parametrize("setting", ["run.device=cpu", "metrics=batchwise128"])
def test_settings_of_engine_and_metrics_do_not_make_it_another_run(folder: Path, setting: str) -> None:
    again = command("run", "config.toml", "--seed", "3", "--out", "run", "--set", setting, cwd=folder)
    assert again.returncode == 0, again.stderr
    assert "complete already" in again.stdout
    assert ("averaged over batches of 128" in again.stdout) == setting.startswith("metrics")


def test_two_processes_do_not_write_to_one_folder(folder: Path) -> None:
    words = ["config.toml", "--out", "both", "--set", "plan.rounds=12"]
    line = [sys.executable, "-m", "holdfast", "run", *words]
    both = [subprocess.Popen(line, cwd=folder, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = sorted((process.wait(timeout=300), process.communicate()[1]) for process in both)
    assert [code for code, _ in ends] in ([0, 2], [0, 0])  # a late second one finds the run complete
    assert all("is being written by another process" in said for code, said in ends if code == 2)
    assert [line["round"] for line in read_record(folder / "both")] == list(range(1, 37))


def test_another_config_does_not_overwrite_a_run(folder: Path) -> None:
    before = digest(folder / "run")
    refused = command("run", "config.toml", "--seed", "4", "--out", "run", cwd=folder)
    assert refused.returncode == 2
    assert "run holds another run: seed is 3 there and 4 here; choose another folder" in refused.stderr
    assert digest(folder / "run") == before


def test_show_prints_the_table_and_json(folder: Path) -> None:
    shown = command("show", "run", cwd=folder)
    assert shown.returncode == 0
    assert "fedavg replay on glyphs, seed 3" in shown.stdout
    assert "batches of 128" not in shown.stdout
    assert "batches of 128" in command("show", "run", "--metrics", "batchwise128", cwd=folder).stdout
    result = json.loads(command("show", "run", "--json", cwd=folder).stdout)
    assert result == read_result(folder / "run").to_json()


def test_predict_names_classes_as_the_model_scores_them(folder: Path, tmp_path: Path) -> None:
    data = load_data(load_config(folder / "run" / "config.toml").data)
    files = []
    for i in range(len(data.test)):
        files.append(tmp_path / f"{i}.png")
        Image.fromarray(data.test.images[i].permute(1, 2, 0).numpy()).save(files[-1])
    answer = command("predict", folder / "run", *files, "--json", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr == ""
    guesses = json.loads(answer.stdout)
    truth = [data.classes[c] for c in data.test.labels.tolist()]
    right = np.mean([guess["classes"][0] == name for guess, name in zip(guesses, truth, strict=True)])
    assert right == pytest.approx(read_result(folder / "run").last_accuracy)
    assert all(1 >= g["probabilities"][0] >= g["probabilities"][1] >= 0 for g in guesses)


def test_plan_is_what_the_run_used(folder: Path) -> None:
    printed = command("plan", "config.toml", "--seed", "3", "--json", cwd=folder)
    plan = json.loads(printed.stdout)
    foretold = plan.pop("bytes")
    assert plan.pop("memory")["total"] > 0
    assert plan == json.loads((folder / "run" / "plan.json").read_text())
    lines = [json.loads(line) for line in (folder / "run" / "record.jsonl").read_text().splitlines()]
    assert [sent["server"]["down"] for sent in foretold] == [line["bytes"]["server"]["down"] for line in lines]
    assert "Za join" in command("plan", "config.toml", cwd=folder).stdout


def test_runs_are_shown_side_by_side_with_a_picture(
    folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    here, run, picture = request.getfixturevalue("holdfast"), folder / "run", tmp_path / "both.png"
    code, shown, _ = here("show", run, run, "--markdown", "--picture", picture)
    assert code == 0
    assert "| method | seeds |" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "mean (± standard deviation) over seeds" in here("show", run, run)[1]


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code, _, said = request.getfixturevalue("holdfast")("resume", tmp_path)
    assert code == 2
    assert "holds no config.toml; give the folder of a run" in said


def test_the_version_is_that_of_the_package(request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue("holdfast")("--version")[1].strip() == holdfast.__version__


def test_methods_and_settings_are_listed(folder: Path) -> None:
    assert {"fedavg", "joint"} <= set(json.loads(command("methods", "--json", cwd=folder).stdout))
    assert any(row["setting"] == "plan.memory" for row in json.loads(command("settings", "--json", cwd=folder).stdout))


def test_a_run_that_diverges_keeps_its_finished_rounds(folder: Path) -> None:
    words = ["config.toml", "--out", "diverged", "--set", "train.lr=100", "--set", "train.epochs=6"]
    failed = command("run", *words, cwd=folder)
    assert failed.returncode == 2
    assert "no client's update could be used in round" in failed.stderr
    assert "lower train.lr" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert (folder / "diverged" / "config.toml").exists()
    read_record(folder / "diverged")
    assert not (folder / "diverged" / "result.json").exists()
