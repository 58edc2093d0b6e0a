"""A run and the images it was made of: what has changed since is not taken for the same."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from holdfast import experiment
from holdfast.compare import run_all
from holdfast.config import load_config, to_toml
from holdfast.errors import HoldfastError
from holdfast.experiment import run_to_folder
from holdfast.results.record import read_config, read_record


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
    with pytest.raises(HoldfastError, match=r"other images than .* has now; choose another folder or delete it"):
        run_to_folder(config, tmp_path / "run")
    run = run_to_folder(config, tmp_path / "runs" / "again")
    assert run.fresh
    with pytest.raises(HoldfastError, match="other images"):
        run_all([config], tmp_path / "run")
    assert run_all([config], tmp_path / "runs")[0].result == run.result


def test_a_run_that_another_process_finished_in_the_meantime_is_left_as_it_is(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, build = load_config(settings(pictures)), experiment.build_federation

    def overtaken(*parts: Any) -> Any:
        monkeypatch.setattr(experiment, "build_federation", build)
        assert run_to_folder(config, tmp_path / "run").fresh
        return build(*parts)

    monkeypatch.setattr(experiment, "build_federation", overtaken)
    assert not run_to_folder(config, tmp_path / "run").fresh
    assert len(read_record(tmp_path / "run")) == 6


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


def test_a_field_that_a_method_got_later_does_not_rename_its_older_runs(tmp_path: Path) -> None:
    """Nor does `inference` count for less in methods that always had it."""
    for method, fields in (("fedavg", ("inference", "prior")), ("lga", ("prior",)), ("podnet", ("prior",))):
        config = load_config({"method": {"name": method}})
        named = experiment.identity_of(config)["method"]
        assert not named.keys() & set(fields)
        text = "".join(line for line in to_toml(config).splitlines(True) if not line.startswith(fields))
        older = tmp_path / method
        older.mkdir()
        (older / "config.toml").write_text(text)
        assert experiment.run_name(load_config(older / "config.toml")) == experiment.run_name(config)
        tree = read_config(older)
        assert tree is not None
        assert tree["method"]["prior"] == 0.0
        changed = load_config({"method": {"name": method, "prior": 1.0}})
        assert experiment.run_name(changed) != experiment.run_name(config)
    assert experiment.identity_of(load_config({"method": {"name": "lga"}}))["method"]["inference"] == "head"


def test_names_with_dollar_signs_and_other_scripts_are_drawn(
    pictures: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """They would be read as formulas, and end the run after all its training."""
    (pictures / "red").rename(pictures / "$\\frac{$")
    (pictures / "green").rename(pictures / "赤い_$x^$")
    odd = pictures.rename(tmp_path / "p$\\foo$")
    run = run_to_folder(load_config(settings(odd)), tmp_path / "run")
    assert {file.name for file in run.folder.glob("*.png")} == {"accuracy.png", "exemplars.png"}
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


@pytest.mark.parametrize("memory", [0, 2])
def test_a_memory_too_small_for_any_exemplar_ends_with_a_result(pictures: Path, tmp_path: Path, memory: int) -> None:
    plan = {**settings(pictures)["plan"], "memory": memory, "rounds": 1}
    for method in ({"name": "lga", "iterations": 2, "perturb_steps": 1}, {"name": "icarl", "inference": "nme"}):
        run = run_to_folder(
            load_config({**settings(pictures), "plan": plan, "method": method}), tmp_path / method["name"]
        )
        assert run.fresh
        assert not (run.folder / "exemplars.png").exists()  # two for three classes are none for each


def test_what_a_killed_write_leaves_does_not_block_the_folder(pictures: Path, tmp_path: Path) -> None:
    config = load_config(settings(pictures))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.toml.999.tmp").write_text("[da")
    assert run_to_folder(config, tmp_path / "run").fresh
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(HoldfastError, match="contains something else already; choose another folder"):
        run_to_folder(config, tmp_path / "other")


def test_a_long_path_has_a_folder_name_that_systems_take(tmp_path: Path) -> None:
    name = experiment.run_name(load_config({"data": {"name": f"folder:/{'d' * 400}/photos"}}))
    assert len(name) < 120
    assert "photos" in name
