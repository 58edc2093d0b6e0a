"""The only source of randomness: one generator per purpose, given by a seed and a path of words and numbers."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


def _digest(seed: int, path: tuple[str | int, ...]) -> bytes:
    return hashlib.sha256(json.dumps([seed, *path]).encode()).digest()


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """A NumPy generator that depends on nothing but its arguments."""
    return np.random.Generator(np.random.PCG64(int.from_bytes(_digest(seed, path)[:16], "little")))


def torch_generator(seed: int, *path: str | int) -> torch.Generator:
    """The same for tensors; always on the CPU, so that a GPU run draws the same numbers."""
    return torch.Generator().manual_seed(int.from_bytes(_digest(seed, path)[:8], "little") >> 1)


@contextmanager
def torch_seeded(rng: torch.Generator, device: torch.device) -> Iterator[None]:
    """What draws from torch's global generators in here, as the dropout of somebody's own network does, follows from
    `rng`; afterwards they are as before."""
    seed = int(torch.randint(2**62, (1,), generator=rng))
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def shuffled(rng: np.random.Generator, items: Sequence[T]) -> list[T]:
    """A random order of `items`, from raw bits only: NumPy guarantees these across versions, but not `permutation`."""
    if not len(items):
        return []
    return [items[i] for i in np.argsort(rng.bit_generator.random_raw(len(items)), kind="stable")]


def draw(rng: np.random.Generator, items: Sequence[T], count: int) -> list[T]:
    """`count` of `items` without replacement, in the order of `items`."""
    return [items[i] for i in sorted(shuffled(rng, range(len(items)))[:count])]
