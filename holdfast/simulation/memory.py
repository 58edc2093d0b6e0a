"""How much memory a run will need, by arithmetic, before anything is allocated."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from holdfast.data.images import DataSet
from holdfast.methods.base import Method
from holdfast.models.incremental import IncrementalModel
from holdfast.privacy.reconstruct import group_bytes
from holdfast.protocol.enrolment import Training
from holdfast.proxy.prototype_server import SelectorSetup
from holdfast.simulation.plan import Plan
from holdfast.simulation.traffic import sizes_of

PROCESS = 350 * 2**20  # bytes of a process that has imported torch, as measured
MODELS = 6  # at a worker: student, gradient, momentum, teacher, broadcast, and the one that passes are asked of


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak. Images that are mapped from a file do not count: the system drops them if space is short."""

    worker: int  # each process that trains clients
    main: int  # global server, proxy and population; with the serial engine it is a worker, too
    images: int  # that no file holds

    def total(self, workers: int) -> int:
        """What `workers` processes and the main one need; 0 workers: everything in one process."""
        if not workers:
            return self.images + self.main + self.worker - PROCESS
        return 2 * self.images + self.main + workers * self.worker  # workers map a copy of the images


def memory_of(method: Method, setup: SelectorSetup, plan: Plan, training: Training, data: DataSet) -> Memory:
    """The memory of a run on the CPU. Prototypes and replies count for the round in which there are most of them."""
    sizes = sizes_of(method, setup, plan, "present")
    model, most = max(sizes.models), max(map(len, plan.selected))
    most_shared = max(
        sum(_new_classes(plan, client, round_index) for client in chosen)
        for round_index, chosen in enumerate(plan.selected)
    )
    held = max(len(arrival.classes) for mine in plan.arrivals for arrival in mine)
    stored, largest = activations(method.build_model(setup.spec, torch.Generator()), setup.spec.image_size)
    batch = min(training.batch, len(data.train))
    teachers = model * max(sizes.teachers, 1)
    worker = PROCESS + MODELS * model + 2 * teachers + batch * (stored + 2 * largest) + 3 * held * sizes.share
    proxy = (most_shared + 2 * held) * sizes.share  # two clients' shares also as messages
    if sizes.share:
        proxy += group_bytes(setup.spec.image_size, most_shared)
    replies = 2 * most * model  # as messages and as tensors
    images = sum(part.images.stored.nbytes for part in (data.train, data.test) if part.images.file is None)
    main = PROCESS + 4 * model + replies + (len(plan.growths) if sizes.teachers else 0) * model + proxy
    return Memory(worker, main, images)


def _new_classes(plan: Plan, client: int, round_index: int) -> int:
    """How many classes come to a client in this round."""
    arrival = plan.arrivals[client][plan.current(client, round_index)]
    return len(arrival.classes) if arrival.round_index == round_index else 0


def activations(model: IncrementalModel, image_size: int) -> tuple[int, int]:
    """Bytes per image that a training step stores for its backward pass, in total and in the largest tensor. Found by
    a pass without data, which allocates nothing."""
    model.grow(1, torch.Generator())
    model = model.to("meta").train()
    own = {tensor.untyped_storage()._cdata for tensor in model.state_dict().values()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    two = torch.empty(2, 3, image_size, image_size, device="meta").to(memory_format=torch.channels_last)
    unpack: Callable[[Tensor], Tensor] = lambda tensor: tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, unpack):
        model(two).logits.sum()
    found = [tensor.untyped_storage().nbytes() // 2 for tensor in kept.values()]
    return sum(found), max(found, default=0)


def machine_memory() -> int | None:
    """The bytes that this process may use: the machine's, or its container's limit if that is lower."""
    limits = []
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemTotal")).split()[1]))
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limits.append(int(Path(file).read_text()))
    return min(limits, default=None)
