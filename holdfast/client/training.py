"""A client's work in a round: a pure function of its state and its messages."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.losses import entropy
from holdfast.methods.context import Local, Stage, World
from holdfast.models.incremental import IncrementalModel, grow_to
from holdfast.models.passes import Question, one_pass
from holdfast.protocol.messages import Inbox, Job, PrototypeShare, Reply, State, Weights
from holdfast.seeding import torch_generator

if TYPE_CHECKING:
    from holdfast.methods.base import Method


Outcome = tuple[State, Reply, tuple[PrototypeShare, ...]]  # kept, for the global server, for the proxy


class ClientWork:
    """`(state, inbox) -> (state, reply, shares)`. It changes neither argument; the models it works in are buffers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._buffers: dict[str, IncrementalModel] = {}
        self._asked: Question | None = None  # whose model is in its buffer

    def __call__(self, state: State, inbox: Inbox) -> Outcome:
        job = inbox.job
        model = self._load("student", job.registry.growths, job.weights).train().requires_grad_(True)
        local = Local(self.world, state, inbox, model, self._frozen)
        samples = len(local.everything)
        if not samples:
            return state, Reply(), ()
        if job.moment != "train":
            ask = self.world.method.begin_task if job.moment == "begin" else self.world.method.finish_task
            model.eval()
            return state, Reply(samples=samples, extras=ask(local)), ()
        sums: dict[str, Tensor] = {}
        count = 0
        for stage in self.world.method.stages(local):
            count += train(self.world.method, local, stage, sums)
        fixed = self.world.method.fixed(local.model)
        weights = {
            name: tensor.detach().clone() for name, tensor in local.model.state_dict().items() if name not in fixed
        }
        losses = {name: float(total) / count for name, total in sums.items()}
        self._check_finite(state, job, weights)
        state, shares = self.world.method.share(local)
        return state, Reply(weights, samples, losses), shares

    def answer(self, question: Question, rows: Tensor, chunk: int) -> Tensor:
        """The answer about one chunk of images, on the CPU."""
        if question is not self._asked:
            self._frozen("asked", question.growths, question.weights)
            self._asked = question
        model, world = self._buffers["asked"], self.world
        answers = {
            "entropies": lambda pixels: entropy(model(pixels).logits),
            "features": lambda pixels: model(pixels).features,
            "scores": lambda pixels: world.method.predict(model, pixels),
        }
        chance = torch_generator(world.seed, *question.augmented, chunk) if question.augmented else None
        images = world.test if question.what == "scores" else world.train
        return one_pass(model, images, world.transform, rows, answers[question.what], chance)

    def _load(self, role: str, growths: tuple[int, ...], weights: Weights) -> IncrementalModel:
        """The buffer of a role with these weights in it."""
        rng = torch_generator(0, "buffer")  # overwritten at once by the weights
        model = self._buffers.get(role)
        if model is None or len(model.blocks) > len(growths):
            model = self.world.method.build_model(self.world.spec, rng).to(self.world.device)
            self._buffers[role] = model
        grow_to(model, growths, rng)
        model.load_state_dict(dict(weights))
        return model

    def _frozen(self, role: str, growths: tuple[int, ...], weights: Weights) -> IncrementalModel:
        """The same in evaluation mode; nothing is learned by it."""
        return self._load(role, growths, weights).eval().requires_grad_(False)

    def _check_finite(self, state: State, job: Job, weights: dict[str, Tensor]) -> None:
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise diverged(state, job, self.world.training.optimiser.lr)


def train(method: "Method", local: Local, stage: Stage, sums: dict[str, Tensor]) -> int:
    """Runs a stage; adds each loss term to `sums` and returns the number of batches."""
    count = 0
    for epoch in range(stage.epochs):
        for group in stage.optimiser.param_groups:
            group["lr"] = stage.rate(epoch)
        for batch in stage.batches(epoch):
            stage.optimiser.zero_grad()
            losses = method.loss(local, batch)
            torch.stack(list(losses.values())).sum().backward()
            if stage.clamp is not None:
                torch.nn.utils.clip_grad_value_(local.model.parameters(), stage.clamp)
            stage.optimiser.step()
            count += 1
            for name, value in losses.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        # Once an epoch, because looking at a value waits for the device.
        if not all(math.isfinite(float(total)) for total in sums.values()):
            raise diverged(local.state, local.job, local.world.training.optimiser.lr)
    return count


def diverged(state: State, job: Job, lr: float) -> HoldfastError:
    return HoldfastError(
        f"the loss of client {state.client} is no longer finite in round {job.round + 1}; "
        f"lower train.lr (now {lr:g}) and run again; the rounds before it are in the record"
    )
