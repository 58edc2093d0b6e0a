"""DyTox (Douillard et al., 2022, Transformers for Continual Learning with Dynamic Token Expansion)."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.losses import distillation, one_hot
from holdfast.methods.base import Losses
from holdfast.methods.context import Batch, ClientContext, Stage
from holdfast.methods.roles import ExtrasForm
from holdfast.methods.shared import Replay, mean_of
from holdfast.models.convit import TokenModel
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.protocol.checks import Like
from holdfast.protocol.enrolment import Preset
from holdfast.protocol.messages import Extras, Phase
from holdfast.settings import STRICT

WIDE = 512  # batch size of the official learning rates
COLD = 1e-6  # where a warm-up begins


@dataclass(frozen=True, config=STRICT)
class DyTox(Replay):
    """A transformer with one learned token and one head per task; sigmoid outputs; distillation weighted by the
    fraction of old classes; a divergence head, which tells the newest classes from all old ones, keeps the tokens
    distinct. Old tokens and heads are frozen. After each task but the first, everything except the encoder is
    fine-tuned on the balanced memory, without the old model. Federated: the server creates tokens and heads; frozen
    parts are neither sent nor averaged and keep their exact bits; the clients of a task's last round that have
    exemplars of old and of new classes fine-tune, and the server averages the tuned parameters, weighted by the numbers
    of exemplars. There is no warm-up (five of 500 epochs are a tenth of a first round) and no stochastic depth; the
    preset's learning rate is the official one for 128 images. Herding uses the outputs of all tokens for plain images
    (the official code's were augmented), and each client has its own memory (theirs grew with the number of GPUs). The
    paper's comparison says ResNet-18: with `encoder = "network"` the tokens attend to the last maps of `model.name`,
    without blocks of gated attention in between."""

    name: ClassVar[str] = "dytox"
    about: ClassVar[str] = "DyTox (Douillard et al., 2022): a transformer with one token and one head per task"
    extras_are: ClassVar[str] = "tuned classifier"

    encoder: Literal["patches", "network"] = Field(
        default="patches", description="tokens attend to a transformer on image patches, or to the maps of model.name"
    )
    width: int = Field(default=384, ge=8, le=4096, description="embedding size per patch")
    heads: int = Field(default=12, ge=1, le=64, description="attention heads; must divide the width")
    depth: int = Field(default=5, ge=1, le=64, description="blocks of gated attention on image patches")
    divergence: float = Field(default=0.1, ge=0, description="weight of telling new classes from old ones")
    temperature: float = Field(default=1.0, gt=0, description="temperature of the distillation, tau")
    warmup: float = Field(
        default=0.0,
        ge=0,
        le=0.5,
        description="fraction of a task in which the rate rises from 1e-6; 0.01 as published (5 of 500 epochs)",
    )
    tune_epochs: int = Field(default=20, ge=0, description="epochs of the balanced fine-tuning")
    tune_rate: float = Field(default=5e-5, gt=0, description="its learning rate, for 512 images per batch")

    def title(self, backbone: str) -> str:
        """On a network's maps it is not the published transformer, and is not called so."""
        return self.label.replace("dytox encoder=network", f"dytox on {backbone} maps")

    @property
    def preset(self) -> Preset:
        return Preset(lr=5e-4 * 128 / WIDE, momentum=0.0, weight_decay=1e-6, schedule="cosine")

    def build_model(self, spec: ModelSpec, rng: torch.Generator) -> IncrementalModel:
        if self.width % self.heads:
            raise HoldfastError(f"method.heads={self.heads} does not divide method.width={self.width}; change either")
        return TokenModel(spec, rng, self.width, self.heads, self.depth, self.encoder == "network")

    def fixed(self, model: IncrementalModel) -> frozenset[str]:
        """Tokens and heads of old tasks."""
        old = {(kind, str(i)) for i in range(len(model.blocks) - 1) for kind in ("tokens", "blocks")}
        return frozenset(name for name in model.state_dict() if tuple(name.split(".")[:2]) in old)

    def stages(self, context: ClientContext) -> Iterable[Stage]:
        stage = context.stage(context.everything)

        def rate(epoch: int) -> float:
            progress = context.job.progress + context.job.step * epoch / stage.epochs
            full = stage.rate(epoch)
            return full if progress >= self.warmup else COLD + (full - COLD) * progress / self.warmup

        yield Stage(stage.epochs, stage.batches, self.optimiser(context, self.fixed(context.model)), rate)

    def optimiser(self, context: ClientContext, fixed: frozenset[str]) -> torch.optim.Optimizer:
        """AdamW over all parameters except the fixed ones."""
        for name, parameter in context.model.named_parameters():
            parameter.requires_grad_(name not in fixed)
        free = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
        preset = context.training.optimiser
        return torch.optim.AdamW(free, lr=preset.lr, weight_decay=preset.weight_decay)

    def loss(self, context: ClientContext, batch: Batch) -> Losses:
        assert isinstance(context.model, TokenModel)
        output = context.model(batch.images)
        classification = F.binary_cross_entropy_with_logits(output.logits, one_hot(batch.labels, output.logits))
        if context.predecessor is None:
            return {"classification": classification}
        with torch.no_grad():
            teacher = context.predecessor(batch.images).logits
        old, everything = teacher.shape[1], output.logits.shape[1]
        share = old / everything  # lambda = Co / C
        distilled = self.temperature**2 * distillation(output.logits, teacher, self.temperature) / old  # element mean
        return {
            "classification": (1 - share) * classification,
            "distillation": share * distilled,
            "divergence": self.divergence * self.apart(context.model, output.features, batch.labels),
        }

    def apart(self, model: TokenModel, features: Tensor, labels: Tensor) -> Tensor:
        """The divergence loss: the newest token's output classifies the newest classes, and all old ones as one
        class."""
        assert model.divergence is not None
        start = sum(model.growths[:-1])
        logits = model.divergence(features[:, -model.features :])
        return F.binary_cross_entropy_with_logits(logits, one_hot((labels - start + 1).clamp(min=0), logits))

    def collects_extras(self, phase: Phase) -> bool:
        return phase == "finish" and self.tune_epochs > 0

    def finish_task(self, context: ClientContext) -> Extras | None:
        if not self.tune_epochs or not context.has_old_and_new:
            return None
        names = frozenset(name for name, _ in context.model.named_parameters())
        tuned = tuned_names(context.model)
        optimiser = self.optimiser(context, names - tuned)
        for group in optimiser.param_groups:
            group["lr"] = self.tune_rate * context.training.batch / WIDE
        for epoch in range(self.tune_epochs):
            for batch in context.batches(context.exemplars, epoch):
                optimiser.zero_grad()
                logits = context.model(batch.images).logits
                F.binary_cross_entropy_with_logits(logits, one_hot(batch.labels, logits)).backward()
                optimiser.step()
        values = {name: context.model.get_parameter(name).detach().cpu().clone() for name in sorted(tuned)}
        return Extras("tuned", {**values, "images": torch.tensor(len(context.exemplars))})

    def extras_form(self, model: IncrementalModel, phase: Phase, most: int) -> ExtrasForm | None:
        form = {name: Like(tuple(model.get_parameter(name).shape)) for name in tuned_names(model)}
        return ExtrasForm({**form, "images": Like((), torch.int64, 1, most)})

    def merge(self, model: IncrementalModel, extras: Sequence[Extras], seed: int, round_index: int) -> None:
        for name in extras[0].tensors if extras else ():
            if name != "images":
                model.get_parameter(name).data.copy_(mean_of(extras, name))


def tuned_names(model: IncrementalModel) -> set[str]:
    """The parameters that the balanced fine-tuning changes."""
    return {name for name, _ in model.named_parameters() if not name.startswith(("backbone.", "divergence."))}
