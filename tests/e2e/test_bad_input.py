"""Bad input is one sentence on standard error, exit code 2, no traceback."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save

from holdfast.cli import main
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.stored import write_model
from holdfast.predict import predict
from holdfast.seeding import torch_generator

TINY = ["--dataset", "tiny-imagenet"]


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["holdfast", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert said.err.strip().count("\n") == 0, said.err
    return said.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--method", "fedagv"], "unknown method 'fedagv'; did you mean 'fedavg'?"),
        (["run", "--dataset", "glyph"], "unknown data set 'glyph'; did you mean 'glyphs'?"),
        (["run", "--set", "train.epocs=3"], "unknown setting 'train.epocs'; did you mean 'epochs'?"),
        (["run", "--set", "planet.tasks=3"], "unknown setting 'planet'; did you mean 'plan'?"),
        (["run", "--set", "train.lr"], "--set 'train.lr' is not of the form"),
        (["run", "--tasks", "7"], "plan.tasks=7 does not divide 25 classes; use 1, 5, 25"),
        (["run", "--tasks", "10,5"], "adds up to 15 classes, but there are 25"),
        (["run", "--tasks", "-1"], "plan.tasks = -1"),
        (["run", "--set", "plan.selected=31"], "plan.selected=31, but round 1 has only 30 clients"),
        (["run", "--set", "train.epochs=-2"], "train.epochs = -2"),
        (["run", "--set", "train.batch=1e12"], "train.batch"),
        (["run", "--set", "data.classes=100000"], "glyphs has 2 to"),
        (["run", "--set", "data.size=7"], "data.size = 7"),
        (["run", "--set", "run.device=tpu"], "run.device='tpu'"),
        (["run", "--set", "run.device=cuda:99"], "no such GPU"),
        (["run", "--set", "plan.order=icarl"], "plan.order=icarl is a list of 100 classes"),
        (
            ["run", "--dataset", "digits", "--set", "data.first_class=8", "--set", "data.classes=5"],
            "digits has 10 classes",
        ),
        (["run", "/nowhere/at/all.toml"], "cannot read the config /nowhere/at/all.toml"),
        (["run", *TINY, "--set", "data.path=/nowhere.zip"], "there is no TinyImageNet at /nowhere.zip"),
        (["show", "/nowhere"], "is not the folder of a finished run"),
        (["predict", "/nowhere", "x.png"], "holds no model.safetensors"),
        (["run", "--tasks", "12,0,13"], "plan.tasks = [12, 0, 13]"),
        (
            ["run", "--set", "metrics=batchwise64"],
            "metrics = 'batchwise64' is not possible: input should be 'whole' or",
        ),
        (["run", "--tasks", "0"], "plan.tasks = 0 is not possible: input should be greater than or equal to 1"),
        (["run", "--set", "method.name=[1]"], "unknown method [1]"),
        (["run", "--set", "train.milestones=[0.5]"], "belong to train.schedule=steps"),
        (["run", "--set", "train.lr=nan"], "train.lr"),
        (["run", "--set", "data.path=x.zip"], "has no effect for glyphs"),
        (["run", "--set", "data.test_share=0.5"], "glyphs has its own test images; leave data.test_share out"),
        (["run", "--set", f"plan.order=random:{'1' * 5000}"], "unknown class order"),
        (["run", "--set", "x=" + "[" * 3000], "unknown setting 'x'"),
        (["run", "--set", "seed" + ".a" * 3000 + "=1"], "unknown setting 'seed.a.a"),
        (["compare", "--methods", "lga[cbl=fa\nlse]"], "is not a list such as fedavg,lga[cbl=false]"),
        (["run", "--seed", "x"], "Invalid value for '--seed'"),
        (["run", "--nonsense"], "No such option"),
        (["rn"], "No such command 'rn'"),
        (["show"], "Missing argument"),
    ],
)
def test_one_sentence(
    words: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert says in refused(capsys, monkeypatch, *words)
    assert list(tmp_path.iterdir()) == []  # nothing half-made is left behind


def tiny_folder(where: Path, image: bytes) -> Path:
    """A data set of the true layout with two classes, in which one training image is `image`."""
    top = where / "tiny-imagenet-200"
    (top / "val" / "images").mkdir(parents=True)
    good = where / "good.jpg"
    Image.new("RGB", (64, 64), (200, 30, 30)).save(good, "JPEG")
    names = ["n01", "n02"]
    (top / "wnids.txt").write_text("\n".join(names) + "\n")
    (top / "words.txt").write_text("n01\tone\nn02\ttwo\n")
    for i, name in enumerate(names):
        (top / "train" / name / "images").mkdir(parents=True)
        for k in range(2):
            content = image if (i, k) == (1, 1) else good.read_bytes()
            (top / "train" / name / "images" / f"{name}_{k}.JPEG").write_bytes(content)
        (top / "val" / "images" / f"val_{i}.JPEG").write_bytes(good.read_bytes())
    lines = "".join(f"val_{i}.JPEG\t{name}\t0\t0\t1\t1\n" for i, name in enumerate(names))
    (top / "val" / "val_annotations.txt").write_text(lines)
    return top


def test_a_truncated_image_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.jpg"
    Image.effect_noise((64, 64), 90).save(whole, "JPEG")
    top = tiny_folder(tmp_path, whole.read_bytes()[:700])
    said = refused(capsys, monkeypatch, "run", *TINY, "--set", f"data.path={top}", "--out", str(tmp_path / "run"))
    assert "n02_1.JPEG" in said
    assert not (tmp_path / "run").exists()


def test_a_corrupt_archive_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = tmp_path / "tiny-imagenet-200.zip"
    archive.write_bytes(b"PK\x03\x04 and then nothing of use")
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    assert str(archive) in refused(capsys, monkeypatch, "run", *TINY)


@pytest.mark.parametrize("content", [None, b"", b"not an image"])
def test_predict_names_the_image_it_cannot_read(
    content: bytes | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from holdfast import run

    settings = {"data": {"name": "digits", "classes": 2, "train_per_class": 4, "size": 16}}
    plan = {"tasks": 1, "clients": 1, "selected": 1, "rounds": 1, "class_share": 1.0}
    run(settings, out=tmp_path / "run", plan=plan)
    image = tmp_path / "strange.png"
    if content is not None:
        image.write_bytes(content)
    assert "strange.png" in refused(capsys, monkeypatch, "predict", str(tmp_path / "run"), str(image))


MODELS = [
    b"\x10\x00\x00\x00\x00\x00\x00\x00{broken",
    save({"w": torch.zeros(1)}),
    save({"w": torch.zeros(1)}, metadata={"holdfast": "{}"}),
    save({"w": torch.zeros(1)}, metadata={"holdfast": "[]"}),
]


@pytest.mark.parametrize("model", MODELS)
def test_a_damaged_model_is_one_sentence(
    model: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(model)
    assert "damaged" in refused(capsys, monkeypatch, "predict", str(tmp_path), "x.png")


@pytest.mark.parametrize("change", [{"classes": ["a"]}, {"mean": None}, {"image_size": 17.5}, {"std": [1, 2]}])
def test_a_model_with_other_facts_is_one_sentence(
    change: dict[str, object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = IncrementalModel(ModelSpec("convnet", "batch", 16), torch_generator(0))
    model.grow(2, torch_generator(1))
    facts: dict[str, object] = {
        "classes": ["a", "b"],
        "growths": [2],
        "method": {"name": "fedavg"},
        "backbone": "convnet",
    }
    facts |= {"backbone": "convnet", "norm": "batch", "image_size": 16, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}
    Image.new("RGB", (16, 16)).save(tmp_path / "x.png")
    write_model(tmp_path / "model.safetensors", model.state_dict(), facts)
    assert len(predict(tmp_path, [tmp_path / "x.png"])[0].classes) == 2
    write_model(tmp_path / "model.safetensors", model.state_dict(), {**facts, **change})
    said = refused(capsys, monkeypatch, "predict", str(tmp_path), str(tmp_path / "x.png"))
    assert "model.safetensors" in said
    assert "damaged" in said


@pytest.mark.parametrize("result", [b'{"method": ', b"{}", b"\xff\xfe", b"null"])
def test_a_damaged_result_is_one_sentence(
    result: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "result.json").write_bytes(result)
    assert "damaged" in refused(capsys, monkeypatch, "show", str(tmp_path))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("record.jsonl", '{"a": 1}'),
        ("record.jsonl", "[1]"),
        ("record.jsonl", ""),
        ("record.jsonl", '{"round": 2, "task": 1}'),
        ("plan.json", '{"a": 1}'),
        ("plan.json", "[]"),
    ],
)
def test_a_record_or_plan_of_another_shape_is_one_sentence(
    file: str, content: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "results" / "old_run", run)
    (run / file).write_text(content)
    for words in (["report", str(run), "--out", str(tmp_path / "page.html")], ["export", str(run), "--out", "x"]):
        if file == "record.jsonl" or words[0] == "report":
            said = refused(capsys, monkeypatch, *words)
            assert f"{file} is damaged" in said
            assert "run it again" in said
    assert not (tmp_path / "page.html").exists()


def test_a_config_with_a_byte_order_mark_is_read_and_a_malformed_table_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"\xef\xbb\xbf[train]\nepochs = 0\n")
    assert "train.epochs = 0" in refused(capsys, monkeypatch, "run", str(file))
    file.write_text("[for.fedavg]\nlr = 1.0\n")
    assert "[for.fedavg] may hold settings such as train.lr" in refused(capsys, monkeypatch, "run", str(file))
    file.write_text('[for.fedavg]\nmethod.name = "joint"\n')
    assert "[for.fedavg]" in refused(capsys, monkeypatch, "run", str(file))
    file.write_text("seed = " + "9" * 5000)
    assert "is not TOML" in refused(capsys, monkeypatch, "run", str(file))


OLD = Path(__file__).parents[1] / "results" / "old_run"
RESULTS: dict[str, object] = {
    "last_accuracy": float("nan"),
    "average_accuracy": 1e300,
    "macro_f1": -1,
    "worst_client": {"accuracy": 0.5},
    "group_accuracy": {"Zq": 0.5},
    "detection": {"hits": 1.0, "transitions": 2.0, "late": None, "false_alarms": 0.0, "client_rounds": 3.0},
    "task_sizes": [-2, 2, 2],
    "seed": -1,
    "bytes": {"server": {"down": -5}},
    "seconds": {"train": float("inf")},
}
LINES: dict[str, object] = {
    "task_accuracy": [None],
    "detector": {"hits": True},
    "accuracy": "0.5",
    "macro_f1": float("nan"),
    "task": [1],
    "bytes": {"server": [1]},
    "seconds": {"train": "x"},
}


@pytest.mark.parametrize("key", RESULTS)
def test_results_that_cannot_be_are_one_sentence(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    facts = json.loads((OLD / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps({**facts, key: RESULTS[key]}))
    for words in (["show"], ["report", "--out", str(tmp_path / "page.html")]):
        assert "result.json is damaged (" in refused(capsys, monkeypatch, words[0], str(tmp_path / "run"), *words[1:])


@pytest.mark.parametrize("key", LINES)
def test_lines_that_cannot_be_are_one_sentence(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    first, *rest = (OLD / "record.jsonl").read_text().splitlines()
    lines = [json.dumps({**json.loads(first), key: LINES[key]}), *rest]
    (tmp_path / "run" / "record.jsonl").write_text("\n".join(lines) + "\n")
    for words in (["report", "--out", str(tmp_path / "page.html")], ["export", "--out", str(tmp_path / "out")]):
        said = refused(capsys, monkeypatch, words[0], str(tmp_path / "run"), *words[1:])
        assert "record.jsonl is damaged (line 1, " in said


def test_a_number_that_no_float_holds_is_exported_as_the_largest(
    holdfast: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    lines = (OLD / "record.jsonl").read_text().splitlines()
    lines[0] = json.dumps({**json.loads(lines[0]), "losses": {"x": 10**400, "y\ud800": 1e300}})
    (tmp_path / "run" / "record.jsonl").write_text("\n".join(lines) + "\n")
    for form in ("csv", "tensorboard"):
        assert holdfast("export", tmp_path / "run", "--out", tmp_path / form, "--format", form)[0] == 0
    assert "losses.y\\ud800" in (tmp_path / "csv" / "run.csv").read_text()


def test_a_file_of_hashes_that_is_none_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(OLD, tmp_path / "run")
    for text in ("", "x", f"{'0' * 64}  ../../etc/passwd\n", f"{'0' * 64}  {'x' * 5000}\n", "0" * 70_000):
        (tmp_path / "run" / "SHA256SUMS").write_text(text)
        assert "SHA256SUMS" in refused(capsys, monkeypatch, "show", str(tmp_path / "run"))


NESTED = "[" * 100_000


@pytest.mark.parametrize("nested", [NESTED, "[" * 500 + "]" * 500, "{" + '"a":{' * 500 + "}" * 501], ids=len)
@pytest.mark.parametrize("file", ["result.json", "record.jsonl", "plan.json"])
def test_nested_brackets_are_one_sentence(
    file: str, nested: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(Path(__file__).parents[1] / "results" / "old_run", run)
    (run / file).write_text(nested + "\n")
    said = refused(capsys, monkeypatch, "report", str(run), "--out", str(tmp_path / "page.html"))
    assert f"{file} is damaged (its lists and tables are nested too deeply)" in said


@pytest.mark.parametrize(
    "text",
    ["seed = " + NESTED, "seed" + ".a" * 500_000 + " = 1", "seed" + ".a" * 500 + " = 1", "x = '" + "y" * 3_000_000],
)
def test_a_config_of_harm_is_one_sentence(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text(text)
    said = refused(capsys, monkeypatch, "run", str(tmp_path / "a.toml"))
    assert "nested too deeply" in said or "has more than 2,097,152 bytes" in said


def test_a_model_with_nested_facts_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(save({"w": torch.zeros(1)}, metadata={"holdfast": NESTED}))
    assert "damaged" in refused(capsys, monkeypatch, "predict", str(tmp_path), "x.png")
