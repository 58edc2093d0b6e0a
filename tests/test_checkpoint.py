"""Checkpoints: a run that was stopped ends with the same bits, and a damaged checkpoint is noticed."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import checkpoint
from holdfast.checkpoint import Checkpoints
from holdfast.config import Config, load_config, to_toml
from holdfast.data.sources import load_data
from holdfast.engines.serial import Serial
from holdfast.errors import HoldfastError
from holdfast.experiment import build_federation, plan_of, resume, run_to_folder
from holdfast.results.record import read_record
from holdfast.simulation.federation import Federation
from holdfast.simulation.rounds import run_rounds

METHODS: list[dict[str, Any]] = [
    {"name": "fedavg", "replay": True},
    {"name": "lga", "iterations": 2, "perturb_steps": 1},
    {"name": "lga", "iterations": 2, "perturb_steps": 1, "detector": "fixed", "psr": False},
]


SETTINGS = {"seed": 1, "train": {"lr": 0.1}}  # what a checkpoint says about its run


def federation_of(settings: dict[str, Any]) -> Federation:
    config = load_config(settings)
    data = load_data(config.data)
    return build_federation(config, data, plan_of(config, data))


def lines_of(rounds: list[Any]) -> list[Any]:
    return [{key: value for key, value in done.line.items() if key != "seconds"} for done in rounds]


def assert_same(a: Federation, b: Federation) -> None:
    assert a.server.registry == b.server.registry
    for name, tensor in a.server.weights.items():
        assert torch.equal(tensor, b.server.weights[name]), name
    for client in range(len(a.plan.arrivals)):
        assert a.population.state(client).to_bytes() == b.population.state(client).to_bytes(), client


@pytest.mark.parametrize("growth", ["schedule", "announce"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_going_on_from_any_round_gives_the_same_bits(
    small: dict[str, Any], tmp_path: Path, method: dict[str, Any], growth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SEGMENTS", 2)  # so that all states are rewritten as one on the way
    settings = {**small, "plan": {**small["plan"], "growth": growth}, "method": method}
    whole = federation_of(settings)
    expected = lines_of(list(run_rounds(whole, Serial())))
    for stop in (1, 3, 4):
        checkpoints = Checkpoints(tmp_path, SETTINGS)
        first = federation_of(settings)
        for number, done in enumerate(run_rounds(first, Serial())):
            checkpoints.save(number + 1, first, done.counts)
            if number + 1 == stop:
                break
        second = federation_of(settings)
        done_rounds, counts, complaints = Checkpoints(tmp_path, SETTINGS).restore(second)
        assert (done_rounds, complaints) == (stop, [])
        assert counts is not None
        assert counts.tolist() == done.counts.tolist()
        assert lines_of(list(run_rounds(second, Serial(), start=stop))) == expected[stop:]
        assert_same(second, whole)
        checkpoints.remove()
        assert list(tmp_path.iterdir()) == []


def saved(settings: dict[str, Any], folder: Path, rounds: int) -> Checkpoints:
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder, SETTINGS)
    federation = federation_of(settings)
    for number, done in zip(range(rounds), run_rounds(federation, Serial()), strict=False):
        checkpoints.save(number + 1, federation, done.counts)
    return checkpoints


@pytest.mark.parametrize("harm", ["cut", "flip", "gone", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_and_said(small: dict[str, Any], tmp_path: Path, harm: str) -> None:
    settings = {**small, "method": METHODS[0]}
    checkpoints = saved(settings, tmp_path, 3)
    newest, before = (json.loads(json.loads(checkpoints._manifest(n).read_text())["body"]) for n in (3, 2))
    blob = checkpoints.folder / newest["parts"]["server/model"]
    assert newest["parts"]["server/model"] != before["parts"]["server/model"]
    content = blob.read_bytes()
    if harm == "cut":
        blob.write_bytes(content[: len(content) // 2])
    elif harm == "flip":
        blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "gone":
        blob.unlink()
    else:
        text = checkpoints._manifest(3).read_text()
        checkpoints._manifest(3).write_text(text.replace("done", "DONE"))
    federation = federation_of(settings)
    done, _, complaints = Checkpoints(tmp_path, SETTINGS).restore(federation)
    assert done == 2
    assert len(complaints) == 1
    assert "trying the one before" in complaints[0]
    whole = federation_of(settings)
    list(run_rounds(whole, Serial()))
    list(run_rounds(federation, Serial(), start=2))
    assert_same(federation, whole)


def test_with_no_valid_checkpoint_left_it_starts_over(small: dict[str, Any], tmp_path: Path) -> None:
    checkpoints = saved({**small, "method": METHODS[0]}, tmp_path, 3)
    for file, text in zip(sorted(checkpoints.folder.glob("round-*.json")), ("[]", '{"body": 5}'), strict=True):
        file.write_text(text)
    done, counts, complaints = Checkpoints(tmp_path, SETTINGS).restore(federation_of({**small, "method": METHODS[0]}))
    assert (done, counts, len(complaints)) == (0, None, 3)
    assert "starting from round 1" in complaints[-1]
    saved({**small, "method": METHODS[0]}, tmp_path, 1)  # a checkpoint of an earlier round than those that were lost
    assert Checkpoints(tmp_path, SETTINGS).restore(federation_of({**small, "method": METHODS[0]}))[0] == 1


def test_a_damaged_part_is_written_again(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "method": METHODS[0]}
    checkpoints = saved(settings, tmp_path, 3)
    parts = json.loads(json.loads(checkpoints._manifest(3).read_text())["body"])["parts"]
    blob = checkpoints.folder / parts["server/model"]
    blob.write_bytes(blob.read_bytes()[:-1])
    assert Checkpoints(tmp_path, SETTINGS).restore(federation_of(settings))[0] == 2
    saved(settings, tmp_path, 3)  # the same bits again, and so the same names
    assert Checkpoints(tmp_path, SETTINGS).restore(federation_of(settings))[0] == 3


def test_a_part_that_cannot_be_read_now_is_said_and_nothing_is_lost(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "method": METHODS[0]}
    checkpoints = saved(settings, tmp_path, 2)
    parts = json.loads(json.loads(checkpoints._manifest(2).read_text())["body"])["parts"]
    blob = checkpoints.folder / parts["server/model"]
    blob.rename(tmp_path / "aside")
    blob.mkdir()  # no permission, or a failing disk, is the same to us
    with pytest.raises(HoldfastError, match=r"cannot read .* fix that and run again"):
        Checkpoints(tmp_path, SETTINGS).restore(federation_of(settings))
    blob.rmdir()
    (tmp_path / "aside").rename(blob)
    assert Checkpoints(tmp_path, SETTINGS).restore(federation_of(settings))[0] == 2


def test_another_version_is_refused_and_nothing_is_lost(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "method": METHODS[0]}
    checkpoints = saved(settings, tmp_path, 2)
    before = {file.name: file.read_bytes() for file in checkpoints.folder.iterdir()}
    for file in checkpoints.folder.glob("round-*.json"):
        body = json.loads(json.loads(file.read_text())["body"]) | {"version": "99"}
        text = json.dumps(body)
        file.write_text(json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}))
        before[file.name] = file.read_bytes()
    with pytest.raises(HoldfastError, match=r"started by version 99 .* continue it with that version, or run it again"):
        Checkpoints(tmp_path, SETTINGS).restore(federation_of(settings))
    assert {file.name: file.read_bytes() for file in checkpoints.folder.iterdir()} == before


@pytest.mark.parametrize("harm", ["shorter", "altered", "gone"])
def test_a_record_that_is_not_the_checkpoints_is_noticed_before_any_training(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    config = load_config({**small, "method": METHODS[0]})

    def stop(self: Checkpoints, *args: Any) -> None:
        original(self, *args)
        if args[0] == 4:
            raise KeyboardInterrupt

    original = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", stop)
    with pytest.raises(KeyboardInterrupt):
        run_to_folder(config, tmp_path / "run")
    record = tmp_path / "run" / "record.jsonl"
    lines = record.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    if harm == "gone":
        record.unlink()
    else:
        record.write_text("".join(lines[:2]) if harm == "shorter" else record.read_text().replace("0.", "0.1", 1))
    monkeypatch.setattr(Checkpoints, "save", lambda *args: pytest.fail("it trained"))
    with pytest.raises(HoldfastError, match=r"record\.jsonl"):
        run_to_folder(config, tmp_path / "run")
    record.write_text("".join(lines))
    monkeypatch.setattr(Checkpoints, "save", original)
    assert run_to_folder(config, tmp_path / "run").fresh


def stopped(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch, rounds: int = 3) -> None:
    """A run that was stopped after so many rounds."""
    original = Checkpoints.save

    def stop(self: Checkpoints, *args: Any) -> None:
        original(self, *args)
        if args[0] == rounds:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            run_to_folder(config, folder)


def test_a_run_does_not_go_on_with_an_edited_config(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config({**small, "method": METHODS[0]})
    folder = tmp_path / "run"
    stopped(config, folder, monkeypatch)
    whole = (folder / "config.toml").read_text()
    lr = f"lr = {config.train.lr}"
    assert lr in whole
    (folder / "config.toml").write_text(whole.replace(lr, "lr = 0.0625"))
    with pytest.raises(HoldfastError, match=rf"train\.{lr}, not 0\.0625; restore .*config\.toml"):
        resume(folder)
    (folder / "config.toml").write_text(whole.replace('engine = "auto"', 'engine = "serial"'))  # decides nothing
    assert resume(folder).fresh


def test_a_run_does_not_go_on_from_another_ones_checkpoint(
    small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        stopped(load_config({**small, "seed": seed}), tmp_path / f"seed-{seed}", monkeypatch)
    shutil.rmtree(tmp_path / "seed-2" / "checkpoint")
    shutil.copytree(tmp_path / "seed-1" / "checkpoint", tmp_path / "seed-2" / "checkpoint")
    shutil.copy(tmp_path / "seed-1" / "record.jsonl", tmp_path / "seed-2")
    with pytest.raises(HoldfastError, match=r"seed = 1, not 2"):
        resume(tmp_path / "seed-2")


@pytest.mark.parametrize(("key", "what"), [("plan", "another plan"), ("data", "other images")])
def test_a_checkpoint_of_another_plan_or_other_images_is_refused(
    small: dict[str, Any], tmp_path: Path, key: str, what: str
) -> None:
    settings = {**small, "method": METHODS[0]}
    saved(settings, tmp_path, 2)
    part = {"plan": {**small["plan"], "selected": 2}} if key == "plan" else {"data": {**small["data"], "seed": 1}}
    with pytest.raises(HoldfastError, match=f"holds a run with {what}"):
        Checkpoints(tmp_path, SETTINGS).restore(federation_of({**settings, **part}))
    assert Checkpoints(tmp_path, SETTINGS).restore(federation_of(settings))[0] == 2  # nothing of it was removed


def test_no_damage_to_one_file_loses_both_checkpoints(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "method": METHODS[1]}
    saved(settings, tmp_path / "whole", 5)
    files = [file for file in (tmp_path / "whole" / "checkpoint").iterdir() if file.name != "round-00000004.json"]
    assert len(files) > 10
    for file in files:
        shutil.copytree(tmp_path / "whole", tmp_path / "harmed")
        harmed = tmp_path / "harmed" / "checkpoint" / file.name
        harmed.write_bytes(harmed.read_bytes()[:-1] + b"?")
        done, _, _ = Checkpoints(tmp_path / "harmed", SETTINGS).restore(federation_of(settings))
        assert done >= 4, file
        shutil.rmtree(tmp_path / "harmed")


def test_a_damaged_segment_is_not_copied_to_the_next_checkpoint(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "method": METHODS[0]}
    checkpoints, federation = Checkpoints(tmp_path, SETTINGS), federation_of(settings)
    rounds = run_rounds(federation, Serial())
    for number in (1, 2, 3):
        checkpoints.save(number, federation, next(rounds).counts)
    newest = checkpoints.folder / checkpoints.segments[-1]
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    checkpoints.save(4, federation, next(rounds).counts)
    again = federation_of(settings)
    assert Checkpoints(tmp_path, SETTINGS).restore(again)[0] == 4
    list(rounds)
    list(run_rounds(again, Serial(), start=4))
    assert_same(again, federation)


def test_only_what_changed_is_written_and_only_two_rounds_are_kept(small: dict[str, Any], tmp_path: Path) -> None:
    settings = {**small, "plan": {**small["plan"], "rounds": 4, "clients": 30, "selected": 2}, "method": METHODS[1]}
    checkpoints = saved(settings, tmp_path, 7)
    manifests = sorted(checkpoints.folder.glob("round-*.json"))
    assert len(manifests) == 2
    bodies = [json.loads(json.loads(file.read_text())["body"]) for file in manifests]
    named = {sha for body in bodies for sha in (*body["parts"].values(), *body["segments"])}
    assert {file.name for file in checkpoints.folder.iterdir()} == named | {file.name for file in manifests}
    for body, other in (bodies, bodies[::-1]):  # the old teacher, written once for even and once for odd rounds
        name = body["parts"]["selector/model.0"]
        assert name.partition(".")[0] == other["parts"]["selector/model.0"].partition(".")[0]
        assert (checkpoints.folder / name).stat().st_mtime_ns < checkpoints._manifest(6).stat().st_mtime_ns
    last = (checkpoints.folder / bodies[1]["segments"][-1]).stat().st_size
    everybody = sum((checkpoints.folder / sha).stat().st_size for sha in bodies[1]["segments"])
    assert last < everybody / 3  # two clients of thirty


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """The short version of `make torture`: one kill in each kind of place."""
    script = Path(__file__).parents[1] / "scripts" / "torture.py"
    line = [sys.executable, str(script), "kills", "--kills", "5", "--seed", "5", "--out", str(tmp_path / "lines.jsonl")]
    found = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("5 kills (")
    assert " 0 did not" in found.stdout
    assert " 0 in a" not in found.stdout


FULL = """
import resource, sys
from holdfast import checkpoint
from holdfast.cli import main

