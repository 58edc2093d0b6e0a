"""What is made to go wrong in a simulation (`[faults]`): in the clients' work, in what they send, and on the way.

Everything is drawn from the run's seed, so that all engines, and a resumed run, see the same."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holdfast.client.training import ClientWork, Outcome
from holdfast.errors import HoldfastError
from holdfast.methods.context import ImageSource
from holdfast.models.encoder import GradientEncoder
from holdfast.privacy.encode import labels_of, prototype_gradients
from holdfast.protocol.codec import Snapshot, Weights
from holdfast.protocol.messages import (
    Announcement,
    Broadcast,
    Failure,
    Inbox,
    Job,
    Phase,
    PrototypeShare,
    Reply,
    RoundClosed,
    TaskEnded,
    Teachers,
)
from holdfast.protocol.state import ClientState
from holdfast.seeding import draw, generator, shuffled, torch_generator
from holdfast.server.clients import Answers, Clients, Opened, Shares
from holdfast.simulation.settings import DelayRule, DropRule, FaultRule, FaultSettings, ScaleRule

CORRUPTIONS = ("nan", "inf", "scale", "sign_flip", "wrong_shape", "wrong_key", "wrong_dtype", "bad_samples")
ENDLESS = 10**12  # samples
WHOLE = 2**64


@dataclass(frozen=True)
class Letter:
    """What one client has sent in answer to a job."""

    client: int
    answer: Reply | Failure | None  # None: it was lost, and the shares were not
    shares: tuple[PrototypeShare, ...] = ()


class Faults:
    """The faults of one run. `selected` are the clients of each round, `deadline` the seconds after which an answer is
    too late."""

    def __init__(
        self,
        settings: FaultSettings,
        seed: int,
        selected: Sequence[Sequence[int]],
        deadline: float | None = None,
        encoder: GradientEncoder | None = None,
        image_size: int = 0,
    ) -> None:
        self.settings, self.seed, self.selected = settings, seed, selected
        self.deadline, self.encoder, self.image_size = deadline, encoder, image_size
        self.late: list[Letter] = []  # on their way, and too late for the job that they answer
        self.happened: list[list[Any]] = []  # client and kind, in this round

    def rule(self, kind: str) -> FaultRule | None:
        rule: FaultRule | None = getattr(self.settings, kind)
        return rule

    def hits(self, kind: str, round_index: int, client: int, attempt: int = 0) -> bool:
        """Does this fault happen to this client in this round? What happens on the way is drawn anew for each
        attempt."""
        rule = self.rule(kind)
        if rule is None or (rule.rounds is not None and round_index + 1 not in rule.rounds):
            return False
        if rule.clients is not None and client not in rule.clients:
            return False
        path: tuple[str | int, ...] = ("faults", kind, round_index, *([attempt] if attempt else []))
        if rule.count is not None:
            chosen = [c for c in self.selected[round_index] if rule.clients is None or c in rule.clients]
            return client in draw(generator(self.seed, *path), chosen, rule.count)
        raw = int(generator(self.seed, *path, "client", client).bit_generator.random_raw())
        return raw < rule.probability * WHOLE

    def note(self, client: int, kind: str) -> None:
        if [client, kind] not in self.happened:
            self.happened.append([client, kind])

    def within(self, work: ClientWork) -> ClientWork:
        """The same work with the faults that happen inside of it."""
        return FaultyWork(work, self)

    # to worker processes, and to a checkpoint and back

    def to_bytes(self) -> bytes:
        """What a worker needs."""
        facts = {"settings": asdict(self.settings), "seed": self.seed, "selected": [list(s) for s in self.selected]}
        return json.dumps(facts).encode()

    @staticmethod
    def from_bytes(blob: bytes) -> "Faults":
        facts = json.loads(blob)
        return Faults(FaultSettings(**facts["settings"]), facts["seed"], facts["selected"])

    def snapshot(self) -> dict[str, Snapshot]:
        late = [[one.client, one.answer.round_index, one.answer.phase] for one in self.late if one.answer]
        return {"late": ({}, {"late": late})}

    def restore(self, parts: Mapping[str, Snapshot]) -> None:
        facts = parts["late"][1]["late"]
        self.late = [Letter(client, Reply(round_index=number, phase=phase)) for client, number, phase in facts]


# inside of a client's work


class FaultyWork(ClientWork):
    """A client's work that may crash, or train on wrong labels."""

    def __init__(self, work: ClientWork, faults: Faults) -> None:
        super().__init__(work.enrolment, work.method, work.images, work.device, work.encoder, work.test)
        self.faults = faults

    def __call__(self, state: ClientState, inbox: Inbox) -> Outcome:
        job, own = inbox.job, self.images
        if self.faults.hits("crash", job.round_index, state.client):
            raise HoldfastError("a fault of the config")
        if job.phase == "train" and self.faults.hits("label_flip", job.round_index, state.client):
            names = {*state.data, *state.memory} & job.registry.position.keys()
            self.images = FlippedLabels(own, sorted(names))
        try:
            return super().__call__(state, inbox)
        finally:
            self.images = own


