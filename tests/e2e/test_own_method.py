"""An own method, backbone and data set from the command line: killed, resumed, compared, and asked for predictions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from own_things import CALM
from PIL import Image
from safetensors.torch import load_file

CONFIG = """
[data]
name = "glyphs"
classes = 4
train_per_class = 12
test_per_class = 6
size = 16
[plan]
tasks = 2
clients = 3
join_per_task = 1
selected = 2
rounds = 6
[train]
epochs = 1
batch = 16
[method]
name = "mine:Calm"
weight = 0.2
[model]
name = "mine:Net"
[run]
engine = "pool"
workers = 1
"""
LINE = [sys.executable, "-c", "from holdfast.cli import main; main()"]  # as the installed command: no current folder


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LINE, *words], cwd=cwd, env=outside(), capture_output=True, text=True, timeout=300, check=False
    )


def outside() -> dict[str, str]:
    return {**os.environ, "PYTHONSAFEPATH": "1", "COLUMNS": "200"}


def test_an_own_method_is_killed_resumed_and_predicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holdfast: Any
) -> None:
    (tmp_path / "mine.py").write_text(CALM)
    (tmp_path / "config.toml").write_text(CONFIG)
    whole = command("run", "config.toml", "--out", "whole", "--set", "run.engine=serial", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    stopped = subprocess.Popen([*LINE, "run", "config.toml", "--out", "run"], cwd=tmp_path, env=outside())
    record, deadline = tmp_path / "run" / "record.jsonl", time.time() + 120
    while not (record.exists() and record.read_bytes().count(b"\n") >= 3):
        assert time.time() < deadline
        assert stopped.poll() is None
        time.sleep(0.02)
    stopped.send_signal(signal.SIGKILL)
    stopped.wait()
    resumed = command("resume", "run", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "continuing after round" in resumed.stderr
    one, two = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "run"))
    assert one.keys() == two.keys()
    assert all(bool((one[name] == two[name]).all()) for name in one)
    Image.new("RGB", (16, 16), (200, 30, 90)).save(tmp_path / "x.png")
    guessed = command("predict", "run", "x.png", "--json", cwd=tmp_path)
    assert guessed.returncode == 0, guessed.stderr
    assert len(json.loads(guessed.stdout)[0]["classes"]) == 3
    monkeypatch.chdir(tmp_path.parent)
    code, _, said = holdfast("predict", tmp_path / "run", tmp_path / "x.png")
    assert code == 2
    assert "there is no module 'mine' for the method 'mine:Calm'" in " ".join(said.split())
    assert holdfast("show", tmp_path / "run")[0] == 0  # reading needs no class


def test_own_methods_are_compared_with_others(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CALM)
    short = CONFIG.replace("rounds = 6", "rounds = 1").replace('engine = "pool"', 'engine = "serial"')
    (tmp_path / "config.toml").write_text(short + '[for."mine:Calm".train]\nlr = 0.05\n')
    done = command("compare", "config.toml", "--methods", "mine:Calm[weight=0.3],fedavg", "--seeds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "calm weight=0.3" in done.stdout
    assert "fedavg" in done.stdout
    [config] = (tmp_path / "runs").glob("*calm*/config.toml")
    assert "lr = 0.05" in config.read_text()