original, calls = checkpoint.Checkpoints.save, 0

def save(*args):
    global calls
    calls += 1
    if calls == 3:  # from now on no file may have more than 10 kB
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    original(*args)

checkpoint.Checkpoints.save = save
sys.argv = ["holdfast", "run", "config.toml", "--out", "run"]
main()
"""


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    small: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(load_config({**small, "method": METHODS[0]})))
    line = [sys.executable, "-c", FULL]
    full = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert full.returncode == 2
    [sentence] = [text for text in full.stderr.splitlines() if "holdfast:" in text]
    assert "cannot write run/checkpoint/" in sentence
    assert "free space" in sentence
    assert "Traceback" not in full.stderr
    line = [sys.executable, "-m", "holdfast", "resume", "run"]
    resumed = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing after round 2" in resumed.stderr
    whole = federation_of({**small, "method": METHODS[0]})
    lines = lines_of(list(run_rounds(whole, Serial())))
    record = read_record(tmp_path / "run")
    assert json.loads(json.dumps(lines)) == [{k: v for k, v in one.items() if k != "seconds"} for one in record]


@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_being_told_to_end_say_how_to_go_on(small: dict[str, Any], tmp_path: Path, told: int) -> None:
    settings = {**small, "method": METHODS[0], "plan": {**small["plan"], "rounds": 40}}
    (tmp_path / "config.toml").write_text(to_toml(load_config(settings)))
    line = [sys.executable, "-m", "holdfast", "run", "config.toml", "--out", "run"]
    process = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    record = tmp_path / "run" / "record.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (record.exists() and record.read_bytes().count(b"\n") > 2):
        time.sleep(0.05)
    process.send_signal(told)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "holdfast resume run" in errors
    assert "Traceback" not in errors
    assert (tmp_path / "run" / "checkpoint").is_dir()
