"""A client's work in a round, a pure function of its state and a job; and what it keeps of a finished task."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holdfast.data.memory import herd, quota
from holdfast.errors import HoldfastError
from holdfast.federation.local import Local, Stage, World
from holdfast.federation.messages import Inbox, Job, PrototypeShare, Reply, State, Weights
from holdfast.federation.transition import IMAGES, Observation
from holdfast.models.incremental import IncrementalModel, grow_to
from holdfast.seeding import torch_generator

if TYPE_CHECKING:
    from holdfast.methods.base import Method


Outcome = tuple[State, Reply, tuple[PrototypeShare, ...]]  # kept, for the global server, for the proxy


class ClientWork:
    """`(state, inbox) -> (state, reply, shares)`. It changes neither argument; the models it works in are buffers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._buffers: dict[str, IncrementalModel] = {}

    def __call__(self, state: State, inbox: Inbox) -> Outcome:
        job = inbox.job
        model = self._load("student", job.registry.growths, job.weights).train()
        local = Local(self.world, state, inbox, model, self._frozen)
        samples = len(local.everything)
        if not samples:
            return state, Reply(), ()
        sums: dict[str, Tensor] = {}
        count = 0
        for stage in self.world.method.stages(local):
            count += train(self.world.method, local, stage, sums)
        weights = {name: tensor.detach().clone() for name, tensor in local.model.state_dict().items()}
        losses = {name: float(total) / count for name, total in sums.items()}
        self._check_finite(state, job, weights)
        state, shares = self.world.method.share(local)
        return state, Reply(weights, samples, losses), shares

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


def observe(
    world: World, clients: Sequence[int], number: int, entropies: Callable[[Tensor], Tensor]
) -> dict[int, Observation]:
    """The entropies of each client's current images; a client without any is left out (N14).

    `entropies` gives training images' entropies under the global model; it is asked once, for the distinct images."""
    arrivals = {c: world.plan.arrivals[c][world.plan.current(c, number)] for c in clients}
    holdings = {arrival: world.holding(arrival) for arrival in set(arrivals.values()) if arrival.classes}
    holdings = {arrival: rows for arrival, rows in holdings.items() if len(rows)}
    if not holdings:
        return {}
    distinct = torch.unique(torch.cat(list(holdings.values())))
    known = entropies(distinct).double()
    seen = {arrival: known[torch.searchsorted(distinct, rows)].numpy() for arrival, rows in holdings.items()}
    noted = {arrival: Observation(float(mine.mean()), mine[:IMAGES]) for arrival, mine in seen.items()}
    return {c: noted[arrival] for c, arrival in arrivals.items() if arrival in noted}


def remember(
    world: World, states: list[State], upto: Mapping[int, int], features: Callable[[Tensor], Tensor]
) -> list[State]:
    """The states once the clients' arrivals before `upto` (a number for each client) are in their memories.

    `features` gives training images' features under the global model; it is asked once, for the distinct images."""
    pending = {state.client: _pending(world, state, upto[state.client]) for state in states}
    wanted: dict[tuple[int, ...], Tensor] = {}
    counts: dict[tuple[int, ...], int] = {}
    for state in states:
        share = quota(world.memory, len({*state.memory, *pending[state.client]}))
        for key, rows in pending[state.client].values():
            wanted[key], counts[key] = rows, max(share, counts.get(key, 0))
    wanted = {key: rows if counts[key] else rows[:0] for key, rows in wanted.items()}
    distinct = torch.unique(torch.cat([*wanted.values(), torch.empty(0, dtype=torch.int64)]))
    known = features(distinct) if len(distinct) else torch.empty(0, 1)
    ranked = {
        key: rows[herd(known[torch.searchsorted(distinct, rows)], counts[key])].int() for key, rows in wanted.items()
    }
    return [_updated(world, state, upto[state.client], pending[state.client], ranked) for state in states]


def _pending(world: World, state: State, upto: int) -> dict[int, tuple[tuple[int, ...], Tensor]]:
    """For each class that waits to be remembered: a key that equal image sets share, and the images."""
    waiting: dict[int, tuple[tuple[int, ...], Tensor]] = {}
    for arrival in world.plan.arrivals[state.client][state.stored : upto]:
        rows = world.holding(arrival)
        for c in arrival.classes:
            mine = rows[world.train.labels[rows] == c]
            before = [waiting[c][1]] if c in waiting else [state.memory[c].long()] if c in state.memory else []
            shared = arrival.images is None and not before
            mine = mine if shared else torch.unique(torch.cat([mine, *before]))
            waiting[c] = ((c,) if shared else (c, *mine.tolist()), mine)
    return waiting


def _updated(
    world: World,
    state: State,
    upto: int,
    pending: Mapping[int, tuple[tuple[int, ...], Tensor]],
    ranked: Mapping[tuple[int, ...], Tensor],
) -> State:
    """Old lists lose their tails, new classes get their best exemplars, all up to the same quota."""
    memory = {**state.memory, **{c: ranked[key] for c, (key, _) in pending.items()}}
    share = quota(world.memory, len(memory))
    return replace(state, memory={c: rows[:share] for c, rows in memory.items()}, stored=upto)
