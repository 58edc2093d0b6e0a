"""Prediction by the head, by nearest class means or by a Gaussian, the last two from sums that clients send."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.methods.base import Method
from holdfast.methods.context import ClientContext
from holdfast.methods.roles import ExtrasForm
from holdfast.models.incremental import IncrementalModel, ModelSpec, Output
from holdfast.protocol.checks import Like
from holdfast.protocol.messages import Extras, Phase
from holdfast.settings import STRICT

BEYOND = 1e9  # larger than any score
Inference = Literal["head", "nme", "gauss", "both"]
INFERENCE = (
    "prediction by the head, by the nearest mean of exemplars (nme), by Gaussians with one covariance from all images "
    "of the last clients (gauss), or by head and Gaussians together (both)"
)
SHRINK = 0.3  # how far the covariance is moved towards a multiple of the identity


# what clients send


def class_sums(context: ClientContext, ids: Tensor) -> Extras:
    """The sums of the unit features of these images (and of their mirror images) under the client's model, by class."""
    features = F.normalize(context.features(context.model, ids), dim=1)
    if context.transform.flip:
        features = features + F.normalize(context.features(context.model, ids, mirrored=True), dim=1)
    labels = context.positions_of(ids)
    sums = torch.zeros(len(context.registry.names), features.shape[1]).index_add_(0, labels, features)
    return Extras("class sums", {"sums": sums, "counts": torch.bincount(labels, minlength=len(sums))})


def gaussian_sums(context: ClientContext, ids: Tensor) -> Extras:
    """The sums from which the server makes means and a covariance, over the unit features of these images and of their
    mirror images under the client's model."""
    features, labels = F.normalize(context.features(context.model, ids), dim=1), context.positions_of(ids)
    if context.transform.flip:
        features = torch.cat([features, F.normalize(context.features(context.model, ids, mirrored=True), dim=1)])
        labels = torch.cat([labels, labels])
    return Extras("class sums", scatter_sums(features, labels, len(context.registry.names)))


def scatter_sums(features: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """Of features (N, d) with labels (N,): `sums` S_c (C, d) and `counts` n_c (C,) by class; `scatter` D (d, d), the
    sum over classes of the mean of (u - S_c / n_c)(u - S_c / n_c)', so that every class counts alike; and `spread` K,
    in how many classes there is more than one feature, because a single one has no scatter."""
    features = features.double()
    counts = torch.bincount(labels, minlength=classes)
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64).index_add_(0, labels, features)
    apart = features - (sums / counts.clamp(min=1)[:, None])[labels]
    scatter = (apart / counts[labels, None]).T @ apart
    return {"sums": sums.float(), "counts": counts, "scatter": scatter.float(), "spread": (counts > 1).sum()}


def class_sums_form(model: IncrementalModel, most: int) -> dict[str, Like]:
    """What `class_sums` of a client with at most `most` images look like: two unit vectors per image at most."""
    classes = sum(model.growths)
    return {
        "sums": Like((classes, model.features), least=-2 * most, most=2 * most),
        "counts": Like((classes,), torch.int64, 0, most),
    }


def gaussian_sums_form(model: IncrementalModel, most: int) -> dict[str, Like]:
    """The same of `gaussian_sums`, whose counts have mirror images too. Two unit vectors differ by 2 at most, so an
    entry of a class's covariance is 4 at most."""
    classes, width = sum(model.growths), model.features
    return {
        "sums": Like((classes, width), least=-2 * most, most=2 * most),
        "counts": Like((classes,), torch.int64, 0, 2 * most),
        "scatter": Like((width, width), least=-4 * classes, most=4 * classes),
        "spread": Like((), torch.int64, 0, classes),
    }


# what the server makes of it


def total(extras: Sequence[Extras], name: str) -> Tensor:
    """The sum of one tensor over all clients, in double precision."""
    return torch.stack([e.tensors[name].double() for e in extras]).sum(dim=0)


def class_means(extras: Sequence[Extras]) -> tuple[Tensor, Tensor]:
    """The normalised class means (C, d) over all clients, and which classes have one (C,)."""
    known = torch.stack([e.tensors["counts"] for e in extras]).sum(dim=0) > 0
    return F.normalize(total(extras, "sums"), dim=1).float(), known


def shrunk(covariance: Tensor, amount: float) -> Tensor:
    """(1 - a) Sigma + a tr(Sigma) / d I (d, d), which can be inverted; the identity where nothing varies."""
    identity = torch.eye(len(covariance), dtype=covariance.dtype)
    variance = covariance.diagonal().mean()
    return (1 - amount) * covariance + amount * variance * identity if variance > 0 else identity


