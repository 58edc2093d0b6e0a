"""A client's work in a round: a pure function of its state and its messages."""

import math
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from holdfast.client.precision import check_precision, reduced, scaler_of, step
from holdfast.client.prototypes import share_prototypes
from holdfast.errors import HoldfastError
from holdfast.losses import entropy
from holdfast.methods.base import Method, fixed_names
from holdfast.methods.context import ClientContext, ImageSource, Stage
from holdfast.models.encoder import GradientEncoder
from holdfast.models.incremental import IncrementalModel, load_grown
from holdfast.models.passes import in_chunks
from holdfast.protocol.codec import MalformedMessage, Weights
from holdfast.protocol.enrolment import Enrolment
from holdfast.protocol.messages import Failure, Inbox, InferenceRequest, Job, PrototypeShare, Reply
from holdfast.protocol.state import ClientState
from holdfast.seeding import torch_generator, torch_seeded

REASON = 300  # characters of an error's message that leave the client
Outcome = tuple[ClientState, Reply, tuple[PrototypeShare, ...]]  # kept, for the global server, for the proxy


class Diverged(HoldfastError):
    """A client's loss or weights are no longer finite."""


class ClientWork:
    """`(state, inbox) -> (state, reply, shares)`. It changes neither argument; the models it works in are buffers."""

    def __init__(
        self,
        enrolment: Enrolment,
        method: Method,
        images: ImageSource,
        device: torch.device,
        encoder: GradientEncoder | None = None,
        test: ImageSource | None = None,
    ) -> None:
        self.enrolment, self.method, self.images, self.device = enrolment, method, images, device
        self.encoder, self.test = encoder, test
        check_precision(enrolment.training.precision, device)
        self.secret: int | None = None  # the client's own seed, which no other party knows; a simulation has none
        self._buffers: dict[str, IncrementalModel] = {}
        self._asked: InferenceRequest | None = None  # whose model is in its buffer

    def __call__(self, state: ClientState, inbox: Inbox) -> Outcome:
        context = self.context(state, inbox)
        with torch_seeded(context.generator("layers"), self.device):
            return self._work(context, state, inbox)

    def _work(self, context: ClientContext, state: ClientState, inbox: Inbox) -> Outcome:
        job = inbox.job
        samples = len(context.everything)
        answer = Reply(samples=samples, round_index=job.round_index, phase=job.phase)
        if not samples:
            return state, answer, ()
        if job.phase != "train":
            extras = self.method.begin_task if job.phase == "begin" else self.method.finish_task
            context.model.eval()
            return state, replace(answer, extras=extras(context)), ()
        sums: dict[str, Tensor] = {}
        count = 0
        for stage in self.method.stages(context):
            count += train(self.method, context, stage, sums)
        fixed = fixed_names(self.method, context.model)
        weights = {
            name: tensor.detach().clone() for name, tensor in context.model.state_dict().items() if name not in fixed
        }
        losses = {name: float(total) / count for name, total in sums.items()}
        if not all(bool(tensor.isfinite().all()) for tensor in weights.values()):
            raise diverged(state, job, self.enrolment.training.optimiser.lr)
        shares: tuple[PrototypeShare, ...] = ()
        sharing = self.method.prototypes()
        if sharing is not None and self.encoder is not None:
            state, shares = share_prototypes(context, self.encoder, sharing)
        return replace(state, notes=context.notes), replace(answer, weights=weights, losses=losses), shares

    def context(self, state: ClientState, inbox: Inbox) -> ClientContext:
        """What the method sees of this client and this job, with the job's model ready to be trained."""
        model = self._load("student", inbox.job.registry.growths, inbox.job.weights).train().requires_grad_(True)
        enrolment = replace(self.enrolment, client=state.client)
        return ClientContext(enrolment, self.images, state, inbox, model, self._frozen, self.secret)

    def infer(self, request: InferenceRequest, ids: Tensor, *chunk: str | int) -> Tensor:
        """What a request asks about one chunk of images, on the CPU. `chunk` names it in the random stream of images
        that are augmented: by its class and its number in that class."""
        if request is not self._asked:
            self._frozen("asked", request.growths, request.weights)
            self._asked = request
        model, transform = self._buffers["asked"], self.enrolment.transform
        answers = {
            "entropies": lambda pixels: entropy(model(pixels).logits),
            "features": lambda pixels: model(pixels).features,
            "scores": lambda pixels: self.method.predict(model, pixels),
            "answers": lambda pixels: torch.stack([*self.method.answers(model, pixels).values()], dim=1),
        }
        source = self.test if request.what in ("scores", "answers") else self.images
        assert source is not None
        rng = torch_generator(self.enrolment.seed, *request.stream, *chunk) if request.stream else None

        def pixels(some: Tensor) -> Tensor:
            images = source.pixels(some).to(self.device)
            return transform.augmented(images, rng) if rng else transform.plain(images)

        return in_chunks(model, pixels, ids, answers[request.what])

    def _load(self, role: str, growths: tuple[int, ...], weights: Weights) -> IncrementalModel:
        """The buffer of a role with these weights in it."""
        rng = torch_generator(0, "buffer")  # overwritten at once by the weights
        model = self._buffers.get(role)
        try:
            if model is None or tuple(model.growths) != growths[: len(model.growths)]:
                model = self.method.build_model(self.enrolment.spec, rng).to(self.device)
                self._buffers[role] = model
            load_grown(model, growths, weights)
        except (KeyError, ValueError, RuntimeError) as error:
            reason = str(error).split("\n")[0]
            raise MalformedMessage(f"the {role} model does not fit the network of the enrolment: {reason}") from error
        return model

    def _frozen(self, role: str, growths: tuple[int, ...], weights: Weights) -> IncrementalModel:
        """The same in evaluation mode; nothing is learned by it."""
        return self._load(role, growths, weights).eval().requires_grad_(False)


