"""A run and the images it was made of: what has changed since is not taken for the same."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from holdfast import experiment
from holdfast.compare import run_all
from holdfast.config import load_config
from holdfast.errors import HoldfastError
from holdfast.experiment import run_to_folder


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three classes of a colour each."""
    for c, name in enumerate(("red", "green", "blue")):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for i in range(8):
            ink = [40 + 5 * i] * 3
            ink[c] = 250 - 5 * i
            Image.new("RGB", (16, 16), tuple(ink)).save(tmp_path / "pictures" / name / f"{i}.png")
    return tmp_path / "pictures"


def settings(pictures: Path, **method: Any) -> dict[str, Any]:
    return {
        "data": {"name": f"folder:{pictures}", "size": 16},
        "plan": {
            "tasks": 3,
            "clients": 4,
            "selected": 2,
            "rounds": 2,
            "join_per_task": 1,
            "class_share": 1.0,
            "memory": 6,
        },
        "train": {"epochs": 1, "batch": 8},
        "method": {"name": "icarl", **method},
    }


def test_a_finished_run_is_not_shown_for_other_images(pictures: Path, tmp_path: Path) -> None:
    config = load_config(settings(pictures))
    assert run_to_folder(config, tmp_path / "run").fresh
    assert not run_to_folder(config, tmp_path / "run").fresh
    (pictures / "red" / "0.png").unlink()
    with pytest.raises(HoldfastError, match=r"other images than .* has now; choose another folder, or delete it"):
        run_to_folder(config, tmp_path / "run")
    run = run_to_folder(config, tmp_path / "runs" / "again")
    assert run.fresh
    with pytest.raises(HoldfastError, match="other images"):
        run_all([config], tmp_path / "run")
    assert run_all([config], tmp_path / "runs")[0].result == run.result


def test_a_stopped_run_does_not_go_on_with_other_images(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(settings(pictures))
    with monkeypatch.context() as patch:

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(experiment, "_write_model", stop)  # after the last round, before the result
        with pytest.raises(KeyboardInterrupt):
            run_to_folder(config, tmp_path / "run")
    Image.new("RGB", (16, 16), (1, 2, 3)).save(pictures / "blue" / "new.png")
    with pytest.raises(HoldfastError, match="other images"):
        run_to_folder(config, tmp_path / "run")


def test_runs_on_different_images_are_different_experiments(pictures: Path, tmp_path: Path) -> None:
    first = run_to_folder(load_config({**settings(pictures), "seed": 1}), tmp_path / "1").result
    same = run_to_folder(load_config({**settings(pictures), "seed": 2}), tmp_path / "2").result
    (pictures / "green" / "3.png").unlink()
    other = run_to_folder(load_config({**settings(pictures), "seed": 3}), tmp_path / "3").result
    assert first.experiment == same.experiment != other.experiment