class FlippedLabels:
    """The same images, but each of these classes is taken for the next of them."""

    def __init__(self, images: ImageSource, names: Sequence[str]) -> None:
        self.images = images
        places = [list(images.classes).index(name) for name in names]
        self.flipped = torch.arange(len(images.classes))
        self.flipped[places] = torch.tensor(places[1:] + places[:1], dtype=torch.int64)

    @property
    def classes(self) -> Sequence[str]:
        return self.images.classes

    def class_of(self, ids: Tensor) -> Tensor:
        return self.flipped[self.images.class_of(ids).long()]

    def pixels(self, ids: Tensor) -> Tensor:
        return self.images.pixels(ids)

    def identity(self, ids: Tensor) -> Tensor:
        return self.images.identity(ids)


# in what a client sends


def corrupted(reply: Reply, kind: str, base: Weights, rule: FaultRule) -> Reply:
    """The reply with one thing wrong. `base` is the model of the job, from which updates are counted."""
    if kind == "bad_samples":
        return replace(reply, samples=ENDLESS)
    change: Callable[[Weights, Weights], dict[str, Tensor]] = {
        "nan": lambda tensors, _: _last_value(tensors, float("nan")),
        "inf": lambda tensors, _: _last_value(tensors, float("inf")),
        "scale": lambda tensors, start: _scaled(tensors, start, rule.factor if isinstance(rule, ScaleRule) else 1.0),
        "sign_flip": lambda tensors, start: _scaled(tensors, start, -1.0),
        "wrong_shape": lambda tensors, _: _first(tensors, lambda name, tensor: (name, tensor.flatten()[None, None])),
        "wrong_key": lambda tensors, _: _first(tensors, lambda name, tensor: (f"{name}_", tensor)),
        "wrong_dtype": lambda tensors, _: {name: tensor.long() for name, tensor in tensors.items()},
    }[kind]
    extras = reply.extras and replace(reply.extras, tensors=change(reply.extras.tensors, {}))
    return replace(reply, weights=change(reply.weights, base), extras=extras)


def _last_value(tensors: Weights, value: float) -> dict[str, Tensor]:
    changed = dict(tensors)
    for name in sorted(n for n, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel())[-1:]:
        changed[name] = tensors[name].clone(memory_format=torch.contiguous_format)
        changed[name].view(-1)[-1] = value
    return changed


def _scaled(tensors: Weights, base: Weights, factor: float) -> dict[str, Tensor]:
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            start = base[name].to(tensor).double() if name in base else torch.zeros_like(tensor, dtype=torch.float64)
            changed[name] = (start + factor * (tensor.double() - start)).to(tensor.dtype)
    return changed


def _first(tensors: Weights, change: Callable[[str, Tensor], tuple[str, Tensor]]) -> dict[str, Tensor]:
    pairs = sorted(tensors.items())  # by name, because the order is lost on the wire
    return dict([change(*pair) for pair in pairs[:1]] + pairs[1:])


def poisoned(
    share: PrototypeShare, encoder: GradientEncoder, size: int, classes: int, rng: torch.Generator
) -> PrototypeShare:
    """A share that passes every check: of noise, with the next label and a hundredfold variance."""
    images = torch.rand((1, 3, size, size), generator=rng)
    label = (labels_of({"linear.bias": share.gradient["linear.bias"][None]}) + 1) % classes
    device = next(encoder.parameters()).device
    found = prototype_gradients(encoder, images.to(device), label.to(device))
    return replace(
        share, gradient={name: g[0].cpu().clone() for name, g in found.items()}, variance=100 * share.variance
    )


# on the way


