"""Settings: read, laid over each other, refused, written back."""

import math
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import describe, load_config, parse_setting, to_toml
from holdfast.errors import HoldfastError
from holdfast.experiment import run_name
from holdfast.methods import METHODS


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_lie_over_the_methods_table_and_that_over_the_file(tmp_path: Path) -> None:
    text = """
    [train]
    lr = 0.3
    epochs = 7
    [for.joint]
    train.lr = 0.2
    train.batch = 9
    [for.fedavg]
    method.replay = true
    """
    file = write(tmp_path, text)
    joint = load_config(file, [("method.name", "joint"), ("train.batch", 4)])
    assert (joint.train.lr, joint.train.epochs, joint.train.batch) == (0.2, 7, 4)
    plain = load_config(file)
    assert (plain.train.lr, plain.train.batch) == (0.3, "auto")
    assert plain.method.keeps_memory


def test_what_is_not_given_comes_from_the_preset_and_the_data_set() -> None:
    config = load_config(None, [("data.name", "digits")])
    assert (config.train.lr, config.train.momentum, config.data.size, config.data.classes) == (0.1, 0.9, 32, None)
    assert (config.train.schedule, config.train.milestones) == ("cosine", None)
    steps = load_config(None, [("train.schedule", "steps")]).train
    assert (steps.milestones, steps.gamma) == ([0.5, 0.75], 0.1)
    assert load_config().data.classes == 25


def test_the_written_config_is_read_back_as_it_was(tmp_path: Path) -> None:
    settings = [("plan.order", ['a "quoted" name', "ü\x7f", "🐭"]), ("plan.tasks", [1, 2]), ("method.replay", True)]
    config = load_config(None, [*settings, ("seed", 5), ("metrics", "batchwise128")])
    assert (config.seed, config.metrics) == (5, "batchwise128")
    assert load_config(write(tmp_path, to_toml(config))) == config


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.lr=0.5", "train.lr", 0.5),
        ("plan.tasks=[1, 2]", "plan.tasks", [1, 2]),
        ("plan.join=irregular", "plan.join", "irregular"),
        ("method.replay=true", "method.replay", True),
        ("data.path=/a/b=c.zip", "data.path", "/a/b=c.zip"),
    ],
)
def test_settings_on_the_command_line(text: str, key: str, value: object) -> None:
    assert parse_setting(text) == (key, value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([("method.name", "fedavgg")], "did you mean 'fedavg'?"),
        ([("data.name", "glyps")], "did you mean 'glyphs'?"),
        ([("model.name", "resnet")], "did you mean 'resnet18'?"),
        ([("train.epoch", 3)], "did you mean 'epochs'?"),
        ([("trian.epochs", 3)], "did you mean 'train'?"),
        ([("method.replays", True)], "did you mean 'replay'?"),
        ([("train.lr", -1)], "train.lr = -1"),
        ([("train.lr", "fast")], "train.lr = 'fast'"),
        ([("train.lr", math.inf)], "train.lr = inf"),
        ([("method.name", "lga"), ("method.radius", math.nan)], "method.radius = nan"),
        ([("train.batch", 0)], "train.batch = 0"),
        ([("plan.clients", -3)], "plan.clients = -3"),
        ([("plan.clients", 10**9)], "plan.clients"),
        ([("plan.rounds", 10**12)], "plan.rounds"),
        ([("plan.class_share", 1.5)], "plan.class_share = 1.5"),
        ([("plan.join", "late")], "plan.join = 'late'"),
        ([("data.size", 4)], "data.size = 4"),
        ([("data.train_per_class", 0)], "data.train_per_class = 0"),
        ([("data.test_per_class", 0)], "data.test_per_class = 0"),
        ([("data.size", 10**6)], "data.size"),
        ([("seed", -1)], "seed = -1"),
        ([("train", 3)], "train = 3 should be a table"),
        ([("train.lr.x", 3)], "train.lr"),
    ],
)
def test_mistakes_are_named_in_one_sentence(settings: list[tuple[str, object]], says: str) -> None:
    with pytest.raises(HoldfastError) as error:
        load_config(None, settings)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = ", "is not TOML"),
        ("[for.lgaa]\ntrain.lr = 1.0", "unknown method 'lgaa'"),
        ("colour = 1", "unknown setting 'colour'"),
        ("[for.lga]\ntrain.lr = 1.0\nmethod.name = 'glfc'", "not 'method.name'"),
        ("[for.lga]\ntrain.lr = 1.0\nseed.x = 1", "not 'seed'"),
    ],
)
def test_mistakes_in_files(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(HoldfastError) as error:
        load_config(write(tmp_path, text))
    assert says in str(error.value)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(HoldfastError, match="cannot read the config"):
        load_config(tmp_path / "none.toml")


def test_every_setting_is_described() -> None:
    rows = describe()
    assert all(about for _, _, about in rows), [name for name, _, about in rows if not about]
    assert {"plan.memory", "train.lr", "data.first_class", "method.replay"} <= {name for name, _, _ in rows}


def test_every_example_config_is_valid() -> None:
    examples = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
    assert examples
    for file in examples:
        for method in METHODS:
            load_config(file, [("method.name", method)])


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_written_config_is_read_back(tmp_path: Path, name: str) -> None:
    config = load_config(None, [("method.name", name)])
    assert load_config(write(tmp_path, to_toml(config))) == config


def test_the_preset_follows_the_form_of_the_loss() -> None:
    sigmoid, softmax = (load_config({"method": {"name": "lga", "form": form}}).train for form in ("sigmoid", "softmax"))
    assert (sigmoid.lr, sigmoid.momentum, sigmoid.schedule) == (1.0, 0.0, "cosine")
    assert (softmax.lr, softmax.momentum, softmax.schedule) == (0.1, 0.9, "cosine")
    code = load_config({"method": {"name": "lga_code"}}).train
    assert (code.schedule, code.milestones, code.gamma) == ("steps", [0.5, 0.75, 0.9], 0.2)


def test_weighting_of_older_configs_is_the_aggregator_and_runs_keep_their_names(tmp_path: Path) -> None:
    """The names are those that older versions gave."""
    uniform, samples = ({"train": {"weighting": word}} for word in ("uniform", "samples"))
    assert load_config(uniform) == load_config({})
    assert load_config(samples).train.aggregator == "samples"
    assert load_config({}, [("train.weighting", "samples")]) == load_config({"train": {"aggregator": "samples"}})
    assert run_name(load_config(OLD)) == "glyphs-fedavg-seed2021-700b9e4f"
    old = {**OLD, "train": {**OLD["train"], "weighting": "samples"}}
    assert run_name(load_config(old)) == "glyphs-fedavg-seed2021-889c9bcf"
    names = {
        run_name(load_config({**OLD, "train": {**OLD["train"], "aggregator": name}}))
        for name in ("mean", "median", "krum")
    }
    assert len(names) == 3
    with pytest.raises(HoldfastError, match=r"train\.weighting = 'size' is not possible: use train\.aggregator"):
        load_config({"train": {"weighting": "size"}})


OLD: dict[str, Any] = {
    "data": {"name": "glyphs", "classes": 6, "train_per_class": 12, "test_per_class": 6, "size": 16},
    "plan": {"tasks": 3, "clients": 5, "join_per_task": 2, "selected": 3, "rounds": 2, "move_on": 0.7, "memory": 12},
    "train": {"batch": 128},  # as older versions always wrote
}
