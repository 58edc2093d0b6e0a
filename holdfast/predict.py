"""Classifying images with the model of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.config import load_config
from holdfast.data.decode import decode_image
from holdfast.data.tree import is_image
from holdfast.errors import HoldfastError
from holdfast.extensions import allow
from holdfast.methods.base import Method
from holdfast.models.incremental import IncrementalModel, ModelSpec, grow_to
from holdfast.models.passes import CHUNK
from holdfast.models.stored import damaged, read_model
from holdfast.models.transform import Transform
from holdfast.seeding import torch_generator
from holdfast.unfinished import finished_part

MODEL = "model.safetensors"


@dataclass(frozen=True)
class Guess:
    """The most probable classes of an image, best first."""

    image: str
    classes: list[str]
    probabilities: list[float] | None  # None: the method has none


@dataclass(frozen=True)
class Trained:
    """A model with all that is needed to use it."""

    method: Method
    model: IncrementalModel
    transform: Transform
    facts: dict[str, Any]  # as stored beside the weights: classes, image_size, ...


def predict(run: Path, images: Sequence[Path], top: int = 3) -> list[Guess]:
    """The best `top` classes of each image under the run's model. `run` is the folder of a run or its model file; of a
    run that is not finished, the model of its last checkpoint is used. A folder of images stands for all images below
    it."""
    trained = trained_model(run)
    method, facts = trained.method, trained.facts
    guesses = []
    files = image_files(images)
    for i in range(0, len(files), CHUNK):
        some = files[i : i + CHUNK]
        pixels = torch.stack([torch.from_numpy(decode_image(p, facts["image_size"], str(p)).copy()) for p in some])
        with torch.inference_mode():
            scores = method.predict(trained.model, trained.transform.plain(pixels))
        best = scores.softmax(dim=1).topk(min(top, len(facts["classes"])), dim=1)
        guesses += [
            Guess(
                str(image),
                [facts["classes"][i] for i in places.tolist()],
                values.tolist() if method.scores_are_logits else None,
            )
            for image, places, values in zip(some, best.indices, best.values, strict=True)
        ]
    return guesses


def image_files(paths: Sequence[Path]) -> list[Path]:
    """These images, and all images below these folders, in the order of their names."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(file for file in path.rglob("*") if is_image(file.name) and file.is_file())
        if not found:
            raise HoldfastError(f"the folder {path} holds no images; check the path")
        files += found
    return files


def trained_model(run: Path) -> Trained:
    """The model of a run, given by its folder or its model file."""
    if run.is_file():
        return load_trained(run)
    with finished_part(run, with_model=True) as (folder, _):
        return load_trained(folder / MODEL)


def load_trained(file: Path) -> Trained:
    """The model in this file, how its images were normalised, and the facts stored beside the weights."""
    weights, facts = read_model(file)
    try:
        method = load_config({"method": facts["method"]}).method
        allow(facts["backbone"])
        spec = ModelSpec(
            facts["backbone"], facts["norm"], facts["image_size"], facts.get("width", 64)
        )  # older models: 64
        model = method.build_model(spec, torch_generator(0))
        grow_to(model, facts["growths"], torch_generator(0))  # overwritten at once by the stored weights
        model.load_state_dict(weights)
        (a, b, c), (d, e, f) = (map(float, facts[name]) for name in ("mean", "std"))
        transform = Transform((a, b, c), (d, e, f), flip=False)
        if sum(facts["growths"]) != len(facts["classes"]) or not isinstance(facts["image_size"], int):
            raise ValueError(f"{len(facts['classes'])} names, images of {facts['image_size']} pixels")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(file, error) from error
    return Trained(method, model.eval(), transform, facts)