class FaultyClients(Clients):
    """Clients whose answers are spoilt, lost, late, doubled and out of order. A client that is asked again for the same
    job gives the same answer as before."""

    def __init__(self, clients: Clients, faults: Faults) -> None:
        self.clients, self.faults = clients, faults
        self.sent: dict[tuple[Phase, int], Letter] = {}
        self.attempts: dict[Phase, int] = {}

    def announce(self, class_list: Broadcast) -> tuple[Sequence[Announcement], int]:
        return self.clients.announce(class_list)

    def open_round(self, broadcast: Broadcast, selected: Sequence[int], observers: np.ndarray) -> Opened:
        self.sent, self.attempts, self.faults.happened = {}, {}, []
        # An answer of an earlier round is refused by its number, so its content need not be kept.
        self.faults.late = [
            Letter(one.client, Reply(round_index=one.answer.round_index, phase=one.answer.phase))
            for one in self.faults.late
            if one.answer
        ]
        return self.clients.open_round(broadcast, selected, observers)

    def collect_extras(self, job: Job, teachers: Teachers, selected: Sequence[int]) -> Answers:
        fresh = self._unasked(job, selected)
        if fresh:
            self._keep(job, self.clients.collect_extras(job, teachers, fresh), [])
        return self._delivered(job, selected)[0]

    def train(
        self, job: Job, teachers: Teachers, selected: Sequence[int], done: Callable[[], None]
    ) -> tuple[Answers, Shares]:
        fresh = self._unasked(job, selected)
        if fresh:
            self._keep(job, *self.clients.train(job, teachers, fresh, done))
        return self._delivered(job, selected)

    def end_task(self, message: TaskEnded) -> None:
        self.clients.end_task(message)

    def close_round(self, message: RoundClosed, selected: Sequence[int]) -> None:
        self.clients.close_round(message, selected)

    def _unasked(self, job: Job, selected: Sequence[int]) -> list[int]:
        return [client for client in selected if (job.phase, client) not in self.sent]

    def _keep(self, job: Job, answers: Answers, shares: Shares) -> None:
        """Keeps what clients have sent, with the faults in it."""
        for client, answer in answers:
            mine = tuple(share for sender, share in shares if sender == client)
            self.sent[job.phase, client] = self._spoilt(job, Letter(client, answer, mine))

    def _spoilt(self, job: Job, letter: Letter) -> Letter:
        faults, client, round_index = self.faults, letter.client, job.round_index
        for kind in ("crash", *(["label_flip"] if job.phase == "train" else [])):
            if faults.hits(kind, round_index, client):
                faults.note(client, kind)
        answer, shares = letter.answer, letter.shares
        for kind in CORRUPTIONS:
            rule = faults.rule(kind)
            if rule is not None and isinstance(answer, Reply) and faults.hits(kind, round_index, client):
                answer = corrupted(answer, kind, job.weights, rule)
                faults.note(client, kind)
        if shares and faults.hits("bad_share", round_index, client):
            shares = tuple(replace(one, variance=torch.full_like(one.variance, float("nan"))) for one in shares)
            faults.note(client, "bad_share")
        if shares and faults.encoder is not None and faults.hits("poison_share", round_index, client):
            rng = torch_generator(faults.seed, "faults", "poison", round_index, client)
            classes = len(job.registry.names)
            shares = tuple(poisoned(one, faults.encoder, faults.image_size, classes, rng) for one in shares)
            faults.note(client, "poison_share")
        return Letter(client, answer, shares)

    def _delivered(self, job: Job, selected: Sequence[int]) -> tuple[Answers, Shares]:
        """What arrives in time, with what was too late for an earlier attempt or round."""
        attempt = self.attempts.get(job.phase, 0)
        self.attempts[job.phase] = attempt + 1
        arriving: list[tuple[float, Letter]] = [(0.0, one) for one in self.faults.late]
        self.faults.late = []
        for client in selected:
            for seconds, letter in self._carried(job, attempt, self.sent[job.phase, client]):
                if self.faults.deadline is not None and seconds > self.faults.deadline:
                    self.faults.late.append(letter)
                else:
                    arriving.append((seconds, letter))
        mixed = shuffled(generator(self.faults.seed, "faults", "order", job.round_index, job.phase, attempt), arriving)
        letters = [letter for _, letter in sorted(mixed, key=lambda pair: pair[0])]
        answers = [(one.client, one.answer) for one in letters if one.answer is not None]
        return answers, [(one.client, share) for one in letters for share in one.shares]

    def _carried(self, job: Job, attempt: int, letter: Letter) -> Iterable[tuple[float, Letter]]:
        """The letter as it travels: not at all, once or twice, each after some seconds."""
        faults, client, round_index = self.faults, letter.client, job.round_index
        copies, seconds = 1, 0.0
        if faults.hits("drop", round_index, client, attempt):
            faults.note(client, "drop")
            rule = faults.rule("drop")
            channel = rule.channel if isinstance(rule, DropRule) else "both"
            if channel == "both":
                return []
            letter = replace(letter, answer=None) if channel == "server" else replace(letter, shares=())
        if faults.hits("delay", round_index, client, attempt):
            faults.note(client, "delay")
            rule = faults.rule("delay")
            seconds = rule.seconds if isinstance(rule, DelayRule) else 0.0
        if faults.hits("duplicate", round_index, client, attempt):
            faults.note(client, "duplicate")
            copies = 2
        return [(seconds, letter)] * copies
