"""Classifying images with the final model of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.config import load_config
from holdfast.data.decode import decode_image
from holdfast.methods.base import Method
from holdfast.models.incremental import IncrementalModel, ModelSpec, load_grown
from holdfast.models.limited import as_large_as
from holdfast.models.passes import CHUNK
from holdfast.models.stored import damaged, read_model
from holdfast.models.transform import Transform
from holdfast.protocol.enrolment import MAX_IMAGE_SIZE
from holdfast.results.checksums import MODEL, check_files
from holdfast.seeding import torch_generator

OLDER_WIDTH = 64  # of models that do not say theirs


@dataclass(frozen=True)
class Guess:
    """The most probable classes of an image, best first."""

    image: str
    classes: list[str]
    probabilities: list[float] | None  # None: the method has none


def predict(run: Path, images: Sequence[Path], top: int = 3) -> list[Guess]:
    """The best `top` classes of each image under the run's final model."""
    check_files(run)
    method, model, transform, facts = _load(run / MODEL)
    guesses = []
    for i in range(0, len(images), CHUNK):
        some = images[i : i + CHUNK]
        pixels = torch.stack([torch.from_numpy(decode_image(p, facts["image_size"], str(p)).copy()) for p in some])
        with torch.inference_mode():
            scores = method.predict(model, transform.plain(pixels))
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


def _load(file: Path) -> tuple[Method, IncrementalModel, Transform, dict[str, Any]]:
    """A run's method, its final model, how its images were normalised, and the facts stored beside the weights."""
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
        spec = ModelSpec(facts["backbone"], facts["norm"], size, facts.get("width", OLDER_WIDTH))
        with as_large_as(weights):
            model = method.build_model(spec, torch_generator(0))
        load_grown(model, growths, weights)
        (a, b, c), (d, e, f) = (map(float, facts[name]) for name in ("mean", "std"))
        transform = Transform((a, b, c), (d, e, f), flip=False)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise damaged(file, error) from error
    return method, model.eval(), transform, facts
