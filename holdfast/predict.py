"""Classifying images with the final model of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.config import load_config
from holdfast.data.decode import decode_image
from holdfast.methods.base import Method
from holdfast.models.incremental import IncrementalModel, ModelSpec, grow_to
from holdfast.models.passes import CHUNK
from holdfast.models.stored import damaged, read_model
from holdfast.models.transform import Transform
from holdfast.results.checksums import MODEL, check_files
from holdfast.seeding import torch_generator


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
        method = load_config({"method": facts["method"]}).method
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
    return method, model.eval(), transform, facts