def attempt(work: Callable[[ClientState, Inbox], Outcome], state: ClientState, inbox: Inbox) -> Outcome | Failure:
    """Does a client's work. An error in it is the failure of this client, and of nobody else; only a job that no client
    could do is an error here."""
    try:
        return work(state, inbox)
    except MalformedMessage:
        raise
    except Diverged as error:
        what, reason = "diverged", str(error)
    except HoldfastError as error:
        what, reason = "crash", str(error)
    except Exception as error:
        traceback.print_exc()  # for whoever writes a method; the federation gets a sentence
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = "crash"
        reason = f"{type(error).__name__}: {str(error)[:REASON]} ({Path(where.filename).name}, line {where.lineno})"
    return Failure(what, reason.encode("utf-8", "replace").decode(), inbox.job.round_index, inbox.job.phase)


def train(method: Method, context: ClientContext, stage: Stage, sums: dict[str, Tensor]) -> int:
    """Runs a stage; adds each loss term to `sums` and returns the number of batches."""
    count = 0
    precision, device = context.training.precision, context.device
    scaler = scaler_of(precision, device)
    for epoch in range(stage.epochs):
        for group in stage.optimiser.param_groups:
            group["lr"] = stage.rate(epoch)
        for batch in stage.batches(epoch):
            stage.optimiser.zero_grad()
            with reduced(precision, device):
                losses = method.loss(context, batch)
            step(scaler, stage.optimiser, torch.stack(list(losses.values())).sum(), context.model, stage.clamp)
            count += 1
            for name, value in losses.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        # Once per epoch, because looking at a value waits for the device.
        if not all(math.isfinite(float(total)) for total in sums.values()):
            raise diverged(context.state, context.job, context.training.optimiser.lr)
    return count


def diverged(state: ClientState, job: Job, lr: float) -> Diverged:
    return Diverged(
        f"the loss of client {state.client} is no longer finite in round {job.round_index + 1}; "
        f"lower train.lr (now {lr:g}) and run again; the rounds before it are in the record"
    )
