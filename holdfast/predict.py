"""Classifying images with the final model of a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from holdfast.config import load_config
from holdfast.data.augment import Transform
from holdfast.data.decode import decode_image
from holdfast.errors import HoldfastError
from holdfast.models.incremental import ModelSpec, grow_to
from holdfast.seeding import torch_generator


@dataclass(frozen=True)
class Guess:
    """The most probable classes of an image, best first."""

    image: str
    classes: list[str]
    probabilities: list[float]


def predict(run: Path, images: Sequence[Path], top: int = 3) -> list[Guess]:
    """The best `top` classes of each image under the run's final model."""
    file = run / "model.safetensors"
    if not file.exists():
        raise HoldfastError(f"{run} holds no model.safetensors; give the folder of a finished run")
    try:
        with safe_open(file, framework="pt") as stored:
            facts = json.loads(stored.metadata()["holdfast"])
            weights = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise HoldfastError(f"{file} is damaged or not a Holdfast model: {error}") from error
    size, transform = facts["image_size"], Transform(tuple(facts["mean"]), tuple(facts["std"]), flip=False)
    pixels = torch.stack([torch.from_numpy(decode_image(image, size, str(image))) for image in images])
    method = load_config({"method": facts["method"]}).method
    model = method.build_model(ModelSpec(facts["backbone"], facts["norm"], size), torch_generator(0))
    grow_to(model, facts["growths"], torch_generator(0))  # overwritten at once by the stored weights
    model.load_state_dict(weights)
    with torch.inference_mode():
        probabilities = method.predict(model.eval(), transform.plain(pixels)).softmax(dim=1)
    best = probabilities.topk(min(top, len(facts["classes"])), dim=1)
    return [
        Guess(str(image), [facts["classes"][i] for i in places.tolist()], values.tolist())
        for image, places, values in zip(images, best.indices, best.values, strict=True)
    ]