def gaussian_scores(unit: Tensor, means: Tensor, rows: Tensor) -> Tensor:
    """Scores (B, C) of unit features (B, d): M_c' Sigma^-1 u - M_c' Sigma^-1 M_c / 2, with rows M_c' Sigma^-1 (C, d).
    Up to a constant per image they are the logarithms of Gaussian densities with one covariance."""
    return unit @ rows.T - (rows * means).sum(dim=1) / 2


@dataclass(frozen=True, config=STRICT)
class InferenceChoice(Method):
    """A method whose model can be asked in several ways. By its head, for which clients send nothing but the model. Or
    by what the clients of a task's last round send about their classes under the new global model, which the server
    adds up: for `nme` the sums of their exemplars' unit features, for `gauss` (LDA) sums over all their images from
    which it makes class means and one covariance. A class that none of these clients holds keeps its previous mean. A
    class without any mean (new during a task, or never held by these clients) is predicted if the head predicts it."""

    extras_are: ClassVar[str] = "class sums"

    inference: Inference = Field(default="head", description=INFERENCE)

    @property
    def shrinkage(self) -> float:
        """How far the covariance is moved towards a multiple of the identity, a."""
        return SHRINK

    def network(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        return IncrementalModel(spec, rng)

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        model = self.network(spec, rng)
        if self.inference != "head":
            model.kinds = {"mean": ((model.features,), 0.0)}
        if self.inference in ("gauss", "both"):
            model.kinds["row"] = ((model.features,), 0.0)
        return model

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        return model.note_names

    def collects_extras(self, phase: Phase) -> bool:
        return self.inference != "head" and phase == "finish"

    def finish_task(self, context: ClientContext) -> Extras | None:
        if self.inference == "nme":
            return class_sums(context, context.exemplars)
        return gaussian_sums(context, context.everything)

    def sums_form(self, model: IncrementalModel, most: int) -> dict[str, Like]:
        """What the sums look like that clients send for this answer; nothing for the head's."""
        if self.inference == "head":
            return {}
        return class_sums_form(model, most) if self.inference == "nme" else gaussian_sums_form(model, most)

    def extras_form(self, model: IncrementalModel, phase: Phase, most: int) -> ExtrasForm | None:
        return ExtrasForm(self.sums_form(model, most))

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        if not extras:
            return
        before = model.noted("mean")
        if self.inference == "nme":
            means, known = class_means(extras)
            model.note("mean", torch.where(known[:, None].to(before.device), means.to(before), before))
            return
        counts = total(extras, "counts")[:, None]
        means = torch.where(counts > 0, total(extras, "sums") / counts.clamp(min=1), before.double().cpu())
        covariance = total(extras, "scatter") / total(extras, "spread").clamp(min=1)
        model.note("mean", means.to(before))
        model.note("row", torch.linalg.solve(shrunk(covariance, self.shrinkage), means.T).T.to(before))

    def predict(self, model: IncrementalModel, images: Tensor) -> Tensor:
        if self.inference == "head":
            return self.head(model, model(images))
        return self.answers(model, images)[self.inference]

    @property
    def answer_names(self) -> tuple[str, ...]:
        if self.inference == "head":
            return ()
        return ("head", "nme") if self.inference == "nme" else ("head", "mean", "gauss", "both")

    def answers(self, model: IncrementalModel, images: Tensor) -> dict[str, Tensor]:
        """By the head, and by everything that the sums allow: with those of `gauss` also by the nearest of its means
        (`mean`), which are means of all images, not of exemplars alone."""
        output = model(images)
        logits = self.head(model, output)
        if not logits.shape[1]:
            return dict.fromkeys(self.answer_names, logits)
        means = model.noted("mean")
        known = means.any(dim=1)
        unit = F.normalize(output.features, dim=1)
        if self.inference == "nme":
            found = {"nme": unit @ means.T}  # cosines of unit vectors: the largest is the nearest
        else:
            gauss = gaussian_scores(unit, means, model.noted("row"))
            together = gauss.masked_fill(~known, -BEYOND).log_softmax(dim=1) + logits.log_softmax(dim=1)
            found = {"mean": unit @ F.normalize(means, dim=1).T, "gauss": gauss, "both": together}
        said = F.one_hot(logits.argmax(dim=1), logits.shape[1]).bool()
        otherwise = torch.where(said, BEYOND, -BEYOND)
        return {"head": logits, **{name: torch.where(known, scores, otherwise) for name, scores in found.items()}}

    def head(self, model: IncrementalModel, output: Output) -> Tensor:
        """The head's scores (B, C), whose softmax gives probabilities."""
        return output.logits

    @property
    def scores_are_logits(self) -> bool:
        return self.inference == "head"  # a softmax of the others gives no probabilities
