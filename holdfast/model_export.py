"""The model of a run for other programs: as ONNX, and as a model card for people."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.files import write_atomic
from holdfast.predict import Trained, load_trained
from holdfast.results.checksums import MODEL
from holdfast.results.details import UNFINISHED
from holdfast.results.record import Result, read_config, read_result
from holdfast.results.tables import markdown, percent
from holdfast.server import metrics

OPSET = 18
NEEDED = ("onnx", "onnxscript")


class Classifier(torch.nn.Module):
    """From pixels (B, 3, S, S) with values from 0 to 255 to the method's scores (B, C)."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.trained, self.model = trained, trained.model

    def forward(self, pixels: Tensor) -> Tensor:
        transform = self.trained.transform
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (transform.mean, transform.std))
        images = (pixels.float() / 255 - mean) / std
        return self.trained.method.predict(self.model, images)


def write_onnx(run: Path, file: Path) -> Path:
    """Writes the model of a run as ONNX. Its input `pixels` (any number, 3, S, S) is uint8 as images have it; its
    output `scores` has one column per class. Names, image size and what the scores are stand in its metadata."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise HoldfastError(f"--format onnx needs {' and '.join(missing)}; install them: pip install 'holdfast[onnx]'")
    import onnx

    trained = load_trained(run / MODEL)
    size = trained.facts["image_size"]
    pixels = torch.randint(0, 256, (2, 3, size, size), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with TemporaryDirectory() as place, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        raw = Path(place) / "model.onnx"
        try:
            torch.onnx.export(
                Classifier(trained).eval(),
                (pixels,),
                raw,
                input_names=["pixels"],
                output_names=["scores"],
                dynamic_shapes=({0: torch.export.Dim("images")},),
                opset_version=OPSET,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        except Exception as error:  # torch.export has many of its own
            reason = str(error).strip().split("\n")[0][:200]
            raise HoldfastError(f"this model cannot be written as ONNX ({type(error).__name__}: {reason})") from error
        model = onnx.load(raw)
    onnx.helper.set_model_props(model, {key: json.dumps(value) for key, value in _metadata(trained).items()})
    write_atomic(file, model.SerializeToString())
    return file


def _metadata(trained: Trained) -> dict[str, Any]:
    return {
        "classes": list(trained.facts["classes"]),
        "image_size": trained.facts["image_size"],
        "pixels": "uint8, red green blue, centre square of the image",
        "scores": "logits: softmax gives probabilities"
        if trained.method.scores_are_logits
        else "the highest is the answer",
        "method": trained.facts["method"],
    }


def write_card(run: Path, file: Path, name: str) -> Path:
    """Writes what somebody must know who gets the model of a run: what it is for, what it was trained on, how good it
    is for each class and client, and how to use it."""
    result, config = read_result(run), read_config(run) or {}
    note = run / UNFINISHED
    unfinished = f"**{note.read_text(encoding='utf-8')}**\n" if note.exists() else ""
    parts = [
        f"# {name}\n",
        unfinished,
        _about(result, config),
        _accuracy(result),
        _classes(result),
        _use(config),
    ]
    write_atomic(file, "\n".join(part for part in parts if part).encode())
    return file


def _about(result: Result, config: Mapping[str, Any]) -> str:
    model, plan, train = (config.get(section, {}) for section in ("model", "plan", "train"))
    facts = {
        "method": result.method,
        "network": f"{model.get('name', '?')}, width {model.get('width', '?')}, {model.get('norm', '?')} normalisation",
        "trained on": f"{result.dataset}, by federated learning: clients sent models, no images",
        "classes": f"{len(result.classes)}, in {len(result.task_sizes)} tasks",
        "exemplars per client": plan.get("memory"),
        "training": f"{train.get('epochs')} epochs per round, batch size {train.get('batch')}, rate {train.get('lr')}",
        "seed": result.seed,
        "made with": f"Holdfast {result.version}, {result.machine or 'machine not recorded'}",
    }
    return "\n".join(f"- {key}: {value}" for key, value in facts.items()) + "\n"


def _accuracy(result: Result) -> str:
    worst = result.worst_client
    rows = [
        ["all classes at the end", percent(result.last_accuracy)],
        ["mean over tasks, each after its end", percent(result.average_accuracy)],
        ["macro F1", percent(result.macro_f1)],
        ["macro recall", percent(result.macro_recall)],
        ["points forgotten", percent(result.forgetting)],
        [f"worst client ({worst.get('name', worst['client'])}), on its classes", percent(worst["accuracy"])],
    ]
    chance = f"Guessing would be right in {percent(1 / len(result.classes))} % of all cases.\n"
    return f"## How good it is\n\nOn test images, in %. {chance}\n{markdown(['measure', 'value'], rows)}\n"


def _classes(result: Result) -> str:
    import numpy as np

    counts = np.array(result.confusion)
    recall, column = metrics.class_recall(counts), counts[:, :-1].sum(axis=0)
    precision = [counts[i, i] / column[i] if column[i] else None for i in range(len(counts))]
    rows: Sequence[Sequence[str]] = [
        [name, str(int(counts[i].sum())), percent(float(recall[i])), percent(precision[i])]
        for i, name in enumerate(result.classes)
    ]
    table = markdown(["class", "test images", "recognised, in %", "right when named, in %"], rows)
    return f"## Classes\n\n{table}\n"


def _use(config: Mapping[str, Any]) -> str:
    size = config.get("data", {}).get("size", "its")
    return (
        "## Use and limits\n\n"
        f"Input: the centre square of an image, {size} pixels wide, red, green and blue from 0 to 255. "
        "`holdfast predict RUN images/ --csv answers.csv` does all of it; the ONNX file takes pixels as they are.\n\n"
        "The figures hold for images like the test images. The model always names one of its classes, also for an "
        "image of something else. It has not been tested on other devices, sites or people, and it is no medical "
        "device: test it on your own images before anybody relies on it.\n"
    )
