"""LGA's proxy: it reconstructs prototypes from their gradients and picks the best global model of each growth."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.losses import augmentation_scale, bounded_noise
from holdfast.methods.base import Method
from holdfast.methods.roles import LastModel, NoTeachers, PrototypeSelection, RandomModel
from holdfast.models.encoder import GradientEncoder
from holdfast.models.incremental import IncrementalModel, ModelSpec, load_grown
from holdfast.models.passes import CHUNK, evaluating
from holdfast.models.transform import Transform
from holdfast.privacy.encode import labels_of
from holdfast.privacy.reconstruct import group_size, reconstruct
from holdfast.protocol.checks import Refusal
from holdfast.protocol.codec import Snapshot, Weights
from holdfast.protocol.messages import GlobalModel, PrototypeShare
from holdfast.proxy.selectors import (
    TWO,
    LastModelSelector,
    NullSelector,
    RandomModelSelector,
    TeacherSelector,
    numbered,
)
from holdfast.proxy.validation import ShareCheck, admit
from holdfast.seeding import generator, shuffled, torch_generator


@dataclass(frozen=True)
class SelectorSetup:
    """What a selector is built from, beside the method."""

    spec: ModelSpec
    transform: Transform
    classes: int  # that the data set has
    seed: int
    device: torch.device


def build_selector(method: Method, setup: SelectorSetup) -> TeacherSelector:
    """The selector that a method asks for."""
    selection = method.teacher_selection()
    match selection:
        case NoTeachers():
            return NullSelector()
        case LastModel():
            return LastModelSelector()
        case RandomModel():
            return RandomModelSelector(setup.seed)
        case PrototypeSelection():
            buffer = method.build_model(setup.spec, torch_generator(0, "buffer")).to(setup.device)
            return PrototypeServer(setup, selection, buffer)


def _content(share: PrototypeShare) -> tuple[bytes, int, bytes]:
    """By what shares are put in order. Their gradients are not copied: a round can have gigabytes of them."""
    return share.fingerprint, share.count, share.variance.cpu().numpy().tobytes()


@dataclass(frozen=True)
class Prototype:
    """A reconstructed prototype, and all that the proxy knows of it."""

    images: Tensor  # (K, 3, S, S): the last iterates
    label: int
    fingerprint: bytes


class PrototypeServer(LastModelSelector):
    """The proxy server: it reconstructs prototype images from their gradients and keeps the global model of each growth
    that tells their augmented features apart best."""

    sent = TWO
    is_party = True
    encoder: GradientEncoder

    def __init__(self, setup: SelectorSetup, settings: PrototypeSelection, model: IncrementalModel) -> None:
        super().__init__()
        self.setup, self.settings = setup, settings
        capacity = settings.capacity or setup.classes
        if capacity < setup.classes:
            raise HoldfastError(f"method.capacity={capacity} is too small for {setup.classes} classes; raise it")
        rng = torch_generator(setup.seed, "proxy", "encoder")
        self.encoder = GradientEncoder(setup.spec.image_size, capacity, rng).to(setup.device)
        self.model = model  # a buffer
        self.check = ShareCheck(self.encoder, model.features)
        self.pools: dict[int, list[Prototype]] = {}  # growth -> its prototypes, in the pool's order
        self.variances: dict[int, tuple[int, Tensor]] = {}  # label -> images, mean variance of their features (d,)
        self.scores: dict[int, float] = {}  # growth -> score of the kept model
        self.rounds: dict[int, int] = {}  # growth -> the kept model's round
        self.first: dict[int, int] = {}  # growth -> its first round

    def gallery(self) -> dict[bytes, Tensor]:
        return {p.fingerprint: p.images[-1] for pool in self.pools.values() for p in pool}

    def judge(self, model: GlobalModel, shares: Sequence[PrototypeShare]) -> dict[str, Any]:
        round_index, growths, weights = model.round_index, model.growths, model.weights
        growth = len(growths) - 1
        if growth < 0:
            return {}
        refused = self._receive(round_index, growths, shares)
        counts = self.first.setdefault(growth, round_index) + self.settings.patience  # from this round on, scores count
        if growth in self.scores and shares and self.rounds[growth] >= counts:  # the kept model on the larger pool
            self.scores[growth] = self.score(growths, self.chosen[growth])
        score = None
        if self.pools.get(growth):
            score = self.score(growths, weights) if round_index >= counts else 0.0
        # A tie goes to the later round; with nothing to score by, the last model is kept (N16).
        if not self.settings.select or score is None or score >= self.scores.get(growth, 0.0):
            self.keep(growth, weights)
            self.rounds[growth] = round_index
            if score is not None:
                self.scores[growth] = score
        return {
            "prototypes": len(self.pools.get(growth, [])),
            "refused": refused,
            "omega": self.omega(growths),
            "score": score,
            "kept_round": self.rounds[growth] + 1,
            "kept_score": self.scores.get(growth),
        }

    def snapshot(self) -> dict[str, Snapshot]:
        parts = super().snapshot()
        for growth, pool in self.pools.items():
            facts = {"labels": [p.label for p in pool], "fingerprints": [p.fingerprint.hex() for p in pool]}
            parts[f"pool.{growth}"] = {"images": torch.stack([p.images for p in pool])}, facts
        counts = {str(label): count for label, (count, _) in self.variances.items()}
        parts["variances"] = {str(label): variance for label, (_, variance) in self.variances.items()}, counts
        scores = {"scores": list(self.scores.items()), "rounds": list(self.rounds.items())}
        parts["scores"] = {}, {**scores, "first": list(self.first.items())}
        return parts

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        super().restore(parts)
        self.pools = {}
        for growth, (tensors, facts) in numbered("pool", parts).items():
            entries = zip(tensors["images"].to(self.setup.device), facts["labels"], facts["fingerprints"], strict=True)
            self.pools[growth] = [Prototype(images, label, bytes.fromhex(mark)) for images, label, mark in entries]
        tensors, counts = parts["variances"]
        self.variances = {int(c): (counts[c], variance.to(self.setup.device)) for c, variance in tensors.items()}
        facts = parts["scores"][1]
        self.scores, self.rounds, self.first = (dict(facts[name]) for name in ("scores", "rounds", "first"))

    def admit(
        self, growths: tuple[int, ...], shares: Sequence[tuple[int, PrototypeShare]]
    ) -> tuple[list[PrototypeShare], list[Refusal]]:
        return admit(self.check, shares, sum(growths))

    def _receive(self, round_index: int, growths: tuple[int, ...], shares: Sequence[PrototypeShare]) -> int:
        """Takes a round's shares into the pool; returns how many cannot be used."""
        usable = [share for share in shares if self.check(share, sum(growths)) is None]
        if usable:
            # First by their content, because shares come in any order and say nobody's name.
            ordered = sorted(usable, key=_content)
            mixed = shuffled(generator(self.setup.seed, "proxy", "shuffle", round_index), ordered)
            self._reconstruct(round_index, growths, mixed)
        return len(shares) - len(usable)

    def _reconstruct(self, round_index: int, growths: tuple[int, ...], shares: Sequence[PrototypeShare]) -> None:
        """All of a round's prototypes (Eqs. 9-10), as many at a time as there is memory for."""
        size = self.setup.spec.image_size
        rng = torch_generator(self.setup.seed, "proxy", "start", round_index)
        noise = torch.randn((len(shares), 3, size, size), generator=rng)
        growth_of = [growth for growth, classes in enumerate(growths) for _ in range(classes)]
        for start in range(0, len(shares), group_size(size)):
            group = slice(start, start + group_size(size))
            labels, images = self._reconstruct_group(shares[group], noise[group].to(self.setup.device))
            for share, label, image in zip(shares[group], labels, images, strict=True):
                self.pools.setdefault(growth_of[label], []).append(Prototype(image, label, share.fingerprint))
                self._pool_variance(label, share)

    def _reconstruct_group(self, shares: Sequence[PrototypeShare], noise: Tensor) -> tuple[list[int], Tensor]:
        """The labels of these prototypes, and their images (N, K, 3, S, S)."""
        settings, device, names = self.settings, self.setup.device, shares[0].gradient
        gradients = {name: torch.cat([share.gradient[name][None] for share in shares]).to(device) for name in names}
        labels = labels_of(gradients)
        images, _ = reconstruct(
            self.encoder,
            gradients,
            labels,
            noise,
            settings.iterations,
            start=settings.start,
            rate=settings.rate,
            snapshots=settings.snapshots,
        )
        return labels.tolist(), images

    def _pool_variance(self, label: int, share: PrototypeShare) -> None:
        """The class's variance over all clients that sent one, by their numbers of images; one image has none (N10)."""
        if share.count < 2:
            return
        variance = share.variance.to(self.setup.device)
        known, mean = self.variances.get(label, (0, torch.zeros_like(variance)))
        total = known + share.count
        self.variances[label] = total, mean + (variance - mean) * (share.count / total)

    def omega(self, growths: tuple[int, ...]) -> float:
        """omega^t (Eq. 12), growth by growth, over the classes whose variance is known (N8, N10)."""
        scale, old, start = 0.0, 0, 0
        for classes in growths:
            known = [self.variances[c][1].mean() for c in range(start, start + classes) if c in self.variances]
            traces = torch.stack(known) if known else torch.zeros(0)
            scale = augmentation_scale(scale, old, traces)
            old, start = old + len(known), start + classes
        return math.sqrt(scale) if self.settings.root else scale

    def score(self, growths: tuple[int, ...], weights: Weights) -> float:
        """The accuracy of a global model on the augmented features (Eq. 11) of this growth's prototypes."""
        growth = len(growths) - 1
        pool = self.pools[growth]
        load_grown(self.model, growths, weights)
        images = torch.cat([p.images for p in pool])  # (N K, 3, S, S)
        labels = torch.tensor([p.label for p in pool for _ in p.images], device=images.device)
        with evaluating(self.model):
            parts = [self.model(self.setup.transform.normalised(some)).features for some in images.split(CHUNK)]
            features = torch.cat(parts)[:, None, :]  # (N K, 1, d)
            if self.settings.augmented:
                features = features + self._noise(growths, labels, features)
            found = self.model.classify(features.flatten(0, 1)).argmax(dim=1).view(len(labels), -1)
            return float((found == labels[:, None]).double().mean())

    def _noise(self, growths: tuple[int, ...], labels: Tensor, features: Tensor) -> Tensor:
        """Each prototype's own noise (N, upsilon, d), the same in every round of its growth (D45)."""
        width = features.shape[-1]
        draws = [
            torch.randn(
                (self.settings.augmented, width),
                generator=torch_generator(self.setup.seed, "proxy", "noise", len(growths), i),
            )
            for i in range(len(labels))
        ]
        none = features.new_zeros(width)
        variance = torch.stack([self.variances.get(int(c), (0, none))[1] for c in labels])[:, None, :]
        noise = self.omega(growths) * variance.sqrt() * torch.stack(draws).to(features.device)
        return bounded_noise(noise, variance, self.settings.radius)
