"""Models as ONNX, checked against PyTorch with onnxruntime; skipped without the extra `onnx`."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.config import load_config
from holdfast.model_export import NEEDED, write_onnx
from holdfast.models.incremental import ModelSpec, grow_to
from holdfast.models.stored import write_model
from holdfast.predict import load_trained
from holdfast.seeding import torch_generator

CLASSES = ["cat", "dog", "élan"]
MISSING = [name for name in (*NEEDED, "onnxruntime") if importlib.util.find_spec(name) is None]
with_onnx = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed (the extra onnx)")


def stored(folder: Path, **method: object) -> Path:
    """A random model of three classes in two growths."""
    built = load_config({"method": method}).method
    model = built.build_model(ModelSpec("convnet", "batch", 16), torch_generator(0))
    grow_to(model, (2, 1), torch_generator(1))
    if method.get("inference") == "nme":
        model.note("mean", torch.randn(3, model.features, generator=torch_generator(2)))
    facts = {"classes": CLASSES, "growths": [2, 1], "method": method, "backbone": "convnet", "norm": "batch"}
    facts |= {"image_size": 16, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}
    write_model(folder / "model.safetensors", model.state_dict(), facts)
    return folder


@with_onnx
@pytest.mark.parametrize("method", [{"name": "lga"}, {"name": "podnet"}, {"name": "icarl", "inference": "nme"}])
def test_the_graph_gives_the_methods_scores(tmp_path: Path, method: dict[str, object]) -> None:
    import onnxruntime

    file = write_onnx(stored(tmp_path, **method), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(file)
    trained = load_trained(tmp_path / "model.safetensors")
    for count in (1, 5):  # any number of images
        pixels = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=torch_generator(3))
        with torch.inference_mode():
            expected = trained.method.predict(trained.model, trained.transform.plain(pixels)).numpy()
        [scores] = session.run(["scores"], {"pixels": pixels.numpy()})
        assert scores.shape == (count, 3)
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == CLASSES
    assert json.loads(facts["image_size"]) == 16
    assert json.loads(facts["method"]) == method


@with_onnx
def test_the_command_writes_the_graph_and_its_card(
    tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]]
) -> None:
    settings = {"data": {"name": "digits", "classes": 2, "train_per_class": 4, "size": 16}}
    plan = {"tasks": 1, "clients": 1, "selected": 1, "rounds": 1, "class_share": 1.0}
    from holdfast import run

    run(settings, out=tmp_path / "run", plan=plan)
    code, out, err = holdfast("export", tmp_path / "run", "--format", "onnx")
    assert (code, err) == (0, "")
    assert out.split() == [str(tmp_path / "run" / "model.onnx"), str(tmp_path / "run" / "model.md")]
    assert all(Path(file).exists() for file in out.split())


def test_without_the_extra_there_is_one_sentence(
    tmp_path: Path, holdfast: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast import model_export

    settings = {"data": {"name": "digits", "classes": 2, "train_per_class": 4, "size": 16}}
    plan = {"tasks": 1, "clients": 1, "selected": 1, "rounds": 1, "class_share": 1.0}
    from holdfast import run

    run(settings, out=tmp_path / "run", plan=plan)
    monkeypatch.setattr(model_export, "NEEDED", ("onnx_that_nobody_has",))
    code, _, err = holdfast("export", tmp_path / "run", "--format", "onnx")
    assert code == 2
    assert "--format onnx needs onnx_that_nobody_has; install them: pip install 'holdfast[onnx]'" in err
