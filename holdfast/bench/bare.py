"""The least that an LGA round can cost: one process of a bare loop over tensors that are ready.

It builds its tensors and prints `ready`. Then, for each line on standard input, it runs once and prints its seconds."""

import json
import sys
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.machine import one_thread
from holdfast.models.incremental import IncrementalModel, ModelSpec
from holdfast.models.passes import CHUNK
from holdfast.seeding import torch_generator


def main(backbone: str, size: int, classes: list[int], batches: list[int], asked: list[int]) -> None:
    """`batches`: sizes of the training batches; `asked`: sizes of the chunks of the detection and evaluation passes."""
    rng = torch_generator(0)
    student, teacher = (IncrementalModel(ModelSpec(backbone, "batch", size), rng) for _ in range(2))
    for count in classes:
        student.grow(count, rng)
    for count in classes[:-1]:
        teacher.grow(count, rng)
    teacher.eval()

    def ready(count: int) -> Tensor:
        return torch.randn(count, 3, size, size, generator=rng).contiguous(memory_format=torch.channels_last)

    training = [(ready(count), torch.randint(0, sum(classes), (count,), generator=rng)) for count in batches]
    chunk = ready(CHUNK)

    def run() -> None:
        student.train()
        for images, labels in training:
            student.zero_grad()
            logits = student(images).logits
            with torch.no_grad():
                teacher(images)
            F.cross_entropy(logits, labels).backward()
        student.eval()
        with torch.inference_mode():
            for count in asked:
                student(chunk[:count])

    run()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = perf_counter()
        run()
        print(perf_counter() - start, flush=True)


if __name__ == "__main__":
    with one_thread():
        main(**json.loads(sys.argv[1]))
