"""A backbone and a growing head; one forward pass gives logits, features and stage maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holdfast.errors import HoldfastError
from holdfast.models import BACKBONE_TABLE, BACKBONES
from holdfast.models.backbone import AdaptedBackbone, Backbone, adapted, hold
from holdfast.models.layers import materialise
from holdfast.models.limited import as_large_as
from holdfast.seeding import torch_generator


class Output(NamedTuple):
    """The result of one forward pass."""

    logits: Tensor  # (B, C)
    features: Tensor  # (B, d)
    maps: list[Tensor]  # the stages' maps before their ReLU, (B, c, h, w) each


NORM, WIDTH = "batch", 64  # defaults


@dataclass(frozen=True)
class ModelSpec:
    """What a network is built from, apart from the number of its classes."""

    backbone: str
    norm: str
    image_size: int
    width: int = WIDTH
    freeze: int = 0  # the first so many parts of the backbone are not trained

    def build_backbone(self, rng: torch.Generator) -> Backbone:
        """The feature extractor; its initial weights depend on `rng` only."""
        if self.backbone in BACKBONES:
            with torch.device("meta"):
                backbone = BACKBONES[self.backbone](self.image_size, self.norm, self.width)
            materialise(backbone, rng)
            return backbone
        settings = {"image_size": self.image_size, "norm": self.norm, "width": self.width}
        given = {key: settings[key] for key, default in (("norm", NORM), ("width", WIDTH)) if settings[key] != default}
        return adapted(self.backbone, BACKBONE_TABLE.find(self.backbone), settings, given, rng)


Notes = dict[str, tuple[tuple[int, ...], float]]  # name -> shape per class, initial value


class IncrementalModel(nn.Module):
    """A backbone with one linear block per growth of the head. It may also carry notes of the server about each class,
    in buffers that no client trains; set `kinds` to choose them before the first growth."""

    def __init__(self, spec: ModelSpec, rng: torch.Generator) -> None:
        super().__init__()
        backbone = spec.build_backbone(rng)
        self.backbone: nn.Module = backbone
        self.features: int = backbone.features
        self.channels: tuple[int, ...] = backbone.channels  # of the stages' maps
        if not isinstance(backbone, AdaptedBackbone):
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._start(spec, backbone.parts())

    def _start(self, spec: ModelSpec, parts: list[list[nn.Module]]) -> None:
        """Prepares an empty head, and freezes the first `spec.freeze` parts."""
        self.blocks, self.notes = nn.ModuleList(), nn.ModuleList()
        self.kinds: Notes = {}
        self.register_buffer("_somewhere", torch.empty(0), persistent=False)
        if spec.freeze > len(parts):
            raise HoldfastError(
                f"model.freeze={spec.freeze}, but {spec.backbone} has {len(parts)} stages here, the stem included; "
                f"use 0 to {len(parts)}"
            )
        self._frozen = [module for part in parts[: spec.freeze] for module in part]
        for module in self._frozen:
            hold(module)

    @property
    def device(self) -> torch.device:
        """Where the model is, even if nothing in it can be trained."""
        return self.get_buffer("_somewhere").device

    @property
    def trunk(self) -> Backbone | None:
        """The backbone that `model.name` names; None if the network has none."""
        return self.backbone if isinstance(self.backbone, Backbone) else None

    @property
    def frozen_names(self) -> frozenset[str]:
        """The tensors of the frozen parts."""
        names = {id(module): name for name, module in self.named_modules()}
        return frozenset(f"{names[id(module)]}.{key}" for module in self._frozen for key in module.state_dict())

    def train(self, mode: bool = True) -> "IncrementalModel":
        """Frozen parts stay in evaluation mode: their batch statistics do not change."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self

    @property
    def growths(self) -> list[int]:
        """How many classes each growth brought."""
        return [block.out_features for block in self.blocks]  # type: ignore[misc]

    def grow(self, classes: int, rng: torch.Generator) -> None:
        """Appends a block of new classes. Old logits keep their bits, which one wider matrix would not ensure."""
        self.blocks.append(self.new_block(classes, rng).to(self.device))
        note = nn.Module()
        for name, (shape, value) in self.kinds.items():
            note.register_buffer(name, torch.full((classes, *shape), value))
        self.notes.append(note.to(self.device))

    def new_block(self, classes: int, rng: torch.Generator) -> nn.Module:
        """The part of the head for new classes: features (B, d) to their logits."""
        with torch.device("meta"):
            block = nn.Linear(self.features, classes)
        materialise(block, rng)
        return block

    def classify(self, features: Tensor) -> Tensor:
        """Features (B, d) to logits (B, C)."""
        if not self.blocks:
            return features.new_zeros(len(features), 0)
        return torch.cat([block(features) for block in self.blocks], dim=1)

    def forward(self, images: Tensor) -> Output:
        features, maps = self.backbone(images)
        return Output(self.classify(features), features, maps)

    def noted(self, name: str) -> Tensor:
        """One kind of note for all classes (C, ...)."""
        return torch.cat([note.get_buffer(name) for note in self.notes])

    def note(self, name: str, values: Tensor) -> None:
        """Writes one kind of note for all classes (C, ...)."""
        for note, part in zip(self.notes, values.split(self.growths), strict=True):
            note.get_buffer(name).copy_(part)

    @property
    def note_names(self) -> frozenset[str]:
        """The tensors that hold notes."""
        return frozenset(name for name in self.state_dict() if name.startswith("notes."))


def grow_to(model: IncrementalModel, growths: Sequence[int], rng: torch.Generator) -> None:
    """Appends the missing blocks, so that `model` has these growths."""
    for classes in growths[len(model.blocks) :]:
        model.grow(classes, rng)


def require_maps(backbone: IncrementalModel | Backbone, spec: ModelSpec) -> None:
    """Raises HoldfastError if a backbone has no maps, for networks that need them."""
    if not backbone.channels:
        raise HoldfastError(
            f"the backbone {spec.backbone!r} returns features without maps, which this method compares or attends to; "
            "have it return (features, list of maps), or choose a method that needs no maps, such as icarl or lga"
        )


def load_grown(model: IncrementalModel, growths: Sequence[int], weights: Mapping[str, Tensor]) -> None:
    """Appends the missing blocks and loads the weights. Raises ValueError or RuntimeError, before anything large is
    allocated, if these are not the weights of a head that grew like this."""
    known = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    if len(known) != len(growths):
        raise ValueError(f"weights of {len(known)} growths, not of {len(growths)}")
    if len(model.blocks) < len(growths):
        with as_large_as(weights):
            grow_to(model, growths, torch_generator(0, "buffer"))  # overwritten at once by the weights
    model.load_state_dict(dict(weights))
