"""Replies are compared with the server's own model before they touch anything."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from holdfast.methods.base import Method, fixed_names
from holdfast.methods.roles import ExtrasForm
from holdfast.models.incremental import IncrementalModel
from holdfast.protocol.checks import LARGEST, Form, Like, Misfit, misfit
from holdfast.protocol.codec import Weights, tensor_bytes
from holdfast.protocol.messages import Extras, Failure, Phase, Reply

MORE_STEPS = 2**31  # by which a counter, such as that of a batch norm, may grow in a round
LOSSES = 64  # terms in a reply
EXTRA_BYTES = 2**20  # of extras whose form the method does not tell, beside four times the model's
EXTRA_TENSORS = 10_000


@dataclass(frozen=True)
class ReplyCheck:
    """What the usable replies to one job look like."""

    round_index: int
    phase: Phase
    weights: Form
    max_samples: int
    collects: bool  # does the method collect extras in this phase?
    extras: ExtrasForm | None  # None: the method does not tell
    extra_bytes: int  # at most

    def __call__(self, answer: Reply | Failure) -> Misfit | None:
        """Why this answer cannot be used; None if it can."""
        if answer.round_index != self.round_index or answer.phase != self.phase:
            return Misfit("late", f"an answer to the {answer.phase} job of round {answer.round_index + 1}")
        if isinstance(answer, Failure):
            return Misfit(answer.what, answer.reason)
        return self._samples(answer) or self._losses(answer.losses) or self._tensors(answer)

    def _samples(self, reply: Reply) -> Misfit | None:
        least = 1 if reply.weights or reply.extras else 0
        if type(reply.samples) is int and least <= reply.samples <= self.max_samples:
            return None
        return Misfit("samples", f"{reply.samples} samples are not between {least} and {self.max_samples}")

    def _losses(self, losses: Mapping[str, float]) -> Misfit | None:
        if len(losses) <= LOSSES and all(math.isfinite(value) for value in losses.values()):
            return None
        return Misfit("losses", f"its losses are more than {LOSSES}, or not finite")

    def _tensors(self, reply: Reply) -> Misfit | None:
        if self.phase != "train":
            if reply.weights:
                return Misfit("names", f"it has a model, but the {self.phase} job asks for extras")
            return self._extras(reply.extras) if reply.extras else None
        if reply.extras:
            return Misfit("names", "it has extras, but the train job asks for a model")
        if not reply.samples:
            return None  # nothing to train on
        return misfit("its model", reply.weights, self.weights)

    def _extras(self, extras: Extras) -> Misfit | None:
        if not self.collects:
            return Misfit("names", "it has extras, but the method collects none")
        if self.extras is not None:
            return misfit("its extras", extras.tensors, self.extras.required, self.extras.optional)
        if tensor_bytes(extras.tensors) > self.extra_bytes or len(extras.tensors) > EXTRA_TENSORS:
            return Misfit("size", f"its extras have more than {self.extra_bytes} bytes or {EXTRA_TENSORS} tensors")
        form = {name: Like(tuple(t.shape), t.dtype, *_range(t, self.max_samples)) for name, t in extras.tensors.items()}
        return misfit("its extras", extras.tensors, form)


def reply_check(
    method: Method, model: IncrementalModel, round_index: int, phase: Phase, max_samples: int
) -> ReplyCheck:
    """The check of replies to a job that carries this model."""
    weights, fixed = model.state_dict(), fixed_names(method, model)
    collects = phase != "train" and method.collects_extras(phase)
    return ReplyCheck(
        round_index,
        phase,
        {name: _like(name, tensor) for name, tensor in weights.items() if name not in fixed},
        max_samples,
        collects,
        method.extras_form(model, phase, max_samples) if collects else None,
        4 * tensor_bytes(weights) + EXTRA_BYTES,
    )


def model_form(weights: Weights) -> Form:
    """What a model with these weights looks like."""
    return {name: _like(name, tensor) for name, tensor in weights.items()}


def _like(name: str, own: Tensor) -> Like:
    """What a client may send for one of the server's own tensors. Counters never go back; a variance is not negative,
    or its root would be no number."""
    shape = tuple(own.shape)
    if own.is_floating_point():
        return Like(shape, own.dtype, 0.0 if name.endswith("running_var") else -LARGEST)
    if not own.numel():
        return Like(shape, own.dtype)
    return Like(shape, own.dtype, own.min().item(), own.max().item() + MORE_STEPS)


def _range(tensor: Tensor, counts: int) -> tuple[float, float]:
    """Whole numbers in extras are counts."""
    return (-LARGEST, LARGEST) if tensor.is_floating_point() else (0, counts)
