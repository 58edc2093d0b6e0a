"""Predicted classes: with probabilities if the method has them, without if not."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image

from holdfast.config import load_config
from holdfast.models.incremental import ModelSpec, grow_to
from holdfast.models.stored import read_model, write_model
from holdfast.predict import predict
from holdfast.seeding import torch_generator


def stored(folder: Path, **method: str) -> Path:
    """The folder of a run that ended with a random model of two classes, and an image beside it."""
    model = load_config({"method": method}).method.build_model(ModelSpec("convnet", "batch", 16), torch_generator(0))
    grow_to(model, (2,), torch_generator(1))
    if method.get("inference") == "nme":
        model.note("mean", torch.eye(2, model.features))
    facts = {"classes": ["cat", "dog"], "growths": [2], "method": method, "backbone": "convnet", "norm": "batch"}
    write_model(
        folder / "model.safetensors",
        model.state_dict(),
        {**facts, "image_size": 16, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    )
    Image.new("RGB", (16, 16), (200, 30, 90)).save(folder / "x.png")
    return folder / "x.png"


@pytest.mark.parametrize("name", ["lga", "podnet", "dde"])
def test_a_head_gives_probabilities(tmp_path: Path, name: str) -> None:
    [guess] = predict(tmp_path, [stored(tmp_path, name=name)])
    assert sorted(guess.classes) == ["cat", "dog"]
    assert guess.probabilities is not None
    assert sum(guess.probabilities) == pytest.approx(1)


def test_the_nearest_mean_gives_no_probabilities(tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]]) -> None:
    image = stored(tmp_path, name="icarl", inference="nme")
    [guess] = predict(tmp_path, [image])
    assert sorted(guess.classes) == ["cat", "dog"]
    assert guess.probabilities is None
    code, shown, _ = holdfast("predict", tmp_path, image)
    assert code == 0
    assert guess.classes[0] in shown
    assert "%" not in shown


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(
    tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]], value: float
) -> None:
    image = stored(tmp_path, name="fedavg")
    weights, facts = read_model(tmp_path / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[7] = 12345.0
    write_model(tmp_path / "model.safetensors", weights, facts)
    whole = (tmp_path / "model.safetensors").read_bytes()  # Holdfast itself writes no such model
    (tmp_path / "model.safetensors").write_bytes(whole.replace(struct.pack("<f", 12345.0), struct.pack("<f", value)))
    code, _, err = holdfast("predict", tmp_path, image)
    assert (code, err.strip().count("\n")) == (2, 0)
    assert f"model.safetensors is damaged: its weight '{name}' is not finite" in err


def test_podnets_learned_scale_sharpens_probabilities(tmp_path: Path) -> None:
    image = stored(tmp_path, name="podnet")
    before = predict(tmp_path, [image])[0]
    weights, facts = read_model(tmp_path / "model.safetensors")
    write_model(tmp_path / "model.safetensors", {**weights, "log_scale": torch.tensor(3.0)}, facts)
    after = predict(tmp_path, [image])[0]
    assert after.classes == before.classes
    assert before.probabilities is not None
    assert after.probabilities is not None
    assert after.probabilities[0] > before.probabilities[0]
