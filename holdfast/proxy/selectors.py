"""Who chooses the old models that clients distil from: nobody in particular, or the proxy server."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from holdfast.losses import augmentation_scale, bounded_noise
from holdfast.models.encoder import GradientEncoder
from holdfast.models.incremental import IncrementalModel, ModelSpec, grow_to
from holdfast.models.passes import CHUNK, evaluating
from holdfast.models.transform import Transform
from holdfast.privacy.encode import Gradients, labels_of
from holdfast.privacy.reconstruct import reconstruct
from holdfast.protocol.messages import PrototypeShare, Snapshot, Teachers, Weights, tensor_bytes
from holdfast.seeding import generator, shuffled, torch_generator


@dataclass(frozen=True)
class ProxyHome:
    """What a proxy is built from."""

    spec: ModelSpec
    transform: Transform
    classes: int  # that the data set has
    seed: int
    device: torch.device


class Proxy(Protocol):
    """Sees every global model and every share; answers with teachers."""

    sent: ClassVar[int]

    @property
    def encoder(self) -> GradientEncoder | None:
        """What clients are handed once, when they join."""
        ...

    def teachers(self, growth: int) -> Teachers:
        """What selected clients are sent while this is the last growth."""
        ...

    def judge(
        self, number: int, growths: tuple[int, ...], model: Weights, shares: Sequence[PrototypeShare]
    ) -> dict[str, Any]:
        """Takes in the shares of a round and its new global model; returns what the record should say about it."""
        ...

    def gallery(self) -> dict[bytes, Tensor]:
        """The prototypes as the proxy sees them, by their fingerprints."""
        ...

    def snapshot(self) -> dict[str, Snapshot]:
        """What it remembers, for a checkpoint; old models are parts of their own, so that they are written once."""
        ...

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        """Remembers it again."""
        ...


def encoder_bytes(proxy: Proxy) -> int:
    """The size of what a client is handed when it joins."""
    return tensor_bytes(proxy.encoder.state_dict()) if proxy.encoder else 0


def copied(model: Weights) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.items()}


def _numbered(name: str, parts: Mapping[str, Snapshot]) -> dict[int, Snapshot]:
    """The parts called `name.<number>`, by their numbers."""
    return {int(key.removeprefix(f"{name}.")): part for key, part in parts.items() if key.startswith(f"{name}.")}


class LastRound:
    """No proxy: the last global model of a growth is the teacher of the next."""

    sent: ClassVar[int] = 1  # models that a client gets

    def __init__(self) -> None:
        self.encoder: GradientEncoder | None = None
        self.chosen: dict[int, Weights] = {}

    def teachers(self, growth: int) -> Teachers:
        return Teachers({g: self.chosen[g] for g in range(max(0, growth - self.sent), growth) if g in self.chosen})

    def judge(
        self, number: int, growths: tuple[int, ...], model: Weights, shares: Sequence[PrototypeShare]
    ) -> dict[str, Any]:
        if growths:
            self.keep(len(growths) - 1, model)
        return {}

    def gallery(self) -> dict[bytes, Tensor]:
        return {}

    def snapshot(self) -> dict[str, Snapshot]:
        return {f"model.{growth}": (dict(model), {}) for growth, model in self.chosen.items()}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        self.chosen = {number: tensors for number, (tensors, _) in _numbered("model", parts).items()}

    def keep(self, growth: int, model: Weights) -> None:
        """Makes this the model of its growth, and drops what no client will be sent any more."""
        self.chosen[growth] = copied(model)
        for old in [g for g in self.chosen if g < growth - self.sent]:
            del self.chosen[old]


class NoTeacher(LastRound):
    """For methods that do not distil: nothing is kept and nothing is sent."""

    sent = 0

    def judge(
        self, number: int, growths: tuple[int, ...], model: Weights, shares: Sequence[PrototypeShare]
    ) -> dict[str, Any]:
        return {}


TWO = 2  # the paper's old and new one, of the last two growths: a client that has not noticed the last needs the older


class AnyRound(LastRound):
    """Without the proxy (w/oPSR): the teacher is drawn by chance from the global models of a growth, each as likely."""

    sent = TWO

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.seen: dict[int, int] = {}  # growth -> models so far

    def judge(
        self, number: int, growths: tuple[int, ...], model: Weights, shares: Sequence[PrototypeShare]
    ) -> dict[str, Any]:
        # The k-th model replaces the one that is kept with chance 1/k: in the end all are equally likely, and only one
        # has to be stored.
        growth = len(growths) - 1
        if growth < 0:
            return {}
        self.seen[growth] = self.seen.get(growth, 0) + 1
        draw = int(generator(self.seed, "proxy", "any", growth, self.seen[growth]).bit_generator.random_raw())
        if draw % self.seen[growth] == 0:
            self.keep(growth, model)
        return {}

    def snapshot(self) -> dict[str, Snapshot]:
        return {**super().snapshot(), "seen": ({}, {"growths": list(self.seen.items())})}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        super().restore(parts)
        self.seen = dict(parts["seen"][1]["growths"])


@dataclass(frozen=True)
class ProxySettings:
    """How the proxy server reconstructs, augments and selects."""

    capacity: int  # class outputs of the encoding network
    iterations: int  # of L-BFGS
    augmented: int  # features made of each prototype, upsilon; 0: none but its own
    start: str = "smooth"  # or white
    rate: float = 1.0  # of L-BFGS
    snapshots: int = 1  # last iterates that count as prototypes (D28: 1)
    radius: float = 0.1  # xi
    root: bool = False  # omega as the square root of the mean variance (N8)
    patience: int = 1  # first rounds of a growth that count for nothing
    select: bool = True  # the best model; if not, the last


@dataclass(frozen=True)
class Prototype:
    """A reconstructed prototype, and all that the proxy knows of it."""

    images: Tensor  # (K, 3, S, S): the last iterates
    label: int
    fingerprint: bytes


class PrototypeProxy(LastRound):
    """The proxy server: it reconstructs prototype images from their gradients and keeps the global model of each growth
    that tells their augmented features apart best."""

    sent = TWO
    encoder: GradientEncoder

    def __init__(self, home: ProxyHome, settings: ProxySettings, model: IncrementalModel) -> None:
        super().__init__()
        self.home, self.settings = home, settings
        rng = torch_generator(home.seed, "proxy", "encoder")
        self.encoder = GradientEncoder(home.spec.image_size, settings.capacity, rng).to(home.device)
        self.model = model  # a buffer
        self.pools: dict[int, list[Prototype]] = {}  # growth -> its prototypes, in the pool's order
        self.variances: dict[int, tuple[int, Tensor]] = {}  # label -> images, mean variance of their features (d,)
        self.scores: dict[int, float] = {}  # growth -> score of the kept model
        self.rounds: dict[int, int] = {}  # growth -> the kept model's round
        self.first: dict[int, int] = {}  # growth -> its first round

    def gallery(self) -> dict[bytes, Tensor]:
        return {p.fingerprint: p.images[-1] for pool in self.pools.values() for p in pool}

    def judge(
        self, number: int, growths: tuple[int, ...], model: Weights, shares: Sequence[PrototypeShare]
    ) -> dict[str, Any]:
        growth = len(growths) - 1
        if growth < 0:
            return {}
        refused = self._receive(number, growths, shares)
        counts = self.first.setdefault(growth, number) + self.settings.patience  # from this round on, scores count
        if growth in self.scores and shares and self.rounds[growth] >= counts:  # the kept model on the larger pool
            self.scores[growth] = self.score(growths, self.chosen[growth])
        score = None
        if self.pools.get(growth):
            score = self.score(growths, model) if number >= counts else 0.0
        # A tie goes to the later round; with nothing to score by, the last model is kept (N16).
        if not self.settings.select or score is None or score >= self.scores.get(growth, 0.0):
            self.keep(growth, model)
            self.rounds[growth] = number
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
        for growth, (tensors, facts) in _numbered("pool", parts).items():
            entries = zip(tensors["images"].to(self.home.device), facts["labels"], facts["fingerprints"], strict=True)
            self.pools[growth] = [Prototype(images, label, bytes.fromhex(mark)) for images, label, mark in entries]
        tensors, counts = parts["variances"]
        self.variances = {int(c): (counts[c], variance.to(self.home.device)) for c, variance in tensors.items()}
        facts = parts["scores"][1]
        self.scores, self.rounds, self.first = (dict(facts[name]) for name in ("scores", "rounds", "first"))

    def _receive(self, number: int, growths: tuple[int, ...], shares: Sequence[PrototypeShare]) -> int:
        """Takes a round's shares into the pool; returns how many told no label and were refused."""
        usable = []
        for share in shuffled(generator(self.home.seed, "proxy", "shuffle", number), shares):
            gradient = {name: part[None].to(self.home.device) for name, part in share.gradient.items()}
            try:
                usable.append((share, gradient, int(labels_of(gradient))))
            except ValueError:
                continue
        if usable:
            self._reconstruct(number, growths, usable)
        return len(shares) - len(usable)

    def _reconstruct(
        self, number: int, growths: tuple[int, ...], usable: list[tuple[PrototypeShare, Gradients, int]]
    ) -> None:
        """All of a round's prototypes as one batch (Eqs. 9-10)."""
        settings, size = self.settings, self.home.spec.image_size
        gradients = {name: torch.cat([g[name] for _, g, _ in usable]) for name in usable[0][1]}
        labels = torch.tensor([label for _, _, label in usable], device=self.home.device)
        rng = torch_generator(self.home.seed, "proxy", "start", number)
        noise = torch.randn((len(usable), 3, size, size), generator=rng).to(self.home.device)
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
        growth_of = [growth for growth, classes in enumerate(growths) for _ in range(classes)]
        for (share, _, label), image in zip(usable, images, strict=True):
            if label >= len(growth_of):
                continue  # a class that the global model does not have
            self.pools.setdefault(growth_of[label], []).append(Prototype(image, label, share.fingerprint))
            self._pool_variance(label, share)

    def _pool_variance(self, label: int, share: PrototypeShare) -> None:
        """The class's variance over all clients that sent one, by their numbers of images; one image has none (N10)."""
        if share.count < 2:
            return
        variance = share.variance.to(self.home.device)
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
        grow_to(self.model, growths, torch_generator(0, "buffer"))
        self.model.load_state_dict(dict(weights))
        images = torch.cat([p.images for p in pool])  # (N K, 3, S, S)
        labels = torch.tensor([p.label for p in pool for _ in p.images], device=images.device)
        with evaluating(self.model):
            parts = [self.model(self.home.transform.normalised(some)).features for some in images.split(CHUNK)]
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
                generator=torch_generator(self.home.seed, "proxy", "noise", len(growths), i),
            )
            for i in range(len(labels))
        ]
        none = features.new_zeros(width)
        variance = torch.stack([self.variances.get(int(c), (0, none))[1] for c in labels])[:, None, :]
        noise = self.omega(growths) * variance.sqrt() * torch.stack(draws).to(features.device)
        return bounded_noise(noise, variance, self.settings.radius)
