"""The examples run as they stand, and the commands that they show are right."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.config import load_config
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.seeding import torch_generator

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, folder: Path) -> list[float]:
    """The percentages that an example prints first on each line."""
    line = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [float(text) for text in re.findall(r": ([\d.]+)%", done.stdout)]


def test_the_own_method_forgets_less_than_averaging(tmp_path: Path) -> None:
    plain, calm = run("own_method.py", tmp_path)
    assert calm > plain + 10


def test_the_own_backbone_learns_frozen_or_not(tmp_path: Path) -> None:
    accuracies = run("own_backbone.py", tmp_path)
    assert len(accuracies) == 2
    assert min(accuracies) > 25  # chance is 10


@pytest.mark.parametrize("name", ["own_method", "own_backbone"])
def test_the_command_in_an_example_finds_its_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    [command] = re.findall(r"^    holdfast run (.*)$", (EXAMPLES / f"{name}.py").read_text(), re.M)
    words = shlex.split(command)
    keys = {"--dataset": "data.name", "--tasks": "plan.tasks", "--method": "method.name"}
    flags = []
    for flag, value in zip(words[::2], words[1::2], strict=True):
        flags.append(tuple(value.split("=")) if flag == "--set" else (keys[flag], value))
    config = load_config(None, [(key, int(value) if value.isdigit() else value) for key, value in flags])
    assert f"{name}:" in f"{config.method_name} {config.model.name}"
    spec = ModelSpec(config.model.name, "batch", 32)
    model = config.method.build_model(spec, torch_generator(0))
    assert isinstance(model, IncrementalModel)
    assert model(torch.zeros(2, 3, 32, 32)).features.shape == (2, model.features)
