"""What a run has to work with, in one line before it starts: chance, steps and images."""

from math import ceil

import torch

from holdfast.data.images import DataSet
from holdfast.protocol.enrolment import Training
from holdfast.simulation.plan import Plan


def outlook(plan: Plan, data: DataSet, training: Training) -> str:
    """The accuracy of guessing, how many steps a client takes in a round, and how many images it has of a class. Only
    clients with new data count; exemplars come on top."""
    work = {(client, plan.current(client, r)) for r, selected in enumerate(plan.selected) for client in selected}
    held = [images_of(plan, data, client, arrival) for client, arrival in sorted(work)]
    totals = [sum(counts) for counts in held if counts]
    steps = [training.epochs * ceil(total / training.for_images(total).batch) for total in totals]
    batches = [training.for_images(total).batch for total in totals]
    first, last = len(plan.tasks[0]), sum(map(len, plan.tasks))
    chance = f"{1 / first:.1%}, at the end {1 / last:.1%}" if first < last else f"{1 / last:.1%}"
    return (
        f"chance is {chance}; {spread(steps)} steps per round and client in batches of {spread(batches)}; "
        f"{spread([count for counts in held for count in counts])} images per class and client"
    )


def images_of(plan: Plan, data: DataSet, client: int, arrival: int) -> list[int]:
    """How many images of each class an arrival makes a client's data."""
    found = plan.arrivals[client][arrival]
    if found.images is None:
        return [len(data.train.by_class[c]) for c in found.classes]
    rows = torch.tensor(found.images, dtype=torch.int64)
    return [count for count in data.train.labels[rows].bincount().tolist() if count]


def spread(values: list[int]) -> str:
    """The smallest and the largest of these numbers."""
    low, high = min(values, default=0), max(values, default=0)
    return f"{low}" if low == high else f"{low}-{high}"
