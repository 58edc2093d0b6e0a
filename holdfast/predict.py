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
from holdfast.models.incremental import IncrementalModel, ModelSpec, load_grown
from holdfast.models.limited import as_large_as
from holdfast.models.passes import CHUNK
from holdfast.models.stored import damaged, read_model
from holdfast.models.transform import Transform
from holdfast.protocol.enrolment import MAX_IMAGE_SIZE
from holdfast.results.checksums import MODEL, check_files
from holdfast.seeding import torch_generator
from holdfast.unfinished import finished_part

OLDER_WIDTH = 64  # of models that do not say theirs


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
        if run.name == MODEL:
            check_files(run.parent)
        return load_trained(run)
    check_files(run)
    with finished_part(run, with_model=True) as (folder, _):
        return load_trained(folder / MODEL)


def load_trained(file: Path) -> Trained:
    """The model in this file, how its images were normalised, and the facts stored beside the weights."""
    weights, facts = read_model(file)
    try:
        growths, size = facts["growths"], facts["image_size"]
        numbers = [*growths, size, facts.get("width", OLDER_WIDTH)]
        if not all(type(number) is int and number > 0 for number in numbers) or not 16 <= size <= MAX_IMAGE_SIZE:
            raise ValueError(f"growths {growths!r:.80}, images of {size!r:.20} pixels")
        classes = facts["classes"]
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ValueError("its classes have no names")
        if sum(growths) != len(classes):
            raise ValueError(f"{len(classes)} names for {sum(growths)} classes")
        method = load_config({"method": facts["method"]}).method
        allow(facts["backbone"])
        spec = ModelSpec(facts["backbone"], facts["norm"], size, facts.get("width", OLDER_WIDTH))
        with as_large_as(weights):
            model = method.build_model(spec, torch_generator(0))
        load_grown(model, growths, weights)
        (a, b, c), (d, e, f) = (map(float, facts[name]) for name in ("mean", "std"))
        transform = Transform((a, b, c), (d, e, f), flip=False)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(file, error) from error
    return Trained(method, model.eval(), transform, facts)
